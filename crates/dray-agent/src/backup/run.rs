//! One backup from its beginning to its end, on a thread of its own.

use super::moment::{self, Moment, Subject, Taken};
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
use dray_types::{Ancestor, BLOCK_SIZE, BitRate, ImageId};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;

/// Threads that hash, compress and write: the processors belong to the guests.
const THREADS: usize = 2;

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

/// One backup under way.
pub struct BackupRun<'a> {
    /// What is being done, for errors.
    pub what: &'a str,
    /// The repository that gets the backup.
    pub repository: &'a Repository,
    /// The job that counts the progress and can be cancelled.
    pub job: &'a Job,
    /// The operator's limit, of what is read.
    pub pacer: &'a Pacer,
}

/// An image's backup that has begun: what it builds on, and who writes it.
struct Begun {
    parent: Option<Manifest>,
    full_because: Option<String>,
    writer: Writer,
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
            if let Some(closed) = self.registry.closed(name) {
                return refuse(format!("it is closed: {}", closed.reason.why), &closed.reason.hint);
            }
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
        let run =
            BackupRun { what: &what, repository: &repository, job: &lease.job, pacer: &pacer };
        let entries: Vec<_> = found.iter().map(|(entry, _)| Arc::clone(entry)).collect();
        // First: without them the rest is of no use.
        let (mut images, bases) = self.back_up_bases(&run, &entries)?;
        let begun = found.iter().map(|(entry, line)| run.begin(entry, line, order.full));
        let begun = begun.collect::<ApiResult<Vec<_>>>()?;
        let subjects = found.into_iter().zip(&begun);
        let subjects = subjects
            .map(|((entry, line), begun)| self.subject(&what, entry, line, begun.parent.as_ref()));
        let subjects = subjects.collect::<ApiResult<Vec<_>>>()?;
        abort::step("Backup-Moment");
        let guests = (&self.frozen, order.fsfreeze.as_deref());
        let moment = moment::take(&what, &subjects, &self.config.name, guests)?;
        let (taken_unix_ms, quiet) = (moment.unix_ms, moment.quiet);
        let consistency = shown(moment.consistency);
        // What was here then is what the guest had only if its disk was here until then.
        ask_vms()?;
        self.check_bases(&what, &entries, &bases)?;
        abort::step("Backup-Committed");
        images.extend(self.write_images(&run, &order.destination, (&subjects, begun), moment)?);
        let pruned = order.keep_last.map_or(Ok(0), |last| run.prune(&subjects, last))?;
        let made_of = order.images.join(", ");
        tracing::info!(to = order.destination.shown, images = %made_of, "made a backup");
        Ok(BackupDone {
            to: order.destination.shown.clone(),
            taken_unix_ms,
            quiet_ms: quiet.as_secs_f64() * 1e3,
            seconds: began.elapsed().as_secs_f64(),
            consistency,
            images,
            pruned,
        })
    }

    /// Writes what the images held at the moment, one after the other, and notes where that is.
    fn write_images(
        &self,
        run: &BackupRun<'_>,
        to: &Destination,
        (subjects, begun): (&[Subject], Vec<Begun>),
        moment: Moment,
    ) -> ApiResult<Vec<BackedUp>> {
        let (unix_ms, consistency) = (moment.unix_ms, moment.consistency);
        let mut done = Vec::new();
        let parts = subjects.iter().zip(begun).zip(moment.images);
        for (nth, ((subject, begun), taken)) in parts.enumerate() {
            let begun = run.trusted(begun, &taken, &subject.entry)?;
            let info = self.info(subject, &taken, begun.parent.as_ref(), (unix_ms, consistency));
            let one = One { run, registry: &self.registry, subject, nth };
            done.push(one.finish(begun, &taken, info)?);
            self.note_backup(&subject.entry.record().name, &taken, to);
        }
        Ok(done)
    }

    fn subject(
        &self,
        what: &str,
        entry: Arc<Entry>,
        line: Arc<ImageLineage>,
        parent: Option<&Manifest>,
    ) -> ApiResult<Subject> {
        let record = entry.record();
        let folder = if record.device { None } else { record.path.parent() };
        let parent = parent.map(|parent| parent.info().generation);
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
        parent: Option<&Manifest>,
        (taken_unix_ms, consistency): (u64, Consistency),
    ) -> Info {
        let record = subject.entry.record();
        Info {
            image: record.id,
            name: record.name,
            bytes: record.len,
            generation: taken.generation,
            parent: parent.map(|parent| parent.info().generation),
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

impl BackupRun<'_> {
    /// Begins the backup of an image. It builds on the parent, unless there is none or everything is wanted.
    fn begin(&self, entry: &Entry, line: &ImageLineage, full: bool) -> ApiResult<Begun> {
        let (parent, full_because) = match self.parent_of(entry, line, full)? {
            Ok(parent) => (Some(parent), None),
            Err(why) => (None, Some(why)),
        };
        let record = entry.record();
        let writer = self.writer(record.id, record.len, parent.as_ref())?;
        Ok(Begun { parent, full_because, writer })
    }

    /// What a backup of an image builds on, or why on nothing.
    fn parent_of(
        &self,
        entry: &Entry,
        line: &ImageLineage,
        full: bool,
    ) -> ApiResult<Result<Manifest, String>> {
        let record = entry.record();
        let whole = |why: &str| Ok(Err(why.to_owned()));
        if full {
            return whole("the operator asked for a full backup");
        }
        let known = self.repository.backups(record.id).map_err(|why| failed(self.what, &why))?;
        if known.backups.is_empty() {
            return whole("the repository had no backup of it");
        }
        let Some(parent) = parent(&known.backups, &line.ancestors(), record.len) else {
            return whole(
                "the image's line contains the generation of no backup in the repository",
            );
        };
        let manifest = self.repository.manifest(parent);
        Ok(manifest.map_err(|why| format!("the previous backup cannot be read: {why}")))
    }

    /// The same backup after the moment, or one that builds on nothing: where the line has ended since it began, what
    /// the parent holds is not what it seems.
    fn trusted(&self, begun: Begun, taken: &Taken, entry: &Entry) -> ApiResult<Begun> {
        if begun.parent.is_none() || taken.incremental {
            return Ok(begun);
        }
        let record = entry.record();
        let full_because = Some("the image's line of generations has ended".to_owned());
        let writer = self.writer(record.id, record.len, None)?;
        Ok(Begun { parent: None, full_because, writer })
    }

    /// Who writes the backup of an image of `len` bytes.
    ///
    /// # Errors
    /// What the repository reports.
    pub fn writer(&self, id: ImageId, len: u64, parent: Option<&Manifest>) -> ApiResult<Writer> {
        let options = WriterOptions { threads: THREADS, ..WriterOptions::default() };
        let writer = self.repository.writer(id, len, parent, options);
        writer.map_err(|why| failed(self.what, &why))
    }

    /// Removes all but the newest backups of these images; how many went.
    fn prune(&self, subjects: &[Subject], last: u32) -> ApiResult<u64> {
        let policy = Policy { last: last as usize, ..Policy::default() };
        let mut removed = 0;
        for subject in subjects {
            let pruned = self.repository.prune(Some(subject.entry.record().id), policy, false);
            removed += pruned.map_err(|why| failed(self.what, &why))?.removed.len() as u64;
        }
        Ok(removed)
    }
}

/// One image after the moment.
struct One<'a> {
    run: &'a BackupRun<'a>,
    registry: &'a Registry,
    subject: &'a Subject,
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
                Err(Refusal::new(ErrorKind::Conflict, self.run.what, why)
                    .hint("back it up again when its vm runs on dray"))
            }
        }
    }

    fn finish(&self, begun: Begun, taken: &Taken, info: Info) -> ApiResult<BackedUp> {
        let BackupRun { what, job, pacer, .. } = *self.run;
        let (nth, mut writer) = (self.nth, begun.writer);
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
            parent: begun.parent.map(|parent| parent.info().generation.into()),
            full_because: begun.full_because,
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
