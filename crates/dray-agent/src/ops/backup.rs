//! `dray backup`, `backups`, `verify`, `restore`.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use crate::backup::restore::{Restoring, choose, is_of};
use crate::backup::run::{Order, shown};
use crate::backup::schedule;
use crate::jobs::{Job, Jobs, Lease};
use dray_api::{
    ApiResult, Backup, BackupCancel, BackupCollected, BackupDone, BackupGc, BackupInit,
    BackupListing, BackupProgress, BackupPrune, BackupPruned, BackupStatus, BackupVerified,
    BackupVerify, Backups, DestinationStatus, ErrorKind, Event, Refusal, Repository,
    RepositoryMade, Restore, Restored,
};
use dray_backup::{Content, GcOptions, Level, PIECE_BYTES, Policy, Problem, Reader, StreamOptions};
use dray_host::refusals::{not_taken, path_error};
use dray_net::pace::Pacer;
use dray_provider::destination::Destination;
use dray_provider::destination::failed;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A client hears at least this often how far it is.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Faults that an answer lists at most.
const MAX_LISTED: usize = 1000;

/// Ends the job when whoever asked for it has gone.
struct EndWithClient(Arc<Job>);

impl Drop for EndWithClient {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Runs `work` on a thread and tells how far `job` is.
async fn follow<T: Send + 'static>(
    job: Arc<Job>,
    events: &Events,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let ends = EndWithClient(Arc::clone(&job));
    let mut work = tokio::task::spawn_blocking(work);
    loop {
        tokio::select! {
            done = &mut work => {
                let _ = events.send(Event::Backup(job.progress())).await;
                return done.map_err(|why| {
                    Refusal::new(ErrorKind::Internal, "the operation ended unexpectedly", why)
                })?;
            }
            () = tokio::time::sleep(HEARTBEAT) => {
                if events.send(Event::Backup(job.progress())).await.is_err() {
                    ends.0.cancel();
                }
            }
        }
    }
}

/// Runs short work on a thread.
async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|why| Refusal::new(ErrorKind::Internal, "the operation ended unexpectedly", why))?
}

impl Answers<Backup> for Arc<Agent> {
    async fn answer(&self, command: Backup, events: Events) -> ApiResult<BackupDone> {
        let key_file = command.key_file.as_deref();
        let destination = Destination::chosen(&self.config, command.to.as_deref(), key_file)?;
        let what = format!("cannot back up to '{}'", destination.shown);
        let fsfreeze = command.fsfreeze.as_deref().map(|socket| self.config.qmp_socket(socket));
        let fsfreeze = fsfreeze.transpose().map_err(|why| path_error(what, why))?;
        let lease = self.begin_backup(&command.images, &destination.shown)?;
        let Backup { images, bandwidth, full, keep_last, .. } = command;
        let order = Order { images, destination, fsfreeze, bandwidth, full, keep_last };
        let (agent, job) = (Arc::clone(self), Arc::clone(&lease.job));
        follow(job, &events, move || agent.back_up(&order, &lease)).await
    }
}

impl Answers<BackupCancel> for Arc<Agent> {
    async fn answer(&self, command: BackupCancel, _: Events) -> ApiResult<BackupProgress> {
        let job = self.backups.of(&command.image).ok_or_else(|| {
            let what = format!("cannot cancel the backup of '{}'", command.image);
            Refusal::new(ErrorKind::NotFound, what, "no backup of it is running")
        })?;
        job.cancel();
        Ok(job.progress())
    }
}

impl Answers<BackupInit> for Arc<Agent> {
    async fn answer(
        &self,
        BackupInit(command): BackupInit,
        _: Events,
    ) -> ApiResult<RepositoryMade> {
        let destination = self.repository(&command)?;
        let at = destination.shown.clone();
        let encrypted = apart(move || destination.create()).await?;
        Ok(RepositoryMade { at, encrypted })
    }
}

impl Answers<Backups> for Arc<Agent> {
    async fn answer(&self, command: Backups, _: Events) -> ApiResult<BackupListing> {
        let Some(at) = command.repository else { return Ok(self.destinations()) };
        let destination = self.repository(&at)?;
        let image = command.image;
        apart(move || {
            let what = format!("cannot list the backups in '{}'", destination.shown);
            let listing = destination.open()?.all().map_err(|why| failed(what, &why))?;
            let wanted = |b: &dray_backup::Backup| image.as_ref().is_none_or(|i| is_of(b, i));
            let backups = listing.backups.iter().filter(|b| wanted(b)).map(status).collect();
            let damaged = listing.damaged.iter().map(|(at, why)| format!("{at}: {why}")).collect();
            Ok(BackupListing { backups, damaged, ..BackupListing::default() })
        })
        .await
    }
}

impl Answers<BackupVerify> for Arc<Agent> {
    async fn answer(&self, command: BackupVerify, events: Events) -> ApiResult<BackupVerified> {
        let destination = self.repository(&command.repository)?;
        let name = command.image.clone().unwrap_or_else(|| destination.shown.clone());
        let lease = watched(&name, &destination.shown)?;
        let job = Arc::clone(&lease.job);
        follow(Arc::clone(&job), &events, move || {
            let _lease = lease;
            verify(&destination, command.image.as_deref(), command.read_data, &job)
        })
        .await
    }
}

