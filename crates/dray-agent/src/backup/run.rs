//! One backup from its beginning to its end, on a thread of its own.

use super::bases::Bases;
use super::moment::{self, Subject, Taken};
use super::write::ImageWriter;
use crate::agent::Agent;
use crate::jobs::{Job, Lease};
use dray_api::{ApiResult, BackedUp, BackupDone, ErrorKind, Refusal};
use dray_backup::{Backup, Consistency, Info, Manifest, Policy, Repository, Writer, WriterOptions};
use dray_host::abort;
use dray_host::lineage::ImageLineage;
use dray_host::record::{CopyState, NameKind};
use dray_host::registry::{Entry, Registry};
use dray_net::pace::Pacer;
use dray_provider::destination::Destination;
use dray_provider::destination::failed;
use dray_provider::notes::{self, Note};
use dray_types::{Ancestor, BLOCK_SIZE, BitRate};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;

/// Threads that hash, compress and write: the processors belong to the guests.
pub(super) const THREADS: usize = 2;

/// What was asked for.
#[derive(Debug, Clone)]
pub struct Order {
    /// Names of the images.
    pub images: Vec<String>,
    /// The repository that gets the backup.
    pub destination: Destination,
    /// Socket of the guest agent.
    pub fsfreeze: Option<PathBuf>,
    /// Limit of what is read.
    pub bandwidth: Option<BitRate>,
    /// Build on nothing.
    pub full: bool,
    /// Earlier backups of each image that stay, this one counted.
    pub keep_last: Option<u32>,
}

/// What an image's backup builds on.
struct Ground {
    parent: Option<Manifest>,
    full_because: Option<String>,
}

/// The parent of a new backup among those that there are, oldest first: the newest one of a
/// generation that the image's line still knows.
fn parent<'a>(backups: &'a [Backup], ancestors: &[Ancestor], len: u64) -> Option<&'a Backup> {
    let fits =
        |backup: &&Backup| backup.info.bytes == len && ancestors.contains(&backup.info.generation);
    backups.iter().filter(fits).max_by_key(|backup| backup.info.generation.number)
}

impl Agent {
    /// The image and its line, if it can be backed up.
    fn backup_entry(&self, what: &str, name: &str) -> ApiResult<(Arc<Entry>, Arc<ImageLineage>)> {
        let refuse = |why: String, hint: &str| {
            let why = format!("image '{name}': {why}");
            Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
        };
        let Some(entry) = self.registry.get(name) else {
            let why = format!("no image '{name}' is on this host");
            return Err(
                Refusal::new(ErrorKind::NotFound, what, why).hint("`dray images` lists the images")
            );
        };
        let record = entry.record();
        if let Some(migration) = record.migration {
            let hint = "back it up when the migration has ended";
            return refuse(format!("it takes part in migration {migration}"), hint);
        }
        if record.flat.is_some() {
            let hint = "`dray release` its disk first";
            return refuse("it is a chain that was flattened for a migration".into(), hint);
        }
        if record.state != CopyState::Owner || record.place != NameKind::Named {
            return refuse(
                "this host does not own it".into(),
                "back it up on the host that owns it",
            );
        }
        let missing = entry.disk.missing_count();
        if missing > 0 {
            let hint = "wait until Backfill has ended";
            return refuse(format!("{missing} of its blocks are still at the source"), hint);
        }
        if record.read_only {
            return refuse("it is read-only and never changes".into(), "copy its file");
        }
        match entry.line() {
            Some(line) => Ok((entry, line)),
            None => refuse(
                "the agent cannot record its line of generations".into(),
                "see the agent's log",
            ),
        }
    }

