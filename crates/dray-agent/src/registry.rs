//! The images this host knows: their durable records, their open disks, and their NBD exports.
//!
//! A record says what this host's copy of an image is. While a migration is open its journal is the
//! truth about ownership and the record follows; both are read when the agent starts.

use crate::config::{Config, PoolIo};
use crate::flat::chain::Chain;
use crate::flat::{self, Flat, FlatRecord};
use crate::heat::ImageHeat;
use crate::lineage::{Line, ReplicaNote, stamp_of};
use crate::migration::intent::SourceImage;
use crate::migration::source::unix_ms;
use crate::released::Notes;
use crate::store::{self, Store};
use crate::vm::RECONNECT_DELAY;
use dray_engine::lineage::Lineage;
use dray_image::{
    DeviceMark, DeviceState, Disk, ErrorKind, FileImage, FileOptions, Image, ImageNames, QemuLocks,
};
use dray_nbd::{ExportError, ExportInfo, Exports};
use dray_types::{Ancestor, BlockSet, Epoch, ImageId, MigrationId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// What this host's copy of an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyState {
    /// This host accepts writes.
    Owner,
    /// The image is on its way here.
    Incoming,
    /// Ownership has passed to another host.
    Replica,
}

/// Which of its names an image's file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// Its own.
    Named,
    /// That of an incomplete image.
    Partial,
    /// That of the copy left behind when this epoch began elsewhere.
    Replica(Epoch),
    /// That of a chain's active image while the newer writes are in an overlay.
    Chain,
}

/// A VM's disk that was spliced under dray while it ran, and goes back to QEMU.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Adopted {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// The disk's device id.
    pub device: String,
    /// The splice, as the hypervisor side needs it to undo it.
    pub splice: serde_json::Value,
}

/// What is durable about an image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Name of the image and of its export.
    pub name: String,
    /// The same on every host.
    pub id: ImageId,
    /// The path it has as a complete, owned image.
    pub path: PathBuf,
    /// The name its file has now (I1).
    pub place: Place,
    /// It is a block device: it keeps its path, and a marker says what `place` says of a file.
    #[serde(default)]
    pub device: bool,
    /// Permission bits of the file under its own name.
    pub mode: u32,
    /// Exported length in bytes.
    pub len: u64,
    /// Exported with room to grow.
    pub growable: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// What is inside, as the operator said.
    pub format: Option<String>,
    /// What this copy is.
    pub state: CopyState,
    /// Ownership counter (I1).
    pub epoch: Epoch,
    /// The migration it takes part in.
    pub migration: Option<MigrationId>,
    /// Set while QEMU believes the disk is its own file.
    pub adopted: Option<Adopted>,
    /// What a copy holds that was left behind; kept while a migration back makes the image of it.
    #[serde(default)]
    pub replica: Option<ReplicaNote>,
    /// Set while the image is a chain, frozen under `path`, with an overlay of dray's over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat: Option<FlatRecord>,
}

impl ImageRecord {
    /// The path under which the file can be found now.
    ///
    /// # Errors
    /// When the configured path is none.
    pub fn current_path(&self) -> dray_image::Result<PathBuf> {
        if self.device {
            return Ok(self.path.clone());
        }
        let names = ImageNames::of(&self.path)?;
        Ok(match self.place {
            Place::Named => self.path.clone(),
            Place::Partial => names.partial(),
            Place::Replica(epoch) => names.replica(epoch),
            Place::Chain => names.chain(),
        })
    }
}

/// An image with its disk.
pub struct Entry {
    record: Mutex<ImageRecord>,
    /// The locks by which QEMU knows that the file is in use. Never held while a QEMU has the file
    /// itself: a lock in the middle of a splice aborts it.
    locks: Mutex<Option<QemuLocks>>,
    /// When the last migration away from here ended. A QEMU that had the disk may still come back
    /// and must be able to quit: it is let in, and everything it asks but a flush fails.
    departed: Mutex<Option<Instant>>,
    /// The line of generations, at the owner.
    line: Mutex<Option<Arc<Line>>>,
    /// What is known of its guest's accesses.
    pub heat: ImageHeat,
    /// What guests are served from.
    pub disk: Arc<Disk>,
    /// The file below it; of a flattened image only what was written since it is one.
    pub file: Arc<FileImage>,
    /// A flattened image's parts.
    pub flat: Option<Flat>,
}

impl Entry {
    /// A copy of the record.
    pub fn record(&self) -> ImageRecord {
        self.lock().clone()
    }

