//! The part of a migration that belongs to QEMU: which images a VM has, moving its memory, and
//! starting it at the target. The engine decides about the disks; these tasks only ask the
//! [`hypervisor`], and tell the owner loops what happened.

mod attached;
#[cfg(test)]
mod fixtures;
pub mod hypervisor;
mod last_look;
pub mod look;
mod made;
pub mod own;
pub mod own_files;
pub mod picture;
pub mod qemu;
pub mod source;
pub(crate) mod start;
pub mod target;

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
            "name the QMP socket of a QEMU that runs (-qmp unix:PATH,server=on,wait=off) and that \
             nobody else is connected to",
        ),
        Qemu::TooOld => error.hint("install a newer QEMU on this host and restart the vm with it"),
        Qemu::Timeout => error.hint("see whether QEMU is stopped or waits for one of its disks"),
        _ => error,
    }
}
