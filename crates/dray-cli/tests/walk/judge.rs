//! Compares what guests and clients have flushed with what is in the images, from outside, and looks for a second
//! owner.

use crate::disk::{Disk, Format};
use crate::vm::Vm;
use crate::world::{LETTERS, World};
use dray_testkit::guest::{Bystander, tools};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Names follow in their own time.
pub const NAMED: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
const POWER_OFF: Duration = Duration::from_secs(60);

/// The guest stops writing, reads everything, and tells what it wrote: that is what its disks hold, seen from
/// outside, and nothing of it is older than what was flushed. `off`: it is powered off before its disks are
/// looked at; otherwise it goes on writing then. The bytes that were compared.
pub fn judge_vm(world: &World, vm: &mut Vm, off: bool) -> Result<u64, String> {
    for command in ["stop", "flush", "verify"] {
        vm.command(command)?;
    }
    vm.hear()?;
    let before: Vec<Bystander> = vm.disks.iter().map(|disk| disk.flushed.clone()).collect();
    for nth in 0..vm.disks.len() {
        let device = vm.disks[nth].device.clone();
        let lines = vm.command(&format!("dump disk={device}"))?;
        let dump = vm.disks[nth].flushed.apply_dump(&device, &lines);
        dump.map_err(|why| why.to_string())?;
    }
    if off {
        let failed = |why: std::io::Error| format!("power off: {why}");
        let running = vm.running()?;
        running.qemu.console().send("poweroff").map_err(failed)?;
        running.qemu.wait_exit(POWER_OFF).map_err(failed)?;
    }
    let mut bytes = 0;
    for (disk, before) in vm.disks.iter().zip(&before) {
        let raw = readable(world, vm.host(), disk)?;
        disk.flushed.check_raw(&raw).map_err(|why| format!("{}: {why}", disk.file))?;
        before.check_flushed(&raw, &[]).map_err(|why| format!("older than flushed: {why}"))?;
        bytes += length(&raw);
    }
    if !off {
        vm.start_work()?;
    }
    Ok(bytes)
}

/// The guest is gone without a word: what its disks hold is what was flushed, or newer.
pub fn judge_lost(world: &World, vm: &Vm, host: usize) -> Result<u64, String> {
    let mut bytes = 0;
    for disk in &vm.disks {
        let raw = readable(world, host, disk)?;
        let checked = disk.flushed.check_flushed(&raw, &[]);
        checked.map_err(|why| format!("{} after the guest's end: {why}", disk.file))?;
        bytes += length(&raw);
    }
    Ok(bytes)
}

pub fn length(raw: &Path) -> u64 {
    raw.metadata().map_or(0, |meta| meta.len())
}

/// Waits until only `host` has a file that opens under the image's own name, and no other agent says that it owns
/// the image.
pub fn judge_owner(world: &World, name: &str, host: usize) -> Result<(), String> {
    let deadline = Instant::now() + NAMED;
    loop {
        match one_owner(world, name, host) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(POLL),
            result => return result,
        }
    }
}

fn one_owner(world: &World, name: &str, host: usize) -> Result<(), String> {
    let other = 1 - host;
    if !tools::opens(&world.file(host, name)) {
        return Err(format!("{name} at {} does not open", LETTERS[host]));
    }
    if tools::opens(&world.file(other, name)) {
        return Err(format!("{name} at {} opens, and is not the owner's", LETTERS[other]));
    }
    match world.image(other, name)? {
        image if image["state"] == "owner" => Err(format!("{} owns, too: {image}", LETTERS[other])),
        _ => Ok(()),
    }
}

/// A disk's content as a raw file that a bystander can read, without asking dray.
fn readable(world: &World, host: usize, disk: &Disk) -> Result<PathBuf, String> {
    let there = world.file(host, &disk.file);
    if disk.format == Format::Raw {
        return Ok(there);
    }
    let raw = world.lab.dir().join("readable.raw");
    let failed = |why: std::io::Error| format!("{} at {}: {why}", disk.file, LETTERS[host]);
    tools::qcow2_as_raw(&there, &raw).map_err(failed)?;
    Ok(raw)
}
