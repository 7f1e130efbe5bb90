//! Neighbouring generations become one, so that a line of frequent backups reaches back far.
//!
//! What is merged is known no longer: a copy of it is of no use any more, but one of any other
//! generation is, as before. So only backups go, never a handover, which has left a replica somewhere,
//! nor one that the caller still needs. Of the others those stay that lie furthest from their neighbours
//! for their age: dense of late, ever sparser further back.

use super::Generation;
use dray_types::{BlockSet, GenerationId};

/// Closed generations from which on a line is merged: this many and the handovers since the last backup
/// are below what is remembered.
pub const MERGED: usize = 56;
/// The newest generations that are never merged.
const NEWEST: usize = 16;

/// Merges until there are few enough, or none is left that may go. `held` may not.
pub(super) fn merge(past: &mut Vec<Generation>, held: &[GenerationId], now_unix_ms: u64) {
    while past.len() > MERGED {
        let Some(at) = most_crowded(past, held, now_unix_ms) else { return };
        let gone = past.remove(at);
        past[at].changed.union_with(&gone.changed);
        if at == 0 {
            // Nobody can have a parent of the first generation.
            past[at].changed = BlockSet::new();
        }
    }
}

/// The generation that leaves the smallest gap for its age when it goes.
fn most_crowded(past: &[Generation], held: &[GenerationId], now: u64) -> Option<usize> {
    let may_go = |at: &usize| !past[*at].is_handover() && !held.contains(&past[*at].at.id);
    let gap = |at: usize| {
        let before = past[at.saturating_sub(1)].closed_unix_ms;
        let age = now.saturating_sub(past[at].closed_unix_ms).max(1);
        past[at + 1].closed_unix_ms.saturating_sub(before) as f64 / age as f64
    };
    let candidates = (0..past.len().saturating_sub(NEWEST)).filter(may_go);
    candidates.min_by(|&a, &b| gap(a).total_cmp(&gap(b)))
}
