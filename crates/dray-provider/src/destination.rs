//! Finds a repository from the operator's argument and the configuration, and opens its store.

use crate::peer::PeerStore;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_backup::{Key, Kind, Location, Repository, S3Access, Store};
use dray_config::Config;
use dray_host::refusals::io_error;
use dray_net::tls::Identity;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A repository, as it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// As the operator named it.
    pub shown: String,
    place: Storage,
    key_file: Option<PathBuf>,
}

/// Where the objects are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Storage {
    Folder(PathBuf),
    /// In a bucket.
    Bucket(Location, S3Access),
    /// At a peer that offers its store.
    Peer {
        name: String,
        address: String,
        folder: String,
        tls: PathBuf,
    },
}

/// What a URL names; `access` is what is configured of it.
fn place(config: &Config, url: &str, access: S3Access) -> dray_backup::Result<Storage> {
    match location(url)? {
        Location::Directory(folder) => Ok(Storage::Folder(folder)),
        location @ Location::S3 { .. } => Ok(Storage::Bucket(location, access)),
        Location::Peer { host, folder } => {
            let peer = config.peer(&host);
            let unknown = || {
                dray_backup::Error::new(Kind::NotFound, format!("no peer '{host}' is configured"))
            };
            let peer = peer.ok_or_else(unknown)?;
            let (name, address) = (peer.name.clone(), peer.address.clone());
            Ok(Storage::Peer { name, address, folder, tls: config.tls_dir.clone() })
        }
    }
}

/// What a URL names. A folder must be absolute: the agent's own directory means nothing to anybody.
///
/// # Errors
/// `Invalid`, with what is wrong with it.
fn location(url: &str) -> dray_backup::Result<Location> {
    match url.parse()? {
        Location::Directory(folder) if !folder.is_absolute() => {
            let why = format!("'{url}' is neither a configured destination nor a URL");
            Err(dray_backup::Error::invalid(why))
        }
        location => Ok(location),
    }
}

impl Destination {
    /// The repository that a command names; the only one that is configured where it names none.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve); `Invalid` when none is named, and not exactly one is configured.
    pub fn chosen(config: &Config, at: Option<&str>, key_file: Option<&Path>) -> ApiResult<Self> {
        if let Some(at) = at {
            return Self::resolve(config, at, key_file);
        }
        let (why, hint) = match config.backups.as_slice() {
            [only] => return Self::resolve(config, &only.name, key_file),
            [] => {
                let hint = format!(
                    "name one by its URL, or add a [[backup]] to {}",
                    config.path.display()
                );
                ("none is configured".to_owned(), hint)
            }
            several => {
                let names: Vec<_> = several.iter().map(|place| place.name.as_str()).collect();
                ("several are configured".to_owned(), format!("name one of {}", names.join(", ")))
            }
        };
        Err(Refusal::new(ErrorKind::Invalid, "no repository is named", why).hint(hint))
    }

    /// What `at` is: a configured name or a URL. A key file that is named goes before the configured
    /// one.
    ///
    /// # Errors
    /// `Invalid` when it is neither.
    pub fn resolve(config: &Config, at: &str, key_file: Option<&Path>) -> ApiResult<Self> {
        let known = config.backups.iter().find(|place| place.name == at);
        let (url, access) = known
            .map_or((at, S3Access::default()), |place| (place.url.as_str(), place.access.clone()));
        let place = place(config, url, access).map_err(|why| {
            let names: Vec<_> = config.backups.iter().map(|place| place.name.as_str()).collect();
            let hint = format!(
                "write file:///folder, s3://bucket/prefix or dray://host/folder, or name a [[backup]] \
                 of {} ({})",
                config.path.display(),
                if names.is_empty() { "none so far".to_owned() } else { names.join(", ") }
            );
            Refusal::new(ErrorKind::Invalid, format!("cannot use repository '{at}'"), why)
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
            Storage::Folder(folder) => Location::Directory(folder.clone())
                .store(&S3Access::default())
                .map_err(|why| failed(what, &why))?,
            Storage::Bucket(location, access) => {
                location.store(access).map_err(|why| failed(what, &why))?
            }
            Storage::Peer { name, address, folder, tls } => {
                let identity = Identity::load(tls)
                    .map_err(|why| Refusal::new(ErrorKind::Denied, what, why))?;
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
        if let Storage::Folder(folder) = &self.place
            && !folder.join("config").exists()
        {
            let why = format!("{} has none", folder.display());
            return Err(Refusal::new(ErrorKind::NotFound, what, why).hint(format!(
                "check that it is mounted; `dray backups init {}` makes a new one",
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
        self.refuse_absent_parent(&what)?;
        Repository::create(self.store(&what)?, &key).map_err(|why| failed(what, &why))?;
        Ok(key != Key::None)
    }
}

impl Destination {
    /// A file system that is not mounted, or a name that was mistyped, would fill another file system.
    fn refuse_absent_parent(&self, what: &str) -> ApiResult<()> {
        let Storage::Folder(folder) = &self.place else { return Ok(()) };
        let Some(parent) = folder.parent() else { return Ok(()) };
        std::fs::metadata(parent).map(drop).map_err(|why| {
            io_error(what, format!("{}: {why}", parent.display()))
                .hint("mount its file system, or make that folder with mkdir")
        })
    }
}

/// What the repository reports, as the API tells it.
pub fn failed(what: impl Into<String>, why: &dray_backup::Error) -> Refusal {
    let (kind, hint) = match why.kind() {
        // A part of a backup that is there.
        Kind::NotFound if why.piece().is_some() => (
            ErrorKind::Verification,
            Some("`dray verify` lists what is missing; restore from another backup"),
        ),
        Kind::NotFound => (ErrorKind::NotFound, None),
        Kind::Damaged => (ErrorKind::Verification, Some("`dray verify` lists what is damaged")),
        Kind::Denied => (ErrorKind::Denied, Some("check the credentials and their rights")),
        Kind::WrongKey => (ErrorKind::Denied, Some("name the right --key-file")),
        Kind::Exists | Kind::Fenced => (ErrorKind::Conflict, None),
        Kind::Unsupported => (ErrorKind::Unsupported, None),
        Kind::Invalid => (ErrorKind::Invalid, None),
        _ => {
            let error = io_error(what, why);
            let is_full = error.kind == ErrorKind::NoSpace;
            let hint = "make room there; `dray backups gc` removes what no backup needs, a day after it was written";
            return if is_full { error.hint(hint) } else { error };
        }
    };
    let error = Refusal::new(kind, what, why);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_absolute() {
        let folder = Location::Directory(PathBuf::from("/srv/b"));
        assert_eq!(location("file:///srv/b").unwrap(), folder);
        assert_eq!(location("/srv/b").unwrap(), folder);
        assert!(matches!(location("s3://bucket/x"), Ok(Location::S3 { .. })));
        for wrong in ["srv/b", "file://srv", "ftp://host/x", "nas", ""] {
            assert!(location(wrong).is_err(), "{wrong}");
        }
    }
}
