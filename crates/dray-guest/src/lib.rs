//! What the program inside a test guest and the test outside it must agree on: what a block
//! written by the guest contains, and how a console line is written and read.
//!
//! The program itself is the binary of this crate; it is linked statically and runs in an
//! initramfs (see `dray_testkit::guest`). Nothing here knows dray: the guest is a bystander.

#![forbid(unsafe_code)]

pub mod content;
pub mod line;
