//! A fresh qcow2 of a complete raw image: QEMU's tools make it and write it, while the image's guest
//! goes on.
//!
//! Until the disk goes over to it ([`super::swap`]) the raw image is the truth, and the qcow2 a file
//! under a hidden name that nobody misses.

use super::chain::Chain;
use super::layer::Admits;
use super::maker;
use super::merge::{Above, merge_most, merge_rest};
use dray_confine::Tool;
use dray_host::flat::ChainImage;
use dray_host::record::ImageRecord;
use dray_host::record::chain::ChainLayer;
use dray_image::blockmap::AtomicBlockMap;
use dray_image::{
    Disk, Image, ImageNames, Result, WriteWitness, growable_len, leave_room, names, runs,
};
use dray_types::text::harmless;
use dray_types::{BLOCK_SIZE, BlockRange};
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// How long a tool may take to say which version it is.
const VERSION: Duration = Duration::from_secs(20);
/// Tables take 10 bytes for each 64 KiB, and some more to begin with.
const TABLES_SHARE: u64 = 4096;
const TABLES: u64 = 1 << 20;
/// Blocks copied by one request: 1 MiB.
const RUN_BLOCKS: u64 = 256;
/// Written bytes between two flushes: so little waits in the host's memory for the disk, and a
/// guest's flush behind it.
const FLUSH_EVERY: u64 = 64 << 20;
/// How often is told how far it is.
const TELL: Duration = Duration::from_millis(500);
/// Blocks that a guest may be stopped for at most: 64 MiB, 0.4 s on a disk that writes 160 MB/s.
const MOST: u64 = 16_384;
/// What is refused when there is no room.
const WHAT: &str = "making a qcow2";

/// Name of the qcow2 that is made of the raw image called `name`.
pub fn qcow2_name(name: &str) -> String {
    format!("{}.qcow2", name.strip_suffix(".raw").unwrap_or(name))
}

/// The qcow2 that is made of the raw image at `path`.
pub fn qcow2_path(path: &Path) -> PathBuf {
    path.with_file_name(qcow2_name(&path.file_name().unwrap_or_default().to_string_lossy()))
}

/// Bytes that the qcow2 of an image with so many allocated bytes takes at most.
pub fn qcow2_bytes(allocated: u64) -> u64 {
    allocated.saturating_add(allocated / TABLES_SHARE).saturating_add(TABLES)
}

/// Whether this host has what a qcow2 is made with, and can run it behind its wall.
///
/// # Errors
/// What is missing.
pub fn check_tools() -> io::Result<()> {
    for name in [maker::CHECKER, maker::MAKER] {
        let mut tool = Tool::new(name);
        tool.arg("--version");
        let failed = |kind, why: &dyn std::fmt::Display| {
            io::Error::new(kind, format!("{name} cannot be started ({why}); it comes with QEMU"))
        };
        let ran = tool.run(VERSION).map_err(|why| failed(why.kind(), &why))?;
        if !ran.status.success() {
            let words = harmless(String::from_utf8_lossy(&ran.stderr).trim());
            return Err(failed(io::ErrorKind::Other, &words));
        }
    }
    Ok(())
}

/// The qcow2 of these names, which has everything, gets its name, and the owner and mode of `image`, of which it was made.
/// Can be repeated.
///
/// # Errors
/// When a file has the name, or what the file system reports.
pub(super) fn name(names: &ImageNames, image: &ImageRecord) -> io::Result<()> {
    if let Some(owner) = image.owner.filter(|_| names.chain().exists()) {
        let opened = names::open_closed(&names.chain(), false).map_err(io::Error::other);
        if let Err(why) = opened.and_then(|file| owner.give(&file)) {
            // It has everything, and who needs it has to be helped by hand.
            tracing::warn!(path = %names.image().display(), %why, "cannot give a file away");
        }
    }
    names.thaw_chain(image.named_mode()).map_err(io::Error::other)
}

/// Told how many bytes are copied, and of how many.
pub type Progress = Box<dyn Fn(u64, u64) + Send + Sync>;

/// A qcow2 in the making; its file is there until it has its name or is [discarded](Self::discard).
pub struct Fresh {
    names: ImageNames,
    len: u64,
    raw: Raw,
    chain: Arc<Chain>,
}

