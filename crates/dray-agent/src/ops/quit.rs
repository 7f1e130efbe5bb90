//! `dray quit`: ends the QEMU of a VM that has left this host. Its guest runs elsewhere, and never again here.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, QemuEnded, Quit, Refusal};
use dray_host::process::QemuProcess;
use dray_qemu::status;
use dray_vm::qemu_error;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a QEMU may take to end before the answer says that it has not.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two looks for its process.
const LOOK: Duration = Duration::from_millis(20);

impl Answers<Quit> for Arc<Agent> {
    async fn answer(&self, command: Quit, _: Events) -> ApiResult<QemuEnded> {
        let what = format!("cannot end the QEMU behind {}", command.qmp.display());
        let vm = self.hypervisor.vm(&command.qmp).await.map_err(|why| qemu_error(&what, &why))?;
        let left = vm.process().filter(|qemu| self.registry.has_left_for_good(qemu));
        let qemu = left.ok_or_else(|| {
            let why = "its vm has not left this host, or may come back to it";
            Refusal::new(ErrorKind::Conflict, &what, why)
                .hint("`dray status` shows the migrations; `quit` at its monitor ends any QEMU")
        })?;
        status::quit(vm.monitor()).await.map_err(|why| qemu_error(&what, &why))?;
        drop(vm);
        Ok(QemuEnded { pid: qemu.pid, ended: has_ended(&qemu).await })
    }
}

async fn has_ended(qemu: &QemuProcess) -> bool {
    let until = Instant::now() + PATIENCE;
    while qemu.runs() {
        if Instant::now() >= until {
            return false;
        }
        sleep(LOOK).await;
    }
    true
}
