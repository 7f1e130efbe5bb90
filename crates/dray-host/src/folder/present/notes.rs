//! Notes: blocks that are in an image before a durable record says so. They survive the process and
//! not the page cache: nothing here is synced, and a note counts for nothing in another boot, or when the file system
//! of the image was mounted anew.
//!
//! The file is a header that names [both](Cache), and notes of one length behind it. Each has a checksum
//! over its place, that name and itself, so what is torn, old or foreign is no note, and those behind
//! it still are. The bytes are described in `docs/reference/formats.md`.

use dray_files::StatePath;
use dray_files::files::{BOOT_LEN, Cache, StateFile};
use dray_types::{BlockRange, BlockSet};
use std::io;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"DRAYNOTE";
const VERSION: u32 = 1;
/// Magic, version, boot and file system, checksum.
const HEADER_LEN: usize = 8 + 4 + BOOT_LEN + 8;
/// First block, number of blocks, checksum.
const NOTE_LEN: usize = 24;
/// Room that notes have from the beginning, whatever else fills the file system: what a guest writes
/// into missing blocks between two of its flushes, or within the two seconds after which a target
/// records by itself.
const ROOM: u64 = 1 << 20;
/// The longest that a file of notes becomes before it is written anew with what still counts.
const COMPACT: u64 = 1 << 20;

/// The notes of one image.
pub struct Notes {
    path: StatePath,
    /// For how long they count.
    boot: [u8; BOOT_LEN],
    /// None when it could not be opened or made: that is tried again with each note.
    file: Option<Open>,
    /// What the notes name and no record does.
    named: BlockSet,
    /// When the file is written anew.
    compact_at: u64,
}

struct Open {
    file: Box<dyn StateFile>,
    /// Up to here it holds notes.
    len: u64,
}

impl Notes {
    /// The notes at `path` of an image of `blocks` blocks in the file or device `image`. Those of another boot, or of
    /// an earlier life of its file system, and what is no note, are as if they were not there; a file that cannot be
    /// made or begun anew costs notes to come, and not the start.
    ///
    /// # Errors
    /// When the file is there and cannot be read, or nobody tells whether its file system was mounted anew: what a guest
    /// has written would be fetched over it.
    pub fn open(path: &StatePath, image: &Path, blocks: u64) -> io::Result<Self> {
        let files = path.files();
        let Ok(boot) = files.boot() else { return Self::of_boot(path, blocks, of_process()) };
        let instance = files.instance(image.parent().unwrap_or(image))?;
        Self::of_boot(path, blocks, Cache { boot, instance }.id())
    }

