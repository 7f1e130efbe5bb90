//! The images of a migration at its target: partial files that become disks.

use super::fetcher::ImageFetcher;
use super::sink::Destination;
use super::timed::TimedLog;
use super::{Input, TargetParts, TargetSlot};
use crate::Threads;
use dray_api::{Amounts, ErrorKind, ImageProgress};
use dray_engine::TargetEvent;
use dray_engine::lineage::Generation;
use dray_engine::receiver::{DiskFault, TargetStatus};
use dray_files::StatePath;
use dray_host::abort;
use dray_host::folder::intent::{TargetImageIntent, TargetIntent};
use dray_host::folder::intents::{IntentFile, Intents};
use dray_host::folder::log::present_name;
use dray_host::folder::present::PresentFile;
use dray_host::lineage::ImageLineage;
use dray_host::process::QemuProcess;
use dray_host::record::{CopyState, ImageRecord};
use dray_host::registry::{Entry, Registry};
use dray_image::{Image, ImageFile, IntentLog, Journal};
use dray_provider::reuse::FileRef;
use dray_types::{Attempt, BLOCK_SIZE, BlockRange, BlockSet, Epoch, ImageIndex, MigrationId, Why};
use dray_wire::ImageHandover;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

/// A demand read brings its neighbourhood: blocks of this alignment (64 KiB) around it.
const NEIGHBOURHOOD: u64 = 16;

/// Makes a received file durable. Long runs went round the page cache: whatever somebody's look at
/// the unfinished file has left there may be older, so it goes before a guest is served from it.
fn settle(file: &dyn ImageFile) -> dray_image::Result<()> {
    file.sync()?;
    file.forget_cached(0, file.geometry().len)
}

/// One image.
struct Open {
    intent: TargetImageIntent,
    entry: Arc<Entry>,
    fetcher: Arc<ImageFetcher>,
    present: Arc<PresentFile>,
    index: ImageIndex,
    /// Its record has changed and is not durable.
    unwritten: AtomicBool,
}

impl Open {
    /// The file gets the length that was handed over, once: what lies behind it from then on is the
    /// guest's, and stays (I2).
    fn begin(&self, len: u64) -> io::Result<()> {
        if self.present.has_begun() {
            return Ok(());
        }
        if self.intent.in_place.is_none() {
            if self.intent.replica.is_none() {
                // No guest wrote here before, and what a sync lost during the copy was sent again.
                self.entry.file.forget_losses();
            }
            abort::step("SetLength");
            self.entry.file.set_len(len).map_err(io::Error::other)?;
            self.entry.file.sync().map_err(io::Error::other)?;
        }
        abort::step("BeginPresent");
        self.present.begin()?;
        abort::step("ServeDisk");
        Ok(())
    }

    fn serve(&self, missing: &BlockSet, written: Option<IntentFile>, log: TimedLog) {
        let mut missing = missing.clone();
        missing.subtract(&self.present.all());
        if self.intent.in_place.is_some() {
            // It has what the image has, whatever the source says.
            missing = BlockSet::new();
        }
        // Blocks the guest writes from here on are not compared.
        let written = written.map(|written| Arc::new(written) as Arc<dyn IntentLog>);
        if written.is_some()
            && let Err(why) = self.entry.disk.start_tracking(written)
        {
            let image = self.intent.name_here();
            tracing::warn!(image, %why, "a verification may compare what the guest has written");
        }
        let fetcher = Arc::clone(&self.fetcher) as _;
        let noted = self.present.noted();
        self.entry.disk.serve_with_missing(missing, &noted, fetcher, Arc::new(log));
    }
}

/// What the engine hears of an error of a disk.
pub(super) fn fault(why: &dray_image::Error) -> DiskFault {
    let kind = match why.kind {
        dray_image::ErrorKind::NoSpace => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    };
    DiskFault { kind, why: why.to_string() }
}

