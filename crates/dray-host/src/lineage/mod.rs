//! The line of generations of an image at its owner: its durable file, and the write intent of the
//! open generation.
//!
//! `images/NAME.line` is a journal of [`LineageRecord`]s. Before the first write into a 64 MiB
//! region it says that the region is open; now and then a set of everything written closes the
//! regions that are not in use. A file that is lost, damaged or cannot be written costs the line:
//! a new one begins, and no replica of the old one is used any more. How a backup closes a
//! generation is in [`close`].

mod close;

pub use close::{Turn, Turning};

use dray_engine::lineage::{
    AtStop, DeviceStamp, FileIdentity, Generation, Lineage, LineageRecord, Recovered, Stamp,
    recover,
};
use dray_files::StatePath;
use dray_files::files::{Device, Kind, Look};
use dray_image::journal::Journal;
use dray_image::{Disk, INTENT_REGION_BYTES, Image, IntentLog};
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet, GenerationId};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Blocks of one region.
pub const REGION_BLOCKS: u64 = INTENT_REGION_BYTES / BLOCK_SIZE;
/// How often regions that are not in use are to be closed: what an unclean stop makes suspect was
/// written into within twice this time.
pub const CLOSE_IDLE: Duration = Duration::from_secs(60);

/// What is known of a copy that was left behind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaNote {
    /// The generation that it holds.
    pub generation: Ancestor,
    /// How the file looked when nobody wrote to it any more.
    pub stamp: Stamp,
    /// Milliseconds since 1970 when it was left behind.
    pub since_unix_ms: u64,
    /// Regions that do not hold the generation any more: a migration back that came to nothing wrote
    /// there.
    #[serde(default)]
    pub distrusted: Vec<u64>,
    /// Nobody vouches for what it holds: it came from others than the image's owner, or another program may have
    /// written to the file. A block of it counts only after it had the hash that the owner gave.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unproved: bool,
    /// Why writes to its file were lost since it was made: it holds its generation only as long as the system shows what
    /// it has not written down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// Its migration was ended without its target: it may be the only copy, and no limit removes it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stays: bool,
}

/// Somebody has written to a copy that was left behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("its file was changed after the handover")]
pub struct Written;

/// What a copy that was left behind holds may not be on the disk, whatever can be read of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("writes to its file were lost: {0}")]
pub struct LostWrites(String);

impl ReplicaNote {
    /// Refuses a copy whose file has lost writes: neither its generation nor a comparison says what is on the disk.
    ///
    /// # Errors
    /// That it has.
    pub fn check_kept(&self) -> Result<(), LostWrites> {
        self.lost.clone().map_or(Ok(()), |why| Err(LostWrites(why)))
    }

    /// What the copy can be taken for, when its file looks like `now`. One that was only touched holds its
    /// generation, unless somebody has written to it and has hidden that: all of it is compared.
    ///
    /// # Errors
    /// That it was changed.
    pub fn as_found(&self, now: &Stamp) -> Result<Self, Written> {
        if *now == self.stamp {
            return Ok(self.clone());
        }
        if !now.seems_unwritten(&self.stamp) {
            return Err(Written);
        }
        Ok(Self { unproved: true, ..self.clone() })
    }
}

/// A random id.
///
/// # Errors
/// When the system has no randomness to give.
pub fn random_generation() -> io::Result<GenerationId> {
    random_id().map(GenerationId)
}

/// A random number, for an id.
///
/// # Errors
/// When the system has no randomness to give.
pub fn random_id() -> io::Result<u128> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        16 => Ok(u128::from_le_bytes(bytes)),
        _ => Err(io::Error::other("no random bytes")),
    }
}

fn identity_of(look: &Look) -> FileIdentity {
    FileIdentity { inode: look.inode, birth: look.birth }
}

/// How a file looks.
///
/// # Errors
/// What the file system reports.
pub fn stamp_of(path: &StatePath) -> io::Result<Stamp> {
    let look = path.look()?;
    let Look { len, changed, touched, .. } = look;
    Ok(Stamp { len, changed, touched, file: identity_of(&look) })
}

