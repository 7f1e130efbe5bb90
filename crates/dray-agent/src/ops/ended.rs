//! Disks of VMs whose QEMU has ended: the agent releases them, so that the next QEMU of the VM can
//! open the disk's file itself and finds no lock of dray on it.

use crate::agent::Agent;
use dray_api::ApiResult;
use dray_files::unix_ms;
use dray_host::process::QemuProcess;
use dray_host::refusals::io_error;
use dray_host::registry::{Entry, Registry};
use dray_host::settle::Rule;
use dray_vm::leaving::refuse_untold;
use std::sync::Arc;
use std::time::Duration;

/// How often is looked for them: a manager that restarts a VM waits about as long for its lock.
const LOOK: Duration = Duration::from_millis(200);

/// The QEMU that has ended with the image's disk, if nothing else is to be done with the image before.
fn left_by(registry: &Registry, entry: &Entry) -> Option<QemuProcess> {
    let qemu = registry.ended_vm(&entry.record())?;
    (registry.rule_of(entry) == Rule::VmHasEnded).then_some(qemu)
}

impl Agent {
    /// Releases a disk that its QEMU has let go, unless somebody is to be told of a loss first.
    pub(super) fn give_back(&self, entry: &Entry, qemu: &QemuProcess) -> ApiResult<()> {
        let what = format!("cannot release image '{}'", entry.record().name);
        refuse_untold(entry).map_err(|loss| {
            // It stays dray's, and whoever starts the VM is to know of the loss before.
            if let Err(why) = entry.take_locks() {
                tracing::debug!(%why, "cannot lock the file of a disk with lost writes");
            }
            loss.refused(&what)
        })?;
        let released = self.registry.give_back(entry, qemu, unix_ms());
        released.map_err(|why| io_error(&what, why))
    }

    /// Releases the disks of VMs that have ended: at the start, before anybody can reach them.
    pub(crate) fn release_all_of_ended(&self) {
        for entry in self.registry.all() {
            if left_by(&self.registry, &entry).is_some() {
                self.release_one(&entry.record().name);
            }
        }
    }

    fn release_one(&self, name: &str) {
        let Ok(_operation) = self.registry.operate(name, "release") else { return };
        // Looked at again: whoever had it meanwhile may have done this.
        let Some(entry) = self.registry.get(name) else { return };
        let Some(qemu) = left_by(&self.registry, &entry) else { return };
        // Somebody is at its export, whoever that is.
        if self.attachments.count(name) > 0 {
            return;
        }
        match self.give_back(&entry, &qemu) {
            Ok(()) => {
                tracing::info!(image = name, "its vm has ended: the disk is a plain file again")
            }
            Err(why) => tracing::debug!(image = name, %why, "a disk stays"),
        }
    }

    /// The same for VMs that end from now on.
    pub(crate) async fn keep_releasing(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK).await;
            let agent = Arc::clone(&self);
            let released = tokio::task::spawn_blocking(move || agent.release_all_of_ended());
            if let Err(why) = released.await {
                tracing::error!(%why, "cannot look for vms that have ended");
            }
        }
    }
}