impl Answers<Restore> for Arc<Agent> {
    async fn answer(&self, command: Restore, events: Events) -> ApiResult<Restored> {
        let destination = self.repository(&command.repository)?;
        let lease = watched(&command.name, &destination.shown)?;
        let (agent, job) = (Arc::clone(self), Arc::clone(&lease.job));
        follow(Arc::clone(&job), &events, move || {
            let _lease = lease;
            agent.restore_from(&destination, &command, &job)
        })
        .await
    }
}

impl Agent {
    /// The repository that a command names, or the only one.
    fn repository(&self, named: &Repository) -> ApiResult<Destination> {
        Destination::chosen(&self.config, named.at.as_deref(), named.key_file.as_deref())
    }

    /// Refuses what would disturb a backup of the image.
    pub(crate) fn refuse_during_backup(&self, what: &str, image: &str) -> ApiResult<()> {
        let Some(job) = self.backups.of(image) else { return Ok(()) };
        let why = format!("image '{image}' is being backed up to '{}'", job.to);
        Err(Refusal::new(ErrorKind::Conflict, what, why)
            .hint(format!("wait, or give `dray backups cancel {image}`")))
    }

    /// The images are being backed up from here on.
    pub(crate) fn begin_backup(&self, images: &[String], to: &str) -> ApiResult<Lease> {
        let what = format!("cannot back up to '{to}'");
        if images.is_empty() {
            return Err(Refusal::new(ErrorKind::Invalid, what, "no image is named"));
        }
        let mut names = images.to_vec();
        names.sort_unstable();
        names.dedup();
        if names.len() < images.len() {
            return Err(Refusal::new(ErrorKind::Invalid, what, "an image is named twice"));
        }
        let lease = self.backups.begin(images, to)?;
        // A command takes the image before it looks for a backup, and this the other way round: one of
        // the two sees the other.
        for image in images {
            if let Some(command) = self.registry.operation(image) {
                let why = format!("image '{image}' is busy: a `dray {command}` is running");
                return Err(Refusal::new(ErrorKind::Conflict, what, why)
                    .hint("try again when that has ended"));
            }
            if let Some(entry) = self.registry.get(image) {
                let free = self.registry.check_answered_for(&entry);
                free.map_err(|why| not_taken(what.clone(), why))?;
            }
        }
        Ok(lease)
    }

    fn destinations(self: &Arc<Self>) -> BackupListing {
        let kept = schedule::kept(self);
        let known = self.config.backups.iter().map(|place| {
            let kept = kept.get(&place.name).cloned().unwrap_or_default();
            DestinationStatus {
                name: place.name.clone(),
                url: place.url.clone(),
                images: place.images.clone(),
                every_seconds: place.every.map(|every| every.as_secs()),
                last_unix_ms: kept.last_unix_ms,
                error: kept.error,
            }
        });
        let destinations = known.collect();
        BackupListing { destinations, running: self.backups.all(), ..BackupListing::default() }
    }

    fn restore_from(
        &self,
        destination: &Destination,
        command: &Restore,
        job: &Job,
    ) -> ApiResult<Restored> {
        let began = Instant::now();
        let what = &format!("cannot restore '{}' from '{}'", command.image, destination.shown);
        let repository = destination.open()?;
        let listing = repository.all().map_err(|why| failed(what, &why))?;
        let generation = command.generation.as_deref();
        let backup =
            choose(what, (&destination.shown, listing.backups), &command.image, generation)?;
        let manifest = &repository.manifest(&backup).map_err(|why| failed(what, &why))?;
        let pacer = &*Pacer::new(command.bandwidth);
        let (name, pool) = (command.name.as_str(), command.pool.as_deref());
        let restoring = Restoring { what, manifest, name, pool, pacer, job };
        let (path, written_bytes) = self.restore_image(&repository, &restoring)?;
        Ok(Restored {
            image: command.name.clone(),
            path,
            generation: backup.info.generation.into(),
            of: backup.info.name,
            size: backup.info.bytes,
            written_bytes,
            seconds: began.elapsed().as_secs_f64(),
        })
    }
}

/// A job of its own, which holds no image of this host.
fn watched(name: &str, to: &str) -> ApiResult<Lease> {
    Arc::new(Jobs::default()).begin(&[name.to_owned()], to)
}

fn status(backup: &dray_backup::Backup) -> BackupStatus {
    let info = &backup.info;
    BackupStatus {
        image: info.name.clone(),
        id: info.image,
        generation: info.generation.into(),
        host: info.host.clone(),
        taken_unix_ms: info.taken_unix_ms,
        consistency: shown(info.consistency),
        size: info.bytes,
        added_bytes: backup.added_bytes,
    }
}