    fn of_boot(path: &StatePath, blocks: u64, boot: [u8; BOOT_LEN]) -> io::Result<Self> {
        let mut notes = Self {
            path: path.clone(),
            boot,
            file: None,
            named: BlockSet::new(),
            compact_at: COMPACT,
        };
        let begun = match path.open() {
            Ok(file) => {
                let bytes = file.read()?;
                notes.take_in(file, &bytes, blocks)
            }
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                path.create().and_then(|file| notes.begin(file))
            }
            Err(why) => return Err(why),
        };
        if let Err(why) = begun {
            tracing::warn!(notes = %path.display(), %why, "cannot begin notes of present blocks");
        }
        Ok(notes)
    }

    /// What they name and no record does.
    pub fn named(&self) -> &BlockSet {
        &self.named
    }

    fn take_in(&mut self, file: Box<dyn StateFile>, bytes: &[u8], blocks: u64) -> io::Result<()> {
        let header = header(&self.boot);
        let Some(notes) = bytes.strip_prefix(&header[..]) else { return self.begin(file) };
        let whole = BlockRange::new(0, blocks);
        for (nth, note) in notes.chunks(NOTE_LEN).enumerate() {
            match self.decode(nth as u64, note).filter(|run| whole.contains(*run)) {
                Some(run) => self.named.insert(run),
                None => tracing::debug!(notes = %self.path.display(), nth, "not a note"),
            }
        }
        let whole_notes = notes.len() / NOTE_LEN * NOTE_LEN;
        self.file = Some(Open { file, len: (HEADER_LEN + whole_notes) as u64 });
        Ok(())
    }

    /// An empty file of this boot.
    fn begin(&mut self, file: Box<dyn StateFile>) -> io::Result<()> {
        file.set_len(0)?;
        // Without it notes still go where there is room.
        let _ = file.reserve(0, ROOM);
        file.write_at(&header(&self.boot), 0)?;
        self.file = Some(Open { file, len: HEADER_LEN as u64 });
        Ok(())
    }

    fn encode(&self, nth: u64, run: BlockRange) -> [u8; NOTE_LEN] {
        let mut note = [0; NOTE_LEN];
        note[..8].copy_from_slice(&run.start.to_le_bytes());
        note[8..16].copy_from_slice(&run.len.to_le_bytes());
        let sum = checksum(&[&self.boot, &nth.to_le_bytes(), &note[..16]]);
        note[16..].copy_from_slice(&sum);
        note
    }

    fn decode(&self, nth: u64, note: &[u8]) -> Option<BlockRange> {
        let start = u64::from_le_bytes(note.get(..8)?.try_into().ok()?);
        let len = u64::from_le_bytes(note.get(8..16)?.try_into().ok()?);
        start.checked_add(len)?;
        let run = BlockRange::new(start, len);
        (self.encode(nth, run)[..] == *note).then_some(run)
    }

    /// Notes a run, for the next process of this boot.
    ///
    /// # Errors
    /// What the file system reports; the run is then not noted.
    pub fn add(&mut self, run: BlockRange) -> io::Result<()> {
        if self.file.is_none() {
            let file = self.path.open_or_create()?;
            // What it held could not be read: nobody was told that it is present.
            self.begin(file)?;
        }
        let Some(Open { len, .. }) = self.file else { return Err(io::ErrorKind::NotFound.into()) };
        let note = self.encode((len - HEADER_LEN as u64) / NOTE_LEN as u64, run);
        let Some(open) = &mut self.file else { return Err(io::ErrorKind::NotFound.into()) };
        if let Err(why) = open.file.write_at(&note, len) {
            // The next one overwrites what is there of it; until then it is no note.
            let _ = open.file.set_len(len).and_then(|()| open.file.reserve(0, ROOM));
            return Err(why);
        }
        open.len += NOTE_LEN as u64;
        self.named.insert(run);
        if self.len() >= self.compact_at {
            self.compact();
        }
        Ok(())
    }

    fn len(&self) -> u64 {
        self.file.as_ref().map_or(0, |open| open.len)
    }

    /// A durable record names these blocks: notes of them are not needed any more.
    pub fn covered(&mut self, recorded: &BlockSet) {
        self.named.subtract(recorded);
        if self.named.is_empty() && self.len() > HEADER_LEN as u64 {
            // If it fails they stay, and say what is so.
            let _ = self.empty();
        }
    }

    fn empty(&mut self) -> io::Result<()> {
        let Some(open) = &mut self.file else { return Ok(()) };
        open.file.set_len(HEADER_LEN as u64)?;
        open.len = HEADER_LEN as u64;
        self.compact_at = COMPACT;
        let _ = open.file.reserve(0, ROOM);
        Ok(())
    }

    /// Writes what still counts into a file of its own, which takes the place of the one before: a
    /// kill leaves either. If it fails the old one goes on. Whether it is done.
    fn compact(&mut self) -> bool {
        let new = self.path.with_extension("notes-new");
        let written = new.create().and_then(|file| {
            // As far as there is any.
            let _ = file.reserve(0, ROOM);
            let mut bytes = header(&self.boot);
            for (nth, run) in self.named.runs().enumerate() {
                bytes.extend(self.encode(nth as u64, run));
            }
            file.write_at(&bytes, 0)?;
            new.rename(&self.path)?;
            Ok(Open { file, len: bytes.len() as u64 })
        });
        let done = written.is_ok();
        match written {
            Ok(open) => self.file = Some(open),
            Err(why) => tracing::debug!(notes = %self.path.display(), %why, "cannot shorten notes"),
        }
        self.compact_at = COMPACT.max(2 * self.len());
        done
    }

    /// No next process believes what was noted so far and is not recorded.
    ///
    /// # Errors
    /// What the file system reports; the notes may then still be there.
    pub fn forget(&mut self) -> io::Result<()> {
        self.named = BlockSet::new();
        let emptied = match &self.file {
            Some(_) => self.empty(),
            None => Ok(()),
        };
        emptied.or_else(|_| {
            self.file = None;
            self.path.remove()
        })
    }
}

