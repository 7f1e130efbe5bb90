//! Providers of blocks other than the source of a migration: backups, replicas at other hosts, and
//! the content that this host has already.
//!
//! * [`snapshots`]: which generations of an image are where, and the traits of a place and of a copy there;
//!   [`provider`]: the trait of who gives a copy's content; [`catalogues`]: the places that are asked.
//! * [`destination`]: repositories, and how they are reached; [`peer`]: one at another host; [`notes`]: what this
//!   host has put into them; [`offer`]: what peers may keep here.
//! * [`seed`]: an image read from them into a replica, before its migration.
//! * [`reuse`]: content of this host by its hash, for migrations to here.
//! * [`bases`]: base images by their digests.

pub mod bases;
pub mod catalogues;
pub mod destination;
pub mod notes;
pub mod offer;
pub mod peer;
pub mod provider;
pub mod reuse;
pub mod seed;
pub mod snapshots;
