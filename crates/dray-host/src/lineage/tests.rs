//! Lines on real files: what is known after a stop, a crash, a backup.

use super::*;
use dray_files::files::Files;
use dray_files::files::sim::SimDisk;
use dray_image::{FileImage, FileOptions, Image};
use std::path::Path;

struct Host {
    dir: tempfile::TempDir,
}

const LEN: u64 = 4 * INTENT_REGION_BYTES;

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(dir.path().join("disk")).unwrap();
        file.set_len(LEN).unwrap();
        Self { dir }
    }

    fn image(&self) -> StatePath {
        StatePath::real(self.dir.path().join("disk"))
    }

    fn line(&self) -> StatePath {
        StatePath::real(self.dir.path().join("line"))
    }

    fn disk(&self) -> Arc<Disk> {
        let options = FileOptions { write: true, direct: false, export_len: None };
        Disk::new(Arc::new(FileImage::open(self.image().path(), options).unwrap()))
    }

    /// A disk whose line has a past: generation 1 is elsewhere.
    fn begin(&self) -> (Arc<ImageLineage>, Arc<Disk>, GenerationId) {
        let first = Lineage::new(GenerationId(7));
        let past = first.closed(BlockSet::new(), "hosta", 1);
        let (line, changed) =
            ImageLineage::after(&self.line(), past, &self.image(), false).unwrap();
        let disk = self.disk();
        line.track(&disk, &changed);
        (line, disk, first.open().id)
    }

    fn restart(&self) -> (Arc<ImageLineage>, Arc<Disk>) {
        let (line, changed) = ImageLineage::go_on(&self.line(), &self.image()).unwrap();
        let disk = self.disk();
        line.track(&disk, &changed);
        (line, disk)
    }
}

fn write(disk: &Disk, block: u64) {
    disk.write_at(&[1; 4096], block * BLOCK_SIZE, false).unwrap();
}

fn blocks(set: &BlockSet) -> Vec<(u64, u64)> {
    set.runs().map(|run| (run.start, run.len)).collect()
}

#[test]
fn an_unclean_stop_distrusts_open_regions_and_a_clean_one_nothing() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    write(&disk, REGION_BLOCKS + 5);
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1), (REGION_BLOCKS + 5, 1)]);
    let (line, disk) = host.restart();
    let changed = line.changed_since(base, &disk).unwrap();
    assert_eq!(blocks(&changed), [(0, 2 * REGION_BLOCKS)]);

    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    line.stop(&disk, &host.image(), Duration::ZERO).unwrap();
    let (line, disk) = host.restart();
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1)]);
    write(&disk, 9);
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1), (9, 1)]);
}

#[test]
fn idle_regions_are_closed_and_opened_again() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    line.close_idle(&disk).unwrap();
    write(&disk, REGION_BLOCKS);
    line.close_idle(&disk).unwrap();
    let (line, disk) = host.restart();
    let changed = line.changed_since(base, &disk).unwrap();
    assert_eq!(blocks(&changed), [(3, 1), (REGION_BLOCKS, REGION_BLOCKS)]);
    line.close_idle(&disk).unwrap();
    write(&disk, 4);
    let (line, disk) = host.restart();
    let changed = line.changed_since(base, &disk).unwrap();
    assert_eq!(blocks(&changed), [(0, 2 * REGION_BLOCKS)], "written again: open again");
}

#[test]
fn an_image_changed_while_no_agent_ran_has_no_past() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    line.stop(&disk, &host.image(), Duration::ZERO).unwrap();
    drop((line, disk));
    std::thread::sleep(Duration::from_millis(20));
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(host.image()).unwrap(),
        b"somebody else's",
        LEN - 4096,
    )
    .unwrap();
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), None);
    assert!(!line.lineage().has_past());
}

#[test]
fn a_damaged_or_missing_file_begins_a_new_line() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    drop((line, disk));
    let mut bytes = std::fs::read(host.line()).unwrap();
    bytes[30] ^= 1;
    std::fs::write(host.line(), bytes).unwrap();
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), None);
    drop((line, disk));
    std::fs::remove_file(host.line()).unwrap();
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), None);
}

