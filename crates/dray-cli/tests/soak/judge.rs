//! Compares what the guest was told is flushed with what is on the disks, and looks for a second owner.

use crate::vm::{Disk, Kind, Vm, path};
use crate::world::{LETTERS, World};
use dray_testkit::counts::Counts;
use dray_testkit::guest::tools;
use std::path::PathBuf;

/// Takes the flushes that the guest has told of. What it complains about that it may not is an error.
pub fn hear(vm: &mut Vm, counts: &mut Counts, full: bool) -> Result<(), String> {
    let Vm { disks, running, waiting, .. } = vm;
    // The one that the guest leaves first: what it said there is older.
    for qemu in [running, waiting].into_iter().flatten() {
        let lines = qemu.news();
        for disk in disks.iter_mut() {
            counts.add("flushes", disk.flushed.apply_flushes(&disk.device, &lines));
        }
        for line in &lines {
            let error = line.starts_with("IOERROR ");
            if error && full && lacks_room(disks, line) {
                counts.add("writes without room", 1);
            } else if error || line.starts_with("BAD ") {
                return Err(format!("the guest at {}: {line}", LETTERS[qemu.host]));
            }
        }
    }
    Ok(())
}

/// Whether a lack of room explains the error. A virtio disk has no word for it: its guest hears of an I/O
/// error. A flush of a qcow2 makes QEMU write its tables, which takes room; that of a raw disk takes none.
fn lacks_room(disks: &[Disk], line: &str) -> bool {
    let tables = disks.iter().filter(|disk| disk.kind == Kind::Growing);
    let mut flushes = tables.map(|disk| format!("disk={} request=flush", disk.device));
    line.contains("request=write") || flushes.any(|flush| line.contains(&flush))
}

/// The guest stops writing, reads everything, and tells what it wrote; that is what its disks hold. It
/// goes on then.
pub fn judge_running(
    world: &World,
    vm: &mut Vm,
    counts: &mut Counts,
    full: bool,
) -> Result<(), String> {
    let console = vm.running.as_mut().ok_or("no guest")?.qemu.console();
    for command in ["stop", "flush", "verify"] {
        console.command(command).map_err(|why| format!("{command}: {why}"))?;
    }
    hear(vm, counts, full)?;
    for i in 0..vm.disks.len() {
        let device = vm.disks[i].device.clone();
        let dump = format!("dump disk={device}");
        let console = vm.running.as_mut().ok_or("no guest")?.qemu.console();
        let lines = console.command(&dump).map_err(|why| format!("{dump}: {why}"))?;
        let disk = &mut vm.disks[i];
        let before = disk.flushed.clone();
        disk.flushed.apply_dump(&device, &lines).map_err(|why| why.to_string())?;
        counts.add("blocks written", disk.flushed.written_blocks());
        let host = vm.running.as_ref().ok_or("no guest")?.host;
        let raw = readable(world, host, &vm.disks[i])?;
        vm.disks[i].flushed.check_raw(&raw).map_err(|why| why.to_string())?;
        before.check_flushed(&raw, &[]).map_err(|why| format!("older than flushed: {why}"))?;
        counts.add("MiB compared", raw.metadata().map_or(0, |meta| meta.len()) >> 20);
    }
    vm.start_work()
}

/// The guest is gone: what its disks hold is what was flushed, or newer.
pub fn judge_stopped(
    world: &World,
    vm: &Vm,
    host: usize,
    counts: &mut Counts,
) -> Result<(), String> {
    for disk in &vm.disks {
        let raw = readable(world, host, disk)?;
        let checked = disk.flushed.check_flushed(&raw, &[]);
        checked.map_err(|why| format!("after the guest's end: {why}"))?;
        counts.add("MiB compared", raw.metadata().map_or(0, |meta| meta.len()) >> 20);
    }
    Ok(())
}

/// Only `host` has files that open under their own names.
pub fn judge_owner(world: &World, vm: &Vm, host: usize) -> Result<(), String> {
    for disk in &vm.disks {
        for (other, letter) in LETTERS.iter().enumerate() {
            let opens = tools::opens(&path(world, other, disk));
            if opens != (other == host) {
                let what = if opens { "opens, and is not the owner's" } else { "does not open" };
                return Err(format!("{} at {letter} {what}", disk.file));
            }
        }
    }
    Ok(())
}

/// A disk's content as a raw file that a bystander can read, without asking dray.
pub fn readable(world: &World, host: usize, disk: &Disk) -> Result<PathBuf, String> {
    let there = path(world, host, disk);
    if disk.kind != Kind::Growing {
        return Ok(there);
    }
    let raw = world.lab.dir().join("readable.raw");
    let failed = |why: std::io::Error| format!("{} at {}: {why}", disk.file, LETTERS[host]);
    tools::qcow2_as_raw(&there, &raw).map_err(failed)?;
    Ok(raw)
}
