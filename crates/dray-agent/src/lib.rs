//! The agent: the shell round the engine. It owns the images of one host, serves them to guests,
//! moves them to other agents and answers the `dray` command.
//!
//! * [`agent`]: wiring: what a process is made of, and what it does when it starts.
//! * [`ops`]: the local API's commands, one file each.
//! * [`backup`]: backups of the images owned here, and their way back.
//! * [`batch`]: several migrations that one command begins, one after the other or together, under
//!   one [budget](dray_net::budget).
//! * `flat`: disks that leave their chains, and come home.
//! * [`api`]: the local socket. [`troubles`]: what does not work just now.

pub mod agent;
pub mod api;
pub mod backup;
pub mod batch;
mod flat;
pub mod ops;
pub mod troubles;
