//! `dray lineage`: the generations of an image, as this host knows them, and who holds them.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, ClosedGeneration, GenerationStatus, Holder, Lineage, LineageStatus, Stray,
};
use dray_engine::lineage::{Generation, Reason};
use dray_host::lineage::{self, REGION_BLOCKS};
use dray_host::refusals::io_error;
use dray_host::released::Released;
use dray_provider::catalogues::catalogues;
use dray_provider::notes::Note;
use dray_provider::snapshots::Snapshots;
use dray_types::{Ancestor, BLOCK_SIZE};
use std::sync::Arc;

impl Answers<Lineage> for Arc<Agent> {
    /// The line, and who says that he holds something of it.
    async fn answer(&self, command: Lineage, _: Events) -> ApiResult<LineageStatus> {
        let mut status = self.line_known_here(&command)?;
        if !command.here_only {
            let (places, image) = (catalogues(&self.config), status.id);
            let asked = tokio::task::spawn_blocking(move || Snapshots::of(&places, image)).await;
            let what = "cannot ask who holds the generations";
            add_holders(&mut status, asked.map_err(|why| io_error(what, why))?);
        }
        Ok(status)
    }
}

impl Agent {
    fn line_known_here(&self, command: &Lineage) -> ApiResult<LineageStatus> {
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
        let notes = dray_provider::notes::of(&self.store.backups(), &record.name);
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
            strays: Vec::new(),
            silent: Vec::new(),
        })
    }

    fn lineage_of_released(&self, note: &Released) -> LineageStatus {
        let status = self.released_status(note);
        let line = self.registry.released.lineage(note.image.id);
        let notes = dray_provider::notes::of(&self.store.backups(), &status.name);
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
            strays: Vec::new(),
            silent: Vec::new(),
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
        held: Vec::new(),
    }
}

/// Who holds what stands with the generation; what is not of this line, apart.
fn add_holders(status: &mut LineageStatus, found: Snapshots) {
    for snapshot in found.held {
        let (held_as, distrusted) = (snapshot.held.held_as(), snapshot.held.distrusted().len());
        let region = REGION_BLOCKS * BLOCK_SIZE;
        let distrusted_bytes = (distrusted as u64).saturating_mul(region).min(snapshot.len);
        let holder = Holder { place: snapshot.place, held_as, distrusted_bytes };
        let at = GenerationStatus::from(snapshot.generation);
        let past = status.past.iter_mut().find(|past| past.at == at);
        let stray = |strays: &mut Vec<Stray>, holder| match strays.iter_mut().find(|s| s.at == at) {
            Some(known) => known.held.push(holder),
            None => strays.push(Stray { at, held: vec![holder] }),
        };
        match past {
            Some(generation) => generation.held.push(holder),
            None => stray(&mut status.strays, holder),
        }
    }
    status.strays.sort_by_key(|stray| stray.at.number);
    status.silent = found.notes.into_iter().chain(found.silent).collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::{HeldAs, ImageState};
    use dray_provider::provider::Provider;
    use dray_provider::snapshots::{HeldCopy, Snapshot, Wanted};
    use dray_types::{GenerationId, ImageId};

    fn at(number: u64) -> Ancestor {
        Ancestor { id: GenerationId(number.into()), number }
    }

    /// A replica with these regions distrusted.
    struct Replica(Vec<u64>);

    impl HeldCopy for Replica {
        fn held_as(&self) -> HeldAs {
            HeldAs::Replica
        }

        fn distrusted(&self) -> &[u64] {
            &self.0
        }

        fn provider(&self, _: Wanted) -> Option<Arc<dyn Provider>> {
            None
        }
    }

    fn replica(place: &str, number: u64, distrusted: &[u64]) -> Snapshot {
        let held = Box::new(Replica(distrusted.to_vec()));
        Snapshot { place: place.to_owned(), generation: at(number), len: 100 << 20, held }
    }

    #[test]
    fn holders_stand_with_their_generation_and_strangers_apart() {
        let past = |number| ClosedGeneration {
            at: at(number).into(),
            reason: "handover".to_owned(),
            host: "hosta".to_owned(),
            closed_unix_ms: 1,
            changed_blocks: None,
            here: false,
            backups: Vec::new(),
            held: Vec::new(),
        };
        let mut status = LineageStatus {
            image: "disk".to_owned(),
            id: ImageId(1),
            host: "hostb".to_owned(),
            state: ImageState::Owner,
            past: vec![past(1), past(2)],
            open: None,
            changed_blocks: None,
            strays: Vec::new(),
            silent: Vec::new(),
        };
        let held = vec![
            replica("hosta", 2, &[]),
            replica("hostc", 9, &[]),
            replica("hostd", 2, &[0, 1]),
            replica("hoste", 9, &[1]),
        ];
        let (notes, silent) = (vec!["nas: down".to_owned()], vec!["hostf: no".to_owned()]);
        add_holders(&mut status, Snapshots { held, notes, silent });
        let places = |held: &[Holder]| -> Vec<_> {
            held.iter().map(|one| (one.place.clone(), one.distrusted_bytes >> 20)).collect()
        };
        assert!(status.past[0].held.is_empty());
        assert_eq!(places(&status.past[1].held), [("hosta".into(), 0), ("hostd".into(), 100)]);
        assert_eq!((status.strays.len(), status.strays[0].at.number), (1, 9));
        assert_eq!(places(&status.strays[0].held), [("hostc".into(), 0), ("hoste".into(), 64)]);
        assert_eq!(status.silent, ["nas: down", "hostf: no"]);
    }
}
