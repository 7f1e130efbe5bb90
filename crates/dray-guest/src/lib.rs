//! What the program inside a test guest and the test outside it must agree on: what a block
//! written by the guest contains, and how a console line is written and read.
//!
//! * [`content`], [`mod@line`]: of the guest that writes its disks as its console says (`dray-guest`).
//! * [`script`], [`note`]: of the client of agents that lose their power (`dray-power`).
//! * [`nbd`]: how that client, and the tests of disks without a VM, use an export.
//!
//! The programs themselves are the binaries of this crate; they are linked statically and run in an
//! initramfs (see `dray_testkit::guest` and `dray_testkit::power`). Nothing here knows dray's code:
//! they are bystanders.

#![forbid(unsafe_code)]

pub mod content;
pub mod line;
pub mod nbd;
pub mod note;
pub mod script;
