//! The line of generations of an image at its owner: its durable file, and the write intent of the
//! open generation.
//!
//! `images/NAME.line` is a journal of [`LineageRecord`]s. Before the first write into a 64 MiB
//! region it says that the region is open; now and then a set of everything written closes the
//! regions that are not in use. A file that is lost, damaged or cannot be written costs the line:
//! a new one begins, and no replica of the old one is used any more.

use crate::migration::source::unix_ms;
use crate::registry::{CopyState, Registry};
use crate::store;
use dray_engine::lineage::{Generation, Lineage, LineageRecord, Recovered, Stamp, recover};
use dray_image::journal::Journal;
use dray_image::{Disk, INTENT_REGION_BYTES, IntentLog};
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet, GenerationId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Blocks of one region.
pub const REGION_BLOCKS: u64 = INTENT_REGION_BYTES / BLOCK_SIZE;
/// How often regions that are not in use are closed: what an unclean stop makes suspect was written
/// into within twice this time.
const CLOSE_IDLE: Duration = Duration::from_secs(60);

/// What is known of a copy that was left behind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaNote {
    /// The generation that it holds.
    pub generation: Ancestor,
    /// How the file looked when nobody wrote to it any more.
    pub stamp: Stamp,
    /// Milliseconds since 1970 when it was left behind.
    pub since_unix_ms: u64,
    /// Regions that do not hold the generation any more: a migration back that came to nothing wrote
    /// there.
    #[serde(default)]
    pub distrusted: Vec<u64>,
}

/// A random id.
///
/// # Errors
/// When the system has no randomness to give.
pub fn random_generation() -> io::Result<GenerationId> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        16 => Ok(GenerationId(u128::from_le_bytes(bytes))),
        _ => Err(io::Error::other("no random bytes")),
    }
}

/// How a file looks.
///
/// # Errors
/// What the file system reports.
pub fn stamp_of(path: &Path) -> io::Result<Stamp> {
    let meta = std::fs::metadata(path)?;
    let (seconds, nanos) = (meta.mtime(), meta.mtime_nsec());
    Ok(Stamp { len: meta.len(), seconds, nanos, inode: meta.ino() })
}

/// The blocks of some regions.
pub fn region_blocks(regions: impl IntoIterator<Item = u64>) -> BlockSet {
    let start = |region: u64| region.saturating_mul(REGION_BLOCKS).min(u64::MAX - REGION_BLOCKS);
    regions.into_iter().map(|region| BlockRange::new(start(region), REGION_BLOCKS)).collect()
}

/// The line of one image that this host owns.
pub struct Line {
    path: PathBuf,
    inner: Mutex<Inner>,
}

struct Inner {
    journal: Journal,
    lineage: Lineage,
    /// Regions that the journal names as open.
    open: BTreeSet<u64>,
}

fn encode(record: &LineageRecord) -> io::Result<Vec<u8>> {
    postcard::to_allocvec(record).map_err(io::Error::other)
}

/// Reads a line's file; none when there is none, or none that can be understood.
fn read(path: &Path) -> io::Result<Option<Recovered>> {
    if !path.exists() {
        return Ok(None);
    }
    let (_, payloads) = Journal::open(path).map_err(io::Error::other)?;
    let decode = |payload: &Vec<u8>| postcard::from_bytes(payload).map_err(io::Error::other);
    let records: Vec<LineageRecord> = payloads.iter().map(decode).collect::<io::Result<_>>()?;
    Ok(recover(&records, REGION_BLOCKS))
}

/// The line at `path`, whoever wrote it last; none when there is none.
///
/// # Errors
/// What the file system reports, or that the file is damaged.
pub fn last_known(path: &Path) -> io::Result<Option<Lineage>> {
    Ok(read(path)?.map(|found| found.lineage))
}

