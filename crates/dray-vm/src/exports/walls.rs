//! Walls between VMs: an image is one VM's, and the QEMU of another one does not get it, also where both run
//! as the same user.
//!
//! Whoever is root could take the file itself, and so could the agent's own user: for them there is no wall. Of
//! other processes, one at a time has an image: the QEMU that it was adopted from; else the first that
//! comes, until it has left or ended. A QEMU comes back after a restart of the agent, and has its images
//! meanwhile.

use super::{ImageExports, process_of};
use dray_files::unix_ms;
use dray_host::process::QemuProcess;
use dray_host::registry::Process;
use dray_serve::{Client, ExportError};

impl ImageExports {
    /// Lets a client in to an image, unless another VM has it.
    pub(super) fn admit(&self, name: &str, client: &Client) -> Result<(), ExportError> {
        let Some(process) = walled(client) else { return Ok(()) };
        if let Some(qemu) = self.adopted_from(name)
            && u32::try_from(qemu.pid) != Ok(process.pid)
            && !self.0.get(name).is_some_and(|entry| self.comes_under_dray(&entry, client))
        {
            return Err(refusal(name, qemu.pid));
        }
        let admitted = self.0.let_in(name, process, unix_ms(), is_walled);
        admitted.map_err(|holder| refusal(name, holder.pid))
    }

    /// The number of the process that has the image and is not this client's, which there is a wall for.
    pub(super) fn who_else_has(&self, name: &str, client: &Client) -> Option<u32> {
        let process = walled(client)?;
        let adopted = self.adopted_from(name).and_then(|qemu| u32::try_from(qemu.pid).ok());
        let holder = || self.0.holder(name, unix_ms(), is_walled).map(|holder| holder.pid);
        adopted.or_else(holder).filter(|pid| *pid != process.pid)
    }

    /// The QEMU that an image was adopted from, if there is a wall for it. The monitor of one that runs as root
    /// may belong to another process than itself.
    fn adopted_from(&self, name: &str) -> Option<QemuProcess> {
        let qemu = self.0.get(name)?.record().adopted?.qemu?;
        qemu.user().is_some_and(has_wall).then_some(qemu)
    }
}

/// The process of a client for which there are walls.
fn walled(client: &Client) -> Option<Process> {
    process_of(client).filter(|_| client.user.is_none_or(has_wall))
}

fn is_walled(process: &Process) -> bool {
    process.user().is_some_and(has_wall)
}

fn has_wall(user: u32) -> bool {
    user != 0 && user != rustix::process::geteuid().as_raw()
}

fn refusal(name: &str, pid: impl std::fmt::Display) -> ExportError {
    ExportError::Refused(format!("image '{name}' belongs to the vm of process {pid}"))
}
