//! The agent: the shell around the engine. It owns the images of one host, serves them to guests,
//! moves them to other agents and answers the `dray` command.
//!
//! * [`start`]: what a process does when it starts and ends. [`agent`]: what it is made of, and what peers may ask.
//! * [`ops`]: the local API's commands, one file each.
//! * [`batches`], [`jobs`]: which batches there are, what is being backed up.
//! * [`backup`]: backups of the images owned here, and their way back.
//! * [`batch`]: several migrations that one command begins, one after the other or together, under
//!   one [budget](dray_net::budget).
//! * `flat`: disks that leave their chains, and come home.
//! * [`qemu_img`]: what QEMU's tool tells of a file. [`readiness`]: what systemd is told.
//! * [`api`]: the local socket. [`troubles`]: what does not work just now.

pub mod agent;
pub mod api;
pub mod backup;
pub mod batch;
pub mod batches;
mod flat;
pub mod jobs;
pub mod ops;
pub mod qemu_img;
pub mod readiness;
pub mod start;
pub mod troubles;
