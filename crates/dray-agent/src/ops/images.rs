//! `dray images`: what this host serves.

use super::released::qemu_has_it;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, ClosedExport, ErrorKind, ImageState, ImageStatus, Images, KeptFor, LostWrites,
    NotLocked, Refusal,
};
use dray_files::folders::Exchangeable;
use dray_host::record::{CopyState, ImageRecord};
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::{Closed, Entry, Operation, Process, Reason, is_device};
use dray_image::names::{SetAside, set_aside};
use dray_image::{DeviceState, Image, WriteBackError, locks};
use dray_types::{Ancestor, ImageId};
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

/// What to do about a file that somebody else has locked.
pub(super) const LOCKED: &str = "stop the program that uses it, or adopt the running vm instead";

impl Answers<Images> for Arc<Agent> {
    async fn answer(&self, _: Images, _: Events) -> ApiResult<Vec<ImageStatus>> {
        Ok(block_in_place(|| self.list_images()))
    }
}

impl Agent {
    pub(super) fn image_status(&self, entry: &Entry) -> ImageStatus {
        let record = entry.record();
        let closed = self.registry.closed(&record.name).map(shown_reason);
        ImageStatus {
            path: record.current_path().unwrap_or_else(|_| record.path.clone()),
            size: record.len,
            allocated: entry.file.allocated_bytes().unwrap_or(0),
            state: shown_state(record.state),
            epoch: record.epoch,
            missing_blocks: entry.disk.missing_count(),
            clients: self.attachments.count(&record.name) as u32,
            growable: record.growable,
            read_only: record.read_only,
            in_place: record.in_place.is_some(),
            migration: record.migration,
            kept_for: self.kept_for(&record),
            generation: generation_of(entry, &record).map(Into::into),
            since_unix_ms: record.replica.as_ref().map(|note| note.since_unix_ms),
            tracked_by: None,
            not_locked: closed.is_none().then(|| self.not_locked(entry)).flatten(),
            closed,
            write_back_error: entry.disk.write_back_error().map(shown_loss),
            name: record.name,
            id: record.id,
        }
    }

    /// Who has the file of an image that is served here without its locks.
    fn not_locked(&self, entry: &Entry) -> Option<NotLocked> {
        let user = entry.used_elsewhere().ok()?;
        let user = user.filter(|_| entry.record().state == CopyState::Owner)?;
        let hint = self.registry.objection(entry)?.hint;
        Some(NotLocked { why: format!("another program has the file: {user}"), hint })
    }

    /// A closed image that is not open here, as far as its record tells of it.
    pub(super) fn absent_status(&self, name: String, closed: Closed) -> ImageStatus {
        let record = closed.absent.as_ref().map(|absent| absent.record.clone());
        let known = record.is_some();
        let record = record.unwrap_or_else(|| {
            ImageRecord::owned(name, ImageId(0), self.store.images().path().to_owned(), 0)
        });
        ImageStatus {
            path: record.current_path().unwrap_or_else(|_| record.path.clone()),
            size: record.len,
            allocated: 0,
            state: if known { shown_state(record.state) } else { ImageState::Unknown },
            epoch: record.epoch,
            missing_blocks: 0,
            clients: self.attachments.count(&record.name) as u32,
            growable: record.growable,
            read_only: record.read_only,
            in_place: record.in_place.is_some(),
            migration: record.migration,
            kept_for: None,
            not_locked: None,
            write_back_error: None,
            generation: None,
            since_unix_ms: None,
            tracked_by: None,
            closed: Some(shown_reason(closed)),
            name: record.name,
            id: record.id,
        }
    }

    /// Who still reads from a replica.
    fn kept_for(&self, record: &ImageRecord) -> Option<KeptFor> {
        let migration = record.migration.filter(|_| record.state == CopyState::Replica)?;
        let shown = self.sources.get(migration)?.board.read();
        let rows = &shown.progress.images;
        let missing = rows.iter().find(|row| row.image == record.name)?.amounts.bytes_missing;
        Some(KeptFor { host: shown.peer, bytes: Some(missing).filter(|&bytes| bytes > 0) })
    }

