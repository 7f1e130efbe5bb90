//! Snapshots of a served disk on real files: what a reader sees, what they cost the guest, and when
//! they are refused.

use dray_image::{
    Attempt, Disk, Error, ErrorKind, Fetcher, FileImage, FileOptions, Image, PresentLog, Result,
    Snapshot, Spill, SpillFile, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BLOCK: usize = BLOCK_SIZE as usize;
/// Not a whole number of blocks.
const LEN: u64 = 2048 * BLOCK_SIZE + 512;
const SOON: Duration = Duration::from_secs(5);

struct Host {
    dir: tempfile::TempDir,
    disk: Arc<Disk>,
}

fn host() -> Host {
    let dir = tempfile::Builder::new().prefix("image-snapshot-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
    let options = FileOptions { write: true, ..Default::default() };
    let disk = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
    Host { dir, disk }
}

fn everything() -> BlockSet {
    [BlockRange::whole(LEN)].into_iter().collect()
}

impl Host {
    fn spill(&self) -> Box<dyn Spill> {
        Box::new(SpillFile::create(self.dir.path(), LEN).unwrap())
    }

    /// A snapshot and a copy of what the disk held then.
    fn snapshot(&self, wanted: &BlockSet, spill: Box<dyn Spill>) -> (Snapshot, Vec<u8>) {
        let prepared = self.disk.prepare_snapshot(&BlockSet::new(), spill).unwrap();
        let quiesced = self.disk.quiesce(SOON).unwrap();
        let snapshot = self.disk.snapshot(prepared, &quiesced, wanted).unwrap();
        let mut shadow = vec![0; LEN as usize];
        self.disk.backing().read_at(&mut shadow, 0).unwrap();
        (snapshot, shadow)
    }
}

fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// One change of a guest: a write, zeros or a trim, aligned or not.
fn change(disk: &Disk, seed: &mut u64) {
    let offset = next(seed) % LEN;
    let len = (next(seed) % 40_000 + 1).min(LEN - offset);
    match next(seed) % 5 {
        0 => disk.zero(offset, len, ZeroMode::MayUnmap, false).unwrap(),
        1 => disk.discard(offset, len, false).unwrap(),
        _ => {
            let data = vec![(next(seed) % 255 + 1) as u8; len as usize];
            if disk.try_write_at(&data, offset).unwrap() == Attempt::WouldWait {
                disk.write_at(&data, offset, next(seed).is_multiple_of(16)).unwrap();
            }
        }
    }
}

fn read_all(snapshot: &Snapshot) -> Result<Vec<u8>> {
    let mut seen = vec![0xee; BlockRange::whole(LEN).byte_len() as usize];
    let holes = snapshot.take_holes(BlockRange::whole(LEN))?;
    let place =
        |run: BlockRange| run.byte_offset() as usize..(run.byte_offset() + run.byte_len()) as usize;
    holes.runs().for_each(|run| seen[place(run)].fill(0));
    for run in snapshot.unread().runs_up_to(16) {
        snapshot.read(run, &mut seen[place(run)])?;
    }
    assert!(seen[LEN as usize..].iter().all(|&byte| byte == 0), "what lies past the end is zeros");
    seen.truncate(LEN as usize);
    Ok(seen)
}

#[test]
fn every_snapshot_is_exactly_its_moment_while_guests_write_and_trim() {
    let host = host();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 1..4u64 {
            let (disk, stop) = (&host.disk, &stop);
            scope.spawn(move || {
                let mut seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                while !stop.load(Ordering::Relaxed) {
                    change(disk, &mut seed);
                }
            });
        }
        let mut kept = 0;
        for _ in 0..40 {
            let (snapshot, shadow) = host.snapshot(&everything(), host.spill());
            let seen = read_all(&snapshot).unwrap();
            let differs = shadow.chunks(BLOCK).zip(seen.chunks(BLOCK)).position(|(a, b)| a != b);
            assert_eq!(differs, None, "a block is not of that moment");
            kept += snapshot.kept_bytes();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(kept > 0, "no guest ever wrote what was not read yet");
    });
    assert!(host.disk.stats().writes > 0);
}

#[test]
fn only_wanted_blocks_are_kept_and_each_once() {
    let host = host();
    host.disk.write_at(&vec![1; 8 * BLOCK], 0, false).unwrap();
    let wanted: BlockSet = [BlockRange::new(2, 3)].into_iter().collect();
    let (snapshot, _) = host.snapshot(&wanted, host.spill());
    for value in 2..5 {
        host.disk.write_at(&vec![value; 8 * BLOCK], 0, false).unwrap();
    }
    assert_eq!(snapshot.kept_bytes(), 3 * BLOCK_SIZE);
    let mut buf = vec![0; 3 * BLOCK];
    snapshot.read(BlockRange::new(2, 3), &mut buf).unwrap();
    assert!(buf.iter().all(|&byte| byte == 1));
    let again = snapshot.read(BlockRange::new(2, 1), &mut buf[..BLOCK]).unwrap_err();
    assert_eq!(again.kind, ErrorKind::Invalid);
    assert!(snapshot.read(BlockRange::new(7, 1), &mut buf[..BLOCK]).is_err(), "never wanted");
}

/// No room at all.
struct Full;

impl Spill for Full {
    fn keep(&self, _: BlockRange, _: &[u8]) -> Result<()> {
        Err(Error::new(ErrorKind::NoSpace, "keeping", "the pool is full"))
    }

    fn read(&self, _: BlockRange, _: &mut [u8]) -> Result<()> {
        unreachable!("nothing is kept")
    }

    fn forget(&self, _: BlockRange) {}
}

#[test]
fn a_full_pool_costs_the_snapshot_and_not_the_guest() {
    let host = host();
    host.disk.write_at(&[1; BLOCK], 0, false).unwrap();
    let (snapshot, _) = host.snapshot(&everything(), Box::new(Full));
    assert!(snapshot.check().is_ok());
    host.disk.write_at(&[2; BLOCK], 0, true).unwrap();
    let why = snapshot.check().unwrap_err();
    assert_eq!(why.kind, ErrorKind::NoSpace);
    assert!(why.to_string().contains("the pool is full"), "{why}");
    let mut block = [0; BLOCK];
    assert_eq!(snapshot.read(BlockRange::new(5, 1), &mut block).unwrap_err().kind, why.kind);
    host.disk.read_at(&mut block, 0).unwrap();
    assert_eq!(block, [2; BLOCK]);
    // The next one has nothing to do with it.
    drop(snapshot);
    let (snapshot, shadow) = host.snapshot(&everything(), host.spill());
    assert_eq!(read_all(&snapshot).unwrap(), shadow);
}

struct Nowhere;

impl Fetcher for Nowhere {
    fn demand(&self, _: BlockRange) {}

    fn peek(&self, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

impl PresentLog for Nowhere {
    fn record(&self, _: &BlockSet) -> Result<()> {
        Ok(())
    }

    fn note(&self, _: BlockRange) -> Result<()> {
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn refused_while_blocks_are_missing_while_another_is_read_and_at_no_quiet_moment() {
    let host = host();
    let first = host.disk.prepare_snapshot(&everything(), host.spill()).unwrap();
    let why = host.disk.prepare_snapshot(&everything(), host.spill()).map(drop).unwrap_err();
    assert_eq!(why.kind, ErrorKind::InUse);
    let other = self::host();
    let quiet = other.disk.quiesce(SOON).unwrap();
    let why = host.disk.snapshot(first, &quiet, &everything()).map(drop).unwrap_err();
    assert_eq!(why.kind, ErrorKind::Invalid);
    let missing: BlockSet = [BlockRange::new(3, 2)].into_iter().collect();
    host.disk.serve_with_missing(missing, &BlockSet::new(), Arc::new(Nowhere), Arc::new(Nowhere));
    let why = host.disk.prepare_snapshot(&everything(), host.spill()).map(drop).unwrap_err();
    assert_eq!(why.kind, ErrorKind::Unavailable);
    assert!(why.to_string().contains("2 blocks of the image are not on this host"), "{why}");
}