/// What the kernel has counted of a block device.
fn device_stamp(path: &StatePath) -> io::Result<DeviceStamp> {
    let Device { number, sequence, written, discarded } = path.device()?;
    let boot = path.files().boot()?.to_vec();
    Ok(DeviceStamp { boot, number, sequence, written, discarded })
}

/// How an image looks that nobody writes to: its file, or its device.
fn at_stop(image: &StatePath) -> io::Result<AtStop> {
    match image.look()?.kind {
        Kind::File => stamp_of(image).map(AtStop::File),
        _ => device_stamp(image).map(AtStop::Device),
    }
}

/// Whether nobody has written to an image that looks like `now` since it looked like `then`.
fn seems_unwritten(now: &AtStop, then: &AtStop) -> bool {
    match (now, then) {
        // Nobody can set back when anything of it was changed.
        (AtStop::File(now), AtStop::File(then)) => {
            now.seems_unwritten(then) && now.touched == then.touched
        }
        (AtStop::Device(now), AtStop::Device(then)) => now == then,
        _ => false,
    }
}

/// The blocks of some regions.
pub fn region_blocks(regions: impl IntoIterator<Item = u64>) -> BlockSet {
    let start = |region: u64| region.saturating_mul(REGION_BLOCKS).min(u64::MAX - REGION_BLOCKS);
    regions.into_iter().map(|region| BlockRange::new(start(region), REGION_BLOCKS)).collect()
}

/// The line of one image that this host owns.
pub struct ImageLineage {
    path: StatePath,
    /// Held by whoever writes the whole line down, from when it looks until that is durable. Taken
    /// before any other lock and before a disk is made quiet.
    rewriting: Mutex<()>,
    inner: Mutex<Inner>,
}

struct Inner {
    journal: Journal,
    lineage: Lineage,
    /// Regions that the journal names as open.
    open: BTreeSet<u64>,
    /// A generation was ended and is being written down: regions are named as open even though the
    /// line has no past yet.
    turning: bool,
    /// Somebody else may have written to the image: everything counts as changed, until it is known
    /// what was. What makes it so is durable elsewhere (see [`released`](crate::released)).
    suspect: bool,
    /// The image's file, where that is known.
    file: Option<FileIdentity>,
}

/// Which file is at a path; none when none is.
pub(crate) fn file_at(image: &StatePath) -> Option<FileIdentity> {
    image.look().ok().filter(|look| look.kind == Kind::File).map(|look| identity_of(&look))
}

fn encode(record: &LineageRecord) -> io::Result<Vec<u8>> {
    postcard::to_allocvec(record).map_err(io::Error::other)
}

/// Reads a line's file; none when there is none, or none that can be understood.
fn read(path: &StatePath) -> io::Result<Option<Recovered>> {
    if !path.exists()? {
        return Ok(None);
    }
    let (_, payloads) = Journal::open(path).map_err(io::Error::other)?;
    let decode = |payload: &Vec<u8>| postcard::from_bytes(payload).map_err(io::Error::other);
    let records: Vec<LineageRecord> = payloads.iter().map(decode).collect::<io::Result<_>>()?;
    Ok(recover(&records, REGION_BLOCKS))
}

/// The line at `path`, whoever wrote it last; none when there is none.
///
/// # Errors
/// What the file system reports, or that the file is damaged.
pub fn last_known(path: &StatePath) -> io::Result<Option<Lineage>> {
    Ok(last_state(path)?.map(|(lineage, _)| lineage))
}

/// The line at `path`, and what was written in its open generation as far as it tells.
///
/// # Errors
/// What the file system reports, or that the file is damaged.
pub fn last_state(path: &StatePath) -> io::Result<Option<(Lineage, BlockSet)>> {
    Ok(read(path)?.map(|found| (found.lineage, found.changed)))
}

