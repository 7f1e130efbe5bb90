//! The durable record of blocks that arrived or were overwritten since this host became the owner.

//!
//! Two files: a journal that survives the host, written after a data sync (I2), and notes that
//! survive the process, written without one. Notes are believed within the boot that wrote them,
//! while the page cache still holds what they speak of.

use dray_image::journal::Journal;
use dray_image::{Error, PresentLog};
use dray_types::{BlockRange, BlockSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Length of the boot's id at the head of the notes.
const BOOT_LEN: usize = 36;
/// Length of one note: first block and number of blocks.
const NOTE_LEN: usize = 16;

/// One image's record.
pub struct PresentFile {
    journal: Mutex<(Journal, BlockSet)>,
    notes: Mutex<File>,
    path: PathBuf,
    /// Blocks that only the notes knew when it was opened.
    noted: BlockSet,
    new: bool,
}

impl PresentFile {
    /// Opens or makes the record at `path`, and the notes beside it.
    ///
    /// # Errors
    /// What the file system reports, or that the record is damaged.
    pub fn open(path: &Path) -> io::Result<Arc<Self>> {
        let (journal, records) = Journal::open(path).map_err(io::Error::other)?;
        let mut all = BlockSet::new();
        for record in &records {
            all.union_with(&BlockSet::decode(record).map_err(io::Error::other)?);
        }
        let path = path.with_extension("notes");
        let (notes, mut noted) = open_notes(&path, boot_id()?.as_bytes())?;
        let new = records.is_empty() && noted.is_empty();
        noted.subtract(&all);
        all.union_with(&noted);
        let (journal, notes) = (Mutex::new((journal, all)), Mutex::new(notes));
        Ok(Arc::new(Self { journal, notes, path, noted, new }))
    }

    /// True when nothing was recorded when it was opened.
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Blocks that were present only by a note when it was opened.
    pub fn noted(&self) -> &BlockSet {
        &self.noted
    }

    /// Every block that is present.
    pub fn all(&self) -> BlockSet {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}

fn boot_id() -> io::Result<String> {
    let mut id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    id.truncate(BOOT_LEN);
    Ok(id)
}

/// The notes of this boot; those of an earlier one are cut off.
fn open_notes(path: &Path, boot: &[u8]) -> io::Result<(File, BlockSet)> {
    let mut file =
        File::options().read(true).append(true).create(true).truncate(false).open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let notes = bytes.strip_prefix(boot);
    let noted = notes.unwrap_or_default().chunks_exact(NOTE_LEN).map(|note| {
        let number =
            |at: usize| note[at..at + 8].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
        BlockRange::new(number(0), number(8))
    });
    let noted = noted.collect();
    if notes.is_none_or(|notes| notes.len() % NOTE_LEN != 0) {
        // Another boot's, or cut off in the middle by a kill: written anew with what counts.
        file.set_len(0)?;
        file.write_all(boot)?;
        for run in BlockSet::runs(&noted) {
            file.write_all(&encode(run))?;
        }
    }
    Ok((file, noted))
}

fn encode(run: BlockRange) -> [u8; NOTE_LEN] {
    let mut note = [0; NOTE_LEN];
    note[..8].copy_from_slice(&run.start.to_le_bytes());
    note[8..].copy_from_slice(&run.len.to_le_bytes());
    note
}

impl PresentLog for PresentFile {
    fn record(&self, present: &BlockSet) -> dray_image::Result<()> {
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.0.append(&present.encode())?;
        journal.1.union_with(present);
        Ok(())
    }

    fn note(&self, run: BlockRange) -> dray_image::Result<()> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.write_all(&encode(run)).map_err(|why| {
            Error::io(format!("noting present blocks in {}", self.path.display()), why)
        })
    }

    fn forget_notes(&self) -> dray_image::Result<()> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let forgotten = notes.set_len(0).and_then(|()| notes.sync_all());
        // Without the boot's id nothing that follows would be believed.
        let begun = forgotten.and_then(|()| notes.write_all(boot_id()?.as_bytes()));
        begun.map_err(|why| Error::io(format!("taking back notes in {}", self.path.display()), why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_believed_within_their_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes");
        let (a, b) = ([b'a'; BOOT_LEN], [b'b'; BOOT_LEN]);
        let (mut file, noted) = open_notes(&path, &a).unwrap();
        assert!(noted.is_empty());
        file.write_all(&encode(BlockRange::new(7, 3))).unwrap();
        file.write_all(&encode(BlockRange::new(900, 1))[..5]).unwrap();
        let (_, noted) = open_notes(&path, &a).unwrap();
        assert_eq!(noted.runs().collect::<Vec<_>>(), [BlockRange::new(7, 3)]);
        let (_, noted) = open_notes(&path, &a).unwrap();
        assert_eq!(noted.len(), 3, "the torn note was cut off, the whole one kept");
        let (_, noted) = open_notes(&path, &b).unwrap();
        assert!(noted.is_empty());
        let (_, noted) = open_notes(&path, &a).unwrap();
        assert!(noted.is_empty(), "an earlier boot's notes are gone for good");
    }
}