fn header(boot: &[u8; BOOT_LEN]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(boot);
    bytes.extend(checksum(&[&bytes]));
    bytes
}

/// For how long notes count where that cannot be told: no note is believed twice.
fn of_process() -> [u8; BOOT_LEN] {
    let mut id = [b'-'; BOOT_LEN];
    let process = format!("process-{}", std::process::id());
    id.iter_mut().zip(process.bytes()).for_each(|(place, byte)| *place = byte);
    id
}

fn checksum(parts: &[&[u8]]) -> [u8; 8] {
    let mut hasher = Xxh3::new();
    parts.iter().for_each(|part| hasher.update(part));
    hasher.digest().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_files::files::sim::{Fault, SimDisk};
    use proptest::prelude::*;
    use std::fs::File;
    use std::sync::Arc;

    const BLOCKS: u64 = 1000;

    fn boot(letter: char) -> [u8; BOOT_LEN] {
        [letter as u8; BOOT_LEN]
    }

    fn open(path: &StatePath, letter: char) -> Notes {
        Notes::of_boot(path, BLOCKS, boot(letter)).unwrap()
    }

    fn set(runs: &[(u64, u64)]) -> BlockSet {
        runs.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
    }

    fn path(dir: &tempfile::TempDir) -> StatePath {
        StatePath::real(dir.path().join("present-0.notes"))
    }

    #[test]
    fn notes_are_believed_within_their_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(&dir);
        let mut notes = open(&path, 'a');
        notes.add(BlockRange::new(7, 3)).unwrap();
        notes.add(BlockRange::new(900, 100)).unwrap();
        notes.add(BlockRange::new(999, 2)).unwrap();
        assert_eq!(*open(&path, 'a').named(), set(&[(7, 3), (900, 100)]), "one lies outside");
        assert!(open(&path, 'b').named().is_empty());
        assert!(open(&path, 'a').named().is_empty(), "an earlier boot's notes are gone for good");
    }

    /// The host goes on, and the agent is only another process.
    #[test]
    fn notes_are_not_believed_when_the_file_system_of_the_image_was_mounted_anew() {
        let root = Path::new("/");
        let (pool, image) = (root.join("pool"), root.join("pool/disk"));
        let disk = SimDisk::new(1, &[root, &pool]);
        let open = || {
            let path = StatePath::new(Arc::new(disk.files()), root.join("present-0.notes"));
            Notes::open(&path, &image, BLOCKS).unwrap()
        };
        open().add(BlockRange::new(7, 3)).unwrap();
        disk.kill();
        assert_eq!(*open().named(), set(&[(7, 3)]), "the page cache still has them");
        disk.remount(&pool);
        assert!(open().named().is_empty());
        open().add(BlockRange::new(9, 1)).unwrap();
        disk.kill();
        assert_eq!(*open().named(), set(&[(9, 1)]));
    }

    #[test]
    fn a_note_that_was_not_written_whole_is_written_over_by_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(&dir);
        open(&path, 'a').add(BlockRange::new(7, 3)).unwrap();
        for cut in 1..NOTE_LEN as u64 {
            let file = File::options().write(true).open(&path).unwrap();
            let len = file.metadata().unwrap().len();
            open(&path, 'a').add(BlockRange::new(100 + cut, 1)).unwrap();
            file.set_len(len + cut).unwrap();
            let mut notes = open(&path, 'a');
            assert!(!notes.named().contains(100 + cut));
            notes.add(BlockRange::new(200 + cut, 1)).unwrap();
            let notes = open(&path, 'a');
            assert!(notes.named().contains(200 + cut) && !notes.named().contains(100 + cut));
            assert_eq!(notes.named().len(), 3 + cut);
        }
    }

    #[test]
    fn notes_go_when_a_record_names_what_they_name_and_stay_until_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(&dir);
        let mut notes = open(&path, 'a');
        notes.add(BlockRange::new(7, 3)).unwrap();
        let recorded = notes.named().clone();
        notes.add(BlockRange::new(20, 1)).unwrap();
        notes.covered(&recorded);
        assert_eq!(*notes.named(), set(&[(20, 1)]));
        assert!(open(&path, 'a').named().contains(20));
        notes.covered(&set(&[(20, 1)]));
        assert_eq!(path.look().unwrap().len, HEADER_LEN as u64);
        notes.add(BlockRange::new(30, 1)).unwrap();
        assert_eq!(*open(&path, 'a').named(), set(&[(30, 1)]));
        notes.forget().unwrap();
        assert!(open(&path, 'a').named().is_empty());
        notes.add(BlockRange::new(40, 1)).unwrap();
        assert_eq!(*open(&path, 'a').named(), set(&[(40, 1)]));
    }

    #[test]
    fn notes_do_not_grow_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = path(&dir);
        let mut notes = open(&path, 'a');
        for nth in 0..3 * COMPACT / NOTE_LEN as u64 {
            notes.add(BlockRange::new(2 * (nth % 400), 1)).unwrap();
            assert!(notes.len() <= COMPACT);
        }
        assert_eq!(*open(&path, 'a').named(), *notes.named());
        assert_eq!(notes.named().len(), 400);
    }

    #[test]
    fn notes_that_cannot_be_read_keep_the_image_closed() {
        let root = std::path::Path::new("/");
        let disk = SimDisk::new(1, &[root]);
        let path = StatePath::new(Arc::new(disk.files()), root.join("present-0.notes"));
        open(&path, 'a').add(BlockRange::new(7, 3)).unwrap();
        for call in [1, 2] {
            disk.plan(disk.looks() + call, Fault::Unread);
            assert!(Notes::of_boot(&path, BLOCKS, boot('a')).is_err());
            assert_eq!(*open(&path, 'a').named(), set(&[(7, 3)]));
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_costs_notes_and_not_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("absent/present-0.notes"));
        let mut notes = open(&path, 'a');
        assert!(notes.named().is_empty());
        assert!(notes.add(BlockRange::new(7, 3)).is_err() && notes.named().is_empty());
        std::fs::create_dir(dir.path().join("absent")).unwrap();
        notes.add(BlockRange::new(8, 3)).unwrap();
        assert_eq!(*open(&path, 'a').named(), set(&[(8, 3)]));
    }

    proptest! {
        /// Whatever becomes of the bytes: only what was noted is ever named.
        #[test]
        fn damage_makes_nothing_present(
            runs in prop::collection::vec((0u64..900, 1u64..100), 1..20),
            damage in prop::collection::vec((0usize..600, any::<u8>()), 0..8),
            cut in 0usize..600,
            more in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = path(&dir);
            let mut notes = open(&path, 'a');
            runs.iter().for_each(|&(start, len)| notes.add(BlockRange::new(start, len)).unwrap());
            let mut bytes = std::fs::read(&path).unwrap();
            for (at, byte) in damage {
                if let Some(place) = bytes.get_mut(at) {
                    *place ^= byte;
                }
            }
            bytes.truncate(cut.max(1));
            bytes.extend(more);
            std::fs::write(&path, bytes).unwrap();
            let mut left = open(&path, 'a').named().clone();
            left.subtract(notes.named());
            prop_assert!(left.is_empty(), "{left:?}");
        }
    }
}