#[test]
fn a_file_that_cannot_be_written_ends_the_line_and_not_the_guest() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    {
        // A journal whose folder is gone cannot be rewritten, and then takes nothing more.
        let folder = host.dir.path().join("gone");
        std::fs::create_dir(&folder).unwrap();
        let (mut journal, _) = Journal::open(&StatePath::real(folder.join("line"))).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        assert!(journal.rewrite(&[b"x"]).is_err());
        line.inner().journal = journal;
    }
    write(&disk, REGION_BLOCKS);
    assert_eq!(line.changed_since(base, &disk), None);
    assert!(!host.line().exists().unwrap());
    let (line, _) = host.restart();
    assert!(!line.lineage().has_past());
}

#[test]
fn a_new_owner_goes_on_with_the_line_it_began() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    let open = line.lineage().open();
    write(&disk, 3);
    let past = line.lineage().past().to_vec();
    drop((line, disk));
    let (line, changed) =
        ImageLineage::after(&host.line(), past.clone(), &host.image(), false).unwrap();
    assert_eq!(line.lineage().open(), open);
    assert_eq!(blocks(&changed), [(0, REGION_BLOCKS)]);
    let disk = host.disk();
    line.track(&disk, &changed);
    assert!(line.changed_since(base, &disk).is_some());
    // After another handover there is another one, though an old file lies there.
    let past = line.closed("hostb", &disk, 2);
    let (line, changed) =
        ImageLineage::after(&host.line(), past.clone(), &host.image(), false).unwrap();
    assert_eq!(line.lineage().open().number, open.number + 1);
    assert!(changed.is_empty());
    // One that ended while the image was served does not begin again as if nothing had been written.
    drop(line);
    host.line().remove().unwrap();
    let (line, _) = ImageLineage::after(&host.line(), past, &host.image(), true).unwrap();
    assert!(!line.lineage().has_past());
}

/// Ends the open generation; what happens between the quiet moment and the record is `meanwhile`'s.
fn turn(
    line: &Arc<ImageLineage>,
    disk: &Arc<Disk>,
    meanwhile: impl FnOnce(),
) -> (Ancestor, io::Result<()>) {
    let turning = line.turning(Vec::new()).unwrap();
    let quiesced = disk.quiesce(Duration::from_secs(5)).unwrap();
    let turn = turning.turn(disk, &quiesced, "hosta", 2).unwrap();
    drop(quiesced);
    meanwhile();
    let closed = turn.closed();
    (closed, turn.commit().map(drop))
}

/// A kill leaves no stamp, and what is at the path afterwards may be another file.
#[test]
fn a_line_is_of_one_file_whatever_its_name() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    drop((line, disk));
    let (image, away) = (host.image(), host.dir.path().join("away"));
    std::fs::rename(image.path(), &away).unwrap();
    std::fs::rename(&away, image.path()).unwrap();
    let (line, disk) = host.restart();
    assert!(line.changed_since(base, &disk).is_some(), "it is the same file");
    drop((line, disk));
    std::fs::rename(image.path(), &away).unwrap();
    std::fs::copy(&away, image.path()).unwrap();
    assert!(ImageLineage::is_of_another(&host.line(), &host.image()));
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), None);
    assert!(
        !ImageLineage::is_of_another(&host.line(), &host.image()),
        "the new line is of the new file"
    );
}

/// Many file systems give a new file the number of one that is gone.
#[test]
fn a_file_that_was_made_again_under_the_same_number_is_another_one() {
    let sim = SimDisk::new(1, &["/", "/state"].map(Path::new));
    let files: Arc<dyn Files> = Arc::new(sim.files());
    let [image, path] =
        ["/state/disk", "/state/line"].map(|at| StatePath::new(Arc::clone(&files), at));
    let make = || {
        files.create_closed(image.path()).unwrap();
        stamp_of(&image).unwrap()
    };
    let old = make();
    let (line, _) = ImageLineage::go_on(&path, &image).unwrap();
    let open = line.lineage().open();
    drop(line);
    let (line, _) = ImageLineage::go_on(&path, &image).unwrap();
    assert_eq!(line.lineage().open(), open, "it is the same file");
    drop(line);
    assert!(!ImageLineage::is_of_another(&path, &image));
    files.remove(image.path()).unwrap();
    let new = make();
    assert!(old.file.inode == new.file.inode && !new.seems_unwritten(&old), "{old:?} {new:?}");
    assert!(ImageLineage::is_of_another(&path, &image));
    let (line, _) = ImageLineage::go_on(&path, &image).unwrap();
    assert_ne!(line.lineage().open(), open);
    assert!(!ImageLineage::is_of_another(&path, &image));
}

