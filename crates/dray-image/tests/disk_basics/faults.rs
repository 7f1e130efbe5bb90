//! A disk over an image that fails.

use crate::*;
use dray_image::layers::{Fault, Faults, Layered, Op, When};

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
    // The kernel may have dropped what came, and show what was there before.
    let refused = disk.read_at(&mut [0; 512], 0).unwrap_err();
    assert!(refused.to_string().contains("restart the agent"), "{refused}");
    disk.extents(0, 4096, 1).unwrap_err();
    disk.read_at(&mut [0; 512], 20 * 4096).unwrap();
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
    disk.start_tracking(None).unwrap();
    faults.layer().arm(first(Op::Write, ErrorKind::Io));
    assert!(disk.write_at(&[1; 4096], 8192, false).is_err());
    assert_eq!(disk.dirty_snapshot(), missing(&[(2, 1)]), "part of it may have been written");
}
