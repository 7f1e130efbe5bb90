//! What a disk promises a front end and a migration, one promise a test.

use dray_image::layers::{Fault, Faults, Layered, Op, When};
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
fn quiesce_holds_writes_back_and_lets_reads_pass() {
    let Fixture { disk, _dir } = fixture(MIB);
    let quiesced = disk.quiesce(SOON).unwrap();
    assert!(disk.quiesce(SOON).is_err(), "quiesced twice");
    assert_eq!(disk.try_write_at(&[1; 512], 0).unwrap(), Attempt::WouldWait);
    disk.read_at(&mut [0; 512], 0).unwrap();
    let writer = thread::spawn({
        let disk = Arc::clone(&disk);
        move || disk.write_at(&[1; 512], 0, false)
    });
    let mut byte = [0; 1];
    disk.backing().read_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0], "a write passed a closed gate");
    drop(quiesced);
    writer.join().unwrap().unwrap();
    disk.read_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
}

#[test]
fn a_parked_disk_answers_flush_and_holds_everything_else() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.park(disk.quiesce(SOON).unwrap());
    disk.flush().unwrap();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    let io: Vec<_> = [true, false]
        .into_iter()
        .map(|write| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || {
                if write {
                    disk.write_at(&[1; 512], 0, false)
                } else {
                    disk.read_at(&mut [0; 512], 0)
                }
            })
        })
        .collect();
    disk.fail_parked();
    for thread in io {
        assert_eq!(thread.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    assert_eq!(disk.read_at(&mut [0; 1], 0).unwrap_err().kind, ErrorKind::Unavailable);
    disk.flush().unwrap();
    disk.unpark();
    disk.write_at(&[1; 512], 0, false).unwrap();
}

#[test]
fn dirty_runs_are_accepted_or_put_back() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.write_at(&[1; 4096], 0, false).unwrap();
    disk.start_tracking(None);
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
    disk.start_tracking(Some(Arc::clone(&log) as _));
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
    disk.start_tracking(Some(Arc::clone(&log) as _));
    disk.write_at(&[1; 512], 64 * MIB, false).unwrap();
    assert_eq!(*log.seen.lock().unwrap(), [1, 0, 2, 1]);
    log.disk.lock().unwrap().take();
}

/// Changes of every kind, each in a thread of its own.
fn changes(disk: &Arc<Disk>) -> Vec<thread::JoinHandle<Result<()>>> {
    let write = |disk: &Disk| disk.write_at(&[1; 512], 0, false);
    let zero = |disk: &Disk| disk.zero(4096, 512, ZeroMode::MayUnmap, false);
    let discard = |disk: &Disk| disk.discard(8192, 512, true);
    let all: [fn(&Disk) -> Result<()>; 3] = [write, zero, discard];
    let spawn = |change: fn(&Disk) -> Result<()>| {
        let disk = Arc::clone(disk);
        thread::spawn(move || change(&disk))
    };
    all.into_iter().map(spawn).collect()
}

#[test]
fn incoming_reads_come_from_the_owner_and_changes_wait_for_the_handover() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.begin_incoming(Arc::new(Sevens::default()));
    let mut buf = [0; 512];
    assert_eq!(disk.try_read_at(&mut buf, 0).unwrap(), Attempt::WouldWait);
    disk.read_at(&mut buf, 0).unwrap();
    assert_eq!(buf, [7; 512]);
    assert_eq!(disk.try_write_at(&buf, 0).unwrap(), Attempt::WouldWait);
    let waiting = changes(&disk);
    assert_eq!(disk.extents(0, MIB, 4).unwrap()[0].kind, ExtentKind::Data);
    disk.flush().unwrap();
    assert!(disk.quiesce(SOON).is_err(), "another host's guest cannot be quiesced here");
    assert_eq!(disk.stats().writes, 0);
    disk.serve_with_missing(
        BlockSet::new(),
        &BlockSet::new(),
        Arc::new(Sevens::default()),
        Arc::new(Log::default()),
    );
    waiting.into_iter().for_each(|change| change.join().unwrap().unwrap());
    disk.read_at(&mut buf, 0).unwrap();
    assert_eq!(buf, [1; 512]);
}

