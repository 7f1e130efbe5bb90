//! Backups of images that this host owns, and their way back.
//!
//! A backup is of one moment of one or several images: [`moment`] takes it, with the guest's file
//! systems frozen ([`freeze`], [`frozen`]) if the operator likes. What the images held then is read while
//! guests go on writing and put into a repository ([`mod@write`], [`destination`]); the repository
//! itself is the crate `dray-backup`. [`jobs`] knows what is being backed up, so that nothing else
//! is done to these images, [`notes`] which generations are in backup where, [`restore`] makes an
//! image of a backup, and [`schedule`] does what the configuration says.

mod bases;
pub mod destination;
mod freeze;
pub mod frozen;
pub mod jobs;
pub mod moment;
pub mod notes;
pub mod offer;
pub mod peer;
pub mod restore;
pub mod run;
pub mod schedule;
pub mod write;

use dray_api::{ErrorKind, Refusal};
use dray_backup::Kind;

/// What the repository reports, as the API tells it.
pub fn failed(what: impl Into<String>, why: &dray_backup::Error) -> Refusal {
    let (kind, hint) = match why.kind() {
        Kind::NotFound => (ErrorKind::NotFound, None),
        Kind::Damaged => (ErrorKind::Verification, Some("`dray verify` lists what is damaged")),
        Kind::Denied => (ErrorKind::Denied, Some("are the credentials right, and may they do it?")),
        Kind::WrongKey => (ErrorKind::Denied, Some("name the right --key-file")),
        Kind::Exists | Kind::Fenced => (ErrorKind::Conflict, None),
        Kind::Unsupported => (ErrorKind::Unsupported, None),
        Kind::Invalid => (ErrorKind::Invalid, None),
        _ => (ErrorKind::Io, None),
    };
    let error = Refusal::new(kind, what, why);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}
