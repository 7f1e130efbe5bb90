//! The VM that a migration moves, and no other: on the same socket another may answer by now, of a VM that was
//! started again on its own disks.

use super::hypervisor::{Departure, Hypervisor, Vm};
use dray_host::folder::intent::SourceVm;
use dray_host::process::QemuProcess;
use dray_qemu::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Pause between two tries to let the guest go on.
pub const AGAIN: Duration = Duration::from_secs(1);

/// The VM of a migration.
///
/// # Errors
/// What stands against the connection, or that another process answers.
pub async fn connect(hypervisor: &dyn Hypervisor, vm: &SourceVm) -> Result<Box<dyn Vm>> {
    connect_to(hypervisor, &vm.qmp, vm.qemu.as_ref()).await
}

/// The VM at `socket`, if it is the process that is `known`; any process where none is.
///
/// # Errors
/// What stands against the connection, or that another process answers.
pub async fn connect_to(
    hypervisor: &dyn Hypervisor,
    socket: &Path,
    known: Option<&QemuProcess>,
) -> Result<Box<dyn Vm>> {
    let found = hypervisor.vm(socket).await?;
    let Some(known) = known else { return Ok(found) };
    if found.process().is_some_and(|now| now.is_process(known)) {
        return Ok(found);
    }
    let why = format!(
        "another process than the vm's answers at {}: the vm was started again",
        socket.display()
    );
    Err(Error::new(ErrorKind::Mismatch, why))
}

/// Whether a migration's VM has ended for good, when connecting to it has failed with `why`.
fn is_over(vm: &SourceVm, why: &Error) -> bool {
    let gone = matches!(why.kind(), ErrorKind::Connect | ErrorKind::Closed);
    gone && vm.qemu.as_ref().is_some_and(|qemu| !qemu.runs())
}

/// The VM at `socket`, if it is the process that is `known`; none when that has ended. Where no process is known,
/// it has ended when nobody listens.
///
/// # Errors
/// What stands against the connection to one that runs.
pub async fn find(
    hypervisor: &dyn Hypervisor,
    socket: &Path,
    known: Option<&QemuProcess>,
) -> Result<Option<Box<dyn Vm>>> {
    if has_ended(socket, known) {
        return Ok(None);
    }
    match connect_to(hypervisor, socket, known).await {
        Err(_) if has_ended(socket, known) => Ok(None),
        found => found.map(Some),
    }
}

/// Whether a VM's process has ended; where none is `known`, whether nobody listens on its socket.
pub fn has_ended(socket: &Path, known: Option<&QemuProcess>) -> bool {
    if let Some(known) = known {
        return !known.runs();
    }
    matches!(connect_now(socket).map(drop), Err(Errno::NOENT | Errno::CONNREFUSED))
}

/// Connects to a socket of QEMU. One that hangs, with as many clients waiting for it as it can have, is not waited
/// for.
///
/// # Errors
/// What the system reports; `AGAIN` where there is no room for another client.
pub fn connect_now(socket: &Path) -> rustix::io::Result<UnixStream> {
    let address = SocketAddrUnix::new(socket)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connecting = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&connecting, &address)?;
    rustix::io::ioctl_fionbio(&connecting, false)?;
    Ok(connecting.into())
}

/// After a restart: a guest that this agent's predecessor had stopped runs again. Nothing is to be done when its
/// QEMU has ended.
///
/// # Errors
/// When QEMU does not answer, is another one, or does not let it run.
pub async fn wake(hypervisor: &dyn Hypervisor, vm: &SourceVm, was_running: bool) -> Result<()> {
    let awake = async { connect(hypervisor, vm).await?.departure(was_running).undo().await };
    awake.await.or_else(|why| if is_over(vm, &why) { Ok(()) } else { Err(why) })
}

/// The guest goes on here if it ran before. Nobody else would see to it: this is tried until it is so, or until
/// its QEMU has ended. `tell` hears why it is not so yet, when that changes.
pub async fn bring_back(
    hypervisor: &dyn Hypervisor,
    vm: &SourceVm,
    was_running: bool,
    begun: Option<Box<dyn Departure>>,
    tell: impl Fn(&str),
) {
    let mut brought = match begun {
        Some(mut departure) => departure.undo().await,
        None => wake(hypervisor, vm, was_running).await,
    };
    let mut told = String::new();
    while let Err(why) = brought {
        // A VM that was started again was stopped by nobody.
        if why.kind() == ErrorKind::Mismatch || is_over(vm, &why) {
            return;
        }
        let now = why.to_string();
        if now != told {
            tell(&now);
            told = now;
        }
        tokio::time::sleep(AGAIN).await;
        brought = wake(hypervisor, vm, was_running).await;
    }
}
