//! An image with its disk.

use super::closed::Absent;
use super::record::{CopyState, ImageRecord, Place};
use crate::flat::Flat;
use crate::flat::chain::Chain;
use crate::flat::peeks::Whereabouts;
use crate::heat::ImageHeat;
use crate::lineage::Line;
use crate::vm::RECONNECT_DELAY;
use dray_image::{Disk, FileImage, Image, QemuLocks};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An image with its disk.
pub struct Entry {
    record: Mutex<ImageRecord>,
    /// The locks by which QEMU knows that the file is in use. Never held while a QEMU has the file
    /// itself: a lock in the middle of a splice aborts it.
    locks: Mutex<Option<QemuLocks>>,
    /// When the last migration away from here ended. A QEMU that had the disk may still come back
    /// and must be able to quit: it is let in, and everything it asks but a flush fails.
    departed: Mutex<Option<Instant>>,
    /// The line of generations, at the owner.
    line: Mutex<Option<Arc<Line>>>,
    /// What is known of its guest's accesses.
    pub heat: ImageHeat,
    /// What guests are served from.
    pub disk: Arc<Disk>,
    /// The file below it; of a flattened image only what was written since it is one.
    pub file: Arc<FileImage>,
    /// A flattened image's parts.
    pub flat: Option<Flat>,
}

impl Entry {
    /// An entry over an open file, without locks and without a line. Its disk is the one that
    /// clients `waits` for it at, if they do.
    pub(super) fn new(
        record: ImageRecord,
        file: Arc<FileImage>,
        heat: ImageHeat,
        flat: Option<Flat>,
        waits: Option<&Absent>,
    ) -> Self {
        let disk = match waits {
            Some(absent) => Arc::clone(&absent.disk),
            None => Disk::new(content(&file, flat.as_ref())),
        };
        Self {
            flat,
            record: Mutex::new(record),
            locks: Mutex::default(),
            departed: Mutex::default(),
            line: Mutex::default(),
            heat,
            disk,
            file,
        }
    }

    /// The image below the disk.
    pub(super) fn content(&self) -> Arc<dyn Image> {
        content(&self.file, self.flat.as_ref())
    }

    /// A copy of the record.
    pub fn record(&self) -> ImageRecord {
        self.lock().clone()
    }

    /// Takes QEMU's locks on the file, for as long as this host serves it. Someone else's lock is
    /// told in the log: the file may be open for reading elsewhere.
    pub fn take_locks(&self) {
        let record = self.record();
        let whole = record.state == CopyState::Owner && record.place == Place::Named;
        // No name keeps a QEMU from opening an incomplete image on a device.
        let unnamed = record.device && record.place == Place::Partial;
        // A chain is kept from others by its name: the daemon that serves it takes locks of its own.
        if record.flat.is_some() {
            return;
        }
        if !unnamed && (record.read_only || !whole) {
            return;
        }
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.is_none() {
            match QemuLocks::take(&record.path) {
                Ok(taken) => *locks = Some(taken),
                Err(why) => tracing::warn!(image = record.name, %why, "cannot lock an image"),
            }
        }
    }

    /// The line of generations; none where this host does not own the image.
    pub fn line(&self) -> Option<Arc<Line>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on this is its line.
    pub fn set_line(&self, line: Option<Arc<Line>>) {
        *self.line.lock().unwrap_or_else(PoisonError::into_inner) = line;
    }

    /// The image has left for good.
    pub fn depart(&self) {
        self.disk.fail_parked();
        *self.departed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether a QEMU that had the disk may still be about to come back.
    pub(super) fn has_just_departed(&self) -> bool {
        let departed = *self.departed.lock().unwrap_or_else(PoisonError::into_inner);
        departed.is_some_and(|at| at.elapsed() < Duration::from_secs(RECONNECT_DELAY.into()))
    }

    /// Where the active image of `chain` is, when this is the same one, flattened.
    pub(super) fn whereabouts(&self, chain: &Chain) -> Option<Whereabouts> {
        let record = self.record();
        let flat = record.flat.as_ref()?;
        if !flat.layers.first().is_some_and(|layer| chain.is_of(&layer.path)) {
            return None;
        }
        let at_rest = flat.turn.is_none() && record.place != Place::Named;
        Some(match record.current_path() {
            Ok(path) if at_rest => Whereabouts::At(path),
            _ => Whereabouts::Turning,
        })
    }

    /// Gives the locks back, before QEMU opens the file itself.
    pub fn drop_locks(&self) {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ImageRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a guest sees of an image: its file, or of a flattened one the overlay over its chain.
fn content(file: &Arc<FileImage>, flat: Option<&Flat>) -> Arc<dyn Image> {
    match flat {
        Some(flat) => Arc::clone(&flat.overlay) as Arc<dyn Image>,
        None => Arc::clone(file) as Arc<dyn Image>,
    }
}
