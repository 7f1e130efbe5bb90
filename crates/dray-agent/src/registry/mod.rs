//! The images this host knows: their durable records, their open disks, and their NBD exports.
//!
//! A record says what this host's copy of an image is. While a migration is open its journal is the
//! truth about ownership and the record follows; both are read when the agent starts.
//!
//! * [`record`]: what is durable of an image. [`entry`]: an image with its disk.
//! * [`names`]: what a file is called while it comes, is here, and has left (I1).
//! * [`claims`]: images that an operator took.
//! * [`files`]: opening what is below. [`lines`]: generations. [`exports`]: what NBD clients see.
//! * [`closed`]: images that nobody vouches for. [`clients`]: who was attached before a restart.

mod claims;
mod clients;
mod closed;
mod entry;
mod exports;
mod files;
mod lines;
mod losses;
mod names;
mod record;

pub use closed::{Closed, Reason};
pub use entry::Entry;
pub use files::is_device;
pub use record::{Adopted, Claim, CopyState, ImageRecord, MODE, Place};

use crate::config::{Config, PoolIo};
use crate::flat::chain::Chain;
use crate::flat::peeks::Peeks;
use crate::flat::{self, Purpose, peeks};
use crate::heat::ImageHeat;
use crate::lineage::Line;
use crate::migration::intent::SourceImage;
use crate::released::Notes;
use crate::store::{self, Store};
use clients::KnownClients;
use closed::{Absent, ClosedImages};
use dray_engine::lineage::Lineage;
use dray_image::{DeviceMark, FileImage};
use dray_types::{BlockSet, ImageId, MigrationId};
use files::{open_file, open_flat};
use lines::{begin_line, line_path};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// All images of this host.
pub struct Registry {
    /// Held while a replica is taken for a migration back, or removed.
    pub(crate) taking: Mutex<()>,
    /// What is known of images that QEMU has taken back.
    pub released: Notes,
    /// Looks at chains whose disks are to be flattened.
    pub peeks: Peeks,
    store: Store,
    config: Arc<Config>,
    entries: RwLock<BTreeMap<String, Arc<Entry>>>,
    closed: ClosedImages,
    clients: Mutex<BTreeMap<String, KnownClients>>,
}

impl Registry {
    /// The registry with every image that has a record. An image that takes part in a migration is
    /// closed until the migration's loop vouches for it, one whose file cannot be opened until it
    /// can be, and one whose record cannot be read for good.
    ///
    /// # Errors
    /// When the records cannot be listed.
    pub fn load(store: Store, config: Arc<Config>) -> io::Result<Arc<Self>> {
        let released = Notes::in_folder(store.released());
        released.sweep();
        let registry = Arc::new(Self {
            taking: Mutex::default(),
            released,
            peeks: Peeks::default(),
            store,
            config,
            entries: RwLock::default(),
            closed: ClosedImages::default(),
            clients: Mutex::default(),
        });
        for path in store::entries(&registry.store.images(), ".json")? {
            let Some(name) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
            registry.load_one(name, store::read_settled(&path));
        }
        Ok(registry)
    }

    /// Takes one image in as its record says; what stands against that concerns it alone.
    fn load_one(&self, name: &str, record: io::Result<ImageRecord>) {
        let record = match record {
            Ok(record) => record,
            Err(why) => {
                tracing::error!(image = name, %why, "cannot read an image's record");
                return self.close(name, closed::record_is_damaged(&why.to_string()));
            }
        };
        let known = KnownClients::load(&clients_path(&self.store, name));
        self.lock_clients().insert(name.to_owned(), known);
        match self.open_known(record.clone(), None) {
            Ok(entry) => {
                if record.is_unfinished() {
                    entry.disk.shut();
                }
                self.admit(name, entry);
            }
            Err(why) => {
                tracing::warn!(image = name, %why, "cannot open an image: it waits for its file");
                let absent = Some(Absent::new(record));
                let reason = closed::file_is_missing(&why.to_string());
                self.closed.lock().insert(name.to_owned(), Closed { reason, absent });
            }
        }
    }

