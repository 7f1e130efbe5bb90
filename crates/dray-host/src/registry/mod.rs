//! The images this host knows: their durable records, their open disks, and their NBD exports.
//!
//! A record says what this host's copy of an image is. While a migration is open its journal is the
//! truth about ownership and the record follows; both are read when the agent starts.
//!
//! * [`record`](crate::record) is what is durable of an image. [`entry`]: an image with its disk.
//! * [`names`]: what a file is called while it comes, is here, and has left (I1).
//! * [`claims`]: images that an operator took. [`left`]: copies whose migration an operator ends.
//!   [`removal`]: copies whose removal a crash has broken off.
//!   [`leftover`]: files that a crash has left without a record.
//! * [`files`]: opening what is below. [`identity`]: whether it is the file that was there before.
//!   [`lines`]: generations. [`surroundings`]: what only the agent knows.
//! * [`operations`]: one image takes part in one operation at a time. [`used`]: a file is one image's.
//! * [`growth`]: how long an image is when its file has grown. [`short`]: files that have become shorter.
//!   [`changed`]: copies that somebody has written to.
//! * [`seen`]: what can be seen of an image. [`closed`]: images that nobody vouches for. [`clients`]: who was attached before a restart.
//!   [`remote`]: clients of other hosts.
//!   [`past`]: VMs that have left. [`contest`]: who gets a claimed image. [`processes`]: lists of processes.

mod changed;
mod claims;
mod clients;
mod closed;
mod contest;
mod entry;
mod files;
mod growth;
mod identity;
pub(crate) mod left;
mod leftover;
mod lines;
mod losses;
mod lossy;
mod names;
mod operations;
mod past;
mod processes;
mod releases;
mod remote;
mod removal;
mod seen;
mod short;
pub(crate) mod surroundings;
#[cfg(test)]
mod tests;
mod used;

pub use claims::Claimed;
pub use closed::{Closed, Reason};
pub use entry::Entry;
pub use files::{is_device, real_path};
pub use operations::{NotTaken, Operation};
pub use processes::Process;

pub use seen::Objection;
pub use surroundings::Surroundings;
pub use used::Used;

use crate::flat::peeks::Peeks;
use crate::flat::{ChainImage, Purpose};
use crate::folder::intent::SourceImage;
use crate::heartbeat::Heartbeats;
use crate::heat::ImageHeat;
use crate::lineage::ImageLineage;
use crate::record::CopyState;
use crate::record::ImageRecord;
use crate::record::MAX_LEN;
use crate::record::NameKind;
use crate::released::Notes;
use crate::store::Store;
use clients::KnownClients;
use closed::{Absent, ClosedImages};
use dray_engine::lineage::Lineage;
use dray_files::StatePath;
use dray_image::{ErrorKind, ImageFile, ImageNames, OpenImages, QemuLocks};
use dray_types::{BlockSet, ImageId, MigrationId};
use files::{open_file, open_flat};
use identity::heartbeat_path;
use lines::{begin_line, begin_line_after, line_path};
use operations::Operations;
use parking_lot::{Mutex, MutexGuard, RwLock};
use past::PastVms;
use remote::mark_path;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// All images of this host.
pub struct Registry {
    /// Held while a replica is taken for a migration back, claimed or removed. Loops of migrations take it as well: who
    /// holds it waits for none.
    pub(crate) taking: Mutex<()>,
    /// What is known of images that QEMU has taken back.
    pub released: Notes,
    /// Looks at chains whose disks are to be flattened.
    pub peeks: Peeks,
    /// Tell the next agent until when this one had its files open.
    pub heartbeats: Heartbeats,
    /// Held while the incomplete file of an image is made that has no record yet.
    making: Mutex<()>,
    store: Store,
    around: Arc<dyn Surroundings>,
    entries: RwLock<BTreeMap<String, Arc<Entry>>>,
    closed: ClosedImages,
    /// Held while the file of a closed image is opened, or such an image is forgotten.
    opening: Mutex<()>,
    operations: Arc<Operations>,
    clients: Mutex<BTreeMap<String, KnownClients>>,
    past_vms: Mutex<PastVms>,
    /// How many connections of other hosts an image has.
    remote_clients: Mutex<BTreeMap<String, usize>>,
}