/// Every block of a disk.
fn whole(disk: &Disk) -> BlockSet {
    [BlockRange::whole(disk.geometry().len)].into_iter().collect()
}

/// What is known of an image's line when somebody is about to go on with it.
pub struct Known<'a> {
    path: &'a StatePath,
    /// The image's file now.
    file: Option<FileIdentity>,
    /// The line, if it can be trusted.
    line: Option<Recovered>,
}

impl<'a> Known<'a> {
    /// Looks at the line at `path` of the image that is now at `image`. Only agents have written to that if it
    /// `is_left`; where the last of them was stopped in order, its note tells more.
    pub fn look_up(path: &'a StatePath, image: &StatePath, is_left: bool) -> Self {
        let found = read(path).unwrap_or_else(|why| {
            tracing::warn!(line = %path.display(), %why, "an image's line of generations is lost");
            None
        });
        let file = file_at(image);
        let is_known = |of: &FileIdentity| file.is_some_and(|file| file.is_same(of));
        let untouched = |found: &Recovered| match &found.stopped {
            Some(then) => at_stop(image).is_ok_and(|now| seems_unwritten(&now, then)),
            None => found.file.as_ref().is_none_or(is_known) && is_left,
        };
        let was_found = found.is_some();
        let line = found.filter(untouched);
        if was_found && line.is_none() {
            let image = image.display();
            tracing::warn!(%image, "was changed while no agent ran: its replicas cannot be used");
        }
        Self { path, file, line }
    }

    /// Whether everything that was written to the image is in its line: without that, or without a line,
    /// nobody can say what another program did to it while no agent ran.
    pub fn is_trusted(&self) -> bool {
        self.line.is_some()
    }

    /// Goes on with the line, or begins a new one, and tells what was written in the open generation so far.
    ///
    /// # Errors
    /// What the file system reports of writing.
    pub fn go_on(self) -> io::Result<(Arc<ImageLineage>, BlockSet)> {
        let Some(Recovered { lineage, changed, .. }) = self.line else {
            return Ok((ImageLineage::fresh_of(self.path, self.file)?, BlockSet::new()));
        };
        let line = ImageLineage::create_of(self.path, lineage, changed.clone(), self.file)?;
        Ok((line, changed))
    }
}

