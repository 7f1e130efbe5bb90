//! The journal against power cuts at every step, torn writes and damage.

use dray_files::StatePath;
use dray_image::ErrorKind;
use dray_image::journal::{FileStorage, Journal, Storage};
use std::io;
use std::sync::{Arc, Mutex};

const SECTOR: usize = 512;

/// Bytes on a simulated disk: what programs see and what a power cut leaves.
#[derive(Clone, Default)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// Steps until the power goes.
    steps_left: Option<usize>,
    /// Fails the next write after this many bytes of it, or the next sync.
    full_after: Option<usize>,
    sync_fails: bool,
    /// Where was written since the last sync. One that fails forgets it, as the kernel does.
    dirty: Vec<(usize, usize)>,
    replace_fails: bool,
}

#[derive(Clone, Default)]
struct Simulated(Arc<Mutex<State>>);

impl Simulated {
    fn step(&self) -> io::Result<std::sync::MutexGuard<'_, State>> {
        let mut state = self.0.lock().unwrap();
        match &mut state.steps_left {
            Some(0) => Err(io::Error::other("power cut")),
            Some(left) => {
                *left -= 1;
                Ok(state)
            }
            None => Ok(state),
        }
    }

    /// The disk after a power cut: of the sectors that differ, those that `random` picks have
    /// reached the disk. The length may or may not have grown.
    fn after_cut(&self, random: &mut u64) -> Self {
        let state = self.0.lock().unwrap();
        let mut left = state.durable.clone();
        if next(random).is_multiple_of(2) || state.live.len() < left.len() {
            left.resize(state.live.len(), 0);
        }
        for (at, sector) in state.live.chunks(SECTOR).enumerate() {
            let from = at * SECTOR;
            let to = (from + sector.len()).min(left.len());
            if from < to && next(random).is_multiple_of(2) {
                left[from..to].copy_from_slice(&sector[..to - from]);
            }
        }
        let state = State { live: left.clone(), durable: left, ..State::default() };
        Self(Arc::new(Mutex::new(state)))
    }
}

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let mixed = (*state ^ (*state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 32)
}

impl Storage for Simulated {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        Ok(self.step()?.live.clone())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // The bytes are on their way when the power goes, so the step is counted afterwards.
        let cut = self.step().is_err();
        let mut state = self.0.lock().unwrap();
        let count = state.full_after.take().unwrap_or(bytes.len());
        let end = offset as usize + count;
        if state.live.len() < end {
            state.live.resize(end, 0);
        }
        state.live[offset as usize..end].copy_from_slice(&bytes[..count]);
        state.dirty.push((offset as usize, end));
        match (cut, count < bytes.len()) {
            (true, _) => Err(io::Error::other("power cut")),
            (_, true) => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.step()?.live.truncate(len as usize);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.step()?;
        let dirty = std::mem::take(&mut state.dirty);
        if std::mem::take(&mut state.sync_fails) {
            return Err(io::Error::other("sync failed"));
        }
        let len = state.live.len();
        state.durable.resize(len, 0);
        for (from, to) in dirty.into_iter().map(|(from, to)| (from.min(len), to.min(len))) {
            let written = state.live[from..to].to_vec();
            state.durable[from..to].copy_from_slice(&written);
        }
        Ok(())
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.step()?;
        state.dirty.clear();
        state.live = bytes.to_vec();
        if std::mem::take(&mut state.replace_fails) {
            return Err(io::Error::other("the folder's sync failed"));
        }
        state.durable = bytes.to_vec();
        Ok(())
    }
}

fn open(storage: &Simulated) -> (Journal<Simulated>, Vec<Vec<u8>>) {
    Journal::open_in(storage.clone(), "test".to_owned()).unwrap()
}

/// Appends random batches and rewrites until the power goes; returns what is acknowledged, and the
/// two states that a crash may leave.
fn work(
    journal: &mut Journal<Simulated>,
    mut acked: Vec<Vec<u8>>,
    random: &mut u64,
) -> [Vec<Vec<u8>>; 2] {
    loop {
        let batch: Vec<Vec<u8>> = (0..next(random) % 4 + 1)
            .map(|_| vec![next(random) as u8; (next(random) % 1500) as usize])
            .collect();
        let slices: Vec<&[u8]> = batch.iter().map(Vec::as_slice).collect();
        let (result, after) = if next(random).is_multiple_of(8) {
            (journal.rewrite(&slices), batch.clone())
        } else {
            (journal.append_all(&slices), [acked.clone(), batch.clone()].concat())
        };
        if result.is_err() {
            return [acked, after];
        }
        acked = after;
    }
}

