//! Where repositories are: what the operator typed, what the configuration says of it, and the store
//! behind it.

use super::failed;
use super::peer::PeerStore;
use crate::api::{ApiError, ApiResult, ErrorKind};
use crate::config::Config;
use crate::tls::Identity;
use dray_backup::{Key, LocalStore, Repository, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A repository, as it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// As the operator named it.
    pub shown: String,
    place: Place,
    key_file: Option<PathBuf>,
}

/// Where the objects are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Folder(PathBuf),
    /// At a peer that offers its store.
    Peer {
        name: String,
        address: String,
        folder: String,
        tls: PathBuf,
    },
}

/// What a URL names.
fn place(config: &Config, url: &str) -> Result<Place, String> {
    let Some(rest) = url.strip_prefix("dray://") else { return folder(url).map(Place::Folder) };
    let (name, folder) = rest.split_once('/').unwrap_or((rest, ""));
    let peer = config.peer(name).ok_or_else(|| format!("no peer '{name}' is configured"))?;
    Ok(Place::Peer {
        name: peer.name.clone(),
        address: peer.address.clone(),
        folder: folder.to_owned(),
        tls: config.tls_dir.clone(),
    })
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
        let place = place(config, known.map_or(at, |place| &place.url)).map_err(|why| {
            let names: Vec<_> = config.backups.iter().map(|place| place.name.as_str()).collect();
            let hint = format!(
                "write file:///folder or dray://host/folder, or name a [[backup]] of {} ({})",
                config.path.display(),
                if names.is_empty() { "none so far".to_owned() } else { names.join(", ") }
            );
            ApiError::new(ErrorKind::Invalid, format!("cannot use repository '{at}'"), why)
                .hint(hint)
        })?;
        let configured = known.and_then(|place| place.key_file.clone());
        let key_file = key_file.map(Path::to_owned).or(configured);
        Ok(Self { shown: at.to_owned(), place, key_file })
    }

    fn key(&self, what: &str) -> ApiResult<Key> {
        let Some(path) = &self.key_file else { return Ok(Key::None) };
        Key::from_file(path).map_err(|why| failed(what, &why))
    }

    fn store(&self, what: &str) -> ApiResult<Arc<dyn Store>> {
        Ok(match &self.place {
            Place::Folder(folder) => {
                Arc::new(LocalStore::open(folder).map_err(|why| failed(what, &why))?)
            }
            Place::Peer { name, address, folder, tls } => {
                let identity = Identity::load(tls)
                    .map_err(|why| ApiError::new(ErrorKind::Denied, what, why))?;
                Arc::new(PeerStore::new(identity, name, address, folder))
            }
        })
    }

    /// Opens it. Nothing is made where there is none: the folder may be one that is not mounted.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Denied` for a wrong key, or what the store reports.
    pub fn open(&self) -> ApiResult<Repository> {
        let what = format!("cannot open repository '{}'", self.shown);
        if let Place::Folder(folder) = &self.place
            && !folder.join("config").exists()
        {
            let why = format!("there is none in {}", folder.display());
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
