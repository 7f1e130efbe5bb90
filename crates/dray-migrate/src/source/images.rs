//! The images of a migration at its source: their disks, files and names.

use super::content::Content;
use super::{Input, SourceParts};
use crate::Threads;
use crate::forecast::Moved;
use dray_engine::lineage::Generation;
use dray_engine::{SourceEvent, SourceRecord};
use dray_files::unix_ms;
use dray_host::folder::intent::{SourceImage, SourceIntent};
use dray_host::folder::intents::{IntentFile, Intents, SOURCE_INTENTS, Trouble};
use dray_host::heat::ImageHeat;
use dray_host::lineage::{REGION_BLOCKS, region_blocks};
use dray_host::process::QemuProcess;
use dray_host::record::CopyState;
use dray_host::registry::{Entry, Registry};
use dray_image::{Disk, FileOptions, Geometry, Image, ImageFile, IntentLog, Late, runs};
use dray_provider::bases::Digests;
use dray_types::{
    BLOCK_SIZE, BlockRange, BlockSet, Epoch, GenerationId, ImageIndex, MigrationId, Why,
};
use dray_vm::leaving::untold;
use dray_wire::request::Base;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Blocks taken from the tracker at once; the answer is one set however often it is asked.
const TAKE: u64 = u64::MAX;

/// One image.
pub struct Open {
    /// Its part of the intent.
    pub image: SourceImage,
    /// Registered here; none for a backing image, and for a disk that is not adopted yet.
    pub entry: Option<Arc<Entry>>,
    /// What is read: the file, or of a flattened disk what its guest sees.
    pub content: Arc<dyn Image>,
    /// The file, where the image is in one.
    pub file: Option<Arc<dyn ImageFile>>,
    /// The generation of a base image whose content is known.
    pub base: Option<GenerationId>,
    /// It is not here any more, and not needed.
    pub gone: bool,
}

impl Open {
    /// Blocks that the target's replica should hold as they are here, if it began with one.
    fn shared(&self, whole: BlockRange) -> Option<BlockSet> {
        let written = self.entry.as_ref().filter(|_| !self.image.offer.read_only);
        shared(&self.image.base, whole, |since| match written {
            Some(entry) => entry.line()?.changed_since(since, &entry.disk),
            None => (self.base == Some(since)).then(BlockSet::new),
        })
    }

    fn moved(&self) -> Moved<'_> {
        let used = self.entry.as_ref().filter(|_| !self.image.offer.read_only);
        let heat = used.map(|entry| &entry.heat);
        let len = self.image.offer.len;
        Moved { image: &*self.content, len, heat, shared: self.shared(BlockRange::whole(len)) }
    }
}

/// Blocks of an image that what its copy at the target begins with should hold as they are here; `changed`
/// tells what was written since a generation, if that can be told.
pub fn shared(
    base: &Base,
    whole: BlockRange,
    changed: impl FnOnce(GenerationId) -> Option<BlockSet>,
) -> Option<BlockSet> {
    let (generation, distrusted) = match base {
        Base::Replica { generation, distrusted, .. } => (generation, distrusted),
        Base::InPlace { .. } => return Some([whole].into_iter().collect()),
        Base::Empty | Base::Refused { .. } => return None,
    };
    let mut shared = changed(generation.id)?.complement_in(whole);
    // A peer's numbers: those behind the image's end mean nothing (I7).
    let inside = |region: &u64| region.saturating_mul(REGION_BLOCKS) < whole.end();
    shared.subtract(&region_blocks(distrusted.iter().copied().filter(inside)));
    Some(shared)
}

/// All images, in the migration's order.
pub struct SourceImages {
    migration: MigrationId,
    registry: Arc<Registry>,
    digests: Arc<Digests>,
    all: Vec<Open>,
    content: Arc<Content>,
    intents: Arc<Intents>,
    threads: Threads,
}