    /// Takes QEMU's locks on the file, for as long as this host serves it. Someone else's lock is
    /// told in the log: the file may be open for reading elsewhere.
    pub fn take_locks(&self) {
        let record = self.record();
        let whole = record.state == CopyState::Owner && record.place == Place::Named;
        // No name keeps a QEMU from opening an incomplete image on a device.
        let unnamed = record.device && record.place == Place::Partial;
        // A chain is kept from others by its name: the daemon that serves it takes locks of its own.
        if record.flat.is_some() {
            return;
        }
        if !unnamed && (record.read_only || !whole) {
            return;
        }
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.is_none() {
            match QemuLocks::take(&record.path) {
                Ok(taken) => *locks = Some(taken),
                Err(why) => tracing::warn!(image = record.name, %why, "cannot lock an image"),
            }
        }
    }

    /// The line of generations; none where this host does not own the image.
    pub fn line(&self) -> Option<Arc<Line>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on this is its line.
    pub fn set_line(&self, line: Option<Arc<Line>>) {
        *self.line.lock().unwrap_or_else(PoisonError::into_inner) = line;
    }

    /// The image has left for good.
    pub fn depart(&self) {
        self.disk.fail_parked();
        *self.departed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether a QEMU that had the disk may still be about to come back.
    fn has_just_departed(&self) -> bool {
        let departed = *self.departed.lock().unwrap_or_else(PoisonError::into_inner);
        departed.is_some_and(|at| at.elapsed() < Duration::from_secs(RECONNECT_DELAY.into()))
    }

    /// Gives the locks back, before QEMU opens the file itself.
    pub fn drop_locks(&self) {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn lock(&self) -> MutexGuard<'_, ImageRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All images of this host.
pub struct Registry {
    /// Held while a replica is taken for a migration back, or removed.
    pub(crate) taking: Mutex<()>,
    /// What is known of images that QEMU has taken back.
    pub released: Notes,
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
        released.sweep()?;
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
                    let entry = entry(record, file, heat, parts);
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
    /// started by the first read and ends with the last user.
    pub fn peek_chain(&self, image: &SourceImage) -> Arc<Chain> {
        let place = flat::daemon_place(&self.config.run_dir, "peek", image.offer.id);
        Chain::new(place, image.chain.clone(), image.offer.len, self.config.limits.stall)
    }

    /// Whether an image at `path` bypasses the page cache.
    pub fn is_direct(&self, path: &Path) -> bool {
        self.config.io(path) == PoolIo::Direct
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.store.images().join(format!("{name}.json"))
    }

    /// Counts the accesses that guests have made since the last time.
    pub fn drain_heat(&self) {
        for entry in self.all() {
            entry.heat.drain(&entry.disk);
        }
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
        let entry = Arc::new(entry(record, file, heat, flat));
        begin_line(&self.store, &entry)?;
        if line.is_some() {
            entry.line().inspect(|line| line.suspect());
        }
        entries.insert(name, Arc::clone(&entry));
        Ok(entry)
    }

    /// Where the line of the image called `name` is kept.
    pub fn line_path(&self, name: &str) -> PathBuf {
        line_path(&self.store, name)
    }

    /// The image was changed in a way that its line does not show, or is another one from now on:
    /// a new line begins.
    ///
    /// # Errors
    /// What the store reports.
    pub fn end_line(&self, entry: &Entry) -> io::Result<()> {
        store::remove(&line_path(&self.store, &entry.record().name))?;
        entry.disk.stop_history();
        entry.set_line(None);
        begin_line(&self.store, entry)
    }

    /// Puts an entry of its own over `file` in the place of the one with the record's name.
    pub(crate) fn replace(&self, record: ImageRecord, file: Arc<FileImage>) -> Arc<Entry> {
        let (name, heat) = (record.name.clone(), ImageHeat::new(record.len));
        let new = Arc::new(entry(record, file, heat, None));
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

    /// The copy left behind by a handover loses the image's name, so that nothing opens it by
    /// accident (I1); a block device is marked and made read-only. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn retire(&self, entry: &Entry, epoch: Epoch) -> io::Result<()> {
        entry.drop_locks();
        let record = entry.record();
        if record.device {
            self.mark(&record.path).set(DeviceState::Replica(epoch)).map_err(io::Error::other)?;
        } else if record.place != Place::Replica(epoch) {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            let named = match &entry.flat {
                Some(_) => names.retire_chain(epoch),
                None => names.make_replica(epoch),
            };
            named.map_err(io::Error::other)?;
        }
        if let Some(flat) = &entry.flat {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            flat.chain.moved(&names.replica(epoch));
        }
        let note = self.note_of(entry, epoch)?;
        self.update(entry, |record| {
            record.state = CopyState::Replica;
            if !record.device {
                record.place = Place::Replica(epoch);
            }
            record.epoch = epoch;
            record.replica = note;
        })
    }

    /// What the copy left behind in `epoch` holds: the generation that was open. The file is at rest;
    /// what was noted before a restart stays, whatever the file looks like by now.
    fn note_of(&self, entry: &Entry, epoch: Epoch) -> io::Result<Option<ReplicaNote>> {
        let record = entry.record();
        if record.state == CopyState::Replica || is_device(&record.path) {
            return Ok(record.replica);
        }
        let generation = match (entry.line(), &entry.flat) {
            (Some(line), _) => line.lineage().open(),
            // One that no line knows: for its age only, nothing can begin with it.
            (None, Some(_)) => Ancestor { id: crate::lineage::random_generation()?, number: 0 },
            (None, None) => return Ok(None),
        };
        let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
        Ok(Some(ReplicaNote {
            generation,
            stamp: stamp_of(&names.replica(epoch))?,
            since_unix_ms: unix_ms(),
            distrusted: Vec::new(),
        }))
    }

    /// Undoes [`retire`](Self::retire): this host owns the image again. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn restore(&self, entry: &Entry, epoch: Epoch) -> io::Result<()> {
        let record = entry.record();
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else if let Place::Replica(replica) = record.place {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            let named = match &entry.flat {
                Some(_) => names.restore_chain(replica),
                None => names.restore_replica(replica, record.mode),
            };
            named.map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.moved(&names.chain());
            }
        }
        self.update(entry, |record| {
            record.state = CopyState::Owner;
            record.place = if record.flat.is_some() { Place::Chain } else { Place::Named };
            record.epoch = epoch;
            record.replica = None;
        })?;
        // After a restart there is none yet: what was open then is not trusted.
        if entry.line().is_none() { begin_line(&self.store, entry) } else { Ok(()) }
    }

    /// The marker of the block device at `path`.
    pub fn mark(&self, path: &Path) -> DeviceMark {
        DeviceMark::of(&self.store.images(), path)
    }

    /// An image that was on its way is complete: its file gets its name, a device loses its marker.
    /// Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn finish_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if record.place == Place::Partial {
            if record.device {
                self.mark(&record.path).clear().map_err(io::Error::other)?;
            } else {
                let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
                names.finish_partial(record.mode).map_err(io::Error::other)?;
            }
        }
        self.update(entry, |record| {
            record.place = Place::Named;
            record.state = CopyState::Owner;
        })
    }

    /// Deletes an incomplete image and forgets it. A block device stays, with contents that nobody
    /// may rely on. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        entry.drop_locks();
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            names.remove_partial().map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }

    /// The image on this device, whatever path it is known by.
    pub fn on_device(&self, device: &File) -> Option<Arc<Entry>> {
        let number = device.metadata().ok()?.rdev();
        let same = |entry: &Arc<Entry>| {
            let meta = entry.file.file().metadata();
            meta.is_ok_and(|meta| meta.file_type().is_block_device() && meta.rdev() == number)
        };
        self.all().into_iter().find(same)
    }

    /// What the markers say of this device, and where the marker is.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn marked(&self, device: &File) -> dray_image::Result<Option<(DeviceMark, DeviceState)>> {
        let Some(mark) = DeviceMark::find(&self.store.images(), device)? else { return Ok(None) };
        Ok(mark.get()?.map(|state| (mark, state)))
    }

    /// Deletes the file of a replica and forgets it. A block device is only forgotten: it stays
    /// marked and read-only.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_replica(&self, entry: &Entry) -> io::Result<()> {
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let record = entry.record();
        if record.state != CopyState::Replica {
            return Err(io::Error::other("it is not a replica any more"));
        }
        if let Place::Replica(epoch) = record.place {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.close();
                names.remove_overlay(record.id).map_err(io::Error::other)?;
            }
            names.remove_replica(epoch).map_err(io::Error::other)?;
        }
        self.forget(&record.name)
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

