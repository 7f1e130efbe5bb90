//! What a guest's 4 KiB writes take while a snapshot of its disk is read, beside what they take
//! without one, in turn on the same file.
//!
//! `cargo run --release -p dray-image --example snapshot_cost [FOLDER]`

use dray_image::{Attempt, Disk, FileImage, FileOptions, Image, Result, SpillFile};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, MAX_RUN_BLOCKS};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LEN: u64 = 1 << 30;
/// Writes a second that the guest asks for.
const RATE: u32 = 5000;
/// Time of each measurement; the two ways take turns.
const TURN: Duration = Duration::from_secs(4);
const TURNS: usize = 4;

/// Times in nanoseconds of the guest's writes until `stop`.
fn guest(disk: &Disk, seed: &mut u64, stop: &dyn Fn() -> bool) -> Result<Vec<u64>> {
    let data = [7; BLOCK_SIZE as usize];
    let (began, mut times) = (Instant::now(), Vec::new());
    while !stop() {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (*seed >> 20) % (LEN / BLOCK_SIZE) * BLOCK_SIZE;
        let due = began + Duration::from_secs(1) / RATE * times.len() as u32;
        while Instant::now() < due {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let at = Instant::now();
        if disk.try_write_at(&data, offset)? == Attempt::WouldWait {
            disk.write_at(&data, offset, false)?;
        }
        times.push(at.elapsed().as_nanos() as u64);
    }
    Ok(times)
}

/// Reads snapshots of everything, one after the other; bytes read, bytes kept aside.
fn read(disk: &Disk, folder: &Path, stop: &AtomicBool) -> Result<(u64, u64)> {
    let all: BlockSet = [BlockRange::whole(LEN)].into_iter().collect();
    let mut buf = vec![0; (MAX_RUN_BLOCKS * BLOCK_SIZE) as usize];
    let (mut bytes, mut kept) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        let spill = Box::new(SpillFile::create(folder, LEN)?);
        let prepared = disk.prepare_snapshot(&all, spill)?;
        let quiet = disk.quiesce(Duration::from_secs(5))?;
        let snapshot = disk.snapshot(prepared, &quiet, &BlockSet::new())?;
        drop(quiet);
        for run in all.runs_up_to(MAX_RUN_BLOCKS) {
            snapshot.read(run, &mut buf)?;
            bytes += run.byte_len();
            // As long as hashing and compressing it takes.
            std::thread::sleep(Duration::from_millis(4));
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        kept += snapshot.kept_bytes();
    }
    Ok((bytes, kept))
}

fn show(what: &str, times: &mut [u64]) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{what}: {} writes, p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
        times.len(),
        at(0.5),
        at(0.99),
        at(0.999)
    );
}

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = folder.join(format!("dray-snapshot-cost-{}", std::process::id()));
    let outcome = measure(&folder, &path);
    let _ = std::fs::remove_file(&path);
    outcome
}

fn measure(folder: &Path, path: &Path) -> Result<()> {
    let failed = |why| dray_image::Error::io("making the image", why);
    std::fs::write(path, vec![5; LEN as usize]).map_err(failed)?;
    let options = FileOptions { write: true, ..Default::default() };
    let disk = Disk::new(std::sync::Arc::new(FileImage::open(path, options)?));
    disk.flush()?;
    let (mut without, mut with, mut seed) = (Vec::new(), Vec::new(), 1);
    let (mut bytes, mut kept) = (0, 0);
    for _ in 0..TURNS {
        let end = Instant::now() + TURN;
        without.extend(guest(&disk, &mut seed, &|| Instant::now() >= end)?);
        let stop = AtomicBool::new(false);
        let end = Instant::now() + TURN;
        let (times, read) = std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(&disk, folder, &stop));
            let times = guest(&disk, &mut seed, &|| Instant::now() >= end);
            stop.store(true, Ordering::Relaxed);
            (times, reader.join())
        });
        with.extend(times?);
        if let Ok(read) = read {
            let (now, aside) = read?;
            (bytes, kept) = (bytes + now, kept + aside);
        }
    }
    show("without a snapshot", &mut without);
    show("while one is read ", &mut with);
    println!("read {} MiB, kept {} MiB aside", bytes >> 20, kept >> 20);
    Ok(())
}
