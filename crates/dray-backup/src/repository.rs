//! A repository: opening it, what is in it, and the way to everything else.

use crate::config;
use crate::error::{Error, Kind, Result};
use crate::key::{Key, Keys};
use crate::manifest::{self, Backup, Manifest};
use crate::pack::PACK_BYTES;
use crate::store::Store;
use crate::tombstone::{TOMBSTONE_BYTES, is_tombstone};
use crate::world::{SystemWorld, World};
use dray_types::ImageId;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// What the parts of this crate share.
#[derive(Clone)]
pub(crate) struct Core {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) keys: Keys,
    pub(crate) world: Arc<dyn World>,
    pub(crate) pack_bytes: usize,
}

/// How a repository is used; the default is right but for tests.
#[derive(Clone)]
pub struct Settings {
    /// Clock and randomness.
    pub world: Arc<dyn World>,
    /// A pack is closed when it holds this many bytes, at most [`PACK_BYTES`].
    pub pack_bytes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { world: Arc::new(SystemWorld), pack_bytes: PACK_BYTES }
    }
}

/// An open backup repository. Cheap to clone; any number of threads may use it.
#[derive(Clone)]
pub struct Repository {
    pub(crate) core: Arc<Core>,
    id: u128,
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Repository({:032x} in {:?})", self.id, self.core.store)
    }
}

/// What a repository holds.
#[derive(Debug, Default)]
pub struct Listing {
    /// The backups, by image and number.
    pub backups: Vec<Backup>,
    /// The objects that should be manifests and cannot be read as such, and why. The others are
    /// not affected.
    pub damaged: Vec<(String, Error)>,
}

impl Repository {
    /// Makes a new repository in an empty store, opened by `key` from now on.
    ///
    /// # Errors
    /// `Exists` when there is one; `Unavailable`.
    pub fn create(store: Arc<dyn Store>, key: &Key) -> Result<Self> {
        Self::create_with(store, key, Settings::default())
    }

    /// [`Repository::create`] with settings.
    ///
    /// # Errors
    /// As there.
    pub fn create_with(store: Arc<dyn Store>, key: &Key, settings: Settings) -> Result<Self> {
        let (config, keys) = config::create(&*store, key, &*settings.world)?;
        Ok(Self::of(store, keys, config.repository, settings))
    }

    /// Opens the repository in `store`.
    ///
    /// # Errors
    /// `NotFound` when there is none, `WrongKey`, `Damaged`, `Unsupported`, `Unavailable`.
    pub fn open(store: Arc<dyn Store>, key: &Key) -> Result<Self> {
        Self::open_with(store, key, Settings::default())
    }

    /// [`Repository::open`] with settings.
    ///
    /// # Errors
    /// As there.
    pub fn open_with(store: Arc<dyn Store>, key: &Key, settings: Settings) -> Result<Self> {
        let (config, keys) = config::open(&*store, key)?;
        Ok(Self::of(store, keys, config.repository, settings))
    }

    pub(crate) fn of(store: Arc<dyn Store>, keys: Keys, id: u128, settings: Settings) -> Self {
        let pack_bytes = settings.pack_bytes.clamp(1, PACK_BYTES);
        let core = Arc::new(Core { store, keys, world: settings.world, pack_bytes });
        Self { core, id }
    }

    /// The repository's random id.
    pub fn id(&self) -> u128 {
        self.id
    }

    /// The backups of one image, oldest first.
    ///
    /// # Errors
    /// `Unavailable`. A manifest that is damaged is in the listing, not an error.
    pub fn backups(&self, image: ImageId) -> Result<Listing> {
        listing(&self.core, &format!("{}{image}/", manifest::FOLDER))
    }

    /// The backups of all images.
    ///
    /// # Errors
    /// As [`Repository::backups`].
    pub fn all(&self) -> Result<Listing> {
        listing(&self.core, manifest::FOLDER)
    }

    /// The manifest of a backup. Segments are read when a reader needs them.
    ///
    /// # Errors
    /// `NotFound` when it was pruned, `Damaged`, `Unavailable`.
    pub fn manifest(&self, backup: &Backup) -> Result<Manifest> {
        match read(&self.core, &backup.object) {
            // A collector may have written it anew under another name.
            Err(e) if e.kind() == Kind::NotFound => self.moved(backup).ok_or(e),
            manifest => manifest,
        }
    }

    fn moved(&self, backup: &Backup) -> Option<Manifest> {
        let now = self.backups(backup.info.image).ok()?;
        let now = now.backups.iter().find(|now| now.id == backup.id)?;
        read(&self.core, &now.object).ok()
    }
}

/// Reads and checks one manifest.
pub(crate) fn read(core: &Core, name: &str) -> Result<Manifest> {
    manifest::decode(name, &core.store.get(name, manifest::MAX_BYTES)?, &core.keys)
}

/// Every manifest below `prefix`, each revision of it, and the damaged ones.
pub(crate) struct Manifests {
    pub(crate) whole: Vec<Manifest>,
    pub(crate) damaged: Vec<(String, Error)>,
}

pub(crate) fn manifests(core: &Core, prefix: &str) -> Result<Manifests> {
    let mut found = Manifests { whole: Vec::new(), damaged: Vec::new() };
    let mut objects = core.store.list(prefix)?;
    objects.sort_by(|a, b| a.name.cmp(&b.name));
    for object in objects {
        let read = core.store.get(&object.name, manifest::MAX_BYTES);
        let bytes = match read {
            Ok(bytes) => bytes,
            // Removed since the listing.
            Err(e) if e.kind() == Kind::NotFound => continue,
            Err(e) => return Err(e),
        };
        if object.bytes <= TOMBSTONE_BYTES && is_tombstone(&bytes) {
            continue;
        }
        match manifest::decode(&object.name, &bytes, &core.keys) {
            Ok(manifest) => found.whole.push(manifest),
            Err(error) => found.damaged.push((object.name, error)),
        }
    }
    Ok(found)
}

fn listing(core: &Core, prefix: &str) -> Result<Listing> {
    let found = manifests(core, prefix)?;
    let mut newest: HashMap<u128, Backup> = HashMap::new();
    for manifest in &found.whole {
        let backup = manifest.backup();
        match newest.get(&backup.id) {
            Some(known) if known.revision >= backup.revision => {}
            _ => drop(newest.insert(backup.id, backup.clone())),
        }
    }
    let mut backups: Vec<Backup> = newest.into_values().collect();
    backups.sort_by_key(|backup| (backup.info.image, backup.number, backup.id));
    Ok(Listing { backups, damaged: found.damaged })
}