    /// Makes a backup; the images are the lease's. On a thread that may block, of a runtime.
    ///
    /// # Errors
    /// Whatever keeps it from being made. There is no backup then of the images that were not done,
    /// and no guest has noticed anything.
    pub fn back_up(&self, order: &Order, lease: &Lease) -> ApiResult<BackupDone> {
        let began = Instant::now();
        let what = format!("cannot back up to '{}'", order.destination.shown);
        let ask_vms = || Handle::current().block_on(self.ask_vms_of(&what, &order.images));
        ask_vms()?;
        let found = order.images.iter().map(|name| self.backup_entry(&what, name));
        let found = found.collect::<ApiResult<Vec<_>>>()?;
        let repository = order.destination.open()?;
        let pacer = Pacer::new(order.bandwidth);
        let entries: Vec<_> = found.iter().map(|(entry, _)| Arc::clone(entry)).collect();
        let below = Bases { what: &what, repository: &repository, job: &lease.job, pacer: &pacer };
        // First: without them the rest is of no use.
        let mut done = self.back_up_bases(&below, &entries)?;
        let mut grounds = Vec::new();
        let mut writers = Vec::new();
        for (entry, line) in &found {
            let ground = ground(&what, &repository, entry, line, order.full)?;
            writers.push(begin(&what, &repository, entry, ground.parent.as_ref())?);
            grounds.push(ground);
        }
        let subjects: Vec<Subject> = found
            .into_iter()
            .zip(&grounds)
            .map(|((entry, line), ground)| self.subject(&what, entry, line, ground))
            .collect::<ApiResult<_>>()?;
        abort::step("Backup-Moment");
        let host = &self.config.name;
        let moment =
            moment::take(&what, &subjects, host, (&self.frozen, order.fsfreeze.as_deref()))?;
        // What was here then is what the guest had only if its disk was here until then.
        ask_vms()?;
        let frozen = order.fsfreeze.is_some();
        let consistency = if frozen { Consistency::Filesystem } else { Consistency::Crash };
        abort::step("Backup-Committed");
        let parts = subjects.iter().zip(grounds).zip(writers).zip(moment.images);
        for (nth, (((subject, mut ground), mut writer), taken)) in parts.enumerate() {
            if ground.parent.is_some() && !taken.incremental {
                // The line has ended since: what the parent holds is not what it seems.
                ground.parent = None;
                ground.full_because = Some("the image's line of generations has ended".into());
                writer = begin(&what, &repository, &subject.entry, None)?;
            }
            let registry = &*self.registry;
            let one = One { what: &what, registry, subject, job: &lease.job, pacer: &pacer, nth };
            let info = self.info(subject, &taken, &ground, moment.unix_ms, consistency);
            done.push(one.finish(writer, &taken, ground, info)?);
            self.note_backup(&subject.entry.record().name, &taken, &order.destination);
        }
        let pruned = match order.keep_last {
            Some(last) => prune(&what, &repository, &subjects, last)?,
            None => 0,
        };
        tracing::info!(to = order.destination.shown, images = ?order.images, "made a backup");
        Ok(BackupDone {
            to: order.destination.shown.clone(),
            taken_unix_ms: moment.unix_ms,
            quiet_ms: moment.quiet.as_secs_f64() * 1e3,
            seconds: began.elapsed().as_secs_f64(),
            consistency: shown(consistency),
            images: done,
            pruned,
        })
    }

    fn subject(
        &self,
        what: &str,
        entry: Arc<Entry>,
        line: Arc<ImageLineage>,
        ground: &Ground,
    ) -> ApiResult<Subject> {
        let record = entry.record();
        let folder = if record.device { None } else { record.path.parent() };
        let parent = ground.parent.as_ref().map(|parent| parent.info().generation);
        // A device's folder has no room.
        let spill = folder.map_or_else(|| self.config.state_dir.clone(), PathBuf::from);
        if !spill.is_dir() {
            let why = format!("{} is no folder", spill.display());
            return Err(Refusal::new(ErrorKind::Io, what, why));
        }
        let held = notes::newest(&self.store.backups(), &entry.record().name);
        Ok(Subject { entry, line, parent, held, spill })
    }

    fn info(
        &self,
        subject: &Subject,
        taken: &Taken,
        ground: &Ground,
        taken_unix_ms: u64,
        consistency: Consistency,
    ) -> Info {
        let record = subject.entry.record();
        Info {
            image: record.id,
            name: record.name,
            bytes: record.len,
            generation: taken.generation,
            parent: ground.parent.as_ref().map(|parent| parent.info().generation),
            ancestors: taken.ancestors.clone(),
            taken_unix_ms,
            host: self.config.name.clone(),
            consistency,
        }
    }

    fn note_backup(&self, image: &str, taken: &Taken, to: &Destination) {
        let note = Note { generation: taken.generation.id, to: to.shown.clone() };
        if let Err(why) = notes::add(&self.store.backups(), image, note) {
            tracing::warn!(image, %why, "cannot note in which repository a generation is");
        }
    }
}

