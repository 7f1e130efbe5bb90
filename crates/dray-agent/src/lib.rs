//! The agent: the shell round the engine. It owns the images of one host, serves them to guests,
//! moves them to other agents and answers the `dray` command.
//!
//! * [`agent`]: wiring: what a process is made of, and what it does when it starts.
//! * [`ops`]: the local API's commands, one file each.
//! * [`registry`], [`store`]: the images of this host and what is durable about them.
//! * [`heat`]: what guests do with the images, counted for the orders of migrations.
//! * [`lineage`]: generations of the images owned here; [`replicas`]: copies that were left
//!   behind, and [`retention`]: for how long; [`released`]: images that QEMU has taken back.
//! * [`reuse`]: content of this host by its hash, for migrations to here.
//! * `bases`: read-only images that lie here before they come.
//! * [`backup`]: backups of the images owned here, and their way back.
//! * [`forecast`]: what the planner is told of images and links.
//! * [`migration`]: the owner loops that run the engine's effects, one per migration and side.
//! * [`batch`]: several migrations that one command begins, one after the other or together, under
//!   one [`budget`].
//! * [`vm`]: the part of a migration that belongs to QEMU.
//! * [`net`], [`tls`], [`pki`], [`pace`]: streams between agents. [`api`]: the local socket.
//! * [`config`]: the configuration file. [`troubles`]: what does not work just now.

pub mod agent;
pub mod api;
pub mod backup;
mod bases;
pub mod batch;
pub mod budget;
pub mod config;
pub mod flat;
pub mod forecast;
pub mod given;
pub mod heat;
pub mod lineage;
mod links;
pub mod migration;
pub mod net;
pub mod ops;
pub mod pace;
pub mod pki;
pub mod registry;
pub mod released;
pub mod replicas;
pub mod retention;
pub mod reuse;
mod seed;
mod snapshots;
pub mod store;
pub mod tls;
pub mod troubles;
pub mod vm;
