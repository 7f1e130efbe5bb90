//! A soak with a real guest: it is moved to and fro between two hosts for as long as it is told,
//! while agents are ended, killed and stopped, links flap, directories run full, clocks jump and
//! hosts restart. The guest's own log of its flushes says what must be on the disks.
//!
//! `make soak-vm MINUTES=60`. A failure prints its seed; `DRAY_SOAK_SEED` begins with it. The sequence of
//! what is done comes from the seed, how it meets the agents does not: it may take several tries.
//!
//! * [`world`]: hosts with small file systems, a link and clocks of their own, and how they are broken.
//! * [`vm`]: the guest, its disks, and the QEMU that it is in.
//! * [`acts`]: what happens while it moves.
//! * [`round`]: one move, until everything is quiet again.
//! * [`claims`]: a host that is gone for good.
//! * [`judge`]: compares what was flushed with what is on the disks.

mod acts;
mod claims;
mod judge;
mod round;
mod vm;
mod world;

use dray_testkit::counts::Counts;
use dray_testkit::guest::{initramfs, tools};
use dray_testkit::random::Random;
use dray_testkit::seeds::Seeds;
use round::Soak;
use std::process::Command;
use std::time::Instant;
use world::Ground;

/// Rounds until new hosts and a new guest are taken.
const ROUNDS: usize = 12;
/// After so many rounds of a hundred a host is gone for good.
const CLAIMS: u64 = 30;
/// Where the folders of all crates are.
const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SOAK: Seeds = Seeds { name: "soak", variables: "DRAY_SOAK", target: "soak-vm" };

#[test]
fn soak() {
    let Some(minutes) = SOAK.minutes() else { return };
    if !rustix::process::geteuid().is_root() || !tools::available(&["ip", "unshare", "cc"]) {
        println!("SKIP: network namespaces and mounts need root");
        return;
    }
    if !initramfs::available() {
        return;
    }
    if std::env::var_os("DRAY_SOAK_INSIDE").is_none() {
        return within_own_mounts();
    }
    let ground = Ground::prepare().expect("namespaces");
    let failed =
        SOAK.run(minutes, WORKSPACE, |seed, end, counts| generation(&ground, seed, end, counts));
    assert_eq!(failed, 0, "see above");
}

/// Runs this test once more where its mounts and namespaces end with it.
fn within_own_mounts() {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--"]);
    command.arg(std::env::current_exe().expect("this test"));
    command.args(["soak", "--exact", "--nocapture"]).env("DRAY_SOAK_INSIDE", "1");
    let status = command.status().expect("unshare");
    assert!(status.success(), "see above");
}

/// One guest on two hosts, for some rounds.
fn generation(ground: &Ground, seed: u64, end: Instant, counts: &mut Counts) -> Result<(), String> {
    let mut soak = Soak::begin(ground, Random::new(seed), counts)?;
    let result = rounds(&mut soak, end);
    if let Err(why) = &result {
        soak.keep(seed, why);
    }
    result
}

fn rounds(soak: &mut Soak<'_>, end: Instant) -> Result<(), String> {
    for nth in 0..ROUNDS {
        if Instant::now() >= end && nth > 0 {
            return Ok(());
        }
        soak.round()?;
        if soak.random.chance(CLAIMS) && !soak.claim()? {
            return Ok(());
        }
    }
    Ok(())
}
