//! Who does what: writers, a pruner, collectors. Each begins anew after every failure.

use super::world::{IMAGE_BYTES, Sim};
use crate::piece::piece_len;
use crate::{
    Consistency, Dedup, GcOptions, GcReport, Info, Kind, Repository, Result, WriterOptions,
};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Three writers, a pruner, two collectors.
pub(super) const COUNT: usize = 6;
/// Pieces that ever have content, in all three segments.
const PLACES: [u64; 9] = [0, 1, 2, 510, 512, 513, 1024, 1099, 1100];

/// So impatient that writers are fenced while they work.
pub(super) fn gc_options() -> GcOptions {
    GcOptions {
        grace: Duration::from_secs(600),
        session_expiry: Duration::from_secs(1800),
        keep_percent: 60,
        threads: 0,
    }
}

pub(super) fn act(sim: &Arc<Sim>, actor: usize) {
    sim.wait(actor);
    let repository = sim.repository(actor);
    while sim.lock().steps_left > 0 {
        sim.lock().crashed[actor] = false;
        let _ = match actor {
            0..3 => back_up(sim, &repository, actor),
            3 => prune(sim, &repository),
            _ => collect(sim, &repository).map(|report| {
                sim.lock().counters.revisions += report.revised_backups;
            }),
        };
        drop(sim.step(actor));
    }
    sim.leave(actor);
}

/// Backs up image 1, or image 2 that the other two share.
fn back_up(sim: &Arc<Sim>, repository: &Repository, actor: usize) -> Result<()> {
    let image = ImageId(if actor == 0 { 1 } else { 2 });
    let listed = repository.backups(image)?.backups;
    let parent = match sim.lock().rng.below(4) {
        0 => None,
        _ => listed.last(),
    };
    if let Some(parent) = parent {
        sim.lock().expected.parents.insert(parent.id);
    }
    let parent = parent.map(|parent| repository.manifest(parent)).transpose()?;
    let inherited = parent.as_ref().map(|parent| parent.info().generation.id.0);
    let (content, changes, generation, dedup) = {
        let mut state = sim.lock();
        let mut content: BTreeMap<u64, u8> = match inherited {
            Some(generation) => state.expected.content[&generation].clone(),
            None => BTreeMap::new(),
        };
        let mut changes = BTreeMap::new();
        for _ in 0..state.rng.below(6) {
            let place = PLACES[state.rng.below(PLACES.len() as u64) as usize];
            changes.insert(place, state.rng.below(7) as u8);
        }
        content.extend(&changes);
        let generation = u128::from(state.rng.next());
        state.expected.content.insert(generation, content.clone());
        let dedup = [Dedup::Parent, Dedup::Image, Dedup::Everything, Dedup::Everything];
        (content, changes, generation, dedup[state.rng.below(4) as usize])
    };
    drop(content);
    let options = WriterOptions { threads: 0, dedup, ..WriterOptions::default() };
    let mut writer = repository.writer(image, IMAGE_BYTES, parent.as_ref(), options)?;
    for (ix, content) in changes {
        writer.put(ix, &vec![content; piece_len(IMAGE_BYTES, ix)])?;
    }
    let finished = writer.finish(info(image, generation));
    let mut state = sim.lock();
    match finished {
        Ok(backup) => {
            state.counters.backups += 1;
            state.expected.finished.insert(backup.id);
            Ok(())
        }
        Err(error) => {
            state.counters.fenced_writers += u64::from(error.kind() == Kind::Fenced);
            Err(error)
        }
    }
}

fn info(image: ImageId, generation: u128) -> Info {
    Info {
        image,
        name: String::new(),
        bytes: IMAGE_BYTES,
        generation: Ancestor { id: GenerationId(generation), number: 1 },
        parent: None,
        ancestors: vec![],
        taken_unix_ms: 0,
        host: String::new(),
        consistency: Consistency::Crash,
    }
}

/// Collects, patiently or not.
fn collect(sim: &Sim, repository: &Repository) -> Result<GcReport> {
    let grace = Duration::from_secs([0, 600][sim.lock().rng.below(2) as usize]);
    repository.gc(GcOptions { grace, ..gc_options() })
}

/// Removes any backup, often where it may hurt: one that names something condemned, or that
/// somebody builds on.
fn prune(sim: &Arc<Sim>, repository: &Repository) -> Result<()> {
    let mut listed = repository.all()?.backups;
    let (at_risk, parents) =
        sim.look(|objects, expected| (expected.at_risk(objects), expected.parents.clone()));
    let worth = match sim.lock().rng.below(3) {
        0 => at_risk,
        1 => parents,
        _ => Default::default(),
    };
    if listed.iter().any(|backup| worth.contains(&backup.id)) {
        listed.retain(|backup| worth.contains(&backup.id));
    }
    let nth = sim.lock().rng.below(listed.len().max(1) as u64) as usize;
    let Some(backup) = listed.get(nth) else { return Ok(()) };
    sim.lock().expected.pruned.insert(backup.id);
    repository.remove(backup)?;
    sim.lock().counters.pruned += 1;
    Ok(())
}