/// Looks through backups; faults are in the answer, and not errors.
fn verify(
    destination: &Destination,
    image: Option<&str>,
    read_data: bool,
    job: &Job,
) -> ApiResult<BackupVerified> {
    let what = &format!("cannot verify the backups in '{}'", destination.shown);
    let repository = destination.open()?;
    let mut found = BackupVerified::default();
    if let Some(image) = image.filter(|_| read_data) {
        read_all(what, &repository, image, job, &mut found)?;
    } else {
        let level = if read_data { Level::Everything } else { Level::Manifests };
        let report = repository.verify(level).map_err(|why| failed(what, &why))?;
        found.bytes_read = report.bytes_read;
        found.backups = match image {
            None => report.backups,
            Some(image) => {
                let all = repository.all().map_err(|why| failed(what, &why))?.backups;
                all.iter().filter(|backup| is_of(backup, image)).count() as u64
            }
        };
        let of = |problem: &&Problem| match (&problem.backup, image) {
            (Some(backup), Some(image)) => is_of(backup, image),
            _ => true,
        };
        found.damaged = report.problems.iter().filter(of).map(told).collect();
    }
    found.damaged.truncate(MAX_LISTED);
    Ok(found)
}

fn of(backup: &dray_backup::Backup) -> String {
    format!("{} generation {}", backup.info.name, backup.info.generation.number)
}

fn told(problem: &Problem) -> String {
    let pieces = match problem.pieces {
        0 => String::new(),
        pieces => format!(", {pieces} pieces of 64 KiB"),
    };
    match &problem.backup {
        Some(backup) => format!("{}{pieces}: {}", of(backup), problem.error),
        None => problem.error.to_string(),
    }
}

/// Reads all content of one image's backups.
fn read_all(
    what: &str,
    repository: &dray_backup::Repository,
    image: &str,
    job: &Job,
    found: &mut BackupVerified,
) -> ApiResult<()> {
    let listing = repository.all().map_err(|why| failed(what, &why))?;
    found.damaged.extend(listing.damaged.iter().map(|(at, why)| format!("{at}: {why}")));
    let backups: Vec<_> = listing.backups.iter().filter(|backup| is_of(backup, image)).collect();
    let total = backups.iter().map(|backup| backup.info.bytes).sum();
    job.change(0, |shown| shown.bytes_total = total);
    for backup in backups {
        found.backups += 1;
        match repository.manifest(backup) {
            Ok(manifest) => read_one(&of(backup), &repository.reader(&manifest), job, found),
            Err(why) => found.damaged.push(format!("{}: {why}", of(backup))),
        }
        if job.is_cancelled() {
            return Err(Refusal::new(ErrorKind::Cancelled, what, "the operator cancelled it"));
        }
    }
    Ok(())
}

fn read_one(of: &str, reader: &Reader, job: &Job, found: &mut BackupVerified) {
    reader.stream(
        std::iter::once(0..reader.piece_count()),
        StreamOptions::default(),
        |_, content| {
            match content {
                Ok(Content::Data(data)) => found.bytes_read += data.len() as u64,
                Ok(Content::Zero) => {}
                Err(why) => found.damaged.push(format!("{of}: {why}")),
            }
            job.change(0, |shown| shown.bytes_done += PIECE_BYTES as u64);
            if job.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    );
}

impl Answers<BackupPrune> for Arc<Agent> {
    async fn answer(&self, command: BackupPrune, _: Events) -> ApiResult<BackupPruned> {
        let destination = self.repository(&command.repository)?;
        apart(move || prune(&destination, &command)).await
    }
}

impl Answers<BackupGc> for Arc<Agent> {
    async fn answer(&self, BackupGc(command): BackupGc, _: Events) -> ApiResult<BackupCollected> {
        let destination = self.repository(&command)?;
        apart(move || {
            let what = format!("cannot remove unneeded content from '{}'", destination.shown);
            let repository = destination.open()?;
            let done = repository.gc(GcOptions { threads: 2, ..GcOptions::default() });
            let done = done.map_err(|why| failed(what, &why))?;
            Ok(BackupCollected {
                removed_bytes: done.removed_bytes,
                condemned_bytes: done.condemned_bytes,
                revised_backups: done.revised_backups,
                fenced_writers: done.fenced_sessions,
                waiting: done.waiting_rounds,
            })
        })
        .await
    }
}

fn prune(destination: &Destination, command: &BackupPrune) -> ApiResult<BackupPruned> {
    let what = &format!("cannot remove backups from '{}'", destination.shown);
    let repository = destination.open()?;
    let image = match &command.image {
        None => None,
        Some(image) => {
            let all = repository.all().map_err(|why| failed(what, &why))?.backups;
            Some(choose(what, (&destination.shown, all), image, None)?.info.image)
        }
    };
    let policy = Policy {
        last: command.keep_last as usize,
        within_days: command.keep_within_days.into(),
        daily: command.keep_daily as usize,
        weekly: command.keep_weekly as usize,
        monthly: command.keep_monthly as usize,
    };
    let pruned = repository.prune(image, policy, command.dry_run);
    let pruned = pruned.map_err(|why| failed(what, &why))?;
    Ok(BackupPruned {
        dry_run: command.dry_run,
        kept: pruned.kept.len() as u64,
        removed: pruned.removed.iter().map(status).collect(),
    })
}
