//! What a disk promises a front end and a migration, one promise a test; when it is closed
//! ([`closed`]), and when the image below fails ([`faults`]).

mod closed;
mod faults;

use dray_image::{
    Attempt, Disk, Error, ErrorKind, ExtentKind, Fetcher, FileImage, FileOptions, Fill, Image,
    IntentLog, PresentLog, Result, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(20);

struct Fixture {
    _dir: tempfile::TempDir,
    disk: Arc<Disk>,
}

fn fixture(len: u64) -> Fixture {
    let dir = tempfile::Builder::new().prefix("image-disk-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    let options = FileOptions { write: true, ..Default::default() };
    let image = FileImage::open(&path, options).unwrap();
    Fixture { _dir: dir, disk: Disk::new(Arc::new(image)) }
}

/// A source whose every byte is 7 and that answers demands when it is told to.
#[derive(Default)]
struct Sevens {
    demands: Mutex<Vec<BlockRange>>,
}

impl Fetcher for Sevens {
    fn demand(&self, range: BlockRange) {
        self.demands.lock().unwrap().push(range);
    }

    fn peek(&self, _offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.fill(7);
        Ok(())
    }
}

#[derive(Default)]
struct Log {
    present: Mutex<BlockSet>,
    noted: Mutex<BlockSet>,
    records: AtomicU64,
    /// Notes cannot be taken back.
    stuck: AtomicBool,
}

impl PresentLog for Log {
    fn note(&self, run: BlockRange) -> Result<()> {
        self.noted.lock().unwrap().insert(run);
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        self.present.lock().unwrap().union_with(present);
        self.records.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        if self.stuck.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::NoSpace, "taking back notes", "disk full"));
        }
        *self.noted.lock().unwrap() = BlockSet::new();
        Ok(())
    }
}

fn missing(ranges: &[(u64, u64)]) -> BlockSet {
    ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
}

/// Polls until `what` holds; a deadline instead of a sleep of fixed length.
fn eventually(what: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !what() {
        assert!(Instant::now() < deadline, "it did not happen in time");
        thread::yield_now();
    }
}

#[test]
fn dirty_runs_are_accepted_or_put_back() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.write_at(&[1; 4096], 0, false).unwrap();
    disk.start_tracking(None).unwrap();
    assert_eq!(disk.dirty_count(), 0);
    disk.write_at(&[1; 2], 2 * BLOCK_SIZE - 1, false).unwrap();
    disk.zero(10 * BLOCK_SIZE, 4096, ZeroMode::MayUnmap, false).unwrap();
    disk.discard(12 * BLOCK_SIZE, 8192, false).unwrap();
    assert_eq!(disk.dirty_count(), 5);
    let taken = disk.take_dirty(0, 3);
    assert_eq!(taken.runs(), [BlockRange::new(1, 2), BlockRange::new(10, 1)]);
    assert_eq!(disk.dirty_count(), 2);
    drop(taken);
    assert_eq!(disk.dirty_count(), 5);
    assert_eq!(disk.take_dirty(10, 100).accept().len(), 2);
    assert_eq!(disk.dirty_count(), 2);
    disk.clear_dirty(BlockRange::new(0, 100));
    disk.mark_dirty(BlockRange::new(3, 1));
    assert_eq!(disk.dirty_snapshot(), missing(&[(3, 1)]));
    disk.stop_tracking();
    disk.write_at(&[1; 4096], 0, false).unwrap();
    assert_eq!(disk.dirty_count(), 0);
}

