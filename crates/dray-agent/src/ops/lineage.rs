//! `dray lineage`: the generations of an image, as this host knows them.

use super::io_error;
use crate::agent::Agent;
use crate::api::{ApiResult, ClosedGeneration, Lineage, LineageStatus};
use crate::backup::notes::Note;
use crate::lineage;
use crate::released::Released;
use dray_engine::lineage::{Generation, Reason};
use dray_types::Ancestor;

impl Agent {
    pub(super) fn lineage(&self, command: &Lineage) -> ApiResult<LineageStatus> {
        if self.registry.get(&command.image).is_none()
            && let Some(note) = self.released_named(&command.image)
        {
            return Ok(self.lineage_of_released(&note));
        }
        let entry = self.image(&command.image)?;
        let record = entry.record();
        let what = format!("cannot read the generations of image '{}'", command.image);
        // Where the image is owned elsewhere the last owned line is in its file.
        let line = match entry.line() {
            Some(line) => Some(line.lineage()),
            None => lineage::last_known(&self.registry.line_path(&record.name))
                .map_err(|why| io_error(what, why))?,
        };
        let held = record.replica.as_ref().map(|note| note.generation);
        let past = line.as_ref().map_or(&[][..], |line| line.past());
        let notes = crate::backup::notes::of(&self.store.backups(), &record.name);
        let past = (0..).zip(past).map(|(nth, generation)| shown(nth, generation, held, &notes));
        let status = self.image_status(&entry);
        Ok(LineageStatus {
            image: record.name,
            id: record.id,
            host: self.config.name.clone(),
            state: status.state,
            past: past.collect(),
            open: line.map(|line| line.open().into()).or(status.generation),
            changed_blocks: entry.disk.keeps_history().then(|| entry.disk.history().len()),
        })
    }

    fn lineage_of_released(&self, note: &Released) -> LineageStatus {
        let status = self.released_status(note);
        let line = self.registry.released.lineage(note.image.id);
        let notes = crate::backup::notes::of(&self.store.backups(), &status.name);
        let past = line.as_ref().map_or(&[][..], |line| line.past());
        let past = (0..).zip(past).map(|(nth, generation)| shown(nth, generation, None, &notes));
        LineageStatus {
            past: past.collect(),
            image: status.name,
            id: status.id,
            host: self.config.name.clone(),
            state: status.state,
            open: status.generation,
            // What QEMU has written since is in its own memory.
            changed_blocks: None,
        }
    }
}

fn shown(
    nth: usize,
    generation: &Generation,
    held: Option<Ancestor>,
    notes: &[Note],
) -> ClosedGeneration {
    let here = |note: &&Note| note.generation == generation.at.id;
    ClosedGeneration {
        at: generation.at.into(),
        reason: match generation.reason {
            Reason::Handover => "handover".to_owned(),
            Reason::Backup => "backup".to_owned(),
        },
        host: generation.host.clone(),
        closed_unix_ms: generation.closed_unix_ms,
        // Of the first one nobody has a parent.
        changed_blocks: (nth > 0).then(|| generation.changed.len()),
        here: held == Some(generation.at),
        backups: notes.iter().filter(here).map(|note| note.to.clone()).collect(),
    }
}
