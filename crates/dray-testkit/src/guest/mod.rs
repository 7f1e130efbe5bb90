//! Real guests for tests: a QEMU with a Debian kernel, an initramfs made here, and a program that
//! writes its disks and verifies them. And the bystander, who computes from the guest's own log
//! what an image must hold, without asking dray.
//!
//! * [`initramfs`]: kernel, modules, busybox and the guest program in one archive ([`cpio`]).
//! * [`vm`]: starts QEMU, ends it by its process id.
//! * [`console`]: commands to the guest program and its answers.
//! * [`saved`]: the state of a booted guest, from which others go on.
//! * [`bystander`]: the expected contents of an image.
//! * [`monitor`]: commands to its QEMU.
//! * [`tools`]: what is installed; a test that cannot run says so.

pub mod bystander;
pub mod console;
pub mod cpio;
pub mod initramfs;
pub mod monitor;
mod saved;
pub mod tools;
pub mod vm;

pub use bystander::Bystander;
pub use console::Console;
pub use monitor::Monitor;
pub use vm::{GuestDisk, GuestVm, GuestVmBuilder};