#[test]
fn intent_is_durable_before_the_first_write_into_a_region() {
    struct Regions {
        seen: Mutex<Vec<u64>>,
        disk: Mutex<Option<Arc<Disk>>>,
    }
    impl IntentLog for Regions {
        fn open_region(&self, region: u64) -> Result<()> {
            let disk = self.disk.lock().unwrap().clone().unwrap();
            let mut byte = [0];
            disk.backing().read_at(&mut byte, region * (64 << 20))?;
            assert_eq!(byte, [0], "written before the intent was durable");
            self.seen.lock().unwrap().push(region);
            if region == 2 {
                return Err(Error::new(ErrorKind::NoSpace, "recording intent", "disk full"));
            }
            Ok(())
        }
    }
    let Fixture { disk, _dir } = fixture(256 * MIB);
    let log =
        Arc::new(Regions { seen: Mutex::default(), disk: Mutex::new(Some(Arc::clone(&disk))) });
    disk.start_tracking(Some(Arc::clone(&log) as _)).unwrap();
    assert_eq!(disk.try_write_at(&[1; 512], 64 * MIB).unwrap(), Attempt::WouldWait);
    disk.write_at(&[1; 512], 64 * MIB, false).unwrap();
    disk.write_at(&[1; 512], 65 * MIB, false).unwrap();
    assert_eq!(disk.try_write_at(&[1; 512], 66 * MIB).unwrap(), Attempt::Done);
    disk.write_at(&[1; 512], 0, false).unwrap();
    assert_eq!(*log.seen.lock().unwrap(), [1, 0]);
    assert!(disk.write_at(&[1; 512], 128 * MIB, false).is_err());
    let mut byte = [9];
    disk.read_at(&mut byte, 128 * MIB).unwrap();
    assert_eq!(byte, [0], "a write whose intent failed was done");
    // A new generation starts with every region closed.
    disk.write_at(&[0; 512], 64 * MIB, false).unwrap();
    disk.start_tracking(Some(Arc::clone(&log) as _)).unwrap();
    disk.write_at(&[1; 512], 64 * MIB, false).unwrap();
    assert_eq!(*log.seen.lock().unwrap(), [1, 0, 2, 1]);
    log.disk.lock().unwrap().take();
}

#[test]
fn reads_wait_for_missing_blocks_and_are_asked_for_once() {
    let Fixture { disk, _dir } = fixture(MIB);
    let (source, log) = (Arc::new(Sevens::default()), Arc::new(Log::default()));
    disk.serve_with_missing(
        missing(&[(2, 3), (9, 1)]),
        &BlockSet::new(),
        Arc::clone(&source) as _,
        log,
    );
    let reader = thread::spawn({
        let disk = Arc::clone(&disk);
        move || {
            let mut buf = vec![0; 16 * 4096];
            disk.read_at(&mut buf, 0).map(|()| buf)
        }
    });
    eventually(|| source.demands.lock().unwrap().len() == 2);
    assert_eq!(disk.waiting_ranges(), [BlockRange::new(0, 16)]);
    let sevens = vec![7; 8 * 4096];
    assert_eq!(disk.fill(BlockRange::new(0, 8), Fill::Data(&sevens)).unwrap(), 3);
    assert!(!reader.is_finished());
    assert_eq!(disk.fill(BlockRange::new(9, 1), Fill::Zero).unwrap(), 1);
    let buf = reader.join().unwrap().unwrap();
    assert!(buf[..8192].iter().all(|&b| b == 0) && buf[5 * 4096..].iter().all(|&b| b == 0));
    assert!(buf[8192..5 * 4096].iter().all(|&b| b == 7));
    assert_eq!(*source.demands.lock().unwrap(), [BlockRange::new(2, 3), BlockRange::new(9, 1)]);
    assert_eq!((disk.stats().remote_reads, disk.stats().filled_blocks), (1, 4));
}

#[test]
fn whole_block_writes_cancel_the_fetch_and_parts_wait_for_it() {
    let Fixture { disk, _dir } = fixture(MIB + 100);
    let (source, log) = (Arc::new(Sevens::default()), Arc::new(Log::default()));
    disk.serve_with_missing(
        missing(&[(0, 257)]),
        &BlockSet::new(),
        Arc::clone(&source) as _,
        Arc::clone(&log) as _,
    );
    assert_eq!(disk.try_write_at(&[1; 4096], 4096).unwrap(), Attempt::Done);
    disk.discard(8192, 4096, false).unwrap();
    // All that exists of the last block.
    disk.write_at(&[3; 100], MIB, false).unwrap();
    assert_eq!((disk.missing_count(), disk.stats().cancelled_blocks), (254, 3));
    assert!(source.demands.lock().unwrap().is_empty());
    assert_eq!(disk.try_write_at(&[1; 4097], 5 * 4096).unwrap(), Attempt::WouldWait);
    let writer = thread::spawn({
        let disk = Arc::clone(&disk);
        move || disk.write_at(&[1; 4097], 5 * 4096, true)
    });
    eventually(|| source.demands.lock().unwrap().len() == 1);
    assert_eq!(*source.demands.lock().unwrap(), [BlockRange::new(6, 1)]);
    disk.fill(BlockRange::new(6, 1), Fill::Data(&[7; 4096])).unwrap();
    writer.join().unwrap().unwrap();
    let mut buf = [0; 3];
    disk.read_at(&mut buf, 6 * 4096).unwrap();
    assert_eq!(buf, [1, 7, 7]);
    assert_eq!(*log.present.lock().unwrap(), missing(&[(1, 2), (5, 2), (256, 1)]));
}