impl Fresh {
    /// Makes an empty one at `path` for `disk`, whose image takes `allocated` bytes. What an earlier
    /// try has left goes. The storage daemon's socket is beside `place`.
    ///
    /// # Errors
    /// When there is no room for it, or what QEMU's tool or the file system says.
    pub fn begin(
        disk: &Arc<Disk>,
        path: &Path,
        allocated: u64,
        place: PathBuf,
        admits: Arc<dyn Admits>,
        progress: Progress,
    ) -> io::Result<Self> {
        let names = ImageNames::of(path).map_err(io::Error::other)?;
        names.remove_chain().map_err(io::Error::other)?;
        let dir = path.parent().unwrap_or(Path::new("/"));
        leave_room(dir, qcow2_bytes(allocated), WHAT).map_err(io::Error::other)?;
        let len = disk.backing().geometry().len;
        create(&names, len)?;
        let layer = ChainLayer {
            path: names.chain(),
            format: "qcow2".into(),
            protocol: "file".into(),
            seen: None,
        };
        let chain = Chain::new(place, vec![layer], len, None, admits);
        match Raw::watch(disk, &chain, dir, progress) {
            Ok(raw) => Ok(Self { names, len, raw, chain }),
            Err(why) => {
                names.remove_chain().map_err(io::Error::other)?;
                Err(io::Error::other(why))
            }
        }
    }

    /// Copies while the guest writes, until little is left.
    ///
    /// # Errors
    /// When it cannot be written, or too much would be left.
    pub fn copy_most(&self) -> io::Result<()> {
        merge_most(&self.raw, &*self.chain)?;
        match self.raw.unmerged_count() {
            left if left <= MOST => Ok(()),
            _ => Err(io::Error::other("the guest writes faster than dray can write the qcow2")),
        }
    }

    /// Copies the rest, with nobody writing: it equals the raw image, and is durable and closed.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn copy_rest(&self) -> io::Result<()> {
        merge_rest(&self.raw, &*self.chain)?;
        match self.chain.life() {
            ..=1 => Ok(()),
            // One that died may have left clusters behind that nothing refers to.
            _ => self.remove_leaks(),
        }
    }

    fn remove_leaks(&self) -> io::Result<()> {
        let path = self.names.chain();
        let file = names::open_closed(&path, true).map_err(io::Error::other)?;
        let room = growable_len(file.metadata()?.len(), self.len);
        maker::remove_leaks(file, &path, room)
    }

    /// It gets its name, and the owner and mode of `image`, durably: by that it is the truth, as soon as nobody is on the
    /// raw image.
    ///
    /// # Errors
    /// When a file has the name, or what the file system reports.
    pub fn name(&self, image: &ImageRecord) -> io::Result<()> {
        name(&self.names, image)
    }

    /// It is of no use: its file goes.
    pub fn discard(self) {
        self.chain.close();
        if let Err(why) = self.names.remove_chain() {
            tracing::warn!(%why, "cannot remove a qcow2 that is not used");
        }
    }
}

/// Makes an empty qcow2 under the hidden name.
fn create(names: &ImageNames, len: u64) -> io::Result<()> {
    let file = names.create_chain().map_err(io::Error::other)?;
    let made = maker::make(file, &names.chain(), len, growable_len(0, len));
    if made.is_err() {
        names.remove_chain().map_err(io::Error::other)?;
    }
    made
}

/// A raw image whose guest goes on, and which of its blocks the qcow2 may lack.
struct Raw {
    disk: Arc<Disk>,
    marks: Arc<Marks>,
    chain: Arc<Chain>,
    dir: PathBuf,
    progress: Progress,
    tally: Mutex<Tally>,
}

struct Marks {
    /// The qcow2 has something there, or should.
    ever: AtomicBlockMap,
    /// It may not be what the raw image has.
    unmerged: AtomicBlockMap,
}

struct Tally {
    copied: u64,
    unflushed: u64,
    requests: u64,
    told: Instant,
}

impl WriteWitness for Marks {
    fn written(&self, range: BlockRange) {
        // In this order: whoever takes all that ever was for unmerged misses nothing.
        self.ever.set(range);
        self.unmerged.set(range);
    }
}