impl SourceImages {
    /// Opens every image of the intent. A migration that has recorded nothing is new: nothing was tracked.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub fn open(
        intent: &SourceIntent,
        parts: &SourceParts,
        records: &[SourceRecord],
    ) -> io::Result<Self> {
        let (new, begun) = (records.is_empty(), intent.options.is_some());
        let done = records.contains(&SourceRecord::Done);
        let handed_over = is_handed_over(records);
        end_removals(intent, parts, records)?;
        let open = |image: &SourceImage| {
            if done && is_gone(&parts.registry, image) {
                return Ok(not_needed(image));
            }
            // Before that the migration fails, and the guest goes on.
            let same = if handed_over { image.check_unwritten() } else { Ok(()) };
            let opened = same.and_then(|()| open(&parts.registry, &parts.digests, image, begun));
            // A base image is only wanted to compare with.
            match done && image.offer.read_only {
                true => Ok(opened.unwrap_or_else(|_| not_needed(image))),
                false => opened,
            }
        };
        let all = intent.images.iter().map(open).collect::<io::Result<Vec<_>>>()?;
        let content = Content::new(all.iter().map(|open| Arc::clone(&open.content)).collect());
        let lens: Vec<_> = intent.images.iter().map(|image| image.offer.len).collect();
        let intents = Intents::shared(&parts.folder.file(SOURCE_INTENTS), &lens, new);
        let (registry, digests) = (Arc::clone(&parts.registry), Arc::clone(&parts.digests));
        let (migration, threads) = (intent.migration, parts.threads);
        Ok(Self { migration, registry, digests, all, content, intents, threads })
    }

    /// What is only a copy was handed over, and the journal says so.
    ///
    /// # Errors
    /// That it does not: its record of that is lost.
    pub fn check_handed_over(&self, records: &[SourceRecord]) -> io::Result<()> {
        let known = is_handed_over(records);
        let lost = |(_, entry): &(usize, &Arc<Entry>)| {
            let record = entry.record();
            record.state == CopyState::Replica && record.migration == Some(self.migration)
        };
        match self.writable().find(lost).filter(|_| !known) {
            None => Ok(()),
            Some((_, entry)) => {
                let name = entry.record().name;
                let why =
                    format!("image '{name}' was handed over, and its migration's journal is lost");
                Err(io::Error::new(io::ErrorKind::InvalidData, why))
            }
        }
    }

    /// Looks every image up again: disks may have been adopted since.
    ///
    /// # Errors
    /// When a file cannot be opened.
    pub fn reopen(&mut self, intent: &SourceIntent) -> io::Result<()> {
        for (slot, image) in self.all.iter_mut().zip(&intent.images) {
            *slot = open(&self.registry, &self.digests, image, true)?;
        }
        self.content.replace(self.all.iter().map(|open| Arc::clone(&open.content)).collect());
        Ok(())
    }

    /// Whether one of them is not here any more: what the target has cannot be compared then.
    pub fn is_one_gone(&self) -> bool {
        self.all.iter().any(|open| open.gone || is_gone(&self.registry, &open.image))
    }

    /// What data streams and peeks read from.
    pub fn content(&self) -> Arc<Content> {
        Arc::clone(&self.content)
    }

    /// Per image that a guest may write, its closed generations as the next owner shall know them;
    /// the guest is quiet.
    pub fn closed_lines(&self, host: &str) -> Vec<Vec<Generation>> {
        let closed = |open: &Open| {
            let entry = open.entry.as_ref().filter(|_| !open.image.offer.read_only)?;
            Some(entry.line()?.closed(host, &entry.disk, unix_ms()))
        };
        let closed = |open| closed(open).unwrap_or_default();
        self.all.iter().map(closed).collect()
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    fn writable(&self) -> impl Iterator<Item = (usize, &Arc<Entry>)> {
        self.all
            .iter()
            .enumerate()
            .filter(|(_, open)| !open.image.offer.read_only)
            .filter_map(|(ix, open)| Some((ix, open.entry.as_ref()?)))
    }

    /// Those of them that take part in this migration.
    fn bound(&self) -> impl Iterator<Item = (usize, &Arc<Entry>)> {
        self.writable().filter(|(ix, entry)| {
            self.registry.is_bound_to(entry, self.migration, self.all[*ix].image.offer.id)
        })
    }

    /// Every image that takes part in no other migration.
    fn free(&self) -> impl Iterator<Item = (usize, &Arc<Entry>)> {
        let all = self.all.iter().enumerate();
        let known = all.filter_map(|(ix, open)| Some((ix, open.entry.as_ref()?)));
        known.filter(|(ix, entry)| {
            let offer = &self.all[*ix].image.offer;
            // A base image is offered by what is in it.
            let id = if offer.read_only { entry.record().id } else { offer.id };
            self.registry.is_free_for(entry, self.migration, id)
        })
    }

    /// Whether every image that a guest may write takes part in this migration.
    pub fn are_bound(&self) -> bool {
        self.bound().count() == self.writable().count()
    }

    /// Opens the exports of what takes part in no other migration.
    pub fn vouch(&self) {
        self.free().for_each(|(_, entry)| self.registry.vouch(&entry.record().name));
    }

    /// The disk of an image that a guest may write.
    pub fn disk(&self, image: ImageIndex) -> Option<&Arc<Disk>> {
        let open = self.all.get(image.ix())?;
        open.entry.as_ref().filter(|_| !open.image.offer.read_only).map(|entry| &entry.disk)
    }

    /// The disks that a guest may write, with the images' numbers, in order.
    pub fn disks(&self) -> impl Iterator<Item = (usize, Arc<Disk>)> {
        self.writable().map(|(ix, entry)| (ix, Arc::clone(&entry.disk)))
    }

    /// Length of each file.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn lens(&self) -> io::Result<Vec<u64>> {
        self.all.iter().map(file_len).collect()
    }

    /// Blocks that may have changed since the target received them: what the tracker still holds
    /// from an earlier try in this process, and regions that were open when the agent died. With
    /// `unwatched`, time has passed in which nobody tracked: then everything is suspect that is not
    /// tracked now.
    pub fn suspects(&self, unwatched: bool) -> Vec<BlockSet> {
        let mut suspects = self.intents.inherited_regions();
        for (ix, entry) in self.writable() {
            if self.bound().all(|(bound, _)| bound != ix) {
                // What its tracker holds is another migration's.
                suspects[ix].insert(BlockRange::whole(self.all[ix].image.offer.len));
            } else if entry.disk.is_tracking() {
                suspects[ix]
                    .union_with(&entry.disk.take_dirty(0, TAKE).accept().into_iter().collect());
            } else if unwatched {
                suspects[ix].insert(BlockRange::whole(self.all[ix].image.offer.len));
            }
        }
        suspects
    }

    /// Tracks writes, with the intent of a first write to a region durable before it.
    ///
    /// # Errors
    /// When a write that is in flight does not end.
    pub fn start_tracking(&self) -> io::Result<()> {
        self.writable().try_for_each(|(ix, entry)| {
            let file = IntentFile::new(Arc::clone(&self.intents), ix);
            let intent = Some(Arc::new(file) as Arc<dyn IntentLog>);
            entry.disk.start_tracking(intent).map_err(io::Error::other)
        })
    }

    /// Stops tracking.
    pub fn stop_tracking(&self) {
        self.free().for_each(|(_, entry)| entry.disk.stop_tracking());
    }

    /// What is wrong with the write intents.
    pub fn trouble(&self) -> Option<Trouble> {
        self.intents.trouble()
    }

    /// Looks for data in a thread and answers `Scanned`.
    ///
    /// # Errors
    /// When there is no thread; can be repeated.
    pub fn scan(&self, image: ImageIndex, inputs: Sender<Input>) -> io::Result<()> {
        let open = &self.all[image.ix()];
        let content = Arc::clone(&open.content);
        let whole = BlockRange::whole(open.image.offer.len);
        // Now that the migration tracks: what is written from here on is dirty.
        let shared = open.shared(whole);
        let proved = !open.image.base.is_unproved();
        self.threads.begin("dray-scan", move || {
            if let Some(blocks) = shared {
                let blocks = if proved { blocks } else { BlockSet::new() };
                let _ = inputs.send(Input::Engine(SourceEvent::Shared { image, blocks }));
            }
            // An image whose holes cannot be seen is data all over.
            let data = runs::data_blocks(&*content, whole)
                .unwrap_or_else(|_| [whole].into_iter().collect());
            let _ = inputs.send(Input::Engine(SourceEvent::Scanned { image, data }));
        })
    }

    /// All dirty blocks of an image, no longer dirty.
    pub fn take_dirty(&self, image: ImageIndex) -> BlockSet {
        match self.disk(image) {
            Some(disk) => disk.take_dirty(0, TAKE).accept().into_iter().collect(),
            None => BlockSet::new(),
        }
    }

    /// Waits in a thread until no guest write is in flight.
    pub fn quiesce(&self, timeout: Duration, inputs: &Sender<Input>) {
        let disks: Vec<_> =
            self.writable().map(|(ix, entry)| (ix, Arc::clone(&entry.disk))).collect();
        let failed = |why: String| Input::Engine(SourceEvent::QuiesceFailed { why });
        let answers = inputs.clone();
        let begun = self.threads.begin("dray-quiesce", move || {
            let quiet = |(ix, disk): (usize, Arc<Disk>)| Ok((ix, disk.quiesce(timeout)?));
            let quiet: dray_image::Result<Vec<_>> = disks.into_iter().map(quiet).collect();
            let _ = answers.send(match quiet {
                Ok(guards) => Input::Quiesced(guards),
                Err(why) => failed(why.to_string()),
            });
        });
        if let Err(why) = begun {
            let _ = inputs.send(failed(why.to_string()));
        }
    }

    /// Syncs every image in a thread and answers `ImagesSynced`.
    pub fn sync(&self, inputs: &Sender<Input>) {
        let entries: Vec<_> = self.writable().map(|(_, entry)| Arc::clone(entry)).collect();
        let registry = Arc::clone(&self.registry);
        let answer = |result| Input::Engine(SourceEvent::ImagesSynced(result));
        let answers = inputs.clone();
        let begun = self.threads.begin("dray-sync", move || {
            let result = entries.iter().try_for_each(|entry| make_durable(&registry, entry));
            let _ = answers.send(answer(result));
        });
        if let Err(why) = begun {
            let _ = inputs.send(answer(Err(Why::of(why))));
        }
    }

    /// Guest I/O of all images waits from now on. Cannot fail: it comes before what can (I5).
    pub fn park(&self) {
        self.bound().for_each(|(_, entry)| entry.disk.park_now());
    }

    /// Guest I/O goes on.
    pub fn unpark(&self) {
        self.bound().for_each(|(_, entry)| entry.unpark());
    }

    /// Gives the files their replica names, of every image that lets it. The disks are parked. `vm` is what answers for
    /// the VM that leaves with them. Can be repeated.
    ///
    /// # Errors
    /// What renaming or the store reported first.
    pub fn retire(&self, epoch: Epoch, vm: Option<&QemuProcess>) -> io::Result<()> {
        if let Some(vm) = vm {
            let written = self.bound().map(|(_, entry)| entry.record());
            let written = written.filter(|record| !record.read_only).map(|record| record.name);
            self.registry.vm_leaves(self.migration, &written.collect::<Vec<_>>(), vm);
        }
        let retired = self.bound().map(|(_, entry)| self.registry.retire(entry, epoch, unix_ms()));
        // Each image is tried, whatever becomes of the others.
        retired.fold(Ok(()), Result::and)
    }

    /// Undoes [`retire`](Self::retire) under a new epoch. Can be repeated.
    ///
    /// # Errors
    /// What renaming or the store reports.
    pub fn restore(&self, epoch: Epoch) -> io::Result<()> {
        self.registry.vm_stays(self.migration);
        for (_, entry) in self.bound() {
            self.registry.restore(entry, epoch)?;
            self.registry.hold(entry);
            entry.unpark();
            entry.disk.stop_tracking();
            // Last: until then all of it is done again.
            self.registry.update(entry, |record| record.migration = None)?;
        }
        Ok(())
    }

    /// The migration has ended before handover: the images may take part in another one.
    ///
    /// # Errors
    /// What the store reports.
    pub fn unbind(&self) -> io::Result<()> {
        for (_, entry) in self.free().filter(|(_, entry)| entry.record().migration.is_some()) {
            self.registry.update(entry, |record| record.migration = None)?;
        }
        Ok(())
    }

    /// The target has everything: the migration no longer holds the images. A QEMU that still has
    /// the disk gets errors from now on instead of waiting for ever: it only wants to quit.
    ///
    /// # Errors
    /// What the store reports.
    pub fn let_go(&self) -> io::Result<()> {
        self.unbind()?;
        for (_, entry) in self.free() {
            let record = entry.record();
            if record.state == CopyState::Replica {
                // All was durable at the handover, and what was lost before is told. Should the image
                // come back, another guest's flush has nothing to hear of that.
                entry.file.forget_losses();
                entry.depart();
            } else if record.in_place.is_some() {
                // The name was this guest's alone; the file stays.
                self.registry.forget(&record.name)?;
            }
        }
        self.intents.close()
    }

    /// What was left behind may be the only copy there is: no limit removes it.
    ///
    /// # Errors
    /// What the store reports.
    pub fn keep_replicas(&self) -> io::Result<()> {
        let replicas = self.free().filter(|(_, entry)| entry.record().state == CopyState::Replica);
        for (_, entry) in replicas {
            self.registry.update(entry, |record| {
                if let Some(note) = &mut record.replica {
                    note.stays = true;
                }
            })?;
        }
        Ok(())
    }

    /// QEMU may stop the guest from now on, or has let it go on: whose a flush is that is told of a loss.
    pub fn guest_stops(&self, stops: bool) {
        self.writable().for_each(|(_, entry)| entry.file.guest_stops(stops));
    }

    /// Deletes the copies that were left behind when `epoch` began. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_replicas(&self, epoch: Epoch) -> io::Result<()> {
        self.writable().try_for_each(|(ix, entry)| {
            let id = self.all[ix].image.offer.id;
            self.registry.remove_left(entry, self.migration, id, epoch)
        })
    }

    /// Starts writing back what guests have written, so that the sync at handover, which is
    /// downtime, finds little left to do.
    pub fn start_writeback(&self) {
        for (_, entry) in self.writable() {
            // A hint; the sync reports what fails.
            let _ = entry.file.start_writeback(0, entry.file.geometry().len);
        }
    }
}