/// It is not stamped as if it were what was served: its guest has written elsewhere.
#[test]
fn a_file_that_came_under_a_running_agent_is_another_one_after_an_orderly_stop() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    let (image, away) = (host.image(), host.dir.path().join("away"));
    std::fs::rename(image.path(), &away).unwrap();
    std::fs::copy(&away, image.path()).unwrap();
    line.stop(&disk, &image, Duration::ZERO).unwrap();
    drop((line, disk));
    assert!(ImageLineage::is_of_another(&host.line(), &image));
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), None);
}

#[test]
fn what_is_suspect_when_the_agent_stops_is_so_afterwards() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    line.suspect();
    line.stop(&disk, &host.image(), Duration::ZERO).unwrap();
    drop((line, disk));
    let (line, disk) = host.restart();
    assert_eq!(line.changed_since(base, &disk), Some(whole(&disk)));
}

#[test]
fn the_first_backup_begins_a_past_and_tracks_from_the_first_write_on() {
    let host = Host::new();
    let (line, changed) = ImageLineage::go_on(&host.line(), &host.image()).unwrap();
    let disk = host.disk();
    line.track(&disk, &changed);
    write(&disk, 1);
    assert!(!disk.keeps_history());
    let (closed, done) = turn(&line, &disk, || write(&disk, 3));
    done.unwrap();
    assert_eq!(closed.number, 1);
    write(&disk, REGION_BLOCKS + 5);
    let changed = line.changed_since(closed.id, &disk).unwrap();
    assert_eq!(blocks(&changed), [(3, 1), (REGION_BLOCKS + 5, 1)]);
    // After a crash the regions that were open count, also the one from before the record.
    let (line, disk) = host.restart();
    let changed = line.changed_since(closed.id, &disk).unwrap();
    assert_eq!(blocks(&changed), [(0, 2 * REGION_BLOCKS)]);
    assert_eq!(line.ancestors(), [closed]);
}

#[test]
fn a_generation_that_was_not_written_down_goes_on() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    let open = line.lineage().open();
    let turning = line.turning(Vec::new()).unwrap();
    let quiesced = disk.quiesce(Duration::from_secs(5)).unwrap();
    let given_up = turning.turn(&disk, &quiesced, "hosta", 2).unwrap();
    drop(quiesced);
    write(&disk, 9);
    drop(given_up);
    assert_eq!(line.lineage().open(), open);
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1), (9, 1)]);
    // The same with a line that had no past: it has none, and the next try begins with nothing.
    let host = Host::new();
    let (line, _) = ImageLineage::go_on(&host.line(), &host.image()).unwrap();
    let disk = host.disk();
    let turning = line.turning(Vec::new()).unwrap();
    let quiesced = disk.quiesce(Duration::from_secs(5)).unwrap();
    drop(turning.turn(&disk, &quiesced, "hosta", 2).unwrap());
    drop(quiesced);
    assert!(!disk.keeps_history() && !line.lineage().has_past());
    write(&disk, 4);
    let (closed, done) = turn(&line, &disk, || ());
    done.unwrap();
    write(&disk, 5);
    let (line, disk) = host.restart();
    assert_eq!(blocks(&line.changed_since(closed.id, &disk).unwrap()), [(0, REGION_BLOCKS)]);
}

/// What one owner does.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64),
    CloseIdle,
    Stop,
    Crash,
    /// A backup with a write before its record: written down, given up, or killed before the record.
    BackUp(u64, End),
}

#[derive(Clone, Copy, Debug)]
enum End {
    Committed,
    GivenUp,
    Killed,
}

/// Blocks that are written: a few in each region.
const PLACES: u64 = 16;

fn place(nth: u64) -> u64 {
    (nth % 4) * REGION_BLOCKS + nth / 4
}