fn line_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.line"))
}

/// An owner goes on with its line, or begins one.
fn begin_line(store: &Store, entry: &Entry) -> io::Result<()> {
    let record = entry.record();
    // A line is of one file's contents; a flattened image is in several.
    if record.state != CopyState::Owner || record.read_only || record.flat.is_some() {
        return Ok(());
    }
    let path = record.current_path().map_err(io::Error::other)?;
    let at = line_path(store, &record.name);
    match Line::go_on(&at, &path) {
        Ok((line, changed)) => {
            line.track(&entry.disk, &changed);
            entry.set_line(Some(line));
            Ok(())
        }
        Err(why) => {
            // Without it every migration is a full one. An old one would be believed some day.
            tracing::warn!(image = record.name, %why, "cannot keep an image's line of generations");
            store::remove(&at)
        }
    }
}

fn heat_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.heat"))
}

/// Where it is written down which blocks are in a flattened image's overlay.
fn present_path(store: &Store, name: &str) -> PathBuf {
    store.images().join(format!("{name}.flat"))
}

fn open_flat(
    store: &Store,
    config: &Config,
    record: &ImageRecord,
    file: &Arc<FileImage>,
) -> io::Result<Option<Flat>> {
    let present = present_path(store, &record.name);
    Flat::open(record, file, &config.run_dir, &present, config.limits.stall)
}