    /// Opens what a record names. The disk is the one that its clients wait at, if they do, and is
    /// shut then.
    fn open_known(&self, record: ImageRecord, waits: Option<&Absent>) -> io::Result<Arc<Entry>> {
        // The kernel forgets at a reboot that a device is not to be written.
        if record.device {
            let mark = DeviceMark::of(&self.store.images(), &record.path);
            let marked = if record.is_unnamed_claim() { mark.clear() } else { mark.reapply() };
            if let Err(why) = marked {
                tracing::error!(image = record.name, %why, "cannot protect a replica's device");
            }
        }
        let heat = ImageHeat::load(&heat_path(&self.store, &record.name), record.len);
        let file = Arc::new(self.open_file(&record).map_err(io::Error::other)?);
        let flat = open_flat(&self.store, &self.config, &record, &file)?;
        let suspect = self.released.knows(record.id);
        let entry = Arc::new(Entry::new(record, file, heat, flat, waits));
        begin_line(&self.store, &entry)?;
        if suspect {
            // A QEMU may have the file: it must not meet a lock.
            entry.line().inspect(|line| line.suspect());
        } else {
            entry.take_locks();
        }
        Ok(entry)
    }

    fn lock_clients(&self) -> MutexGuard<'_, BTreeMap<String, KnownClients>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file that a record names, in the way of its pool.
    ///
    /// # Errors
    /// What opening under the recorded name reports.
    pub fn open_file(&self, record: &ImageRecord) -> dray_image::Result<FileImage> {
        open_file(record, self.config.io(&record.path))
    }

    /// The chain of a disk that will be flattened, beside whoever has it. The daemon that reads it is
    /// started by the first read and ends with the last user. Reads fail after a while.
    pub fn peek_chain(&self, image: &SourceImage) -> Arc<Chain> {
        let place = flat::daemon_place(&self.config.run_dir, Purpose::Peek, image.offer.id);
        let chain = Chain::new(place, image.chain.clone(), image.offer.len, Some(peeks::PATIENCE));
        self.peeks.add(&chain, || self.all().iter().find_map(|entry| entry.whereabouts(&chain)));
        chain
    }

    /// Whether an image at `path` bypasses the page cache.
    pub fn is_direct(&self, path: &Path) -> bool {
        self.config.io(path) == PoolIo::Direct
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.store.images().join(format!("{name}.json"))
    }

    /// Counts the accesses that guests have made since the last time. Tells how full the fullest log
    /// was.
    pub fn drain_heat(&self) -> f64 {
        self.all().iter().map(|entry| entry.heat.drain(&entry.disk)).fold(0.0, f64::max)
    }

    /// Counts the accesses and keeps what has changed for the next agent.
    pub fn save_heat(&self) {
        self.drain_heat();
        // Held meanwhile, so that no image is forgotten before its file is written.
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        for (name, entry) in entries.iter() {
            if let Err(why) = entry.heat.save(&heat_path(&self.store, name)) {
                tracing::debug!(image = name, %why, "cannot keep an image's heat");
            }
        }
    }

    /// The image called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Every image, in name order.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Adds an image whose file is open.
    ///
    /// # Errors
    /// `AlreadyExists` when the name is taken, or what the store reports.
    pub fn add(&self, record: ImageRecord, file: Arc<FileImage>) -> io::Result<Arc<Entry>> {
        self.released.remove_others(&record.path, record.id)?;
        self.add_with(record, file, None)
    }

