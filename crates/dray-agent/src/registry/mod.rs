//! The images this host knows: their durable records, their open disks, and their NBD exports.
//!
//! A record says what this host's copy of an image is. While a migration is open its journal is the
//! truth about ownership and the record follows; both are read when the agent starts.
//!
//! * [`record`]: what is durable of an image. [`entry`]: an image with its disk.
//! * [`names`]: what a file is called while it comes, is here, and has left (I1).
//! * [`files`]: opening what is below. [`lines`]: generations. [`exports`]: what NBD clients see.

mod entry;
mod exports;
mod files;
mod lines;
mod names;
mod record;

pub use entry::Entry;
pub use files::is_device;
pub use record::{Adopted, CopyState, ImageRecord, MODE, Place};

use crate::config::{Config, PoolIo};
use crate::flat::chain::Chain;
use crate::flat::peeks::Peeks;
use crate::flat::{self, Purpose, peeks};
use crate::heat::ImageHeat;
use crate::lineage::Line;
use crate::migration::intent::SourceImage;
use crate::released::Notes;
use crate::store::{self, Store};
use dray_engine::lineage::Lineage;
use dray_image::{DeviceMark, FileImage};
use dray_types::BlockSet;
use files::{open_file, open_flat};
use lines::{begin_line, line_path};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

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
}

impl Registry {
    /// The registry with every image that has a record and a file. Images whose file cannot be
    /// opened are left out with a warning; their record stays.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn load(store: Store, config: Arc<Config>) -> io::Result<Arc<Self>> {
        let released = Notes::in_folder(store.released());
        released.sweep();
        let mut entries = BTreeMap::new();
        for path in store::entries(&store.images(), ".json")? {
            let mut record: ImageRecord = store::read_json(&path)?;
            // Records of earlier versions do not say.
            record.device |= is_device(&record.path);
            // The kernel forgets at a reboot that a device is not to be written.
            if record.device
                && let Err(why) = DeviceMark::of(&store.images(), &record.path).reapply()
            {
                tracing::error!(image = record.name, %why, "cannot protect a replica's device");
            }
            let heat = ImageHeat::load(&heat_path(&store, &record.name), record.len);
            let opened = open_file(&record, config.io(&record.path)).map_err(io::Error::other);
            let opened = opened.and_then(|file| {
                let file = Arc::new(file);
                open_flat(&store, &config, &record, &file).map(|flat| (file, flat))
            });
            match opened {
                Ok((file, parts)) => {
                    let name = record.name.clone();
                    let suspect = released.knows(record.id);
                    let entry = Entry::new(record, file, heat, parts);
                    begin_line(&store, &entry)?;
                    if suspect {
                        // A QEMU may have the file: it must not meet a lock.
                        entry.line().inspect(|line| line.suspect());
                    } else {
                        entry.take_locks();
                    }
                    entries.insert(name, Arc::new(entry));
                }
                Err(why) => tracing::warn!(image = record.name, %why, "cannot open an image"),
            }
        }
        Ok(Arc::new(Self {
            taking: Mutex::default(),
            released,
            peeks: Peeks::default(),
            store,
            config,
            entries: RwLock::new(entries),
        }))
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
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.contains_key(&record.name) {
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
        let heat = ImageHeat::new(record.len);
        store::remove(&present_path(&self.store, &name))?;
        store::remove(&present_path(&self.store, &name).with_extension("notes"))?;
        let flat = open_flat(&self.store, &self.config, &record, &file)?;
        let entry = Arc::new(Entry::new(record, file, heat, flat));
        begin_line(&self.store, &entry)?;
        if line.is_some() {
            entry.line().inspect(|line| line.suspect());
        }
        entries.insert(name, Arc::clone(&entry));
        Ok(entry)
    }

    /// Puts an entry of its own over `file` in the place of the one with the record's name.
    pub(crate) fn replace(&self, record: ImageRecord, file: Arc<FileImage>) -> Arc<Entry> {
        let (name, heat) = (record.name.clone(), ImageHeat::new(record.len));
        let new = Arc::new(Entry::new(record, file, heat, None));
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = entries.insert(name, Arc::clone(&new)) {
            new.heat.take_over(&old.heat);
        }
        new
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

    /// Forgets an image; its file stays.
    ///
    /// # Errors
    /// What the store reports.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        let gone = self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        if let Some(flat) = gone.as_ref().and_then(|entry| entry.flat.as_ref()) {
            flat.chain.close();
        }
        let present = present_path(&self.store, name);
        store::remove(&present.with_extension("notes"))?;
        store::remove(&present)?;
        store::remove(&heat_path(&self.store, name))?;
        store::remove(&line_path(&self.store, name))?;
        store::remove(&self.path_of(name))
    }
}

fn heat_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.heat"))
}

/// Where it is written down which blocks are in a flattened image's overlay.
fn present_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.flat"))
}
