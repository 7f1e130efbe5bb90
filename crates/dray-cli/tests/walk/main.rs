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
use dray_testkit::seeds::Seeds;
use std::time::Instant;
use walk::Walk;

/// Steps until new hosts, guests and images are taken.
const STEPS: usize = 15;
/// Where the folders of all crates are.
const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const WALK: Seeds = Seeds { name: "walk", variables: "DRAY_WALK", target: "walk" };

#[test]
fn walk() {
    let Some(minutes) = WALK.minutes() else { return };
    if !initramfs::available() || !tools::available(&["qemu-img"]) {
        return;
    }
    assert_eq!(WALK.run(minutes, WORKSPACE, generation), 0, "see above");
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
