//! Running VMs of a host: which disks they have, how these come under dray and go back to QEMU, and what has to be
//! durable meanwhile.
//!
//! * [`hypervisor`]: what is asked of a VM, whoever runs it; [`qemu`]: the same of a QEMU behind its QMP socket.
//! * [`look`]: what a VM is and does; [`picture`]: its disks with everything that is needed to put them under dray
//!   and back. [`attached`] and [`last_look`]: whether they are still where they are thought to be.
//! * [`own`], [`own_files`]: whether it is still the VM that was looked at.
//! * [`released`]: how disks get back to QEMU; [`leaving`]: when they may not.
//! * [`flat`]: disks that move without the chain of images that they are made of.
//! * [`frozen`]: guests whose file systems are frozen for a backup.
//! * [`exports`]: the images of a host as NBD clients see them.

pub mod attached;
pub mod exports;
#[cfg(test)]
mod fixtures;
pub mod flat;
pub mod frozen;
pub mod hypervisor;
pub mod last_look;
pub mod leaving;
pub mod look;
pub mod own;
pub mod own_files;
pub mod picture;
pub mod qemu;
pub mod released;
pub mod socket;

use dray_api::{ErrorKind, Refusal};

/// For how long QEMU holds requests back while the agent is away (it restarts in well under a
/// second; an upgrade may take minutes), before it fails them. In seconds.
pub const RECONNECT_DELAY: u32 = 300;

/// A failure of QEMU as the API tells it.
pub fn qemu_error(what: impl Into<String>, why: &dray_qemu::Error) -> Refusal {
    use dray_qemu::ErrorKind as Qemu;
    let kind = match why.kind() {
        Qemu::NotFound => ErrorKind::NotFound,
        Qemu::Refused | Qemu::Mismatch => ErrorKind::Conflict,
        Qemu::TooOld => ErrorKind::Unsupported,
        _ => ErrorKind::Hypervisor,
    };
    let error = Refusal::new(kind, what, why);
    match why.kind() {
        Qemu::Connect | Qemu::NotQmp | Qemu::Closed => error.hint(
            "give the QMP socket of a running QEMU (-qmp unix:PATH,server=on,wait=off) to which \
             no other program is connected",
        ),
        Qemu::TooOld => error.hint("install a newer QEMU on this host and restart the vm with it"),
        Qemu::Timeout => error.hint("check whether QEMU is stopped or waits for one of its disks"),
        _ => error,
    }
}
