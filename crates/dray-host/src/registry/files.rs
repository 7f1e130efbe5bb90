//! Opening what is below an image: a file under one of its names, a device, a chain.

use super::Surroundings;
use super::{Entry, Registry, loss_path, losses, present_path};
use crate::flat::{self, Flat, Purpose};
use crate::record::{CopyState, ImageRecord, NameKind};
use crate::stamp::FileStamp;
use crate::store::Store;
use dray_image::{ErrorKind, FileImage, FileOptions, ImageFile, ImageNames};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the chain of a flattened image, and what an image's guest is still to be told.
pub(super) fn open_flat(
    store: &Store,
    around: &dyn Surroundings,
    record: &ImageRecord,
    file: &Arc<dyn ImageFile>,
) -> io::Result<Option<Flat>> {
    if !record.read_only {
        losses::keep(&**file, &loss_path(store, &record.name))?;
    }
    let present = present_path(store, &record.name);
    let Some(flat) = &record.flat else { return Ok(None) };
    let chain = around.chain(Purpose::Serve, record.id, flat.layers.clone(), record.len);
    Flat::open(record, chain, file, &present).map(Some)
}

/// Whether a block device is at `path`.
pub fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// The path by which dray knows the file at `path`: links followed. Of a block device only those in
/// its directory's path: its own name may be a link whose end is another device after a reboot.
///
/// # Errors
/// What the file system reports.
pub fn real_path(path: &Path) -> std::io::Result<PathBuf> {
    match (path.parent(), path.file_name()) {
        (Some(dir), Some(name)) if is_device(path) => Ok(dir.canonicalize()?.join(name)),
        _ => path.canonicalize(),
    }
}

/// Opens the file that a record names, or what lies under the other names that it may have.
///
/// # Errors
/// What opening under the recorded name reports.
pub(super) fn open_file(
    store: &Store,
    record: &ImageRecord,
    direct: bool,
) -> dray_image::Result<Arc<dyn ImageFile>> {
    let opener = store.opener();
    let write = !record.read_only || record.state == CopyState::Incoming;
    let export_len = Some(record.len).filter(|&len| len > 0);
    let options = |write| FileOptions { write, direct, export_len };
    if record.flat.is_some() {
        return Ok(Arc::new(flat::open_overlay(record, direct)?));
    }
    if record.device {
        return Ok(Arc::new(open_device(record, options(write))?));
    }
    if record.in_place.is_some() {
        return Ok(Arc::new(open_in_place(record, options(false))?));
    }
    let names = ImageNames::of(&record.path)?;
    let named = || opener.open(&record.path, options(write));
    let partial = || opener.open_closed(&names.partial(), options(true));
    // While the migration is open a guest's writes are parked, not refused, and the image may yet
    // be handed back (I5).
    let open = write && (record.migration.is_some() || record.is_unnamed_claim());
    let replica = |epoch| opener.open_closed(&names.replica(epoch), options(open));
    let at = |place| match place {
        NameKind::Named => named(),
        NameKind::Partial => partial(),
        NameKind::Replica(epoch) => replica(epoch),
        NameKind::Chain => Ok(Arc::new(flat::open_overlay(record, direct)?) as _),
    };
    match at(record.place) {
        Err(why) if why.kind == ErrorKind::NotFound => {
            record.other_places().into_iter().find_map(|place| at(place).ok()).ok_or(why)
        }
        other => other,
    }
}

impl Registry {
    /// Opens the file that a record names once more, `before` being how it is open now: the new one has another
    /// length, or is written. A guest has written to the file that is open, whatever lies at the path.
    ///
    /// # Errors
    /// That another file lies there by now, or what opening reports.
    pub(crate) fn open_again(
        &self,
        record: &ImageRecord,
        before: &dyn ImageFile,
    ) -> io::Result<Arc<dyn ImageFile>> {
        let file = self.open_file(record).map_err(io::Error::other)?;
        match is_same(before, &*file) {
            true => Ok(file),
            false => Err(other_file(&record.path)),
        }
    }

    /// Refuses an image of which another file lies at the path than the one that is open.
    ///
    /// # Errors
    /// That it does, or that nothing lies there.
    pub fn check_same_file(&self, entry: &Entry) -> io::Result<()> {
        self.open_again(&entry.record(), &*entry.file).map(drop)
    }

    /// Whether what is served is what is at the image's path, where that was here before the image.
    ///
    /// # Errors
    /// That somebody has written to the file, or has put another one there.
    pub fn check_in_place(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let Some(known) = record.in_place else { return Ok(()) };
        let now = FileStamp::of(&record.path)?;
        if known.has_same_content(&now) {
            return Ok(());
        }
        let shown = record.path.display();
        Err(io::Error::other(format!("{shown} was changed since it was compared with the image")))
    }
}

fn other_file(path: &Path) -> io::Error {
    let shown = path.display();
    io::Error::other(format!("another file is at {shown} than the one that is served"))
}

/// Whether both are the same file or device. On a simulated disk nothing is renamed by others.
fn is_same(one: &dyn ImageFile, other: &dyn ImageFile) -> bool {
    let id = |file: &dyn ImageFile| file.as_file().and_then(FileImage::id);
    id(one).zip(id(other)).is_none_or(|(one, other)| one == other)
}

/// A file that was compared once is taken for the same as long as nobody has written to it since. Its
/// owner and mode may change: who starts a QEMU on it changes them.
fn open_in_place(record: &ImageRecord, options: FileOptions) -> dray_image::Result<FileImage> {
    let file = FileImage::open(&record.path, options)?;
    let now = FileStamp::of_open(file.file());
    match (record.in_place, now) {
        (Some(known), Ok(now)) if known.has_same_content(&now) => Ok(file),
        _ => {
            let context = format!("opening image {}", record.path.display());
            let why = "the file was changed since it was compared with the image";
            Err(dray_image::Error::new(ErrorKind::Invalid, context, why))
        }
    }
}

fn open_device(record: &ImageRecord, options: FileOptions) -> dray_image::Result<FileImage> {
    if record.place == NameKind::Partial {
        return FileImage::claim(&record.path, options);
    }
    let kept = record.state == CopyState::Replica && record.migration.is_none();
    FileImage::open(&record.path, FileOptions { write: options.write && !kept, ..options })
}
