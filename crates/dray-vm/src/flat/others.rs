//! Who else changes the image of a disk that is being exchanged: everybody but the QEMU of its VM.
//!
//! QEMU's mirror writes to both sides what its guest writes. It sees nothing of what other clients of the export
//! write, so the other side would lack that. They wait until it is known where the disk is: then they go on, or fail.

use dray_host::process::QemuProcess;
use dray_host::registry::{Entry, Process, Registry};
use dray_image::{FileId, ImageNames, has_open};
use std::fs;
use std::io;

/// From now on only the VM's QEMU changes the image of `entry`. `names`: those of what is on the other side, which QEMU
/// has open; `monitor`: the process that made the socket of QEMU's monitor, which need not be QEMU.
///
/// # Errors
/// When it cannot be found out which process it is: then nobody changes the image.
pub(super) fn hold_back(
    registry: &Registry,
    entry: &Entry,
    names: &ImageNames,
    monitor: Option<&QemuProcess>,
) -> io::Result<()> {
    let image = entry.record().name;
    let vm = vm_among(&registry.clients_that_run(&image), &files(names), monitor);
    let origin = vm.map(|Process { pid, started }| dray_serve::Process { pid, started }.origin());
    entry.disk.reserve(origin.as_ref());
    if origin.is_some() {
        return Ok(());
    }
    tracing::error!(
        image,
        "the agent does not know which of the clients of an image is its vm's QEMU"
    );
    Err(io::Error::other("it is not known which client of the image is its vm's QEMU"))
}

/// From now on nobody changes the image of `entry`: its disk is not there yet.
pub(super) fn hold_all_back(entry: &Entry) {
    entry.disk.reserve(None);
}

/// It is known where the disk is: whoever was held back goes on, if the image is open.
pub(super) fn let_go_on(entry: &Entry) {
    entry.disk.unreserve();
}

/// The files of these names.
fn files(names: &ImageNames) -> Vec<FileId> {
    let found = [names.chain(), names.image()].map(fs::metadata);
    found.into_iter().flatten().map(|file| FileId::of(&file)).collect()
}

/// The VM's QEMU: the one that has one of `files` open, else the monitor's process, else the only client, of which it
/// cannot be seen what it has open.
fn vm_among(
    clients: &[Process],
    files: &[FileId],
    monitor: Option<&QemuProcess>,
) -> Option<Process> {
    let has = |one: &Process, file: &FileId| has_open(one.pid, *file);
    let has_file = |one: &&Process| files.iter().any(|file| has(one, file).unwrap_or(false));
    let is_unseen = |one: &&Process| files.iter().any(|file| has(one, file).is_err());
    let has_monitor = |one: &&Process| {
        monitor.is_some_and(|qemu| {
            u32::try_from(qemu.pid) == Ok(one.pid) && qemu.started == one.started
        })
    };
    let only = || clients.first().filter(|_| clients.len() == 1).filter(is_unseen);
    let found = clients.iter().find(has_file).or_else(|| clients.iter().find(has_monitor));
    found.or_else(only).copied()
}
