//! Opening a repository that the configuration names.

use crate::config::BackupPlace;
use dray_backup::{Error, Key, LocalStore, Repository, Result};
use std::path::Path;
use std::sync::Arc;

/// Opens it.
///
/// # Errors
/// Those of the store and of [`Repository::open`]; `Invalid` for a URL of a kind that is not known.
pub fn open(place: &BackupPlace) -> Result<Repository> {
    let Some(path) = place.url.strip_prefix("file://") else {
        return Err(Error::invalid(format!("'{}' is no URL of a repository", place.url)));
    };
    let key = place.key_file.as_deref().map_or(Ok(Key::None), Key::from_file)?;
    Repository::open(Arc::new(LocalStore::open(Path::new(path))?), &key)
}
