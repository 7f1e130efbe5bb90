//! Backups of images that this host owns, and their way back.
//!
//! A backup is of one moment of one or several images: [`moment`] takes it, with the guest's file
//! systems [frozen](dray_vm::frozen) if the operator likes; [`thaw`] asks again what did not thaw. What the images held then is read while
//! guests go on writing and put into a repository ([`mod@write`]); the repository
//! itself is the crate `dray-backup`, and `dray-provider` knows where it is. [`jobs`](crate::jobs) knows what is being backed up, so
//! that nothing else is done to these images, [`restore`] makes an
//! image of a backup, and [`schedule`] does what the configuration says.

mod bases;
pub mod moment;
pub mod restore;
pub mod run;
pub mod schedule;
pub mod thaw;
pub mod write;