fn steps() -> impl proptest::strategy::Strategy<Value = Vec<Step>> {
    use proptest::prelude::*;
    let end =
        prop_oneof![3 => Just(End::Committed), 1 => Just(End::GivenUp), 1 => Just(End::Killed)];
    let step = prop_oneof![
        6 => (0..PLACES).prop_map(Step::Write),
        2 => Just(Step::CloseIdle),
        1 => Just(Step::Stop),
        1 => Just(Step::Crash),
        3 => (0..PLACES, end).prop_map(|(nth, end)| Step::BackUp(nth, end)),
    ];
    proptest::collection::vec(step, 0..40)
}

/// The image's owner with a model of what its blocks held at each backup.
struct Owner {
    host: Host,
    line: Arc<ImageLineage>,
    disk: Arc<Disk>,
    content: [u64; PLACES as usize],
    version: u64,
    backups: Vec<(Ancestor, [u64; PLACES as usize])>,
}

impl Owner {
    fn new() -> Self {
        let host = Host::new();
        let (line, disk) = host.restart();
        let (content, backups) = ([0; PLACES as usize], Vec::new());
        Self { host, line, disk, content, version: 0, backups }
    }

    fn restart(&mut self) {
        (self.line, self.disk) = self.host.restart();
    }

    fn write(&mut self, nth: u64) {
        self.version += 1;
        self.content[nth as usize] = self.version;
        write(&self.disk, place(nth));
    }

    fn back_up(&mut self, nth: u64, end: End) {
        let (line, disk) = (Arc::clone(&self.line), Arc::clone(&self.disk));
        let turning = line.turning(Vec::new()).unwrap();
        let quiesced = disk.quiesce(Duration::from_secs(5)).unwrap();
        let turn = turning.turn(&disk, &quiesced, "hosta", 2).unwrap();
        let content = self.content;
        drop(quiesced);
        self.write(nth);
        match end {
            End::Committed => self.backups.push((turn.commit().unwrap(), content)),
            End::GivenUp => drop(turn),
            End::Killed => {
                // Nothing of what happens in memory after a kill reaches the journal.
                let journal = std::fs::read(self.host.line()).unwrap();
                drop(turn);
                std::fs::write(self.host.line(), journal).unwrap();
                self.restart();
            }
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write(nth) => self.write(nth),
            Step::CloseIdle => self.line.close_idle(&self.disk).unwrap(),
            Step::Stop => {
                self.line.stop(&self.disk, &self.host.image(), Duration::ZERO).unwrap();
                self.restart();
            }
            Step::Crash => self.restart(),
            Step::BackUp(nth, end) => self.back_up(nth, end),
        }
    }

    fn check(&self) {
        for (at, was) in &self.backups {
            let differs = self.line.changed_since(at.id, &self.disk).expect("the line knows it");
            for nth in 0..PLACES {
                let same = was[nth as usize] == self.content[nth as usize];
                assert!(same || differs.contains(place(nth)), "place {nth} since {at:?}");
            }
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(60))]
    /// Whatever happens, a block that differs from a backup is among those that may differ.
    #[test]
    fn no_block_changed_since_a_backup_is_ever_left_out(steps in steps()) {
        let mut owner = Owner::new();
        for step in steps {
            owner.step(step);
            owner.check();
        }
    }
}

#[test]
fn a_suspect_line_names_everything_until_it_is_known_what_was_written() {
    let host = Host::new();
    let (line, disk, base) = host.begin();
    write(&disk, 3);
    line.suspect();
    let everything = [(0, LEN / BLOCK_SIZE)];
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), everything);
    assert_eq!(blocks(&line.closed("hosta", &disk, 2).last().unwrap().changed), everything);
    line.trust();
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1)]);
    line.suspect();
    let theirs: BlockSet = [BlockRange::new(REGION_BLOCKS, 2)].into_iter().collect();
    line.settle(&disk, Some(&theirs)).unwrap();
    write(&disk, 4);
    let known = [(3, 2), (REGION_BLOCKS, 2)];
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), known);
    // Durable at once, though nobody wrote to that region through the agent.
    let (line, disk) = host.restart();
    let changed = line.changed_since(base, &disk).unwrap();
    assert_eq!(blocks(&changed), [(0, REGION_BLOCKS + 2)]);
    line.suspect();
    line.settle(&disk, None).unwrap();
    let (line, disk) = host.restart();
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), everything);
}