#[test]
fn changes_that_wait_for_a_handover_fail_when_the_image_is_discarded() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.begin_incoming(Arc::new(Sevens::default()));
    let waiting = changes(&disk);
    disk.fail_parked();
    for change in waiting.into_iter().chain(changes(&disk)) {
        assert_eq!(change.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    disk.read_at(&mut [0; 512], 0).unwrap();
    disk.flush().unwrap();
}

#[test]
fn a_shut_disk_holds_reads_changes_and_flushes() {
    let Fixture { disk, _dir } = fixture(MIB);
    let disk = Disk::new_shut(Arc::clone(disk.backing()));
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    assert_eq!(disk.try_write_at(&[1; 512], 0).unwrap(), Attempt::WouldWait);
    let io = || {
        let mut all = changes(&disk);
        let (reader, flusher) = (Arc::clone(&disk), Arc::clone(&disk));
        all.push(thread::spawn(move || reader.read_at(&mut [0; 512], 0)));
        all.push(thread::spawn(move || flusher.flush()));
        all
    };
    let waiting = io();
    // What ends other causes opens nothing.
    disk.unpark();
    disk.wait_again();
    drop(disk.quiesce(SOON).unwrap());
    let stats = disk.stats();
    assert_eq!((stats.reads, stats.writes, stats.zeroes), (0, 0, 0));
    disk.unshut();
    waiting.into_iter().for_each(|io| io.join().unwrap().unwrap());
    disk.shut();
    let waiting = io();
    disk.fail_parked();
    for io in waiting.into_iter().chain(io()) {
        assert_eq!(io.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    disk.wait_again();
    let waiting = io();
    disk.unshut();
    waiting.into_iter().for_each(|io| io.join().unwrap().unwrap());
}

#[test]
fn a_disk_that_is_parked_while_it_is_shut_is_parked_when_it_is_no_longer_shut() {
    let Fixture { disk, _dir } = fixture(MIB);
    let disk = Disk::new_shut(Arc::clone(disk.backing()));
    disk.park(disk.quiesce(Duration::ZERO).unwrap());
    disk.unshut();
    disk.flush().unwrap();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    disk.shut();
    disk.unpark();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    disk.unshut();
    disk.read_at(&mut [0; 512], 0).unwrap();
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

fn faulty(len: u64) -> (tempfile::TempDir, Arc<Layered<Faults>>, Arc<Disk>) {
    let Fixture { disk, _dir } = fixture(len);
    let faults = Arc::new(Layered::new(Arc::clone(disk.backing()), Faults::new()));
    let disk = Disk::new(Arc::clone(&faults) as _);
    (_dir, faults, disk)
}

fn first(op: Op, kind: ErrorKind) -> Fault {
    Fault { name: "first".to_owned(), op, when: When::Nth(1), kind }
}

fn serve(disk: &Disk, missing: BlockSet, log: &Arc<Log>) {
    let source = Arc::new(Sevens::default());
    disk.serve_with_missing(missing, &BlockSet::new(), source, Arc::clone(log) as _);
}

#[test]
fn after_a_failed_sync_nothing_is_recorded_and_nothing_noted_is_believed() {
    let (_dir, faults, disk) = faulty(MIB);
    let log = Arc::new(Log::default());
    serve(&disk, missing(&[(0, 9)]), &log);
    disk.fill(BlockRange::new(0, 4), Fill::Zero).unwrap();
    faults.layer().arm(first(Op::Flush, ErrorKind::Io));
    assert_eq!(disk.flush().unwrap_err().kind, ErrorKind::Io);
    // The kernel reports a lost page once; the next sync would succeed without it.
    let error = disk.checkpoint().unwrap_err();
    assert!(error.to_string().contains("restart the agent"), "{error}");
    assert_eq!(log.records.load(Ordering::SeqCst), 0);
    assert!(log.noted.lock().unwrap().is_empty());
    // Nothing that no flush can ever answer for is accepted.
    for at in [0, 8 * 4096, 20 * 4096] {
        let refused = disk.write_at(&[1; 4096], at, false).unwrap_err();
        assert!(refused.to_string().contains("restart the agent"), "{refused}");
        disk.try_write_at(&[1; 4096], at).unwrap_err();
        disk.discard(at, 4096, false).unwrap_err();
    }
    disk.fill(BlockRange::new(4, 1), Fill::Zero).unwrap_err();
    assert!(log.noted.lock().unwrap().is_empty());
    disk.read_at(&mut [0; 512], 0).unwrap();
}

#[test]
fn notes_that_cannot_be_taken_back_are_tried_again_at_each_flush() {
    let (_dir, faults, disk) = faulty(MIB);
    let log = Arc::new(Log::default());
    serve(&disk, missing(&[(0, 9)]), &log);
    disk.fill(BlockRange::new(0, 4), Fill::Zero).unwrap();
    faults.layer().arm(first(Op::Flush, ErrorKind::Io));
    log.stuck.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        let error = disk.flush().unwrap_err().to_string();
        assert!(error.contains("disk full") && error.contains("only when"), "{error}");
        assert_eq!(log.noted.lock().unwrap().len(), 4);
    }
    disk.write_at(&[1; 4096], 0, false).unwrap_err();
    log.stuck.store(false, Ordering::SeqCst);
    let error = disk.flush().unwrap_err().to_string();
    assert!(error.contains("restart the agent") && !error.contains("only when"), "{error}");
    assert!(log.noted.lock().unwrap().is_empty());
}

#[test]
fn blocks_that_an_earlier_process_noted_are_recorded_before_a_flush_is_answered() {
    let Fixture { disk, _dir } = fixture(MIB);
    let log = Arc::new(Log::default());
    let source = Arc::new(Sevens::default());
    let noted = missing(&[(2, 3)]);
    disk.serve_with_missing(BlockSet::new(), &noted, source, Arc::clone(&log) as _);
    assert_eq!(log.records.load(Ordering::SeqCst), 0);
    disk.flush().unwrap();
    assert_eq!(*log.present.lock().unwrap(), noted);
    disk.flush().unwrap();
    assert_eq!(log.records.load(Ordering::SeqCst), 1);
}

#[test]
fn what_could_not_be_written_stays_missing() {
    let (_dir, faults, disk) = faulty(MIB);
    let log = Arc::new(Log::default());
    disk.serve_with_missing(missing(&[(0, 4)]), &BlockSet::new(), Arc::new(Sevens::default()), log);
    faults.layer().arm(first(Op::Write, ErrorKind::NoSpace));
    let sevens = [7; 4 * 4096];
    let error = disk.fill(BlockRange::new(0, 4), Fill::Data(&sevens)).unwrap_err();
    assert_eq!((error.kind, disk.missing_count()), (ErrorKind::NoSpace, 4));
    faults.layer().arm(first(Op::Write, ErrorKind::NoSpace));
    assert!(disk.write_at(&[1; 4096], 0, false).is_err());
    assert_eq!(disk.missing_count(), 4);
    assert_eq!(disk.fill(BlockRange::new(0, 4), Fill::Data(&sevens)).unwrap(), 4);
    assert!(disk.fill(BlockRange::new(0, 4), Fill::Data(&sevens[1..])).is_err());
}

#[test]
fn a_failed_write_leaves_its_blocks_dirty() {
    let (_dir, faults, disk) = faulty(MIB);
    disk.start_tracking(None);
    faults.layer().arm(first(Op::Write, ErrorKind::Io));
    assert!(disk.write_at(&[1; 4096], 8192, false).is_err());
    assert_eq!(disk.dirty_snapshot(), missing(&[(2, 1)]), "part of it may have been written");
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