impl Registry {
    /// The registry with every image that has a record. An image that takes part in a migration is
    /// closed until the migration's loop vouches for it, one whose file cannot be opened until it
    /// can be, and one whose record cannot be read for good.
    ///
    /// # Errors
    /// When the records cannot be listed.
    pub fn load(store: Store, around: Arc<dyn Surroundings>) -> io::Result<Arc<Self>> {
        let released = Notes::in_folder(store.released());
        released.sweep();
        let past_vms = Mutex::new(PastVms::load(store.past_vms()));
        let registry = Arc::new(Self {
            taking: Mutex::default(),
            released,
            peeks: Peeks::default(),
            heartbeats: Heartbeats::default(),
            making: Mutex::default(),
            store,
            around,
            entries: RwLock::default(),
            closed: ClosedImages::default(),
            opening: Mutex::default(),
            operations: Arc::default(),
            clients: Mutex::default(),
            past_vms,
            remote_clients: Mutex::default(),
        });
        for path in registry.store.images().entries(".json")? {
            let Some(name) = path.stem() else { continue };
            registry.load_one(name, path.get());
        }
        Ok(registry)
    }

    /// Takes one image in as its record says; what stands against that concerns it alone.
    fn load_one(&self, name: &str, record: io::Result<ImageRecord>) {
        let record = match record.and_then(of_fair_len) {
            Ok(record) => record,
            Err(why) => {
                tracing::error!(image = name, %why, "cannot read an image's record");
                return self.close(name, closed::record_is_unread(&why));
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
                let reason = closed::cannot_open(&self.store, &record, &why);
                let absent = Some(Absent::new(record));
                self.closed.lock().insert(name.to_owned(), Closed { reason, absent });
            }
        }
    }

    /// Opens what a record names. The disk is the one that its clients wait at, if they do, and is
    /// shut then.
    fn open_known(&self, record: ImageRecord, waits: Option<&Absent>) -> io::Result<Arc<Entry>> {
        // Before anything is written to the record.
        let overtaken = self.claim_overtaken(&record);
        self.opener().check_folder(&record.path)?;
        // The kernel forgets at a reboot that a device is not to be written.
        if record.device {
            let mark = self.mark(&record.path);
            let marked = if record.is_unnamed_claim() { mark.clear() } else { mark.reapply() };
            if let Err(why) = marked {
                tracing::error!(image = record.name, %why, "cannot protect a replica's device");
            }
        }
        self.refuse_other_file(&record)?;
        let doubt = changed::refuse(self, &record)?;
        let is_left = self.is_left(&record).unwrap_or(false);
        let record = if is_left { record } else { self.distrust_return(record)? };
        self.settle_return(&record, is_left)?;
        let opened = self.open_file(&record);
        let file = opened
            .map_err(|why| short::device(&record).unwrap_or_else(|| io::Error::other(why)))?;
        short::refuse(&record, &*file)?;
        let (record, file) = self.with_all_of_it(record, file)?;
        let heat = ImageHeat::load(&heat_path(&self.store, &record.name), record.len);
        let flat = open_flat(&self.store, &*self.around, &record, &file)?;
        // What it has lost is known from here on.
        let record = self.found_whole(record, &*file);
        let is_told =
            self.tell_mounted_anew(&record, &*file) & self.tell_remote_clients(&record, &*file);
        let entry = Arc::new(Entry::new(record, file, heat, flat, waits));
        if entry.record().is_between_places() {
            // Its QEMU may have to flush it before it can say where it is.
            entry.disk.park_now();
        }
        self.lock_at_start(&entry)?;
        let is_taken = !matches!(entry.used_elsewhere(), Ok(None));
        let overtaken = overtaken.or_else(|| self.contested(&entry.record()).filter(|_| is_taken));
        overtaken.map_or(Ok(()), |migration| self.others_have_it(migration))?;
        doubt.iter().try_for_each(|doubt| changed::begin_anew(&entry, doubt))?;
        // If the file was put back to an earlier state, no backup or copy is a base for it.
        let is_known = is_left && !self.is_put_back(&entry.record());
        begin_line_after(&self.store, &entry, is_known)?;
        self.begin_heartbeat(&entry)?;
        self.settle_at_start(&entry);
        // Otherwise the next agent has to see it as this one did.
        if is_told {
            self.note_file_system(&entry);
        }
        Ok(entry)
    }

    /// The guest of an image whose file system was mounted anew, and which runs still, may have written what is lost: its
    /// next flush says so. False when a restart would forget that.
    fn tell_mounted_anew(&self, record: &ImageRecord, file: &dyn ImageFile) -> bool {
        let images = self.store.images();
        let is_concerned = record.state == CopyState::Owner
            && record.was_mounted_anew(&**images.files())
            && self.a_client_runs(&record.name);
        let why = "its file system was unmounted and mounted anew while a client was attached";
        let why = dray_image::Error::new(ErrorKind::Io, "keeping what was written", why);
        !is_concerned || file.owe_loss(&why)
    }

