//! What a guest whose writes are slowed feels, and what nobody else does.

use dray_image::{Attempt, Disk, FileImage, FileOptions, Image, WriteDelay, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough that a test which waited for it would be seen to.
const LONG: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(20);

/// Holds every change up for the same time.
struct Fixed {
    delay: Duration,
    asked: Mutex<Vec<u64>>,
    waited: AtomicU64,
}

impl Fixed {
    fn new(delay: Duration) -> Arc<Self> {
        Arc::new(Self { delay, asked: Mutex::default(), waited: AtomicU64::new(0) })
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().unwrap().clone()
    }
}

impl WriteDelay for Fixed {
    fn delay(&self, new_dirty: u64) -> Duration {
        self.asked.lock().unwrap().push(new_dirty);
        self.delay
    }

    fn waited(&self, time: Duration) {
        self.waited.fetch_add(time.as_micros() as u64, Ordering::SeqCst);
    }
}

fn tracked() -> (tempfile::TempDir, Arc<Disk>) {
    let dir = tempfile::Builder::new().prefix("image-brake-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
    let options = FileOptions { write: true, ..Default::default() };
    let disk = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
    disk.start_tracking(None).unwrap();
    (dir, disk)
}

#[test]
fn only_blocks_that_are_clean_count() {
    let (_dir, disk) = tracked();
    let rule = Fixed::new(Duration::from_millis(20));
    disk.mark_dirty(BlockRange::new(2, 3));
    disk.set_write_delay(Some(rule.clone()));
    let began = Instant::now();
    disk.write_at(&[1; 4 * BLOCK_SIZE as usize], 2 * BLOCK_SIZE, false).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(20));
    assert_eq!(rule.asked(), [BLOCK_SIZE], "block 5 alone was clean");
    disk.write_at(&[2; 100], 5 * BLOCK_SIZE, false).unwrap();
    assert_eq!(rule.asked().len(), 1, "it is dirty now");
    disk.zero(8 * BLOCK_SIZE, 2 * BLOCK_SIZE, ZeroMode::MayUnmap, false).unwrap();
    disk.discard(20 * BLOCK_SIZE, BLOCK_SIZE, false).unwrap();
    assert_eq!(rule.asked(), [BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE]);
    assert!(rule.waited.load(Ordering::SeqCst) >= 60_000);
}

#[test]
fn who_must_not_wait_is_told_so_and_reads_are_not_slowed() {
    let (_dir, disk) = tracked();
    disk.set_write_delay(Some(Fixed::new(LONG)));
    disk.mark_dirty(BlockRange::new(7, 1));
    let block = [3; BLOCK_SIZE as usize];
    assert_eq!(disk.try_write_at(&block, 0).unwrap(), Attempt::WouldWait);
    assert_eq!(disk.dirty_count(), 1, "it has not begun");
    disk.write_at(&block, 7 * BLOCK_SIZE, false).unwrap();
    assert_ne!(disk.try_write_at(&block, 7 * BLOCK_SIZE).unwrap(), Attempt::WouldWait);
    let mut read = [0; BLOCK_SIZE as usize];
    disk.read_at(&mut read, 7 * BLOCK_SIZE).unwrap();
    assert_eq!(read, block);
    disk.flush().unwrap();
    disk.set_write_delay(None);
    disk.write_at(&block, 0, false).unwrap();
}

/// I6 and the handover: what sleeps is not in flight, and comes after the quiesce.
#[test]
fn nobody_who_quiesces_waits_for_a_change_that_is_held_up() {
    let (_dir, disk) = tracked();
    let rule = Fixed::new(LONG);
    disk.set_write_delay(Some(rule.clone()));
    let writer = {
        let disk = Arc::clone(&disk);
        thread::spawn(move || disk.write_at(&[9; BLOCK_SIZE as usize], 0, false))
    };
    wait_until(|| !rule.asked().is_empty());
    let quiesced = disk.quiesce(SOON).unwrap();
    assert_eq!(disk.dirty_count(), 0, "the write has not begun");
    let began = Instant::now();
    disk.set_write_delay(None);
    thread::sleep(Duration::from_millis(50));
    assert!(!writer.is_finished(), "it waits at the gate now");
    drop(quiesced);
    writer.join().unwrap().unwrap();
    assert!(began.elapsed() < SOON, "lifting ends the waiting");
    assert_eq!(disk.dirty_count(), 1);
    let waited = Duration::from_micros(rule.waited.load(Ordering::SeqCst));
    assert!(waited < SOON, "what was waited counts, not what was asked for: {waited:?}");
}

#[test]
fn nothing_waits_on_a_disk_that_is_not_tracked() {
    let (_dir, disk) = tracked();
    disk.stop_tracking();
    let rule = Fixed::new(LONG);
    disk.set_write_delay(Some(rule.clone()));
    disk.write_at(&[1; 10], 0, false).unwrap();
    assert!(rule.asked().is_empty());
}

fn wait_until(done: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < deadline, "it does not come");
        thread::sleep(Duration::from_millis(2));
    }
}
