//! Images that QEMU has taken back, as the local API shows them.

use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, ImageState, ImageStatus, Refusal};
use dray_host::record::ImageRecord;
use dray_host::refusals::io_error;
use dray_host::released::Released;
use dray_vm::qemu_error;
use dray_vm::released::NotReleased;
use std::os::unix::fs::MetadataExt;

/// What the system counts allocated space in.
const SECTOR: u64 = 512;

impl Agent {
    /// Everything that `dray images` shows: what this host has, and what QEMU has taken back.
    pub(super) fn list_images(&self) -> Vec<ImageStatus> {
        let mut all: Vec<_> =
            self.registry.all().iter().map(|entry| self.image_status(entry)).collect();
        // An image that becomes something else meanwhile is what it was when it was looked at first.
        let mut closed = self.registry.all_closed();
        closed.retain(|(name, _)| all.iter().all(|image| image.name != *name));
        all.extend(closed.into_iter().map(|(name, closed)| self.absent_status(name, closed)));
        let mut notes = self.registry.released.all();
        notes.retain(|note| note.done && note.has_line() && !is_listed(&all, &note.image));
        all.extend(notes.iter().map(|note| self.released_status(note)));
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// The note of an image that QEMU has taken back.
    pub(super) fn released_named(&self, name: &str) -> Option<Released> {
        let mut notes = self.registry.released.all().into_iter();
        notes.find(|note| note.done && note.has_line() && note.image.name == name)
    }

    pub(super) fn released_status(&self, note: &Released) -> ImageStatus {
        let image = &note.image;
        let blocks = std::fs::metadata(&image.path).map_or(0, |meta| meta.blocks());
        let line = self.registry.released.lineage(image.id);
        ImageStatus {
            name: image.name.clone(),
            id: image.id,
            path: image.path.clone(),
            size: image.len,
            allocated: blocks * SECTOR,
            state: ImageState::Released,
            epoch: image.epoch,
            missing_blocks: 0,
            clients: 0,
            growable: image.growable,
            read_only: image.read_only,
            in_place: image.in_place.is_some(),
            migration: None,
            kept_for: None,
            generation: line.map(|line| line.open().into()),
            since_unix_ms: Some(note.since_unix_ms),
            closed: None,
            not_locked: None,
            write_back_error: None,
            tracked_by: note.is_tracked().then_some(note.qemu.pid),
        }
    }

    /// Forgets what is known of a released image, which stays where it is.
    pub(super) fn forget_released(&self, what: &str, name: &str) -> ApiResult<Option<ImageStatus>> {
        let Some(note) = self.released_named(name) else { return Ok(None) };
        let status = self.released_status(&note);
        self.registry.released.remove(note.image.id).map_err(|why| io_error(what, why))?;
        Ok(Some(status))
    }
}

/// What is told of an image that `dray images` lists, and that a QEMU has as a plain file.
pub(super) fn qemu_has_it(what: String, note: &Released) -> Refusal {
    let (pid, socket) = (note.qemu.pid, note.qemu.socket.display());
    let (why, hint) = match note.qemu.runs() {
        true => (
            format!("it was released: QEMU, process {pid}, has it as a plain file"),
            format!("put the vm's disks under dray first: `dray adopt --qmp {socket}`"),
        ),
        false => (
            "it was released, and its vm has ended".to_owned(),
            format!("`dray images add` serves its file, {}", note.image.path.display()),
        ),
    };
    Refusal::new(ErrorKind::Conflict, what, why).hint(hint)
}

/// Why a disk was not released, as the API tells it.
pub(super) fn not_released(what: &str, why: NotReleased) -> Refusal {
    match &why {
        NotReleased::Qemu(why) => qemu_error(what, why),
        NotReleased::Store(why) | NotReleased::NotNoted(why) => io_error(what, why),
        NotReleased::Untold(loss) => loss.refused(what),
        NotReleased::TooShort(_) => Refusal::new(ErrorKind::Io, what, &why).hint(
            "check whether the file system allows a file of this length; most of it is a hole",
        ),
        NotReleased::Left(..) => Refusal::new(ErrorKind::DataAtRisk, what, &why).hint(
            "end the job, export or bitmap on the disk that prevents it, and repeat the command; \
             or acknowledge the loss yourself with `dray images remove`",
        ),
    }
}

/// Whether an image is in the list already.
fn is_listed(all: &[ImageStatus], image: &ImageRecord) -> bool {
    all.iter().any(|listed| listed.name == image.name && listed.id == image.id)
}