    /// Where the image's file is found from now on.
    fn note_file_system(&self, entry: &Entry) {
        let record = entry.record();
        let file_system = record.file_system_now().or(record.file_system);
        let mounted = record.mounted_now(&**self.store.images().files()).or(record.mounted.clone());
        if (file_system, &mounted) == (record.file_system, &record.mounted) {
            return;
        }
        let noted = self.update(entry, |record| {
            (record.file_system, record.mounted) = (file_system, mounted);
        });
        if let Err(why) = noted {
            tracing::debug!(image = record.name, %why, "cannot note the file system of an image");
        }
    }

    fn lock_clients(&self) -> MutexGuard<'_, BTreeMap<String, KnownClients>> {
        self.clients.lock()
    }

    /// Opens the file that a record names, in the way of its pool.
    ///
    /// # Errors
    /// What opening under the recorded name reports.
    pub fn open_file(&self, record: &ImageRecord) -> dray_image::Result<Arc<dyn ImageFile>> {
        open_file(&self.store, record, self.is_direct(&record.path))
    }

    /// The names that the file of an image can have.
    ///
    /// # Errors
    /// When its path is no file name, or one too long to be changed.
    pub(crate) fn names(&self, record: &ImageRecord) -> io::Result<ImageNames> {
        self.store.names(&record.path)
    }

    /// What is durable of this host.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// What opens image files.
    pub fn opener(&self) -> &dyn OpenImages {
        self.store.opener()
    }

    /// A path of this host, among the files in which its images are.
    pub fn at(&self, path: &Path) -> StatePath {
        self.store.beside(path)
    }

    /// The chain of a disk that will be flattened, beside whoever has it. Reads fail after a while.
    pub fn peek_chain(&self, image: &SourceImage) -> Arc<dyn ChainImage> {
        let SourceImage { offer, chain: layers, .. } = image;
        let chain = self.around.chain(Purpose::Peek, offer.id, layers.clone(), offer.len);
        self.peeks.add(&chain, || self.all().iter().find_map(|entry| entry.whereabouts(&*chain)));
        chain
    }

    /// Whether an image at `path` bypasses the page cache.
    pub fn is_direct(&self, path: &Path) -> bool {
        self.around.is_direct(path)
    }

    fn path_of(&self, name: &str) -> StatePath {
        self.store.images().join(format!("{name}.json"))
    }

    /// Counts the accesses that guests have made since the last time. Tells how full the fullest log
    /// was.
    pub fn drain_heat(&self, now: Instant) -> f64 {
        self.all().iter().map(|entry| entry.heat.drain(&entry.disk, now)).fold(0.0, f64::max)
    }

    /// Counts the accesses and keeps what has changed for the next agent.
    pub fn save_heat(&self, now: Instant) {
        self.drain_heat(now);
        // Held meanwhile, so that no image is forgotten before its file is written.
        let entries = self.entries.read();
        for (name, entry) in entries.iter() {
            if let Err(why) = entry.heat.save(&heat_path(&self.store, name)) {
                tracing::debug!(image = name, %why, "cannot keep an image's heat");
            }
        }
    }

    /// The image called `name`.
    pub fn get(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries.read().get(name).cloned()
    }

    /// Every image, in name order.
    pub fn all(&self) -> Vec<Arc<Entry>> {
        self.entries.read().values().cloned().collect()
    }

    /// Adds an image whose file is open.
    ///
    /// # Errors
    /// `AlreadyExists` when the name is taken, or what the store reports.
    pub fn add(&self, record: ImageRecord, file: Arc<dyn ImageFile>) -> io::Result<Arc<Entry>> {
        self.released.remove_others(&record.path, record.id)?;
        self.add_with(record, file, None, None)
    }

    /// Adds an image that takes the file over from `old`, which is forgotten next.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub(crate) fn add_instead(
        &self,
        record: ImageRecord,
        file: Arc<dyn ImageFile>,
        old: &Entry,
    ) -> io::Result<Arc<Entry>> {
        self.released.remove_others(&record.path, record.id)?;
        self.add_with(record, file, None, Some((old, old.give_up_locks())))
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
        file: Arc<dyn ImageFile>,
        line: (Lineage, BlockSet),
    ) -> io::Result<Arc<Entry>> {
        self.add_with(record, file, Some(line), None)
    }

    fn add_with(
        &self,
        record: ImageRecord,
        file: Arc<dyn ImageFile>,
        line: Option<(Lineage, BlockSet)>,
        from: Option<(&Entry, Option<QemuLocks>)>,
    ) -> io::Result<Arc<Entry>> {
        let whole = short::is_whole(&record, &*file);
        let file_system = record.file_system_now();
        let mounted = record.mounted_now(&**self.store.images().files());
        let record = of_fair_len(ImageRecord { whole, file_system, mounted, ..record })?;
        let waits = self.waits_for_file(&record.name);
        // Before the images: one whose file comes back meanwhile is among those by then.
        let absent = self.absent_records();
        let mut entries = self.entries.write();
        if waits || entries.contains_key(&record.name) {
            let why = format!("an image named '{}' exists already", record.name);
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        // Looked at and listed under one lock: of two images that are added at once one is refused.
        let old = from.as_ref().map(|(old, _)| *old);
        used::refuse(&entries, &absent, &record, (&*file, old))?;
        let locks = match from {
            Some((_, locks)) => locks,
            None => used::lock_new(&record, &*file)?,
        };
        let name = record.name.clone();
        // What lies there is another image's: its line, and the losses that its guest was to be told.
        self.remove_notes(&name)?;
        lossy::inherit(&self.store, &record)?;
        if let Some((lineage, changed)) = line.clone() {
            ImageLineage::create(&line_path(&self.store, &name), lineage, changed)?;
        }
        // Without it clients of a closed export are refused instead of kept waiting.
        let listed = KnownClients::make(&clients_path(&self.store, &name));
        listed.unwrap_or_else(|why| tracing::debug!(image = name, %why, "no room for its clients"));
        let known = KnownClients::load(&clients_path(&self.store, &name));
        self.lock_clients().insert(name.clone(), known);
        let heat = ImageHeat::new(record.len);
        let flat = open_flat(&self.store, &*self.around, &record, &file)?;
        let entry = Arc::new(Entry::new(record, file, heat, flat, None));
        entry.put_locks(locks);
        // The record comes last: an image that could not be added is not there after a restart either.
        let kept = self
            .make_heartbeat(&entry)
            .and_then(|()| begin_line(&self.store, &entry))
            .and_then(|()| self.keep(&entry));
        if let Err(why) = kept {
            entry.flat.iter().for_each(|flat| flat.chain.close());
            return Err(why);
        }
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
        let file = self.open_again(&record, &*entry.file)?;
        let new = self.replace(record, file)?;
        begin_line(&self.store, &new)?;
        Ok(new)
    }

    /// Puts an entry of its own over `file` in the place of the one with the record's name. The locks of the
    /// old one become its own, and it takes those that it needs beyond them.
    ///
    /// # Errors
    /// That somebody else has locked the file; everything is as before then.
    pub(crate) fn replace(
        &self,
        record: ImageRecord,
        file: Arc<dyn ImageFile>,
    ) -> io::Result<Arc<Entry>> {
        let name = record.name.clone();
        let new = self.entry_over(record, file);
        let mut entries = self.entries.write();
        let old = entries.get(&name).cloned();
        old.iter().for_each(|old| new.inherit_locks(old));
        if let Err(why) = new.take_locks() {
            old.iter().for_each(|old| old.inherit_locks(&new));
            return Err(io::Error::other(why));
        }
        new.loosen_locks(&new.record());
        self.cut_off_clients(&name);
        put_in_place(&mut entries, &new);
        Ok(new)
    }

    /// An entry of an image that has one already, over `file`. What its guest is still to be told goes on.
    fn entry_over(&self, record: ImageRecord, file: Arc<dyn ImageFile>) -> Arc<Entry> {
        if let Err(why) = losses::keep(&*file, &loss_path(&self.store, &record.name)) {
            tracing::error!(image = record.name, %why, "nobody knows what its guest is to be told");
        }
        let heat = ImageHeat::new(record.len);
        Arc::new(Entry::new(record, file, heat, None, None))
    }

    /// Whether an image takes part in no migration but `migration`, which knows it by `id`: what is left of
    /// one that is over says nothing about an image that takes part in another by now, that was claimed,
    /// or that only has the name.
    pub fn is_free_for(&self, entry: &Arc<Entry>, migration: MigrationId, id: ImageId) -> bool {
        let record = entry.record();
        let free = record.migration.is_none_or(|of| of == migration);
        self.is_current(entry) && free && record.id == id
    }

    /// Whether the image of the entry's name is still this one. One that was replaced knows nothing of what
    /// has become of it.
    pub(crate) fn is_current(&self, entry: &Entry) -> bool {
        let current = self.get(&entry.record().name);
        current.is_some_and(|current| std::ptr::eq(Arc::as_ptr(&current), entry))
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
        let new = of_fair_len(new)?;
        self.path_of(&new.name).put(&new)?;
        entry.loosen_locks(&new);
        *record = new;
        Ok(())
    }

    /// Changes an image's record for now: what it says is durable elsewhere, and
    /// [`keep`](Self::keep) makes the record say so after a restart too.
    pub fn change(&self, entry: &Entry, change: impl FnOnce(&mut ImageRecord)) {
        let mut record = entry.lock();
        change(&mut record);
        entry.loosen_locks(&record);
    }

    /// Makes an image's record durable as it is.
    ///
    /// # Errors
    /// What the store reports.
    pub fn keep(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.lock();
        self.path_of(&record.name).put(&*record)
    }

    /// Forgets which blocks a flattened image's overlay holds: everything is in its chain.
    ///
    /// # Errors
    /// What the store reports.
    pub fn forget_overlay(&self, name: &str) -> io::Result<()> {
        let present = present_path(&self.store, name);
        present.with_extension("notes").remove()?;
        present.remove()
    }

    /// Forgets an image; its file stays, and that it has lost writes stays known. What is left of its notes when they cannot be removed, the next image of
    /// that name removes.
    ///
    /// # Errors
    /// What the store reports; nothing is forgotten then.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        if let Some(entry) = self.get(name) {
            lossy::keep(&self.store, &entry)?;
        }
        // Before its notes: as long as it is there the image is, after a restart too, and this can be repeated.
        self.path_of(name).remove()?;
        let gone = self.entries.write().remove(name);
        gone.iter().for_each(|entry| tell_untold(entry));
        // Whoever still has the entry has nothing to do with the file any more.
        gone.iter().for_each(|entry| entry.drop_locks());
        // A copy that was left behind lets nothing pass, and the QEMU that had it must be able to quit.
        let serves = |entry: &&Arc<Entry>| entry.record().state != CopyState::Replica;
        gone.iter().filter(serves).for_each(|entry| entry.disk.withdraw());
        if let Some(flat) = gone.as_ref().and_then(|entry| entry.flat.as_ref()) {
            flat.chain.close();
        }
        self.lock_clients().remove(name);
        self.closed.lock().remove(name);
        if let Err(why) = self.remove_notes(name) {
            tracing::warn!(image = name, %why, "cannot remove the notes of an image that is forgotten");
        }
        Ok(())
    }

    /// Removes what is kept beside an image's record.
    fn remove_notes(&self, name: &str) -> io::Result<()> {
        self.forget_overlay(name)?;
        self.remote_clients.lock().remove(name);
        [loss_path, heat_path, line_path, clients_path, mark_path, heartbeat_path]
            .iter()
            .try_for_each(|path| path(&self.store, name).remove())
    }
}

