//! Predicts with which base an image would begin at this host, and which providers would give it.
//! It reads lists and recipes, and creates nothing.

use super::choose::{self, Choice};
use super::job::{Parts, at_hand, in_the_way, old_copy};
use super::state::REGION_TASKS;
use dray_host::lineage::ReplicaNote;
use dray_host::record::CopyState;
use dray_host::replicas::MAX_DISTRUSTED;
use dray_wire::request::{Base, SeedImage, Surveyed};

/// Looks; without `backups` only at what lies here.
pub fn survey(parts: &Parts, backups: bool) -> Surveyed {
    let here = base_here(parts);
    let nothing = |notes| Surveyed { base: here.clone(), given: Vec::new(), notes };
    if let Some(why) = earlier_try(parts) {
        return nothing(vec![why]);
    }
    if !backups {
        return nothing(Vec::new());
    }
    if let Some(why) = in_the_way(parts) {
        return nothing(Some(why).filter(|why| !why.is_empty()).into_iter().collect());
    }
    let old = old_copy(parts);
    match choose::choose(&parts.places, &parts.wanted, old.as_ref(), at_hand(parts)) {
        Err(notes) => nothing(notes),
        Ok(choice) => from_providers(choice, old.is_some()),
    }
}

/// What it would be after everything was read that is chosen.
fn from_providers(choice: Choice, old: bool) -> Surveyed {
    let (given, distrusted) = (choice.expected(), missing(&choice));
    let mut notes = choice.notes;
    if old {
        notes.push(
            "how much of it the old copy at the target has is unknown until the target reads it"
                .to_owned(),
        );
    }
    // As a migration would find it then.
    let base = if distrusted.len() > MAX_DISTRUSTED {
        Base::Refused { why: "no provider has enough of it".to_owned() }
    } else {
        Base::Replica { generation: choice.generation, distrusted, unproved: true }
    };
    Surveyed { base, given, notes }
}

/// What lies here of it, as a migration would find it.
fn base_here(parts: &Parts) -> Base {
    let SeedImage { image, ancestors, .. } = &parts.wanted;
    let Some(entry) = parts.at_name() else { return Base::Empty };
    let record = entry.record();
    if record.state != CopyState::Replica || record.id != image.id || record.device {
        return Base::Empty;
    }
    match record.base_for(image, ancestors, &parts.pool) {
        Ok(ReplicaNote { generation, distrusted, unproved, .. }) => {
            Base::Replica { generation, distrusted, unproved }
        }
        Err(why) => Base::Refused { why: why.to_string() },
    }
}

/// What is said where a migration that came to nothing has left its part.
fn earlier_try(parts: &Parts) -> Option<String> {
    let record = parts.at_name()?.record();
    let same = record.state == CopyState::Incoming && record.id == parts.wanted.image.id;
    let why = "an earlier attempt has left blocks at the target: how many of them can be used is \
               unknown until the hosts compare them";
    same.then(|| why.to_owned())
}

/// The regions of which nobody can give everything.
fn missing(choice: &Choice) -> Vec<u64> {
    let masks = choice.masks.iter().zip(0..);
    let mut regions: Vec<u64> = masks
        .filter(|(mask, _)| **mask == 0)
        .map(|(_, task): (_, u64)| task / REGION_TASKS)
        .collect();
    regions.dedup();
    regions
}
