//! After a crash between two steps of a release or of an adoption: where a disk is says what is left
//! to be done.

use super::{NotReleased, Released, absorb};
use crate::registry::{Entry, Registry};
use dray_qemu::bitmap;
use dray_qemu::{LayerPlan, Qmp};
use dray_types::BlockSet;
use std::io;
use std::path::Path;

impl Registry {
    /// The disk of an image that is registered here is on its own file: a release came to its pivot and
    /// is finished, or an adoption did not and is undone, which comes to the same. QEMU holds its own
    /// locks, and nobody was served.
    ///
    /// # Errors
    /// What QEMU or the store reports.
    pub async fn settle_on_file(&self, qmp: &Qmp, entry: &Entry) -> Result<(), NotReleased> {
        let record = entry.record();
        entry.drop_locks();
        let noted = match self.released.of(record.id) {
            Some(note) => Some(note),
            None => self.note_again(qmp, entry)?,
        };
        let Some(note) = noted else {
            // Adopted for the first time, and not for long: nobody has a part of it.
            return Ok(self.forget(&record.name)?);
        };
        tracing::info!(image = record.name, "finishing a release that was cut short");
        let tracked = match &note.bitmap {
            Some(name) => {
                let found = bitmap::recorded(qmp, note.plan.local_node(), name).await;
                found.map_err(NotReleased::Qemu)?.is_some()
            }
            None => false,
        };
        self.end_release(entry, note, tracked)?;
        Ok(self.forget(&record.name)?)
    }

    /// The note without which nobody would know how the disk's nodes are made.
    fn note_again(&self, qmp: &Qmp, entry: &Entry) -> io::Result<Option<Released>> {
        let record = entry.record();
        let Some(adopted) = record.adopted.as_ref().filter(|adopted| adopted.noted) else {
            return Ok(None);
        };
        let plan = serde_json::from_value(adopted.splice.clone()).map_err(io::Error::other)?;
        self.begin_release(qmp, &plan, entry)
    }

    /// The disk of an image with a note is on dray.
    ///
    /// # Errors
    /// What the store reports.
    pub async fn settle_on_dray(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        entry: &Entry,
        run_dir: &Path,
    ) -> io::Result<()> {
        let Some(note) = self.released.of(entry.record().id) else { return Ok(()) };
        if note.done {
            // An adoption that came to its pivot. The old node may still be there.
            self.end_adoption(qmp, plan, &note, entry, run_dir).await.map(drop)
        } else {
            self.undo_release(entry)
        }?;
        entry.take_locks();
        Ok(())
    }

    /// The pivot is done: what QEMU wrote meanwhile is read and written down, and the note goes. The
    /// reason when it could not be read: everything counts as changed then.
    ///
    /// # Errors
    /// What the store reports; the line stays suspect.
    pub async fn end_adoption(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        note: &Released,
        entry: &Entry,
        run_dir: &Path,
    ) -> io::Result<Option<String>> {
        crate::migration::abort::step("AdoptAbsorb");
        let changed = absorb::changed(qmp, plan, note, entry, run_dir).await;
        crate::migration::abort::step("AdoptSettle");
        let Some(line) = entry.line() else { return Ok(None) };
        let (changed, why) = match changed {
            Ok(changed) => (Some(changed), None),
            Err(why) => (None, Some(why)),
        };
        line.settle(&entry.disk, changed.as_ref())?;
        let blocks = changed.as_ref().map(BlockSet::len);
        tracing::info!(image = note.image.name, blocks, why, "an image that was released is back");
        crate::migration::abort::step("AdoptNote");
        self.released.remove(note.image.id)?;
        Ok(why)
    }
}