/// A host whose image is on a device that only its kernel counts, and whose state is on the same simulated disk.
struct DeviceHost {
    host: Host,
    sim: Arc<SimDisk>,
    files: Arc<dyn Files>,
}

impl DeviceHost {
    const AT: &str = "/dev/disk";

    fn new() -> Self {
        let sim = SimDisk::new(1, &["/", "/state"].map(std::path::Path::new));
        let files = Arc::new(sim.files()) as Arc<dyn Files>;
        let this = Self { host: Host::new(), sim, files };
        this.put(DEVICE);
        this
    }

    fn put(&self, device: Device) {
        self.sim.put_device(std::path::Path::new(Self::AT), device);
    }

    fn path(&self, path: &str) -> StatePath {
        StatePath::new(Arc::clone(&self.files), path)
    }

    fn start(&self) -> (Arc<ImageLineage>, Arc<Disk>) {
        let (line, image) = (self.path("/state/line"), self.path(Self::AT));
        let (line, changed) = ImageLineage::go_on(&line, &image).unwrap();
        let disk = self.host.disk();
        line.track(&disk, &changed);
        (line, disk)
    }

    /// A backup, a write, and a stop in order; which generation the backup has.
    fn backed_up_and_stopped(&self) -> GenerationId {
        let (line, disk) = self.start();
        let (closed, done) = turn(&line, &disk, || ());
        done.unwrap();
        write(&disk, 3);
        line.stop(&disk, &self.path(Self::AT), Duration::ZERO).unwrap();
        closed.id
    }
}

const DEVICE: Device = Device { number: (8, 1), sequence: Some(4), written: 100, discarded: 50 };

#[test]
fn a_device_goes_on_after_a_stop_if_the_kernel_has_counted_no_write() {
    let host = DeviceHost::new();
    let base = host.backed_up_and_stopped();
    let (line, disk) = host.start();
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1)]);
    // While an agent runs its own writes are counted.
    write(&disk, 9);
    host.put(Device { written: 108, ..DEVICE });
    line.stop(&disk, &host.path(DeviceHost::AT), Duration::ZERO).unwrap();
    let (line, disk) = host.start();
    assert_eq!(blocks(&line.changed_since(base, &disk).unwrap()), [(3, 1), (9, 1)]);
}

#[test]
fn a_device_that_was_written_to_while_no_agent_ran_has_no_past() {
    let changed = [
        Device { written: 101, ..DEVICE },
        Device { discarded: 51, ..DEVICE },
        Device { sequence: Some(5), ..DEVICE },
        Device { sequence: None, ..DEVICE },
        Device { number: (8, 2), ..DEVICE },
    ];
    for device in changed {
        let host = DeviceHost::new();
        let base = host.backed_up_and_stopped();
        host.put(device);
        let (line, disk) = host.start();
        assert_eq!(line.changed_since(base, &disk), None, "{device:?}");
    }
}

/// The counts begin anew, and may come to be the same.
#[test]
fn a_device_is_not_trusted_over_a_boot_of_its_host() {
    let host = DeviceHost::new();
    let base = host.backed_up_and_stopped();
    host.sim.cut();
    let host = DeviceHost { files: Arc::new(host.sim.files()), ..host };
    let (line, disk) = host.start();
    assert_eq!(line.changed_since(base, &disk), None);
}

/// An earlier release has looked at the device's node, which does not tell.
#[test]
fn the_stamp_of_a_node_says_nothing_of_its_device() {
    let host = DeviceHost::new();
    let base = host.backed_up_and_stopped();
    let path = host.path("/state/line");
    let (lineage, changed) = last_state(&path).unwrap().unwrap();
    let stamp = stamp_of(&host.path(DeviceHost::AT)).unwrap();
    let whole = LineageRecord::Whole { lineage, changed };
    let records = [whole, LineageRecord::Stopped { stamp }].map(|record| encode(&record).unwrap());
    let (mut journal, _) = Journal::open(&path).unwrap();
    journal.rewrite(&[&records[0], &records[1]]).unwrap();
    drop(journal);
    let (line, disk) = host.start();
    assert_eq!(line.changed_since(base, &disk), None);
}