/// Makes durable what the guest has written, and what is known of the blocks. What was lost before is a
/// failure as well, until the guest has been told: at the target nobody would tell it, and a block that is
/// fetched later may be the old one.
fn make_durable(registry: &Registry, entry: &Entry) -> Result<(), Why> {
    let at = registry.time_of(entry);
    entry.disk.checkpoint().map_err(Why::of)?;
    // A file that was changed before this is not what is handed over.
    registry.keep_time(entry, at);
    match entry.disk.write_back_error().filter(|lost| !lost.told) {
        Some(lost) => Err(untold(&lost).into()),
        None => Ok(()),
    }
}

fn is_handed_over(records: &[SourceRecord]) -> bool {
    records.iter().any(|record| matches!(record, SourceRecord::HandedOver(_)))
}

/// Length of the file, as far as it is the image; what is in none is as long as it is exported.
fn file_len(open: &Open) -> io::Result<u64> {
    let exported = open.content.geometry().len;
    let Some(file) = &open.file else { return Ok(exported) };
    file.file_len().map(|len| len.min(exported)).map_err(io::Error::other)
}

/// Whether one that a guest may write is not here any more: no image has its name, or another one. One that is only
/// closed is here.
fn is_gone(registry: &Registry, image: &SourceImage) -> bool {
    if image.offer.read_only {
        return false;
    }
    match registry.all_records().into_iter().find(|record| record.name == image.name) {
        Some(record) => record.id != image.offer.id,
        None => !registry.waits_for_file(&image.name),
    }
}