impl Raw {
    fn watch(disk: &Arc<Disk>, chain: &Arc<Chain>, dir: &Path, progress: Progress) -> Result<Self> {
        let whole = BlockRange::whole(disk.backing().geometry().len);
        let map = || AtomicBlockMap::new(whole.len);
        let marks = Arc::new(Marks { ever: map(), unmerged: map() });
        disk.set_write_witness(Some(Arc::clone(&marks) as _));
        let tally =
            Mutex::new(Tally { copied: 0, unflushed: 0, requests: 0, told: Instant::now() });
        let (disk, chain, dir) = (Arc::clone(disk), Arc::clone(chain), dir.to_owned());
        let raw = Self { disk, marks, chain, dir, progress, tally };
        // Pairs with the fence of a write that completes: it is told of, or seen here.
        fence(Ordering::SeqCst);
        for run in runs::data_blocks(raw.disk.backing().as_ref(), whole)?.runs() {
            raw.marks.ever.set(run);
        }
        Ok(raw)
    }

    /// After a run that took so long: what is due now and then.
    fn account(&self, run: BlockRange, took: Duration) -> Result<()> {
        let mut tally = self.tally.lock();
        tally.copied += run.byte_len();
        tally.unflushed += run.byte_len();
        if tally.unflushed >= FLUSH_EVERY {
            tally.unflushed = 0;
            self.chain.flush()?;
        }
        let total = self.marks.ever.count() * BLOCK_SIZE;
        if tally.told.elapsed() >= TELL {
            tally.told = Instant::now();
            (self.progress)(tally.copied.min(total), total);
        }
        let stats = self.disk.stats();
        let requests = stats.reads + stats.writes + stats.zeroes + stats.flushes;
        let busy = std::mem::replace(&mut tally.requests, requests) != requests;
        // The first time through there is no hurry: half of the disk's time is the guest's.
        if busy && tally.copied <= total {
            std::thread::sleep(took);
        }
        Ok(())
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.disk.set_write_witness(None);
    }
}

impl Above for Raw {
    fn merge(&self, from: u64) -> Result<Option<BlockRange>> {
        let Some(run) = self.marks.unmerged.next_run(from, RUN_BLOCKS) else { return Ok(None) };
        let began = Instant::now();
        leave_room(&self.dir, run.byte_len(), WHAT)?;
        // Cleared before it is read: a write that completes later marks it again.
        self.marks.unmerged.clear(run);
        let copied = runs::copy_run(self.disk.backing().as_ref(), self.chain.as_ref(), run);
        if let Err(why) = copied {
            self.marks.unmerged.set(run);
            return Err(why);
        }
        self.account(run, began.elapsed())?;
        Ok(Some(run))
    }

    fn unmerge(&self) {
        for run in self.marks.ever.snapshot().runs() {
            self.marks.unmerged.set(run);
        }
    }