/// What a record says of the owner.
fn owned_by(record: &mut ImageRecord, owner: Option<Epoch>) {
    match owner {
        Some(epoch) => {
            record.state = CopyState::Owner;
            record.epoch = epoch;
            record.replica = None;
        }
        None => record.state = CopyState::Incoming,
    }
}

/// A guest may have written to an image whose record says that it is this host's. Without the journal that says
/// so too (`owned`), or without a record of its present blocks (`begun`), nobody knows which blocks those are. Of one
/// that is discarded nobody needs to know.
fn check_served(
    record: &ImageRecord,
    migration: MigrationId,
    (owned, begun): (bool, bool),
) -> io::Result<()> {
    let serves = record.state == CopyState::Owner && record.migration == Some(migration);
    if !serves || !record.is_unfinished() || owned && begun {
        return Ok(());
    }
    let what = if owned { "its record of present blocks" } else { "its migration's journal" };
    let why = format!("image '{}' was served by this host, and {what} is lost", record.name);
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// What an image is that the registry does not have: nothing that is missed, or an error.
fn absent<T>(
    registry: &Registry,
    migration: MigrationId,
    name: &str,
    (over, discarded): (bool, bool),
) -> Option<io::Result<T>> {
    let closed = registry.closed(name);
    let is_ours = |record: &ImageRecord| record.migration == Some(migration);
    let waits = closed.as_ref().and_then(|closed| closed.absent.as_ref());
    let waits = waits.filter(|it| is_ours(&it.record));
    // What comes here is not needed any more, and its file is lost.
    if let Some(it) = waits.filter(|it| discarded && registry.has_lost_arriving(&it.record)) {
        it.disk.withdraw();
        return registry.forget_arriving(&it.record).err().map(Err);
    }
    // One whose record cannot be read may be ours as well.
    let ours = closed.is_some_and(|closed| closed.absent.is_none_or(|it| is_ours(&it.record)));
    let why = format!("image '{name}' of the migration is missing");
    (!over || ours).then(|| Err(io::Error::new(io::ErrorKind::NotFound, why)))
}

/// All images, in the migration's order.
pub struct TargetImages {
    migration: MigrationId,
    registry: Arc<Registry>,
    all: Vec<Open>,
    /// Regions the guest wrote into since handover, for a verification after a restart.
    written: Arc<Intents>,
    /// Regions of files that were replicas in which they no longer are.
    overwritten: Arc<Intents>,
    /// Where the line of each image is kept until it is owned here.
    lines: StatePath,
    inputs: Sender<Input>,
    threads: Threads,
}

impl TargetImages {
    /// Finds every image of the intent in the registry. In a `new` migration nothing has arrived; of
    /// one that is `over` some may have been removed before a crash, of one that was `discarded` also
    /// without its record. It is `owned` once this host was told that its images are.
    ///
    /// # Errors
    /// When one is not there or its record of present blocks cannot be read.
    pub fn open(
        intent: &TargetIntent,
        parts: &TargetParts,
        inputs: &Sender<Input>,
        (new, owned, over, discarded): (bool, bool, bool, bool),
    ) -> io::Result<Self> {
        let (registry, migration) = (&parts.registry, intent.migration);
        let open = |(ix, image): (usize, &TargetImageIntent)| {
            let Some(entry) = registry.get(image.name_here()) else {
                return absent(registry, migration, image.name_here(), (over, discarded));
            };
            let present = parts.folder.file(&present_name(ix));
            let blocks = BlockRange::whole(entry.disk.geometry().len).len;
            let index = ImageIndex(ix as u16);
            let known =
                PresentFile::open(&present, &entry.record().path, blocks).and_then(|present| {
                    let begun = present.has_begun();
                    let known = check_served(&entry.record(), migration, (owned, begun));
                    if discarded { Ok(present) } else { known.map(|()| present) }
                });
            Some(known.map(|present| Open {
                intent: image.clone(),
                entry,
                fetcher: ImageFetcher::new(index, inputs.clone()),
                present,
                index,
                unwritten: AtomicBool::new(false),
            }))
        };
        let all = intent.images.iter().enumerate().filter_map(open).collect::<io::Result<_>>()?;
        let lens: Vec<_> = intent.images.iter().map(|image| image.offer.len).collect();
        let written = Intents::open(&parts.folder.file("written"), &lens, new);
        let overwritten = Intents::open(&parts.folder.file("overwritten"), &lens, new);
        let lines = parts.folder.file("lines");
        let (registry, inputs, threads) = (Arc::clone(registry), inputs.clone(), parts.threads);
        Ok(Self { migration, registry, all, written, overwritten, lines, inputs, threads })
    }

    /// Keeps what the source says of the images' generations, durably: part of a promise.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn keep_lines(&self, attempt: Attempt, images: Vec<Vec<Generation>>) -> io::Result<()> {
        let bytes = postcard::to_allocvec(&(attempt, images)).map_err(io::Error::other)?;
        let (mut journal, _) = Journal::open(&self.lines).map_err(io::Error::other)?;
        journal.rewrite(&[&bytes]).map_err(io::Error::other)
    }

    /// What was kept for the attempt that succeeded; of a source that said nothing no generations are known.
    fn kept_lines(&self, attempt: Attempt) -> io::Result<Vec<Vec<Generation>>> {
        if !self.lines.exists()? {
            return Ok(Vec::new());
        }
        let (_, records) = Journal::open(&self.lines).map_err(io::Error::other)?;
        let Some(bytes) = records.last() else { return Ok(Vec::new()) };
        let kept: (Attempt, Vec<Vec<Generation>>) =
            postcard::from_bytes(bytes).map_err(io::Error::other)?;
        match kept {
            (of, images) if of == attempt => Ok(images),
            _ => Ok(Vec::new()),
        }
    }

    /// The image's line begins here, before anything is written to it. One that cannot be kept is
    /// worth less than the guest: without it the next migration is a full one.
    fn begin_line(&self, open: &Open, past: Vec<Generation>) {
        let record = open.entry.record();
        if record.read_only || record.state == CopyState::Owner || open.entry.line().is_some() {
            // Owned here before a restart: whatever line there is knows what was written since.
            return;
        }
        let path = self.registry.line_path(&record.name);
        let image = record.current_path().map_err(io::Error::other);
        let image = image.map(|image| self.registry.at(&image));
        let served = open.present.has_begun();
        let begun = image.and_then(|image| ImageLineage::after(&path, past, &image, served));
        match begun {
            Ok((line, changed)) => {
                line.track(&open.entry.disk, &changed);
                open.entry.set_line(Some(line));
            }
            Err(why) => {
                let image = record.name;
                tracing::warn!(image, %why, "cannot keep an image's line of generations");
                // An old one would be believed some day.
                if let Err(why) = path.remove() {
                    tracing::error!(image, %why, "cannot remove an image's line of generations");
                }
            }
        }
    }

    /// Where data streams write.
    pub fn places(&self) -> Vec<Destination> {
        let place = |(ix, open): (usize, &Open)| Destination {
            disk: Arc::clone(&open.entry.disk),
            file: Arc::clone(&open.entry.file),
            len: open.intent.offer.len,
            image: FileRef::Image {
                name: open.intent.name_here().to_owned(),
                id: open.intent.offer.id,
            },
            sparse: !open.entry.record().device,
            overwritten: open
                .intent
                .replica
                .as_ref()
                .map(|_| IntentFile::new(Arc::clone(&self.overwritten), ix)),
        };
        self.all.iter().enumerate().map(place).collect()
    }

    /// Those that still take part in this migration.
    fn bound(&self) -> impl Iterator<Item = &Open> {
        self.all.iter().filter(|open| {
            // A file that lay here before has an id of its own.
            let id = match open.intent.in_place {
                Some(_) => open.entry.record().id,
                None => open.intent.offer.id,
            };
            self.registry.is_bound_to(&open.entry, self.migration, id)
        })
    }

    /// Whether any image still takes part in this migration.
    pub fn any_bound(&self) -> bool {
        self.bound().next().is_some()
    }

    /// Until the commit the disks answer reads from the source, and changes wait.
    pub fn begin_incoming(&self, slot: &TargetSlot) {
        slot.sink.receive();
        for open in self.bound() {
            open.entry.disk.begin_incoming(Arc::clone(&open.fetcher) as _);
            self.registry.vouch(open.intent.name_here());
        }
    }

    /// Nobody may serve them before they are exposed.
    pub fn shut(&self) {
        self.bound().for_each(|open| open.entry.disk.shut());
    }

    /// The disks serve; what is missing comes. Can be repeated, after a restart or when it failed:
    /// nothing is served before nothing can fail any more.
    ///
    /// # Errors
    /// What the files or the records of present blocks report.
    pub fn expose(
        &self,
        slot: &TargetSlot,
        images: &[ImageHandover],
        attempt: Attempt,
    ) -> io::Result<()> {
        let mut lines = self.kept_lines(attempt).unwrap_or_else(|why| {
            tracing::warn!(%why, "cannot keep the images' generations at the target: a new line \
                                  begins");
            Vec::new()
        });
        lines.resize(self.all.len(), Vec::new());
        self.all.iter().zip(lines).for_each(|(open, past)| self.begin_line(open, past));
        for (open, handover) in self.all.iter().zip(images) {
            open.begin(handover.len)?;
        }
        let verify = slot.intent().settings.verify;
        for (open, handover) in self.all.iter().zip(images) {
            let written = || IntentFile::new(Arc::clone(&self.written), open.index.ix());
            self.hold_changes(open);
            let log = TimedLog::new(&open.present, &self.registry, &open.entry);
            open.serve(&handover.missing, verify.then(written), log);
            self.registry.vouch(open.intent.name_here());
        }
        Ok(())
    }

    /// The loop is told when a change waits.
    fn hold_changes(&self, open: &Open) {
        let inputs = self.inputs.clone();
        open.entry.disk.hold_changes(move || {
            // A loop that has ended lets nothing through.
            let _ = inputs.send(Input::Engine(TargetEvent::ChangeWaits));
        });
    }

    /// The disks take changes: the images do not go back.
    pub fn let_change(&self) {
        self.bound().for_each(|open| open.entry.disk.start_changes());
    }

    /// The records of the images say who owns them: this host in the epoch, or another one.
    ///
    /// # Errors
    /// What the store reports: they say so until the next restart.
    pub fn write_records(&self, owner: Option<Epoch>) -> io::Result<()> {
        let mut written = Ok(());
        for open in &self.all {
            let old = open.entry.record();
            let mut new = old.clone();
            owned_by(&mut new, owner);
            // One that was claimed meanwhile has a record of its own.
            if old.migration == Some(self.migration) && new != old {
                self.registry.change(&open.entry, |record| owned_by(record, owner));
                self.registry.note_whole(&open.entry);
                open.unwritten.store(true, Ordering::SeqCst);
            }
            if open.unwritten.load(Ordering::SeqCst) {
                let kept = self.registry.keep(&open.entry);
                open.unwritten.store(kept.is_err(), Ordering::SeqCst);
                written = written.and(kept);
            }
        }
        written
    }

    /// Gives the files their names, and takes the markers of devices away: of those that stay what they
    /// are. Can be repeated.
    ///
    /// # Errors
    /// What renaming or the store reports.
    pub fn finish(&self) -> io::Result<()> {
        // Of which a qcow2 is made: nobody needs it under its name, or it has it already.
        let mut named = self.bound().filter(|open| !open.intent.qcow2);
        named.try_for_each(|open| self.registry.finish_partial(&open.entry))?;
        self.bound().for_each(|open| self.registry.vouch(open.intent.name_here()));
        Ok(())
    }

    /// The migration no longer holds the images, which have come for `vm`; those that QEMU has taken back (all, or those that are `given`)
    /// are forgotten, and those that have become a qcow2 removed.
    ///
    /// # Errors
    /// What the store reports.
    pub fn let_go(
        &self,
        released: bool,
        given: &BTreeSet<usize>,
        vm: Option<&QemuProcess>,
    ) -> io::Result<()> {
        for open in self.bound() {
            if open.entry.record().swap.is_some_and(|swap| swap.done) {
                // The raw image is of the past.
                self.registry.remove_partial(&open.entry)?;
                continue;
            }
            if released || given.contains(&open.index.ix()) {
                self.registry.forget(open.intent.name_here())?;
                continue;
            }
            self.registry.hold_arrived(&open.entry);
            open.entry.disk.stop_tracking();
            // Last: until then all of it is done again.
            self.registry.update(&open.entry, |record| {
                (record.migration, record.came_for) = (None, vm.cloned());
            })?;
        }
        self.written.close()
    }

    /// Removes what was received. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn discard(&self) -> io::Result<()> {
        for open in self.bound() {
            // What waits for ownership waits for nothing.
            open.entry.disk.fail_parked();
            let record = open.entry.record();
            // Whatever it says of the owner: the journal knows better.
            if record.state == CopyState::Replica {
                continue;
            }
            if record.replica.is_some() {
                let regions = self.overwritten.regions(open.index.ix());
                self.registry.end_return(&open.entry, &regions)?;
            } else {
                self.registry.remove_partial(&open.entry)?;
            }
        }
        Ok(())
    }

    /// Images on their way here whose files have lost writes.
    pub fn lossy(&self) -> Vec<ImageIndex> {
        let lossy = |open: &&Open| {
            open.intent.in_place.is_none() && open.entry.file.lost_writes().is_some()
        };
        self.all.iter().filter(lossy).map(|open| open.index).collect()
    }

    /// The file of an image on its way here holds nothing from now on.
    ///
    /// # Errors
    /// What the file system or the store reports: it can be repeated.
    pub fn begin_anew(&self, image: ImageIndex) -> io::Result<()> {
        let Some(open) = self.all.get(image.ix()) else { return Ok(()) };
        open.entry.file.begin_anew().map_err(io::Error::other)
    }

    /// Makes what was received durable, in a thread; answers `ImagesSynced`. Every promise comes after
    /// it, so files that are used in place are looked at once more.
    pub fn sync(&self, id: u64) {
        let entries: Vec<_> = self.all.iter().map(|open| Arc::clone(&open.entry)).collect();
        let registry = Arc::clone(&self.registry);
        let work = move || {
            let settled = |entry: &Arc<Entry>| match entry.record().in_place {
                Some(_) => registry.check_in_place(entry).map_err(|why| why.to_string().into()),
                None => {
                    let at = registry.time_of(entry);
                    settle(&*entry.file).map_err(|why| fault(&why))?;
                    registry.keep_time(entry, at);
                    Ok(())
                }
            };
            entries.iter().try_for_each(settled)
        };
        self.in_thread(work, move |result| TargetEvent::ImagesSynced { id, result });
    }

    /// Data sync and a durable record of what is present, in a thread; answers `Checkpointed`.
    pub fn checkpoint(&self, id: u64) {
        let entries: Vec<_> = self.all.iter().map(|open| Arc::clone(&open.entry)).collect();
        let work = move || {
            entries.iter().try_for_each(|entry| entry.disk.checkpoint()).map_err(Why::of)?;
            match entries.iter().map(|entry| entry.disk.missing_count()).sum::<u64>() {
                0 => Ok(()),
                missing => Err(format!("{missing} blocks are still missing").into()),
            }
        };
        self.in_thread(work, move |result| TargetEvent::Checkpointed { id, result });
    }

    /// Does `work` in a thread and tells the loop what came of it; a thread that cannot be made is
    /// work that failed.
    fn in_thread<E: From<String> + 'static>(
        &self,
        work: impl FnOnce() -> Result<(), E> + Send + 'static,
        event: impl Fn(Result<(), E>) -> TargetEvent + Clone + Send + 'static,
    ) {
        let (inputs, told) = (self.inputs.clone(), event.clone());
        let made = self.threads.begin("dray-sync", move || {
            // A loop that has ended needs no answer.
            let _ = inputs.send(Input::Engine(told(work())));
        });
        if let Err(why) = made {
            let why = format!("cannot start a thread: {why}");
            let _ = self.inputs.send(Input::Engine(event(Err(why.into()))));
        }
    }

    /// Fails guest I/O that needs a missing block, now and until [`unstall`](Self::unstall).
    pub fn fail_stalled(&self) {
        self.all.iter().for_each(|open| open.entry.disk.fail_parked());
    }

    /// Missing blocks are waited for again.
    pub fn unstall(&self) {
        // One whose disk goes over to a qcow2 has all blocks, and may be of the past.
        let waits = self.all.iter().filter(|open| open.entry.record().swap.is_none());
        waits.for_each(|open| open.entry.disk.unpark());
    }

    /// The next missing run.
    pub fn next_missing(
        &self,
        image: ImageIndex,
        range: BlockRange,
        max: u64,
    ) -> Option<BlockRange> {
        let run = self.all.get(image.ix())?.entry.disk.next_missing(range.start, max)?;
        Some(run.intersect(range)).filter(|run| !run.is_empty())
    }

    /// The missing runs among the blocks a guest waits for and, if `wide`, their neighbours.
    pub fn neighbourhood(
        &self,
        image: ImageIndex,
        range: BlockRange,
        wide: bool,
    ) -> Vec<BlockRange> {
        let Some(open) = self.all.get(image.ix()) else { return Vec::new() };
        let alignment = if wide { NEIGHBOURHOOD } else { 1 };
        let start = range.start / alignment * alignment;
        let end = range.end().div_ceil(alignment) * alignment;
        let mut from = start;
        let mut runs = Vec::new();
        while let Some(run) = open.entry.disk.next_missing(from, end - from) {
            if run.start >= end {
                break;
            }
            let run = run.intersect(BlockRange::new(start, end - start));
            runs.push(run);
            from = run.end();
            if from >= end {
                break;
            }
        }
        runs
    }

    /// Blocks that the guest may have written since handover: what the tracker holds, and regions
    /// that were open when the agent restarted.
    pub fn written(&self, ix: usize) -> BlockSet {
        let mut written = self.written.inherited_regions().swap_remove(ix);
        written.union_with(&self.all[ix].entry.disk.dirty_snapshot());
        written
    }

    /// Disks and files, for verification.
    pub fn entries(&self) -> Vec<(Arc<Entry>, u64)> {
        self.all.iter().map(|open| (Arc::clone(&open.entry), open.intent.offer.len)).collect()
    }

    /// Per image, blocks missing.
    pub fn missing(&self) -> Vec<u64> {
        self.all.iter().map(|open| open.entry.disk.missing_count()).collect()
    }

    /// Reads that waited for a missing block.
    pub fn remote_reads(&self) -> u64 {
        self.all.iter().map(|open| open.entry.disk.stats().remote_reads).sum()
    }

    /// How far each image is.
    pub fn progress(&self, status: &TargetStatus) -> Vec<ImageProgress> {
        let row = |(ix, open): (usize, &Open)| {
            let missing = open.entry.disk.missing_count();
            let received = status.received.get(ix).copied().unwrap_or(0);
            ImageProgress {
                image: open.intent.offer.name.clone(),
                amounts: Amounts {
                    bytes_total: (received + missing) * BLOCK_SIZE,
                    bytes_done: received * BLOCK_SIZE,
                    bytes_missing: missing * BLOCK_SIZE,
                    dirty_blocks: 0,
                },
            }
        };
        self.all.iter().enumerate().map(row).collect()
    }
}
