//! Backups of images that this host owns, and their way back.
//!
//! A backup is of one moment of one or several images: [`moment`] takes it, with the guest's file
//! systems frozen (`freeze`, [`frozen`]) if the operator likes. What the images held then is read while
//! guests go on writing and put into a repository ([`mod@write`]); the repository
//! itself is the crate `dray-backup`, and `dray-provider` knows where it is. [`jobs`] knows what is being backed up, so
//! that nothing else is done to these images, [`restore`] makes an
//! image of a backup, and [`schedule`] does what the configuration says.

mod bases;
mod freeze;
pub mod frozen;
pub mod jobs;
pub mod moment;
pub mod restore;
pub mod run;
pub mod schedule;
pub mod write;