impl Line {
    /// Writes a line down, in which `changed` was written in the open generation; durable on return.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn create(path: &Path, lineage: Lineage, changed: BlockSet) -> io::Result<Arc<Self>> {
        let opened = Journal::open(path).or_else(|_| {
            // What is damaged is of no use.
            store::remove(path).map_err(|why| dray_image::Error::io("removing a line", why))?;
            Journal::open(path)
        });
        let (mut journal, _) = opened.map_err(io::Error::other)?;
        let record = encode(&LineageRecord::Whole { lineage: lineage.clone(), changed })?;
        journal.rewrite(&[&record]).map_err(io::Error::other)?;
        let inner = Mutex::new(Inner { journal, lineage, open: BTreeSet::new() });
        Ok(Arc::new(Self { path: path.to_owned(), inner }))
    }

    /// A line of which nothing is known.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn fresh(path: &Path) -> io::Result<Arc<Self>> {
        Self::create(path, Lineage::new(random_generation()?), BlockSet::new())
    }

    /// Goes on with the line at `path` of the image that is now at `image`, as far as it can be
    /// trusted, and tells what was written in the open generation so far. Else a new one begins.
    ///
    /// # Errors
    /// What the file system reports of writing.
    pub fn go_on(path: &Path, image: &Path) -> io::Result<(Arc<Self>, BlockSet)> {
        let found = read(path).unwrap_or_else(|why| {
            tracing::warn!(line = %path.display(), %why, "an image's line of generations is lost");
            None
        });
        let untouched = |found: &Recovered| match found.stopped {
            Some(stamp) => stamp_of(image).is_ok_and(|now| now == stamp),
            None => true,
        };
        match found {
            Some(found) if untouched(&found) => {
                let line = Self::create(path, found.lineage, found.changed.clone())?;
                Ok((line, found.changed))
            }
            Some(_) => {
                let image = image.display();
                tracing::warn!(%image, "was changed while no agent ran: its replicas are of no use");
                Ok((Self::fresh(path)?, BlockSet::new()))
            }
            None => Ok((Self::fresh(path)?, BlockSet::new())),
        }
    }

    /// The line of a new owner: `past` as the source told it; goes on with what an earlier process
    /// has begun after the same past.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn after(
        path: &Path,
        past: Vec<Generation>,
        image: &Path,
    ) -> io::Result<(Arc<Self>, BlockSet)> {
        let begun = read(path).unwrap_or_default();
        if begun.is_some_and(|begun| begun.lineage.has_past() && begun.lineage.past() == past) {
            return Self::go_on(path, image);
        }
        let id = random_generation()?;
        let lineage = Lineage::after(past, id).unwrap_or_else(|| Lineage::new(id));
        Ok((Self::create(path, lineage, BlockSet::new())?, BlockSet::new()))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the line.
    pub fn lineage(&self) -> Lineage {
        self.inner().lineage.clone()
    }

    /// Remembers from now on what is written to `disk`, if anybody can have an earlier generation.
    pub fn track(self: &Arc<Self>, disk: &Disk, changed: &BlockSet) {
        if self.inner().lineage.has_past() {
            disk.start_history(Arc::clone(self) as _, changed);
        }
    }

    /// The blocks in which the image may differ from a replica of `base`; none when they cannot be
    /// told. To be asked after a migration has begun to track.
    pub fn changed_since(&self, base: GenerationId, disk: &Disk) -> Option<BlockSet> {
        let inner = self.inner();
        disk.keeps_history().then(|| inner.lineage.changed_since(base, &disk.history()))?
    }

    /// The past as the next owner shall know it; the disk is quiesced.
    pub fn closed(&self, host: &str, disk: &Disk) -> Vec<Generation> {
        self.inner().lineage.closed(disk.history(), host, unix_ms())
    }

    /// Closes the regions that are not in use.
    ///
    /// # Errors
    /// What the file system reports.
    fn close_idle(&self, disk: &Disk) -> io::Result<()> {
        // Nobody opens a region before the journal holds the set.
        let mut inner = self.inner();
        let closed = disk.close_idle_history();
        if closed.is_empty() || !disk.keeps_history() {
            return Ok(());
        }
        let (lineage, changed) = (inner.lineage.clone(), disk.history());
        inner.open.retain(|region| !closed.contains(region));
        let mut records = vec![encode(&LineageRecord::Whole { lineage, changed })?];
        for &region in &inner.open {
            records.push(encode(&LineageRecord::Opened { region })?);
        }
        // If this fails nobody knows which journal is there. Either tells enough of what is written
        // so far, and the next region that is opened ends the line.
        inner.rewrite(&records)
    }

    /// Everything is written down, and nothing is written any more: the agent stops.
    ///
    /// # Errors
    /// What the file system reports; the stop then counts as an unclean one.
    fn stop(&self, disk: &Disk, image: &Path) -> io::Result<()> {
        let mut inner = self.inner();
        if inner.lineage.has_past() && !disk.keeps_history() {
            return Ok(());
        }
        let (lineage, changed) = (inner.lineage.clone(), disk.history());
        let stamp = stamp_of(image)?;
        let whole = encode(&LineageRecord::Whole { lineage, changed })?;
        inner.rewrite(&[whole, encode(&LineageRecord::Stopped { stamp })?])
    }
}

impl Inner {
    fn rewrite(&mut self, records: &[Vec<u8>]) -> io::Result<()> {
        let slices: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        self.journal.rewrite(&slices).map_err(io::Error::other)
    }
}

impl IntentLog for Line {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        let mut inner = self.inner();
        if !inner.lineage.has_past() || inner.open.contains(&region) {
            return Ok(());
        }
        let record = encode(&LineageRecord::Opened { region })
            .map_err(|why| dray_image::Error::io("noting a write intent", why))?;
        let Err(why) = inner.journal.append(&record) else {
            inner.open.insert(region);
            return Ok(());
        };
        // The guest's write is worth more than the line. What can be neither written nor removed
        // would be believed after a restart: only then does the write fail.
        let fresh = random_generation().and_then(|id| store::remove(&self.path).map(|()| id));
        let Ok(id) = fresh else { return Err(why) };
        tracing::warn!(line = %self.path.display(), %why, "an image's line of generations ends");
        inner.lineage = Lineage::new(id);
        Ok(())
    }
}

