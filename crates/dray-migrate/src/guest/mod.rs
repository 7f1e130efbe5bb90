//! The part of a migration that belongs to the guest: moving its memory, and starting it at the target. The engine
//! decides about the disks; these tasks only ask the VM, and tell the owner loops what happened.

pub mod behind;
mod qcow2;
pub mod receiver;
pub mod source;
pub mod start;