/// Removes all but the newest backups of these images; how many went.
fn prune(what: &str, repository: &Repository, subjects: &[Subject], last: u32) -> ApiResult<u64> {
    let policy = Policy { last: last as usize, ..Policy::default() };
    let mut removed = 0;
    for subject in subjects {
        let pruned = repository.prune(Some(subject.entry.record().id), policy, false);
        removed += pruned.map_err(|why| failed(what, &why))?.removed.len() as u64;
    }
    Ok(removed)
}

fn ground(
    what: &str,
    repository: &Repository,
    entry: &Entry,
    line: &ImageLineage,
    full: bool,
) -> ApiResult<Ground> {
    let record = entry.record();
    let whole = |why: &str| Ok(Ground { parent: None, full_because: Some(why.to_owned()) });
    if full {
        return whole("the operator asked for a full backup");
    }
    let known = repository.backups(record.id).map_err(|why| failed(what, &why))?.backups;
    if known.is_empty() {
        return whole("the repository had no backup of it");
    }
    let Some(parent) = parent(&known, &line.ancestors(), record.len) else {
        return whole("the image's line contains the generation of no backup in the repository");
    };
    match repository.manifest(parent) {
        Ok(manifest) => Ok(Ground { parent: Some(manifest), full_because: None }),
        Err(why) => whole(&format!("the previous backup cannot be read: {why}")),
    }
}

fn begin(
    what: &str,
    repository: &Repository,
    entry: &Entry,
    parent: Option<&Manifest>,
) -> ApiResult<Writer> {
    let record = entry.record();
    let options = WriterOptions { threads: THREADS, ..WriterOptions::default() };
    let writer = repository.writer(record.id, record.len, parent, options);
    writer.map_err(|why| failed(what, &why))
}

/// One image after the moment.
struct One<'a> {
    what: &'a str,
    registry: &'a Registry,
    subject: &'a Subject,
    job: &'a Job,
    pacer: &'a Pacer,
    nth: usize,
}

impl One<'_> {
    /// Refuses a disk that was on its file while it was read: its VM has ended, or has moved the disk away, and nobody
    /// knows what was written to the file since.
    fn refuse_given_back(&self) -> ApiResult<()> {
        let name = self.subject.entry.record().name;
        match self.registry.get(&name) {
            Some(entry) if Arc::ptr_eq(&entry, &self.subject.entry) => Ok(()),
            _ => {
                let why = format!("the disk of image '{name}' has left dray while it was read");
                Err(Refusal::new(ErrorKind::Conflict, self.what, why)
                    .hint("back it up again when its vm runs on dray"))
            }
        }
    }

    fn finish(
        &self,
        mut writer: Writer,
        taken: &Taken,
        ground: Ground,
        info: Info,
    ) -> ApiResult<BackedUp> {
        let Self { what, job, pacer, nth, .. } = *self;
        let len = info.bytes;
        let image = info.name.clone();
        ImageWriter { what, len, writer: &mut writer, pacer, job, nth }.run(&taken.snapshot)?;
        // The last chance: everything that was read is of the moment.
        taken.snapshot.check().map_err(|why| moment::disk_error(what, &why))?;
        self.refuse_given_back()?;
        let kept_aside_bytes = taken.snapshot.kept_bytes();
        abort::step("Backup-Finish");
        let backup = writer.finish(info).map_err(|why| failed(what, &why))?;
        abort::step("Backup-Finished");
        job.change(nth, |shown| shown.stored_bytes = backup.added_bytes);
        tracing::debug!(image = self.subject.entry.record().name, "its backup is complete");
        Ok(BackedUp {
            image,
            generation: taken.generation.into(),
            parent: ground.parent.map(|parent| parent.info().generation.into()),
            full_because: ground.full_because,
            size: len,
            changed_bytes: (taken.changed_blocks * BLOCK_SIZE).min(len),
            stored_bytes: backup.added_bytes,
            kept_aside_bytes,
        })
    }
}

/// What a guest would find, in the API's words.
pub fn shown(consistency: Consistency) -> dray_api::Consistency {
    match consistency {
        Consistency::Crash => dray_api::Consistency::Crash,
        Consistency::Filesystem => dray_api::Consistency::Filesystem,
    }
}