    /// Adds an image that was released and is being adopted again: its line goes on, with what was
    /// written in its open generation until then. It is suspect until it is known what was written
    /// since.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn add_again(
        &self,
        record: ImageRecord,
        file: Arc<FileImage>,
        line: (Lineage, BlockSet),
    ) -> io::Result<Arc<Entry>> {
        self.add_with(record, file, Some(line))
    }

    fn add_with(
        &self,
        record: ImageRecord,
        file: Arc<FileImage>,
        line: Option<(Lineage, BlockSet)>,
    ) -> io::Result<Arc<Entry>> {
        let waits = self.waits_for_file(&record.name);
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if waits || entries.contains_key(&record.name) {
            let why = format!("an image named '{}' exists already", record.name);
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        let name = record.name.clone();
        // A line that lies there is another image's.
        let at = line_path(&self.store, &name);
        store::remove(&at)?;
        if let Some((lineage, changed)) = line.clone() {
            Line::create(&at, lineage, changed)?;
        }
        store::replace_json(&self.path_of(&name), &record)?;
        // Without it clients of a closed export are refused instead of kept waiting.
        let listed = KnownClients::make(&clients_path(&self.store, &name));
        listed.unwrap_or_else(|why| tracing::debug!(image = name, %why, "no room for its clients"));
        let known = KnownClients::load(&clients_path(&self.store, &name));
        self.lock_clients().insert(name.clone(), known);
        let heat = ImageHeat::new(record.len);
        // And a loss its guest's.
        store::remove(&loss_path(&self.store, &name))?;
        store::remove(&present_path(&self.store, &name))?;
        store::remove(&present_path(&self.store, &name).with_extension("notes"))?;
        let flat = open_flat(&self.store, &self.config, &record, &file)?;
        let entry = Arc::new(Entry::new(record, file, heat, flat, None));
        begin_line(&self.store, &entry)?;
        if line.is_some() {
            entry.line().inspect(|line| line.suspect());
        }
        entries.insert(name, Arc::clone(&entry));
        Ok(entry)
    }

    /// Opens the file of an image again, which was open for reading only: from here on it is written.
    ///
    /// # Errors
    /// What opening or the store reports.
    pub fn reopen(&self, entry: &Entry) -> io::Result<Arc<Entry>> {
        let record = entry.record();
        let file = Arc::new(self.open_file(&record).map_err(io::Error::other)?);
        let new = self.replace(record, file);
        entry.disk.fail_parked();
        begin_line(&self.store, &new)?;
        Ok(new)
    }

    /// Puts an entry of its own over `file` in the place of the one with the record's name.
    pub(crate) fn replace(&self, record: ImageRecord, file: Arc<FileImage>) -> Arc<Entry> {
        let (name, heat) = (record.name.clone(), ImageHeat::new(record.len));
        losses::keep(&file, &loss_path(&self.store, &name));
        let new = Arc::new(Entry::new(record, file, heat, None, None));
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = entries.insert(name, Arc::clone(&new)) {
            new.heat.take_over(&old.heat);
        }
        new
    }

    /// Whether an image takes part in no migration but `migration`, which knows it by `id`: what is left of
    /// one that is over says nothing about an image that takes part in another by now, that was claimed,
    /// or that only has the name.
    pub fn is_free_for(&self, entry: &Arc<Entry>, migration: MigrationId, id: ImageId) -> bool {
        let record = entry.record();
        let current = self.get(&record.name).is_some_and(|current| Arc::ptr_eq(&current, entry));
        let free = record.migration.is_none_or(|of| of == migration);
        current && free && record.id == id
    }

    /// Whether an image takes part in `migration`, which knows it by `id`.
    pub fn is_bound_to(&self, entry: &Arc<Entry>, migration: MigrationId, id: ImageId) -> bool {
        entry.record().migration.is_some() && self.is_free_for(entry, migration, id)
    }

    /// Changes an image's record, durably.
    ///
    /// # Errors
    /// What the store reports; the record then is as before.
    pub fn update(&self, entry: &Entry, change: impl FnOnce(&mut ImageRecord)) -> io::Result<()> {
        let mut record = entry.lock();
        let mut new = record.clone();
        change(&mut new);
        store::replace_json(&self.path_of(&new.name), &new)?;
        *record = new;
        Ok(())
    }

    /// Changes an image's record for now: what it says is durable elsewhere, and
    /// [`keep`](Self::keep) makes the record say so after a restart too.
    pub fn change(&self, entry: &Entry, change: impl FnOnce(&mut ImageRecord)) {
        change(&mut entry.lock());
    }

    /// Makes an image's record durable as it is.
    ///
    /// # Errors
    /// What the store reports.
    pub fn keep(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.lock();
        store::replace_json(&self.path_of(&record.name), &*record)
    }

    /// Forgets which blocks a flattened image's overlay holds: everything is in its chain.
    ///
    /// # Errors
    /// What the store reports.
    pub fn forget_overlay(&self, name: &str) -> io::Result<()> {
        let present = present_path(&self.store, name);
        store::remove(&present.with_extension("notes"))?;
        store::remove(&present)
    }

    /// Forgets an image; its file stays.
    ///
    /// # Errors
    /// What the store reports.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        let gone = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        if let Some(flat) = gone.as_ref().and_then(|entry| entry.flat.as_ref()) {
            flat.chain.close();
        }
        self.forget_overlay(name)?;
        store::remove(&loss_path(&self.store, name))?;
        store::remove(&heat_path(&self.store, name))?;
        store::remove(&line_path(&self.store, name))?;
        self.lock_clients().remove(name);
        self.closed.lock().remove(name);
        store::remove(&clients_path(&self.store, name))?;
        store::remove(&self.path_of(name))
    }
}

fn heat_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.heat"))
}

fn clients_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.clients"))
}

/// Where it is written down that writes of an image's guest may be lost.
fn loss_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.lost"))
}

/// Where it is written down which blocks are in a flattened image's overlay.
fn present_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.flat"))
}