impl ImageLineage {
    /// Writes a line down, in which `changed` was written in the open generation; durable on return.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn create(path: &StatePath, lineage: Lineage, changed: BlockSet) -> io::Result<Arc<Self>> {
        Self::create_of(path, lineage, changed, None)
    }

    /// The same, of the image that is in this file.
    fn create_of(
        path: &StatePath,
        lineage: Lineage,
        changed: BlockSet,
        file: Option<FileIdentity>,
    ) -> io::Result<Arc<Self>> {
        let opened = Journal::open(path).or_else(|_| {
            // What is damaged is of no use.
            path.remove().map_err(|why| dray_image::Error::io("removing a line", why))?;
            Journal::open(path)
        });
        let (journal, _) = opened.map_err(io::Error::other)?;
        let whole = LineageRecord::Whole { lineage: lineage.clone(), changed };
        let (open, turning, suspect) = (BTreeSet::new(), false, false);
        let mut inner = Inner { journal, lineage, open, turning, suspect, file };
        inner.rewrite(&whole, &[])?;
        let (rewriting, inner) = (Mutex::default(), Mutex::new(inner));
        Ok(Arc::new(Self { path: path.clone(), rewriting, inner }))
    }

    /// A line of which nothing is known.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn fresh(path: &StatePath) -> io::Result<Arc<Self>> {
        Self::fresh_of(path, None)
    }

    /// Goes on with the line at `path` of the image that is now at `image`, as far as it can be
    /// trusted, and tells what was written in the open generation so far. Else a new one begins.
    ///
    /// # Errors
    /// What the file system reports of writing.
    pub fn go_on(path: &StatePath, image: &StatePath) -> io::Result<(Arc<Self>, BlockSet)> {
        Known::look_up(path, image, true).go_on()
    }

    fn fresh_of(path: &StatePath, file: Option<FileIdentity>) -> io::Result<Arc<Self>> {
        Self::create_of(path, Lineage::new(random_generation()?), BlockSet::new(), file)
    }

    /// Whether the line at `path` is of another file than the one that is now at `image`.
    pub fn is_of_another(path: &StatePath, image: &StatePath) -> bool {
        let known = read(path).ok().flatten();
        let known = known.and_then(|line| match line.stopped {
            Some(AtStop::File(stamp)) => Some(stamp.file),
            _ => line.file,
        });
        known.is_some_and(|known| file_at(image).is_some_and(|now| !now.is_same(&known)))
    }

    /// The line of a new owner: `past` as the source told it; goes on with what an earlier process
    /// has begun after the same past. Where an earlier process has `served` the image and its line is
    /// not there, one begins that knows of no past.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn after(
        path: &StatePath,
        past: Vec<Generation>,
        image: &StatePath,
        served: bool,
    ) -> io::Result<(Arc<Self>, BlockSet)> {
        let begun = read(path).unwrap_or_default();
        if begun.is_some_and(|begun| begun.lineage.has_past() && begun.lineage.past() == past) {
            return Self::go_on(path, image);
        }
        if served {
            // Its line ended, or never began: nobody knows what was written since.
            return Ok((Self::fresh(path)?, BlockSet::new()));
        }
        let id = random_generation()?;
        let lineage = Lineage::after(past, id).unwrap_or_else(|| Lineage::new(id));
        Ok((Self::create_of(path, lineage, BlockSet::new(), file_at(image))?, BlockSet::new()))
    }

    fn rewriting(&self) -> MutexGuard<'_, ()> {
        self.rewriting.lock()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// A copy of the line.
    pub fn lineage(&self) -> Lineage {
        self.inner().lineage.clone()
    }

    /// Remembers from now on what is written to `disk`, if anybody can have an earlier generation.
    pub fn track(self: &Arc<Self>, disk: &Disk, changed: &BlockSet) {
        if self.inner().lineage.has_past() {
            disk.start_history(Arc::clone(self) as _, changed);
        }
    }

    /// The blocks in which the image may differ from a replica of `base`; none when they cannot be
    /// told. To be asked after a migration has begun to track.
    pub fn changed_since(&self, base: GenerationId, disk: &Disk) -> Option<BlockSet> {
        let inner = self.inner();
        disk.keeps_history().then(|| inner.lineage.changed_since(base, &inner.changed(disk)))?
    }

    /// The past as the next owner shall know it; the disk is quiesced, and it is `unix_ms`.
    pub fn closed(&self, host: &str, disk: &Disk, unix_ms: u64) -> Vec<Generation> {
        let inner = self.inner();
        inner.lineage.closed(inner.changed(disk), host, unix_ms)
    }

    /// Somebody else may write to the image from now on: until [`settle`](Self::settle), or
    /// [`trust`](Self::trust), everything counts as changed.
    pub fn suspect(&self) {
        self.inner().suspect = true;
    }

    /// Nobody else has written to the image.
    pub fn trust(&self) {
        self.inner().suspect = false;
    }

    /// It is known what somebody else has written in the open generation: `changed`, or with none
    /// everything may have been. Durable on return, and no longer suspect.
    ///
    /// # Errors
    /// What the file system reports; the line stays suspect.
    pub fn settle(&self, disk: &Disk, changed: Option<&BlockSet>) -> io::Result<()> {
        let _rewriting = self.rewriting();
        let mut inner = self.inner();
        if disk.keeps_history() {
            match changed {
                Some(changed) => disk.add_history(changed),
                None => disk.add_history(&whole(disk)),
            }
            let (lineage, changed) = (inner.lineage.clone(), disk.history());
            inner.rewrite_open(&LineageRecord::Whole { lineage, changed })?;
        }
        inner.suspect = false;
        Ok(())
    }

    /// Closes the regions that are not in use.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn close_idle(&self, disk: &Disk) -> io::Result<()> {
        let _rewriting = self.rewriting();
        // Nobody opens a region before the journal holds the set.
        let mut inner = self.inner();
        let closed = disk.close_idle_history();
        if closed.is_empty() || !disk.keeps_history() {
            return Ok(());
        }
        let whole =
            LineageRecord::Whole { lineage: inner.lineage.clone(), changed: disk.history() };
        inner.open.retain(|region| !closed.contains(region));
        // If this fails nobody knows which journal is there. Either tells enough of what is written
        // so far, and the next region that is opened ends the line.
        inner.rewrite_open(&whole)
    }

    /// Everything is written down, and nothing is written any more: the agent stops. Waits for `grace` at most.
    ///
    /// # Errors
    /// What the file system reports, or that somebody else is writing the line down for longer than that; the
    /// stop then counts as an unclean one.
    pub(crate) fn stop(&self, disk: &Disk, image: &StatePath, grace: Duration) -> io::Result<()> {
        let busy = || io::Error::new(io::ErrorKind::TimedOut, "it is being recorded");
        let _rewriting = self.rewriting.try_lock_for(grace).ok_or_else(busy)?;
        let mut inner = self.inner();
        if inner.lineage.has_past() && !disk.keeps_history() {
            return Ok(());
        }
        // What is suspect is so after the stop.
        let (lineage, changed) = (inner.lineage.clone(), inner.changed(disk));
        let whole = LineageRecord::Whole { lineage, changed };
        let stopped = match at_stop(image)? {
            // Another file at the path is not what was served.
            AtStop::File(stamp) if inner.file.is_some_and(|file| !file.is_same(&stamp.file)) => {
                None
            }
            AtStop::File(stamp) => Some(LineageRecord::Stopped { stamp }),
            AtStop::Device(stamp) => Some(LineageRecord::StoppedDevice { stamp }),
        };
        inner.rewrite(&whole, stopped.as_slice())
    }
}