fn entry(record: ImageRecord, file: Arc<FileImage>, heat: ImageHeat, flat: Option<Flat>) -> Entry {
    let backing = match &flat {
        Some(flat) => Arc::clone(&flat.overlay) as Arc<dyn Image>,
        None => Arc::clone(&file) as Arc<dyn Image>,
    };
    let disk = Disk::new(backing);
    Entry {
        flat,
        record: Mutex::new(record),
        locks: Mutex::default(),
        departed: Mutex::default(),
        line: Mutex::default(),
        heat,
        disk,
        file,
    }
}

/// Whether a block device is at `path`.
pub fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Opens the file that a record names. A crash may have come between a new name and the record of
/// it, so the other names are tried too.
///
/// # Errors
/// What opening under the recorded name reports.
fn open_file(record: &ImageRecord, io: PoolIo) -> dray_image::Result<FileImage> {
    let write = !record.read_only || record.state == CopyState::Incoming;
    let direct = io == PoolIo::Direct;
    let export_len = Some(record.len).filter(|&len| len > 0);
    let options = |write| FileOptions { write, direct, export_len };
    if record.flat.is_some() {
        return flat::open_overlay(record, direct);
    }
    if record.device {
        return open_device(record, options(write));
    }
    let names = ImageNames::of(&record.path)?;
    let named = || FileImage::open(&record.path, options(write));
    let partial = || FileImage::from_file(names.open_partial()?, &names.partial(), options(true));
    // While the migration is open a guest's writes are parked, not refused, and the image may yet
    // be handed back (I5).
    let open = write && record.migration.is_some();
    let replica = |epoch| {
        let file = names.open_replica(epoch, open)?;
        FileImage::from_file(file, &names.replica(epoch), options(open))
    };
    let recorded = match record.place {
        Place::Named => named(),
        Place::Partial => partial(),
        Place::Replica(epoch) => replica(epoch),
        Place::Chain => flat::open_overlay(record, direct),
    };
    match recorded {
        Err(why) if why.kind == ErrorKind::NotFound => {
            let next = record.epoch.next();
            let other = named().or_else(|_| partial()).or_else(|_| replica(next));
            other.or_else(|_| replica(record.epoch)).map_err(|_| why)
        }
        other => other,
    }
}

fn open_device(record: &ImageRecord, options: FileOptions) -> dray_image::Result<FileImage> {
    if record.place == Place::Partial {
        return FileImage::claim(&record.path, options);
    }
    let kept = record.state == CopyState::Replica && record.migration.is_none();
    FileImage::open(&record.path, FileOptions { write: options.write && !kept, ..options })
}

impl Exports for Registry {
    fn list(&self) -> Vec<ExportInfo> {
        let shown = |entry: &Arc<Entry>| {
            let record = entry.record();
            (record.state != CopyState::Replica).then(|| ExportInfo {
                name: record.name,
                description: String::new(),
                fast_zero: true,
            })
        };
        self.all().iter().filter_map(shown).collect()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Image>, ExportError> {
        let Some(entry) = self.get(name) else {
            return Err(ExportError::Unknown {
                name: name.to_owned(),
                hint: "; `dray images` lists the images of this host".to_owned(),
            });
        };
        let record = entry.record();
        let gone = record.state == CopyState::Replica && record.migration.is_none();
        if gone && !entry.has_just_departed() {
            let why = format!("image '{name}' was handed over to another host");
            return Err(ExportError::Refused(why));
        }
        Ok(Arc::clone(&entry.disk) as Arc<dyn Image>)
    }
}
