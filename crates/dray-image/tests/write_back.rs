//! Writes that are lost after they were acknowledged: the guest's next flush says so, whoever synced
//! the image in between. With faults on order, and with a loop device whose backing has no room.

use dray_image::layers::{Fault, Faults, Layered, Op, When};
use dray_image::{
    Client, Departure, Disk, ErrorKind, Fetcher, FileImage, FileOptions, Image, ImageFile, Late,
    Loss, LossLog, Overlay, Past, PresentLog, Result, ZeroMode,
};
use dray_types::{BlockRange, BlockSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

/// A block device of 16 MiB that has room for less: what is written back past it is lost.
struct Full {
    device: PathBuf,
    dir: tempfile::TempDir,
}

fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    output.status.success().then_some(text)
}

impl Full {
    fn new() -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("image-full-").tempdir().unwrap();
        let (place, backing) = (dir.path().display().to_string(), dir.path().join("backing"));
        let mounted = run("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs", &place]);
        let made = mounted.and_then(|_| {
            std::fs::File::create(&backing).unwrap().set_len(16 * MIB).unwrap();
            run("losetup", &["--find", "--show", &backing.display().to_string()])
        });
        let Some(device) = made else {
            let _ = run("umount", &["-l", &place]);
            println!("SKIPPED: no loop device over a small file system");
            return None;
        };
        Some(Self { device: device.into(), dir })
    }

    fn open(&self, direct: bool) -> Arc<FileImage> {
        let options = FileOptions { write: true, direct, export_len: None };
        Arc::new(FileImage::open(&self.device, options).unwrap())
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        run("losetup", &["-d", &self.device.display().to_string()]).expect("losetup -d");
        let _ = run("umount", &["-l", &self.dir.path().display().to_string()]);
    }
}

/// Acknowledged, and more than there is room for.
fn overfill(image: &dyn Image) {
    for at in 0..8 {
        image.write_at(&vec![5; MIB as usize], at * MIB, false).unwrap();
    }
}

#[test]
fn the_guests_flush_is_told_what_a_sync_of_drays_own_was_told() {
    let Some(full) = Full::new() else { return };
    let image = full.open(false);
    let disk = Disk::new(Arc::clone(&image) as _);
    overfill(&*disk);
    disk.checkpoint().unwrap_err();
    assert!(disk.write_back_error().is_some_and(|last| !last.told && last.count == 1));
    image.sync().unwrap();
    let told = disk.flush().unwrap_err();
    assert!(told.to_string().contains("earlier writes may be lost"), "{told}");
    disk.flush().unwrap();
    assert!(disk.write_back_error().is_some_and(|last| last.told));
}

#[test]
fn the_guests_own_flush_is_told_once() {
    let Some(full) = Full::new() else { return };
    let disk = Disk::new(full.open(false) as _);
    overfill(&*disk);
    disk.flush().unwrap_err();
    disk.flush().unwrap();
    assert!(disk.write_back_error().is_some_and(|last| last.told && last.count == 1));
}

#[test]
fn a_write_that_is_durable_at_once_does_not_swallow_what_others_lost() {
    let Some(full) = Full::new() else { return };
    let disk = Disk::new(full.open(false) as _);
    overfill(&*disk);
    // Whether this one hears of the others or not, the flush does.
    let _ = disk.write_at(&[6; 4096], 0, true);
    let _ = disk.zero(0, 4096, ZeroMode::MayUnmap, true);
    let zeroed = disk.write_at(&[6; 4096], 8192, true);
    let flushed = disk.flush();
    assert!(zeroed.is_err() || flushed.is_err());
    flushed.unwrap_err();
    disk.flush().unwrap();
}

#[test]
fn a_loss_that_was_told_is_not_told_again_by_the_same_file_opened_twice() {
    let Some(full) = Full::new() else { return };
    let disk = Disk::new(full.open(true) as _);
    // What does not fit direct I/O goes through the page cache.
    for at in 0..2000 {
        disk.write_at(&[5; 100], at * 8192 + 7, false).unwrap();
    }
    disk.flush().unwrap_err();
    disk.flush().unwrap();
    // Where there is room, this is durable.
    disk.write_at(&[6; 4096], 0, true).unwrap();
    disk.flush().unwrap();
}

#[test]
fn a_file_that_is_opened_again_tells_of_what_nobody_was_told() {
    let Some(full) = Full::new() else { return };
    let first = full.open(false);
    overfill(&*first);
    // As the kernel writes back when it likes.
    first.start_writeback(0, 8 * MIB).ok();
    let second = full.open(false);
    first.sync().unwrap_err();
    Disk::new(second as _).flush().unwrap_err();
    Disk::new(first as _).flush().unwrap_err();
}

/// What the processes of a host leave to each other.
#[derive(Default)]
struct Host {
    lost: Mutex<Option<Loss>>,
    noted: Mutex<BlockSet>,
    recorded: Mutex<BlockSet>,
}

impl LossLog for Host {
    fn lost(&self, loss: &Loss) -> Result<()> {
        *self.lost.lock().unwrap() = Some(loss.clone());
        Ok(())
    }

