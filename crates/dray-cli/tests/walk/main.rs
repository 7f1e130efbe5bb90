//! A random walk over VMs and images on two hosts with real agents and real guests: they are moved, adopted,
//! released, backed up, resized and started again, and agents, guests and other programs come in between.
//! What guests and clients have flushed says what must be in the images.
//!
//! `make walk MINUTES=60`. A failure prints its seed; `DRAY_WALK_SEED` begins with it. The sequence of what is
//! tried comes from the seed, how it meets the agents does not: it may take several tries.
//!
//! * [`world`]: the hosts, and commands to them.
//! * [`walk`]: one step after the other.
//! * [`vm`], [`disk`], [`boots`]: guests, their disks, and the QEMUs that they are in.
//! * [`moves`], [`faults`], [`others`], [`settle`]: a VM moves, what comes in between, until all is quiet again.
//! * [`spliced`]: a VM's disks come to dray and go back to QEMU.
//! * [`loose`], [`loose_moves`], [`backups`]: images that no VM uses.
//! * [`replicas`]: what somebody does to a copy that was left behind.
//! * [`judge`]: compares what was flushed with what is in the images.

mod backups;
mod boots;
mod disk;
mod faults;
mod judge;
mod loose;
mod loose_moves;
mod moves;
mod others;
mod replicas;
mod settle;
mod spliced;
mod vm;
mod walk;
mod world;

use dray_testkit::counts::Counts;
use dray_testkit::guest::{initramfs, tools};
use dray_testkit::random::Random;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use walk::Walk;

/// Steps until new hosts, guests and images are taken.
const STEPS: usize = 15;
/// After so many failures there is enough to look at.
const MAX_FAILURES: usize = 10;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn walk() {
    let Some(minutes) = number("DRAY_WALK_MINUTES") else {
        println!("SKIP: it runs for DRAY_WALK_MINUTES (make walk MINUTES=…)");
        return;
    };
    if !initramfs::available() || !tools::available(&["qemu-img"]) {
        return;
    }
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let first = number("DRAY_WALK_SEED").unwrap_or(since.as_secs() % 1_000_000 * 1000);
    assert_eq!(run(first, end), 0, "see above");
}

/// Walks from seed to seed; how many failed.
fn run(first: u64, end: Instant) -> usize {
    let mut counts = Counts::default();
    let mut failed = Vec::new();
    for seed in first.. {
        if Instant::now() >= end || failed.len() == MAX_FAILURES {
            break;
        }
        println!("seed {seed}");
        if let Err(why) = generation(seed, end, &mut counts) {
            println!(
                "FAILED: {why}\n  repeat: DRAY_WALK_SEED={seed} make walk MINUTES=1\n  logs: {}",
                world::kept(seed).display()
            );
            failed.push(seed);
        }
    }
    println!("walk: {counts}, {} failed {failed:?}", failed.len());
    failed.len()
}

/// Some steps over VMs and images of a seed.
fn generation(seed: u64, end: Instant, counts: &mut Counts) -> Result<(), String> {
    let mut walk = Walk::begin(Random::new(seed), counts)?;
    let result = steps(&mut walk, end);
    if let Err(why) = &result {
        walk.keep(seed, why);
    }
    result
}

fn steps(walk: &mut Walk<'_>, end: Instant) -> Result<(), String> {
    for nth in 0..STEPS {
        if Instant::now() >= end && nth > 0 {
            break;
        }
        walk.step(nth)?;
    }
    walk.judge_all()
}