impl Inner {
    /// What counts as changed in the open generation.
    fn changed(&self, disk: &Disk) -> BlockSet {
        if self.suspect { whole(disk) } else { disk.history() }
    }

    /// The journal is `whole` and the regions that are open.
    fn rewrite_open(&mut self, whole: &LineageRecord) -> io::Result<()> {
        let open: Vec<_> =
            self.open.iter().map(|&region| LineageRecord::Opened { region }).collect();
        self.rewrite(whole, &open)
    }

    /// The journal is `whole`, which file it is of, and `more`.
    fn rewrite(&mut self, whole: &LineageRecord, more: &[LineageRecord]) -> io::Result<()> {
        let of = self.file.map(|file| LineageRecord::Of { file });
        let records = std::iter::once(whole).chain(&of).chain(more);
        let records = records.map(encode).collect::<io::Result<Vec<_>>>()?;
        let slices: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        self.journal.rewrite(&slices).map_err(io::Error::other)
    }
}

impl IntentLog for ImageLineage {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        let mut inner = self.inner();
        let named = inner.lineage.has_past() || inner.turning;
        if !named || inner.open.contains(&region) {
            return Ok(());
        }
        let record = encode(&LineageRecord::Opened { region })
            .map_err(|why| dray_image::Error::io("noting a write intent", why))?;
        let Err(why) = inner.journal.append(&record) else {
            inner.open.insert(region);
            return Ok(());
        };
        // The guest's write is worth more than the line. What can be neither written nor removed
        // would be believed after a restart: only then does the write fail.
        let fresh = random_generation().and_then(|id| self.path.remove().map(|()| id));
        let Ok(id) = fresh else { return Err(why) };
        tracing::warn!(line = %self.path.display(), %why, "an image's line of generations ends");
        inner.lineage = Lineage::new(id);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