/// Tells the operator of a loss that nobody can tell the guest any more. What an overlay has lost since it
/// was merged the chain has.
fn tell_untold(entry: &Entry) {
    let record = entry.record();
    let of_guest = record.state == CopyState::Owner && record.place == NameKind::Named;
    if of_guest
        && entry.flat.is_none()
        && let Some(loss) = entry.file.untold_loss()
    {
        let (image, why) = (record.name, loss.why);
        tracing::error!(
            image,
            why,
            "the image is forgotten, and its guest was not told that writes may be lost"
        );
    }
}

/// The image is `new` from now on, which goes on with what is known of its guest. Clients of the old disk are
/// cut off and come back to the new one: at the old one they would write past it, or wait for ever.
fn put_in_place(entries: &mut BTreeMap<String, Arc<Entry>>, new: &Arc<Entry>) {
    if let Some(old) = entries.insert(new.record().name, Arc::clone(new)) {
        new.heat.take_over(&old.heat);
        new.set_heartbeat(old.heartbeat());
        old.disk.withdraw();
    }
}

/// What is longer is served by nobody.
fn of_fair_len(record: ImageRecord) -> io::Result<ImageRecord> {
    if record.len <= MAX_LEN {
        return Ok(record);
    }
    let why =
        format!("an image of {} bytes is longer than the {MAX_LEN} that one may have", record.len);
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

fn heat_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.heat"))
}

fn clients_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.clients"))
}

/// Where it is written down that writes of an image's guest may be lost.
fn loss_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.lost"))
}

/// Where it is written down which blocks are in a flattened image's overlay.
fn present_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.flat"))
}
