//! The agent: the shell round the engine. It owns the images of one host, serves them to guests,
//! moves them to other agents and answers the `dray` command.
//!
//! * [`agent`]: wiring: what a process is made of, and what it does when it starts.
//! * [`ops`]: the local API's commands, one file each.
//! * `exports`: the images of this host as NBD clients see them; what is durable about them is
//!   [`dray_host`].
//! * [`released`]: how images get back to QEMU; `leaving`: when they may not.
//! * [`reuse`]: content of this host by its hash, for migrations to here.
//! * `bases`: read-only images that lie here before they come.
//! * [`backup`]: backups of the images owned here, and their way back.
//! * [`forecast`]: what the planner is told of images and links.
//! * [`migration`]: the owner loops that run the engine's effects, one per migration and side.
//! * [`batch`]: several migrations that one command begins, one after the other or together, under
//!   one [budget](dray_net::budget).
//! * [`vm`]: the part of a migration that belongs to QEMU.
//! * [`api`]: the local socket. Streams between agents are in [`dray_net`].
//! * [`config`]: the configuration file. [`troubles`]: what does not work just now.

pub mod agent;
pub mod api;
pub mod backup;
pub mod batch;
mod flat;
pub mod forecast;
mod links;
pub mod migration;
pub mod ops;
pub mod troubles;
pub mod vm;