/// Closes idle regions now and then, for as long as the registry lives.
///
/// # Errors
/// When no thread can be made.
pub fn keep(registry: &Arc<Registry>) -> io::Result<()> {
    let registry = Arc::downgrade(registry);
    let work = move || loop {
        std::thread::sleep(CLOSE_IDLE);
        let Some(registry) = registry.upgrade() else { return };
        registry.close_idle_lines();
    };
    std::thread::Builder::new().name("dray-lines".to_owned()).spawn(work).map(drop)
}

impl Registry {
    /// Closes the regions of all images that are not in use.
    fn close_idle_lines(&self) {
        for entry in self.all() {
            let Some(line) = entry.line() else { continue };
            if let Err(why) = line.close_idle(&entry.disk) {
                tracing::warn!(image = entry.record().name, %why, "cannot close write intents");
            }
        }
    }

    /// Writes down what was written to the images that this host owns: a restart then need not
    /// distrust anything. No guest can write any more after this.
    pub fn stop_lines(&self, grace: Duration) {
        for entry in self.all() {
            let Some(line) = entry.line() else { continue };
            let record = entry.record();
            let name = &record.name;
            // What arrives later would look like somebody else's writing.
            if record.state != CopyState::Owner || entry.disk.missing_count() > 0 {
                continue;
            }
            let Ok(guard) = entry.disk.quiesce(grace) else {
                tracing::debug!(name, "writes are under way at the end: its regions stay open");
                continue;
            };
            let stopped = record
                .current_path()
                .and_then(|path| dray_image::Image::flush(&*entry.file).map(|()| path))
                .map_err(io::Error::other)
                .and_then(|path| line.stop(&entry.disk, &path));
            if let Err(why) = stopped {
                tracing::warn!(name, %why, "cannot write down an image's line");
            }
            entry.disk.park(guard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_image::{FileImage, FileOptions, Image};

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

        fn image(&self) -> PathBuf {
            self.dir.path().join("disk")
        }

        fn line(&self) -> PathBuf {
            self.dir.path().join("line")
        }

        fn disk(&self) -> Arc<Disk> {
            let options = FileOptions { write: true, direct: false, export_len: None };
            Disk::new(Arc::new(FileImage::open(&self.image(), options).unwrap()))
        }

        /// A disk whose line has a past: generation 1 is elsewhere.
        fn begin(&self) -> (Arc<Line>, Arc<Disk>, GenerationId) {
            let first = Lineage::new(GenerationId(7));
            let past = first.closed(BlockSet::new(), "hosta", 1);
            let (line, changed) = Line::after(&self.line(), past, &self.image()).unwrap();
            let disk = self.disk();
            line.track(&disk, &changed);
            (line, disk, first.open().id)
        }

        fn restart(&self) -> (Arc<Line>, Arc<Disk>) {
            let (line, changed) = Line::go_on(&self.line(), &self.image()).unwrap();
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
        assert_eq!(
            blocks(&line.changed_since(base, &disk).unwrap()),
            [(3, 1), (REGION_BLOCKS + 5, 1)]
        );
        let (line, disk) = host.restart();
        let changed = line.changed_since(base, &disk).unwrap();
        assert_eq!(blocks(&changed), [(0, 2 * REGION_BLOCKS)]);

        let host = Host::new();
        let (line, disk, base) = host.begin();
        write(&disk, 3);
        line.stop(&disk, &host.image()).unwrap();
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
        line.stop(&disk, &host.image()).unwrap();
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
            let (mut journal, _) = Journal::open(&folder.join("line")).unwrap();
            std::fs::remove_dir_all(folder).unwrap();
            assert!(journal.rewrite(&[b"x"]).is_err());
            line.inner().journal = journal;
        }
        write(&disk, REGION_BLOCKS);
        assert_eq!(line.changed_since(base, &disk), None);
        assert!(!host.line().exists());
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
        let (line, changed) = Line::after(&host.line(), past.clone(), &host.image()).unwrap();
        assert_eq!(line.lineage().open(), open);
        assert_eq!(blocks(&changed), [(0, REGION_BLOCKS)]);
        let disk = host.disk();
        line.track(&disk, &changed);
        assert!(line.changed_since(base, &disk).is_some());
        // After another handover there is another one, though an old file lies there.
        let past = line.closed("hostb", &disk);
        let (line, changed) = Line::after(&host.line(), past, &host.image()).unwrap();
        assert_eq!(line.lineage().open().number, open.number + 1);
        assert!(changed.is_empty());
    }
}