    fn unmerged_count(&self) -> u64 {
        self.marks.unmerged.count()
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain::tests::contents;
    use super::super::merge::tests::Small;
    use super::*;
    use dray_image::{FileImage, FileOptions, ZeroMode};
    use dray_types::ImageId;
    use std::io::Read;

    /// More than may be left for the end.
    const LEN: u64 = (24 << 20) + 1536;
    const DATA: usize = 20 << 20;

    fn disk(dir: &Path) -> (Arc<Disk>, Vec<u8>) {
        let path = dir.join("vm.raw");
        let mut seen: Vec<u8> = (0..DATA as u32 / 4).flat_map(u32::to_le_bytes).collect();
        std::fs::write(&path, &seen).unwrap();
        seen.resize(LEN as usize, 0);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(LEN).unwrap();
        let options = FileOptions { write: true, direct: false, export_len: None };
        (Disk::new(Arc::new(FileImage::open(&path, options).unwrap())), seen)
    }

    fn begin(disk: &Arc<Disk>, pool: &Path) -> io::Result<Fresh> {
        let dir = tempfile::tempdir()?.keep();
        let path = qcow2_path(&pool.join("vm.raw"));
        let (place, admits) = (dir.join("chain"), super::super::confined::anything());
        Fresh::begin(disk, &path, DATA as u64, place, admits, Box::new(|_, _| {}))
    }

    fn write(disk: &Disk, seen: &mut [u8], at: usize, byte: u8, len: usize) {
        disk.write_at(&vec![byte; len], at as u64, false).unwrap();
        seen[at..at + len].fill(byte);
    }

    #[test]
    fn names_go_both_ways() {
        assert_eq!(qcow2_name("vm.raw"), "vm.qcow2");
        assert_eq!(qcow2_name("vm"), "vm.qcow2");
        assert_eq!(qcow2_name(&super::super::raw_name("vm.qcow2")), "vm.qcow2");
        assert_eq!(qcow2_path(Path::new("/pool/vm.raw")), Path::new("/pool/vm.qcow2"));
    }

    /// What a guest writes and discards while its qcow2 is made is in it, whatever the storage daemon
    /// had not written down when it died.
    #[test]
    fn a_qcow2_is_what_the_guest_sees() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, mut seen) = disk(dir.path());
        let fresh = begin(&disk, dir.path()).unwrap();
        write(&disk, &mut seen, 1000, 9, 3000);
        fresh.copy_most().unwrap();
        write(&disk, &mut seen, 22 << 20, 8, 1 << 20);
        write(&disk, &mut seen, LEN as usize - 700, 7, 700);
        // It was copied before, and reads as a hole from now on.
        let (hole, len) = (4 << 20, 1 << 20);
        disk.zero(hole as u64, len as u64, ZeroMode::MayUnmap, false).unwrap();
        seen[hole..hole + len].fill(0);
        while fresh.raw.unmerged_count() > 0 {
            assert!(fresh.raw.merge(0).unwrap().is_some());
        }
        fresh.chain.kill_daemon();
        // Nothing is there any more, but the qcow2 may have what was.
        fresh.raw.unmerge();
        let hole = BlockRange::covering(hole as u64, len as u64);
        assert_eq!(fresh.raw.marks.unmerged.count_in(hole), hole.len);
        let quiet = disk.quiesce(Duration::from_secs(5)).unwrap();
        fresh.copy_rest().unwrap();
        assert!(!dir.path().join("vm.qcow2").exists(), "it has no name before it is asked for");
        let image = ImageRecord::owned("vm".into(), ImageId(1), dir.path().join("vm.raw"), LEN);
        fresh.name(&image).unwrap();
        drop((fresh, quiet));
        let qcow2 = dir.path().join("vm.qcow2");
        assert!(contents(&qcow2) == seen);
        // Not the room that the daemon saw.
        assert!(std::fs::metadata(&qcow2).unwrap().len() < 2 * LEN);
    }

    #[test]
    fn a_qcow2_that_comes_to_nothing_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, _) = disk(dir.path());
        let fresh = begin(&disk, dir.path()).unwrap();
        fresh.copy_most().unwrap();
        fresh.discard();
        let names = || std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(names().collect::<Vec<_>>(), ["vm.raw"]);
        // Of an agent that died in the middle.
        let left = begin(&disk, dir.path()).unwrap();
        drop(left);
        assert_eq!(names().count(), 2);
        begin(&disk, dir.path()).unwrap().discard();
        assert_eq!(names().collect::<Vec<_>>(), ["vm.raw"]);
    }

    /// The guest's room is the guest's.
    #[test]
    fn a_pool_without_room_has_no_qcow2() {
        let dir = tempfile::tempdir().unwrap();
        let Some(small) = Small::mount(&dir.path().join("pool"), 48) else { return };
        let (disk, mut seen) = disk(&small.0);
        let fresh = begin(&disk, &small.0).unwrap();
        let filler = std::fs::File::create(small.0.join("filler")).unwrap();
        std::io::copy(&mut std::io::repeat(1).take(12 << 20), &mut &filler).unwrap();
        let why = fresh.copy_most().unwrap_err().to_string();
        assert!(why.contains("nearly full"), "{why}");
        fresh.discard();
        let why = begin(&disk, &small.0).err().unwrap().to_string();
        assert!(why.contains("nearly full"), "{why}");
        // 48 MiB, 20 of them the disk's and 12 the filler's.
        write(&disk, &mut seen, 20 << 20, 5, 1 << 20);
        assert!(!ImageNames::of(&small.0.join("vm.qcow2")).unwrap().chain().exists());
    }
}