    /// The image of this name.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn image(&self, name: &str) -> ApiResult<Arc<Entry>> {
        self.registry.get(name).ok_or_else(|| {
            let what = format!("cannot find image '{name}'");
            if let Some(closed) = self.registry.closed(name) {
                let Reason { why, hint, .. } = closed.reason;
                return Refusal::new(ErrorKind::Conflict, what, why).hint(hint);
            }
            if let Some(note) = self.released_named(name) {
                return qemu_has_it(what, &note);
            }
            Refusal::new(ErrorKind::NotFound, what, "no image of that name is on this host")
                .hint("`dray images` lists the images")
        })
    }

    /// Nobody else does anything with an image until the answer is dropped.
    ///
    /// # Errors
    /// What is under way with it.
    pub(crate) fn operate(
        &self,
        what: &str,
        name: &str,
        command: &'static str,
    ) -> ApiResult<Operation> {
        self.registry.operate(name, command).map_err(|why| not_taken(what, why))
    }

    /// Refuses files outside the pools and files that somebody else writes.
    pub(crate) fn check_file(&self, what: &str, path: &Path, probe: bool) -> ApiResult<()> {
        if !path.exists() {
            let why = format!("{}: no such file", path.display());
            return Err(Refusal::new(ErrorKind::NotFound, what, why)
                .hint("name an image file or a block device of this host"));
        }
        if !self.config.pools.iter().any(|pool| pool.contains(path)) {
            let why = format!("{} lies outside every pool of this host", path.display());
            return Err(Refusal::new(ErrorKind::Denied, what, why)
                .hint(format!("add its folder as a [[pool]] to {}", self.config.path.display())));
        }
        dray_files::folders::check_of(path).map_err(|why| exchangeable(what, &why))?;
        self.check_mark(what, path)?;
        refuse_set_aside(what, path)?;
        if probe {
            let user = locks::probe(path).map_err(|why| io_error(what, why))?;
            if let Some(user) = user.filter(|user| user.excludes_owner()) {
                return Err(Refusal::new(ErrorKind::Conflict, what, user).hint(LOCKED));
            }
        }
        Ok(())
    }

    /// Refuses a block device that is no image: one that is marked as incomplete or handed over.
    fn check_mark(&self, what: &str, path: &Path) -> ApiResult<()> {
        if !is_device(path) {
            return Ok(());
        }
        let failed = |why: &dyn std::fmt::Display| io_error(what, why);
        let device = std::fs::File::open(path).map_err(|why| failed(&why))?;
        let Some((mark, state)) = self.registry.marked(&device).map_err(|why| failed(&why))? else {
            return Ok(());
        };
        let state = match state {
            DeviceState::Partial => "holds an incomplete image".to_owned(),
            DeviceState::Replica(epoch) => {
                format!("is a replica: epoch {} began at another host", epoch.0)
            }
        };
        let why = format!("{} {state}", path.display());
        Err(Refusal::new(ErrorKind::Conflict, what, why).hint(format!(
            "if you are sure that this is the image: blockdev --setrw {}, and remove {}",
            path.display(),
            mark.file().display()
        )))
    }

    /// Refuses a block device that takes no writes: opening it would not tell.
    pub(super) fn check_writable(&self, what: &str, path: &Path) -> ApiResult<()> {
        if !is_device(path)
            || !self.registry.mark(path).is_read_only().map_err(|e| io_error(what, e))?
        {
            return Ok(());
        }
        let why = format!("{} is read-only", path.display());
        let hint = format!("make it writable: blockdev --setrw {}", path.display());
        Err(Refusal::new(ErrorKind::Denied, what, why).hint(hint))
    }
}

/// A file that other users could exchange while the agent opens it.
fn exchangeable(what: &str, why: &std::io::Error) -> Refusal {
    let open = why.get_ref().and_then(|why| why.downcast_ref::<Exchangeable>());
    let hint = open.map_or_else(String::new, Exchangeable::hint);
    Refusal::new(ErrorKind::Denied, what, why).hint(hint)
}

/// Who uses an image, and would be cut off from it.
pub(crate) enum ImageUser {
    /// A client that is attached.
    Attached,
    /// A process that was, runs, and is expected back: the agent was restarted, or has cut it off.
    Absent(Process),
}

impl ImageUser {
    /// What else helps against one that does not come back, behind a hint.
    pub(crate) fn or_end(&self) -> String {
        match self {
            Self::Attached => String::new(),
            Self::Absent(process) => {
                format!("; if process {} does not need the image any more, end it", process.pid)
            }
        }
    }
}

impl std::fmt::Display for ImageUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attached => write!(f, "a client is attached to it"),
            Self::Absent(process) => {
                write!(
                    f,
                    "process {} was attached to it, still runs, and has not reconnected yet",
                    process.pid
                )
            }
        }
    }
}

impl Agent {
    /// Who uses an image, whether attached just now or not.
    pub(crate) fn user_of_image(&self, entry: &Entry) -> Option<ImageUser> {
        if self.attachments.count(&entry.record().name) > 0 {
            return Some(ImageUser::Attached);
        }
        self.registry.absent_client(entry).map(ImageUser::Absent)
    }
}

fn shown_state(state: CopyState) -> ImageState {
    match state {
        CopyState::Owner => ImageState::Owner,
        CopyState::Incoming => ImageState::Incoming,
        CopyState::Replica => ImageState::Replica,
    }
}

fn shown_reason(closed: Closed) -> ClosedExport {
    ClosedExport { why: closed.reason.why, hint: closed.reason.hint }
}

fn shown_loss(last: WriteBackError) -> LostWrites {
    LostWrites { why: last.why, count: last.count, told: last.told }
}

/// The generation that is open at an owner, or that a replica holds.
fn generation_of(entry: &Entry, record: &ImageRecord) -> Option<Ancestor> {
    match record.state {
        CopyState::Owner => Some(entry.line()?.lineage().open()),
        CopyState::Replica if record.flat.is_some() => None,
        CopyState::Replica => record.replica.as_ref().map(|note| note.generation),
        CopyState::Incoming => None,
    }
}

/// Refuses a file whose name says that it is not an image, or not this host's: it may be what another host still reads,
/// or have zeros where blocks are missing. Whoever knows better can rename it.
fn refuse_set_aside(what: &str, path: &Path) -> ApiResult<()> {
    let real = std::fs::canonicalize(path).map_err(|why| io_error(what, why))?;
    let Some(aside) = set_aside(&real) else { return Ok(()) };
    let is = match aside {
        SetAside::Replica => "the copy of an image that another host owns",
        SetAside::Partial => "an image that has not arrived whole",
    };
    let why = format!("{} is by its name {is}", real.display());
    Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
        "put the agent's state directory back if it is lost; if nothing else is left of the image, \
         rename the file and add it",
    ))
}
