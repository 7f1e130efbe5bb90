//! The durable record of blocks that arrived or were overwritten since this host became the owner.
//!
//! Two files: a journal that survives the host, written after a data sync (I2), and [`notes`] that
//! survive the process, written without one. Notes are believed within the boot that wrote them, and as long as the
//! image's file system stays mounted, while the page cache still holds what they speak of; what only they name must be recorded by the
//! next flush.

mod notes;

use dray_files::StatePath;
use dray_image::journal::Journal;
use dray_image::{Error, PresentLog};
use dray_types::{BlockRange, BlockSet};
use notes::Notes;
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A journal up to this long is left as it is.
const COMPACT: u64 = 1 << 20;
/// A longer one is written anew when it is so many times as long as it was after the last time.
const GROWN: u64 = 4;

/// Room that the journal keeps, so that a guest's flush succeeds when the state directory is full.
const ROOM: u64 = 1 << 20;

/// One image's record.
pub struct PresentFile {
    journal: Mutex<Recorded>,
    notes: Mutex<Notes>,
    path: StatePath,
}

/// What is recorded, and where.
struct Recorded {
    journal: Journal,
    all: BlockSet,
    /// Something was recorded, if only that nothing is present.
    begun: bool,
    /// The journal is written anew when it is this long.
    compact_at: u64,
}

impl PresentFile {
    /// Opens or makes the record at `path` of an image of `blocks` blocks in the file or device `image`, and the notes
    /// beside it.
    ///
    /// # Errors
    /// What the file system reports, or that the record is damaged.
    pub fn open(path: &StatePath, image: &Path, blocks: u64) -> io::Result<Arc<Self>> {
        let (mut journal, records) = Journal::open(path).map_err(io::Error::other)?;
        // Without it a flush needs room when it comes.
        let _ = journal.reserve(ROOM);
        let mut all = BlockSet::new();
        for record in &records {
            all.union_with(&BlockSet::decode(record).map_err(io::Error::other)?);
        }
        let all = all.intersection(BlockRange::new(0, blocks));
        let mut notes = Notes::open(&path.with_extension("notes"), image, blocks)?;
        notes.covered(&all);
        let (begun, compact_at) = (!records.is_empty(), COMPACT);
        let journal = Mutex::new(Recorded { journal, all, begun, compact_at });
        Ok(Arc::new(Self { journal, notes: Mutex::new(notes), path: path.clone() }))
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.journal.lock()
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock()
    }

    /// Whether a guest may have written to the image: from [`begin`](Self::begin) on.
    pub fn has_begun(&self) -> bool {
        self.recorded().begun || !self.noted().is_empty()
    }

    /// A guest may write to the image from now on. Durable on return.
    ///
    /// # Errors
    /// When it cannot be made durable; it has then not begun.
    pub fn begin(&self) -> io::Result<()> {
        let mut recorded = self.recorded();
        if !recorded.begun {
            recorded.append(&BlockSet::new()).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Every block that is present.
    pub fn all(&self) -> BlockSet {
        let mut all = self.recorded().all.clone();
        all.union_with(self.notes().named());
        all
    }

    /// Blocks that are present and that no record names.
    pub fn noted(&self) -> BlockSet {
        self.notes().named().clone()
    }
}

impl Recorded {
    fn append(&mut self, present: &BlockSet) -> dray_image::Result<()> {
        self.journal.append(&present.encode())?;
        self.begun = true;
        self.all.union_with(present);
        Ok(())
    }

    /// Writes the journal anew as one set, if it has grown. If that fails the one that is there goes
    /// on: both say the same.
    fn compact(&mut self, path: &StatePath) {
        if self.journal.len() < self.compact_at {
            return;
        }
        match self.journal.rewrite(&[&self.all.encode()]) {
            Ok(()) => drop(self.journal.reserve(ROOM)),
            Err(why) => {
                tracing::debug!(journal = %path.display(), %why, "cannot shorten a present record");
                match reopen(path) {
                    Ok(journal) => self.journal = journal,
                    Err(why) => tracing::warn!(journal = %path.display(), %why, "cannot reopen it"),
                }
            }
        }
        self.compact_at = COMPACT.max(GROWN * self.journal.len());
    }
}

/// After a rewrite that failed: whichever file has the name is there after a power cut too, before
/// anything is appended to it.
fn reopen(path: &StatePath) -> io::Result<Journal> {
    let (mut journal, _) = Journal::open(path).map_err(io::Error::other)?;
    let _ = journal.reserve(ROOM);
    Ok(journal)
}

impl PresentLog for PresentFile {
    fn record(&self, present: &BlockSet) -> dray_image::Result<()> {
        let mut recorded = self.recorded();
        recorded.append(present)?;
        recorded.compact(&self.path);
        drop(recorded);
        // Only now: until the record is durable a note is all that a restart has.
        self.notes().covered(present);
        Ok(())
    }

    fn forget_notes(&self) -> dray_image::Result<()> {
        self.notes()
            .forget()
            .map_err(|why| Error::io(format!("removing notes beside {}", self.path.display()), why))
    }

    fn note(&self, run: BlockRange) -> dray_image::Result<()> {
        self.notes().add(run).map_err(|why| {
            Error::io(format!("noting present blocks beside {}", self.path.display()), why)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(runs: &[(u64, u64)]) -> BlockSet {
        runs.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
    }

    #[test]
    fn what_is_only_noted_is_told_apart_until_it_is_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("present-0"));
        let open = || PresentFile::open(&path, path.path(), 1000).unwrap();
        let file = open();
        assert!(!file.has_begun());
        file.begin().unwrap();
        file.begin().unwrap();
        assert!(open().has_begun() && open().all().is_empty());
        file.note(BlockRange::new(3, 2)).unwrap();
        file.record(&set(&[(3, 1)])).unwrap();
        let again = open();
        assert_eq!((again.all(), again.noted()), (set(&[(3, 2)]), set(&[(4, 1)])));
        again.record(&set(&[(4, 1), (2000, 5)])).unwrap();
        let again = open();
        assert_eq!((again.all(), again.noted()), (set(&[(3, 2)]), BlockSet::new()));
    }

    #[test]
    fn a_record_does_not_grow_without_end() {
        const BLOCKS: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("present-0"));
        let file = PresentFile::open(&path, path.path(), BLOCKS).unwrap();
        let every_other: BlockSet = (0..1 << 15).map(|n| BlockRange::new(2 * n, 1)).collect();
        for nth in 0..300 {
            let mut present = every_other.clone();
            present.insert(BlockRange::new((1 << 17) + nth, 1));
            file.record(&present).unwrap();
            assert!(path.look().unwrap().len < 2 * COMPACT);
        }
        let again = PresentFile::open(&path, path.path(), BLOCKS).unwrap();
        assert_eq!((again.all().len(), again.has_begun()), ((1 << 15) + 300, true));
    }
}