    fn begun_anew(&self) -> Result<()> {
        self.settled("")
    }

    fn settled(&self, _: &str) -> Result<()> {
        *self.lost.lock().unwrap() = None;
        Ok(())
    }
}

impl PresentLog for Host {
    fn record(&self, present: &BlockSet) -> Result<()> {
        self.recorded.lock().unwrap().union_with(present);
        self.noted.lock().unwrap().subtract(present);
        Ok(())
    }

    fn note(&self, run: BlockRange) -> Result<()> {
        self.noted.lock().unwrap().insert(run);
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        *self.noted.lock().unwrap() = BlockSet::new();
        Ok(())
    }
}

impl Fetcher for Host {
    fn demand(&self, range: BlockRange) {
        panic!("{range:?} is only written");
    }

    fn peek(&self, _: u64, _: &mut [u8]) -> Result<()> {
        panic!("nothing is read");
    }
}

fn with_missing(host: &Arc<Host>, image: Arc<FileImage>, _: &Path) -> Arc<Disk> {
    let mut missing = BlockSet::new();
    missing.insert(BlockRange::whole(16 * MIB));
    let noted = host.noted.lock().unwrap().clone();
    [&noted, &*host.recorded.lock().unwrap()].into_iter().for_each(|here| missing.subtract(here));
    let disk = Disk::new(image as _);
    disk.serve_with_missing(missing, &noted, Arc::clone(host) as _, Arc::clone(host) as _);
    disk
}

fn flattened(host: &Arc<Host>, image: Arc<FileImage>, dir: &Path) -> Arc<Disk> {
    let below = file(dir, 16 * MIB);
    let (here, noted) = (host.recorded.lock().unwrap(), host.noted.lock().unwrap());
    let overlay = Overlay::new(below, image as _, &here, &noted, Arc::clone(host) as _).unwrap();
    Disk::new(Arc::new(overlay) as _)
}

#[test]
fn after_a_restart_a_loss_is_told_once_and_the_disk_goes_on() {
    for serve in [with_missing, flattened] {
        let Some(full) = Full::new() else { return };
        let (host, dir) = (Arc::new(Host::default()), tempfile::tempdir().unwrap());
        let start = || {
            let image = full.open(false);
            let lost = host.lost.lock().unwrap().clone();
            image.keep_losses(Arc::clone(&host) as _, &Past::owing(lost));
            serve(&host, image, dir.path())
        };
        let first = start();
        overfill(&*first);
        first.flush().unwrap_err();
        first.write_at(&[6; 4096], 0, false).unwrap_err();
        let second = start();
        // There is room for it.
        second.write_at(&[6; 4096], 0, false).unwrap();
        let told = second.flush().unwrap_err();
        assert!(told.to_string().contains("before the agent was restarted"), "{told}");
        assert_eq!(host.recorded.lock().unwrap().len(), 1);
        second.write_at(&[7; 4096], 0, false).unwrap();
        second.flush().unwrap();
        assert!(host.lost.lock().unwrap().is_none());
        start().flush().unwrap();
    }
}

fn file(dir: &Path, len: u64) -> Arc<dyn Image> {
    let path = dir.join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    let options = FileOptions { write: true, ..FileOptions::default() };
    Arc::new(FileImage::open(&path, options).unwrap())
}

#[test]
fn a_client_is_known_to_the_file_below_every_layer_until_it_has_gone() {
    let (dir, host, none) =
        (tempfile::tempdir().unwrap(), Arc::new(Host::default()), BlockSet::new());
    let (below, image) = (file(dir.path(), MIB), file(dir.path(), MIB));
    let overlay = Overlay::new(below, image, &none, &none, host).unwrap();
    let layered = Layered::new(Arc::new(overlay), Faults::new());
    let late = Late::new(layered.geometry());
    let disk = Disk::new(Arc::clone(&late) as _);
    let clients: Vec<_> = (0..3).map(|_| Client::new(Arc::new(|| true))).collect();
    let goes = |client: &Arc<Client>| {
        client.departs(Departure::Goodbye);
        disk.look_at(client);
    };
    clients[..2].iter().for_each(|client| disk.look_at(client));
    goes(&clients[1]);
    late.attach(Arc::new(layered)).unwrap();
    disk.look_at(&clients[2]);
    assert_eq!(clients.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2, 1, 2]);
    clients.iter().for_each(goes);
    assert!(clients.iter().all(|client| Arc::strong_count(client) == 1));
}

#[test]
fn a_guest_and_dray_are_told_apart_through_every_layer() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Arc::new(Layered::new(file(dir.path(), MIB), Faults::new()));
    let disk = Disk::new(Arc::clone(&faults) as _);
    let strike = |op| {
        let fault = Fault { name: "one".to_owned(), op, when: When::Nth(1), kind: ErrorKind::Io };
        faults.layer().disarm("one");
        faults.layer().arm(fault);
    };
    strike(Op::Sync);
    disk.flush().unwrap();
    disk.checkpoint().unwrap_err();
    strike(Op::Flush);
    disk.checkpoint().unwrap();
    disk.sync().unwrap();
    disk.flush().unwrap_err();
}