#[test]
fn a_flush_with_nothing_new_writes_no_record() {
    let Fixture { disk, _dir } = fixture(MIB);
    let log = Arc::new(Log::default());
    disk.serve_with_missing(
        missing(&[(0, 9)]),
        &BlockSet::new(),
        Arc::new(Sevens::default()),
        Arc::clone(&log) as _,
    );
    disk.flush().unwrap();
    disk.write_at(&[1; 4096], 20 * 4096, true).unwrap();
    assert_eq!(log.records.load(Ordering::SeqCst), 0);
    disk.fill(BlockRange::new(0, 8), Fill::Zero).unwrap();
    disk.checkpoint().unwrap();
    disk.flush().unwrap();
    assert_eq!(log.records.load(Ordering::SeqCst), 1);
    disk.write_at(&[1; 4096], 8 * 4096, true).unwrap();
    assert_eq!(log.records.load(Ordering::SeqCst), 2);
    assert_eq!(disk.next_missing(0, 9), None);
}

#[test]
fn told_to_fail_only_what_needs_missing_blocks_fails() {
    let Fixture { disk, _dir } = fixture(MIB);
    let source = Arc::new(Sevens::default());
    let log = Arc::new(Log::default());
    disk.serve_with_missing(missing(&[(0, 1)]), &BlockSet::new(), Arc::clone(&source) as _, log);
    let reader = thread::spawn({
        let disk = Arc::clone(&disk);
        move || disk.read_at(&mut [0; 512], 0)
    });
    eventually(|| !source.demands.lock().unwrap().is_empty());
    disk.fail_parked();
    assert_eq!(reader.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    disk.write_at(&[1; 512], 8192, true).unwrap();
    disk.read_at(&mut [0; 512], 8192).unwrap();
    disk.write_at(&[1; 4096], 0, false).unwrap();
    disk.read_at(&mut [0; 512], 0).unwrap();
}

#[test]
fn missing_blocks_show_as_data() {
    let Fixture { disk, _dir } = fixture(MIB);
    let log = Arc::new(Log::default());
    disk.serve_with_missing(
        missing(&[(4, 4), (20, 1)]),
        &BlockSet::new(),
        Arc::new(Sevens::default()),
        log,
    );
    let found: Vec<_> = disk
        .extents(5 * 4096, MIB - 5 * 4096, 9)
        .unwrap()
        .iter()
        .map(|e| (e.len / 4096, e.kind))
        .collect();
    let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
    assert_eq!(found, [(3, data), (12, hole), (1, data), (235, hole)]);
    assert_eq!(disk.extents(0, MIB, 2).unwrap().iter().map(|e| e.len / 4096).sum::<u64>(), 8);
}

#[test]
fn requests_outside_are_refused() {
    let Fixture { disk, _dir } = fixture(MIB);
    for (offset, len) in [(MIB - 1, 2), (u64::MAX, 2), (MIB + 1, 1)] {
        assert_eq!(disk.discard(offset, len, false).unwrap_err().kind, ErrorKind::OutOfRange);
        let mut buf = vec![0; len as usize];
        assert_eq!(disk.read_at(&mut buf, offset).unwrap_err().kind, ErrorKind::OutOfRange);
        assert_eq!(disk.try_write_at(&buf, offset).unwrap_err().kind, ErrorKind::OutOfRange);
    }
    assert_eq!(disk.dirty_count(), 0);
}

#[test]
fn a_block_is_noted_before_its_write_is_acknowledged() {
    let Fixture { disk, _dir } = fixture(MIB);
    let (source, log) = (Arc::new(Sevens::default()), Arc::new(Log::default()));
    disk.serve_with_missing(missing(&[(0, 8)]), &BlockSet::new(), source, Arc::clone(&log) as _);
    disk.write_at(&[1; 4096], 4096, false).unwrap();
    assert_eq!(*log.noted.lock().unwrap(), missing(&[(1, 1)]));
    assert_eq!(disk.try_write_at(&[1; 4096], 3 * 4096).unwrap(), Attempt::Done);
    disk.discard(5 * 4096, 4096, false).unwrap();
    disk.fill(BlockRange::new(6, 1), Fill::Zero).unwrap();
    assert_eq!(*log.noted.lock().unwrap(), missing(&[(1, 1), (3, 1), (5, 2)]));
    assert_eq!(log.records.load(Ordering::SeqCst), 0, "nothing durable was asked for");
}