#[test]
fn a_power_cut_at_any_step_loses_nothing_acknowledged_and_keeps_batches_whole() {
    for seed in 0..4000u64 {
        let mut random = seed;
        let storage = Simulated::default();
        let (mut journal, records) = open(&storage);
        assert!(records.is_empty());
        let mut disk = storage;
        let mut expected = Vec::new();
        // Several lives, so that torn tails get cut off and written over.
        for _ in 0..3 {
            disk.0.lock().unwrap().steps_left = Some((next(&mut random) % 20) as usize);
            let may_be = work(&mut journal, expected, &mut random);
            disk = disk.after_cut(&mut random);
            let (again, records) = open(&disk);
            assert!(may_be.contains(&records), "seed {seed}: {} records", records.len());
            (journal, expected) = (again, records);
        }
    }
}

#[test]
fn a_full_disk_loses_the_record_and_not_the_journal() {
    let storage = Simulated::default();
    let (mut journal, _) = open(&storage);
    journal.append(b"one").unwrap();
    storage.0.lock().unwrap().full_after = Some(30);
    assert_eq!(journal.append(&[2; 100]).unwrap_err().kind, ErrorKind::NoSpace);
    journal.append(b"three").unwrap();
    assert_eq!(open(&storage).1, [b"one".to_vec(), b"three".to_vec()]);
}

/// The disk after a power cut that took whatever was not durable.
fn durable(storage: &Simulated) -> Simulated {
    let bytes = storage.0.lock().unwrap().durable.clone();
    let state = State { live: bytes.clone(), durable: bytes, ..State::default() };
    Simulated(Arc::new(Mutex::new(state)))
}

#[test]
fn after_a_failed_sync_the_next_record_decides() {
    let storage = Simulated::default();
    let (mut journal, _) = open(&storage);
    journal.append(b"one").unwrap();
    storage.0.lock().unwrap().sync_fails = true;
    journal.append(b"two").unwrap_err();
    assert!(journal.is_unsure());
    journal.append(b"three").unwrap();
    assert!(!journal.is_unsure());
    assert_eq!(open(&durable(&storage)).1, [b"one".to_vec(), b"three".to_vec()]);
    journal.append(b"four").unwrap();
    assert_eq!(open(&durable(&storage)).1.len(), 3);
}

/// The page cache shows it, the disk does not have it: who believes it makes it so.
#[test]
fn a_record_that_a_restart_believes_is_durable() {
    let storage = Simulated::default();
    let (mut journal, _) = open(&storage);
    journal.append(b"one").unwrap();
    storage.0.lock().unwrap().sync_fails = true;
    journal.append(b"two").unwrap_err();
    drop(journal);
    let (_, believed) = open(&storage);
    assert_eq!(open(&durable(&storage)).1, believed);
}

#[test]
fn a_replacement_that_failed_leaves_the_old_records_or_the_new_ones() {
    let storage = Simulated::default();
    let (mut journal, _) = open(&storage);
    for record in [&b"a long one"[..], b"another", b"and one more"] {
        journal.append(record).unwrap();
    }
    storage.0.lock().unwrap().replace_fails = true;
    journal.rewrite(&[b"short"]).unwrap_err();
    journal.append(b"after").unwrap();
    journal.append(b"that").unwrap();
    let wanted = [b"short".to_vec(), b"after".to_vec(), b"that".to_vec()];
    assert_eq!(open(&durable(&storage)).1, wanted);
}

/// What was reserved is there when nothing else is, and stays when an append has failed.
#[test]
fn records_find_the_room_that_was_reserved() {
    let dir = tempfile::Builder::new().prefix("image-journal-").tempdir().unwrap();
    let (mut journal, _) = Journal::open(&StatePath::real(dir.path().join("journal"))).unwrap();
    journal.reserve(64 << 10).unwrap();
    journal.append(b"one").unwrap();
    let meta = std::fs::metadata(dir.path().join("journal")).unwrap();
    assert!(meta.len() < 200, "the room is behind the end");
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) >= 128, "{meta:?}");
}