/// Of a migration that is done a crash may have broken the removal of its copies off.
fn end_removals(
    intent: &SourceIntent,
    parts: &SourceParts,
    records: &[SourceRecord],
) -> io::Result<()> {
    let removes = intent.options.as_ref().is_some_and(|options| options.remove_replica);
    if !removes || !records.contains(&SourceRecord::Done) {
        return Ok(());
    }
    let epoch = records.iter().rev().find_map(|record| match record {
        SourceRecord::HandedOver(handed_over) => Some(handed_over.epoch),
        _ => None,
    });
    let Some(epoch) = epoch else { return Ok(()) };
    let mut copies = intent.images.iter().filter(|image| !image.offer.read_only);
    copies.try_for_each(|image| parts.registry.end_removal(&image.name, image.offer.id, epoch))
}

/// An image that a migration which is done has nothing to do with any more: it only has to be told to its target
/// that it is.
fn not_needed(image: &SourceImage) -> Open {
    let geometry = Geometry {
        len: image.offer.len,
        min_block: 1,
        preferred_block: BLOCK_SIZE as u32,
        read_only: true,
    };
    let image = image.clone();
    Open { image, entry: None, content: Late::new(geometry), file: None, base: None, gone: true }
}

/// A chain of a migration that has not `begun` is not frozen for it yet: it is only looked at, by who
/// waits at the target, wherever an exchange that was broken off has left it.
fn open(
    registry: &Registry,
    digests: &Digests,
    image: &SourceImage,
    begun: bool,
) -> io::Result<Open> {
    let image = image.clone();
    let looked_at = !begun && !image.chain.is_empty();
    if let Some(entry) = registry.get(&image.name).filter(|_| !looked_at) {
        if begun && !image.offer.read_only && entry.record().id != image.offer.id {
            let why = format!("image '{}' is not the one that the migration moves", image.name);
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        let file = entry.flat.is_none().then(|| Arc::clone(&entry.file));
        let content = Arc::clone(entry.disk.backing());
        return Ok(Open { image, entry: Some(entry), content, file, base: None, gone: false });
    }
    if let Some(closed) =
        registry.closed(&image.name).filter(|_| registry.waits_for_file(&image.name))
    {
        let why = format!("image '{}' is closed: {}", image.name, closed.reason.why);
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    if !image.chain.is_empty() {
        let content = registry.peek_chain(&image);
        return Ok(Open { image, entry: None, content, file: None, base: None, gone: false });
    }
    let direct = registry.is_direct(&image.path);
    let options = FileOptions { write: false, direct, export_len: Some(image.offer.len) };
    let file = registry.opener().open(&image.path, options).map_err(io::Error::other)?;
    let known = digests.identity(&image.path).filter(|(id, _)| *id == image.offer.id);
    let base = known.filter(|_| image.offer.read_only).map(|(_, generation)| generation.id);
    let content = Arc::clone(&file) as _;
    Ok(Open { image, entry: None, content, file: Some(file), base, gone: false })
}

impl SourceImages {
    /// What the target was told of an image.
    pub fn offer(&self, ix: usize) -> &dray_wire::ImageOffer {
        &self.all[ix].image.offer
    }

    /// An image's name here.
    pub fn name(&self, ix: usize) -> &str {
        &self.all[ix].image.name
    }

    /// Blocks of all of them.
    pub fn blocks(&self) -> u64 {
        self.all.iter().map(|open| BlockRange::whole(open.image.offer.len).len).sum()
    }

    /// The images as the planner wants to know them.
    pub fn moved(&self) -> Vec<Moved<'_>> {
        self.all.iter().map(Open::moved).collect()
    }

    /// What is known of the guest's accesses to the images that one may use, up to now.
    pub fn heats(&self) -> impl Iterator<Item = (ImageIndex, &ImageHeat)> {
        self.writable().map(|(ix, entry)| {
            entry.heat.drain(&entry.disk, Instant::now());
            (ImageIndex(ix as u16), &entry.heat)
        })
    }

    /// Dirty blocks of an image.
    pub fn dirty_count(&self, ix: usize) -> u64 {
        self.disk(ImageIndex(ix as u16)).map_or(0, |disk| disk.dirty_count())
    }
}
