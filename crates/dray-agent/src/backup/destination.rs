//! Where repositories are: what the operator typed, what the configuration says of it, and the store
//! behind it.

use super::failed;
use crate::api::{ApiError, ApiResult, ErrorKind};
use crate::config::Config;
use dray_backup::{Key, LocalStore, Repository, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A repository, as it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// As the operator named it.
    pub shown: String,
    folder: PathBuf,
    key_file: Option<PathBuf>,
}

/// The folder that a URL names.
///
/// # Errors
/// What is wrong with it.
pub fn folder(url: &str) -> Result<PathBuf, String> {
    let path = url.strip_prefix("file://").unwrap_or(url);
    match path.split_once("://") {
        Some((scheme, _)) => Err(format!("'{scheme}' is no kind of repository that dray knows")),
        None if path.starts_with('/') => Ok(PathBuf::from(path)),
        None => Err(format!("'{url}' is neither a configured destination nor a URL")),
    }
}

impl Destination {
    /// What `at` is: a configured name or a URL. A key file that is named goes before the configured
    /// one.
    ///
    /// # Errors
    /// `Invalid` when it is neither.
    pub fn resolve(config: &Config, at: &str, key_file: Option<&Path>) -> ApiResult<Self> {
        let known = config.backups.iter().find(|place| place.name == at);
        let folder = folder(known.map_or(at, |place| &place.url)).map_err(|why| {
            let names: Vec<_> = config.backups.iter().map(|place| place.name.as_str()).collect();
            let hint = format!(
                "write file:///folder, or name a [[backup]] of {} ({})",
                config.path.display(),
                if names.is_empty() { "none so far".to_owned() } else { names.join(", ") }
            );
            ApiError::new(ErrorKind::Invalid, format!("cannot use repository '{at}'"), why)
                .hint(hint)
        })?;
        let configured = known.and_then(|place| place.key_file.clone());
        let key_file = key_file.map(Path::to_owned).or(configured);
        Ok(Self { shown: at.to_owned(), folder, key_file })
    }

    fn key(&self, what: &str) -> ApiResult<Key> {
        let Some(path) = &self.key_file else { return Ok(Key::None) };
        Key::from_file(path).map_err(|why| failed(what, &why))
    }

    fn store(&self, what: &str) -> ApiResult<Arc<dyn Store>> {
        let store = LocalStore::open(&self.folder).map_err(|why| failed(what, &why))?;
        Ok(Arc::new(store))
    }

    /// Opens it. Nothing is made where there is none: the folder may be one that is not mounted.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Denied` for a wrong key, or what the store reports.
    pub fn open(&self) -> ApiResult<Repository> {
        let what = format!("cannot open repository '{}'", self.shown);
        if !self.folder.join("config").exists() {
            let why = format!("there is none in {}", self.folder.display());
            return Err(ApiError::new(ErrorKind::NotFound, what, why).hint(format!(
                "is it mounted? `dray backups init {}` makes a new one",
                self.shown
            )));
        }
        let (store, key) = (self.store(&what)?, self.key(&what)?);
        Repository::open(store, &key).map_err(|why| failed(what, &why))
    }

    /// Makes it; whether it is encrypted.
    ///
    /// # Errors
    /// `Conflict` when there is one, or what the store reports.
    pub fn create(&self) -> ApiResult<bool> {
        let what = format!("cannot make repository '{}'", self.shown);
        let key = self.key(&what)?;
        Repository::create(self.store(&what)?, &key).map_err(|why| failed(what, &why))?;
        Ok(key != Key::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_named_by_urls() {
        assert_eq!(folder("file:///srv/b"), Ok(PathBuf::from("/srv/b")));
        assert_eq!(folder("/srv/b"), Ok(PathBuf::from("/srv/b")));
        for wrong in ["srv/b", "s3://bucket", "file://srv", "nas", ""] {
            assert!(folder(wrong).is_err(), "{wrong}");
        }
    }
}