#[test]
fn damage_is_an_error_and_a_torn_tail_is_cut_off() {
    let storage = Simulated::default();
    let (mut journal, _) = open(&storage);
    for record in [&b"first"[..], b"second", b"third"] {
        journal.append(record).unwrap();
    }
    let whole = storage.0.lock().unwrap().live.clone();
    let starts = [24, 24 + 24 + 4 + 5, 24 + 2 * (24 + 4) + 5 + 6];
    for at in 24..whole.len() {
        let damaged = Simulated::default();
        damaged.0.lock().unwrap().live = whole.clone();
        damaged.0.lock().unwrap().live[at] ^= 0x40;
        match Journal::open_in(damaged.clone(), "test".to_owned()) {
            Ok((_, records)) => {
                // A length that lies behind the end of the file, as of a frame that is being written.
                let longer = (starts[2]..starts[2] + 4).contains(&at);
                assert!(longer, "byte {at}: damage was taken for a torn tail");
                assert_eq!(records, [b"first".to_vec(), b"second".to_vec()]);
                assert_eq!(damaged.0.lock().unwrap().live.len(), starts[2]);
            }
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::Invalid);
                let why = error.to_string();
                assert!(why.contains("damaged") && why.contains("at byte"), "{error}");
            }
        }
    }
}

#[test]
fn what_is_no_journal_is_refused() {
    let storage = Simulated::default();
    open(&storage);
    let header = storage.0.lock().unwrap().live.clone();
    for at in 0..24 {
        let damaged = Simulated::default();
        damaged.0.lock().unwrap().live = header.clone();
        damaged.0.lock().unwrap().live[at] ^= 1;
        let error = Journal::open_in(damaged, "test".to_owned()).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid, "byte {at}");
    }
    let short = Simulated::default();
    short.0.lock().unwrap().live = header[..10].to_vec();
    assert!(Journal::open_in(short, "test".to_owned()).is_err());
}

#[test]
fn a_file_keeps_records_over_appends_rewrites_and_reopening() {
    let dir = tempfile::Builder::new().prefix("image-journal-").tempdir().unwrap();
    let path = dir.path().join("migration.journal");
    let (mut journal, records) = Journal::open(&StatePath::real(&path)).unwrap();
    assert!(records.is_empty() && journal.is_empty());
    journal.append_all(&[b"a", b"", b"c"]).unwrap();
    drop(journal);
    let (mut journal, records) = Journal::open(&StatePath::real(&path)).unwrap();
    assert_eq!(records, [&b"a"[..], b"", b"c"]);
    journal.rewrite(&[b"all"]).unwrap();
    journal.append(b"more").unwrap();
    assert_eq!(journal.len(), std::fs::metadata(&path).unwrap().len());
    let (mut journal, records) = Journal::open(&StatePath::real(&path)).unwrap();
    assert_eq!(records, [&b"all"[..], b"more"]);
    journal.rewrite(&[]).unwrap();
    assert!(journal.is_empty());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a temporary file is left");
    let mut storage = FileStorage::new(&StatePath::real(&path));
    assert_eq!(storage.read().unwrap().len(), 24);
}

/// Killed between a write and its sync, restarted, and then without power: what the restart believed
/// is believed by the one after it too.
#[test]
fn what_a_restart_has_read_is_not_undone_by_a_power_cut() {
    let mut random = 7;
    let mut kept = 0;
    for _ in 0..200 {
        let disk = Simulated::default();
        let (mut journal, _) = Journal::open_in(disk.clone(), "j".to_owned()).unwrap();
        journal.append(b"first").unwrap();
        // It dies when the frame is written and before it is synced.
        disk.0.lock().unwrap().steps_left = Some(1);
        assert!(journal.append(b"handed over").is_err());
        disk.0.lock().unwrap().steps_left = None;
        let (_, believed) = Journal::open_in(disk.clone(), "j".to_owned()).unwrap();
        let left = disk.after_cut(&mut random);
        let (_, records) = Journal::open_in(left, "j".to_owned()).unwrap();
        assert_eq!(records, believed);
        kept += u32::from(records.len() == 2);
    }
    assert_eq!(kept, 200, "a kill leaves what was written");
}
