//! The QEMU that a migration moves the guest of, and no other: on the same socket another may answer by now,
//! of a VM that was started again on its own disks.

use crate::released::process_of;
use dray_host::migration::intent::SourceVm;
use dray_qemu::{Error, ErrorKind, Outgoing, Qmp};

/// The way to the QEMU of a migration's VM.
///
/// # Errors
/// What stands against the connection, or that another process answers.
pub async fn connect(vm: &SourceVm) -> dray_qemu::Result<Qmp> {
    let qmp = Qmp::connect(&vm.qmp).await?;
    let Some(known) = &vm.qemu else { return Ok(qmp) };
    if process_of(&qmp).is_some_and(|now| now.is_process(known)) {
        return Ok(qmp);
    }
    let why = format!(
        "another process than that of the vm answers at {}: the vm was started again after the migration began",
        vm.qmp.display()
    );
    Err(Error::new(ErrorKind::Mismatch, why))
}

/// Whether the VM's QEMU has ended for good, when connecting to it has failed with `why`.
pub fn has_ended(vm: &SourceVm, why: &Error) -> bool {
    let gone = matches!(why.kind(), ErrorKind::Connect | ErrorKind::Closed);
    gone && vm.qemu.as_ref().is_some_and(|qemu| !qemu.runs())
}

/// Returns when the monitor has closed.
pub async fn closed(qmp: &Qmp) {
    let mut events = qmp.events();
    while events.next().await.is_ok() {}
}

/// After a restart: a guest that this agent's predecessor had stopped runs again. Nothing is to be done when its
/// QEMU has ended.
///
/// # Errors
/// When QEMU does not answer, is another one, or does not let it run.
pub async fn wake(vm: &SourceVm, was_running: bool) -> dray_qemu::Result<()> {
    let awake = async {
        let qmp = connect(vm).await?;
        Outgoing::attach(&qmp, was_running).abandon().await
    };
    awake.await.or_else(|why| if has_ended(vm, &why) { Ok(()) } else { Err(why) })
}
