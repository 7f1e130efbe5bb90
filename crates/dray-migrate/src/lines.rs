//! The closed generations of a migration's images on their way to the target: bounded in number, bytes and memory,
//! whoever sends them.

use dray_engine::lineage::{Generation, MAX_PAST};
use dray_types::BlockSet;
use dray_types::list::HasSet;
use dray_wire::control::{MAX_IMAGES, MAX_PARTS};
use serde::{Deserialize, Serialize};

/// Most generations of all images together.
pub const MAX_GENERATIONS: usize = MAX_IMAGES * MAX_PAST;
/// Most bytes of all their sets.
pub const MAX_BYTES: usize = 64 << 20;

/// A closed generation of an image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Closed {
    /// The image's number in the migration.
    pub image: u16,
    /// The generation.
    pub generation: Generation,
}

impl HasSet for Closed {
    fn set(&self) -> &BlockSet {
        &self.generation.changed
    }
}

/// What a set takes: bytes on the wire, and parts in memory.
#[derive(Clone, Copy, Default)]
struct Cost {
    bytes: usize,
    parts: u64,
}

impl Cost {
    fn of(generation: &Generation) -> Self {
        let set = &generation.changed;
        Self { bytes: set.encode().len(), parts: set.parts() }
    }

    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, parts: self.parts + other.parts }
    }

    fn is_fair(self) -> bool {
        self.bytes <= MAX_BYTES && self.parts <= MAX_PARTS
    }
}

/// The lines of the images, in the migration's order, as they are sent: each oldest first. What is too much to send
/// loses its oldest generations, as if they had been forgotten.
pub fn to_send(mut lines: Vec<Vec<Generation>>) -> Vec<Closed> {
    let cost_of = |line: &Vec<Generation>| line.iter().map(Cost::of).collect::<Vec<_>>();
    let mut costs: Vec<Vec<Cost>> = lines.iter().map(cost_of).collect();
    let sum = |costs: &[Cost]| costs.iter().copied().fold(Cost::default(), Cost::plus);
    let total =
        |costs: &[Vec<Cost>]| costs.iter().map(|line| sum(line)).fold(Cost::default(), Cost::plus);
    while !total(&costs).is_fair() {
        let largest = costs.iter().enumerate().max_by_key(|(_, line)| sum(line).bytes);
        let Some((image, _)) = largest else { break };
        lines[image].remove(0);
        costs[image].remove(0);
        // Of the first that is remembered nobody needs to know what was written.
        if let Some(first) = lines[image].first_mut() {
            first.changed = BlockSet::new();
            costs[image][0] = Cost::of(first);
        }
    }
    let numbered = (0..).zip(lines);
    let closed = |(image, line): (u16, Vec<Generation>)| {
        line.into_iter().map(move |generation| Closed { image, generation })
    };
    numbered.flat_map(closed).collect()
}

/// The lines of so many images, as they came.
pub fn per_image(closed: Vec<Closed>, images: usize) -> Vec<Vec<Generation>> {
    let mut lines = vec![Vec::new(); images];
    for Closed { image, generation } in closed {
        let Some(line) = lines.get_mut(usize::from(image)) else { continue };
        if line.len() < MAX_PAST {
            line.push(generation);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_engine::lineage::Reason;
    use dray_types::{Ancestor, BlockRange, GenerationId};

    /// A generation in which the first block of this many leaves was written.
    fn generation(number: u64, leaves: u64) -> Generation {
        let at = Ancestor { id: GenerationId(u128::from(number)), number };
        let leaf = |leaf| BlockRange::new(leaf << 15, 1);
        let changed = (0..leaves).map(leaf).collect();
        Generation { at, reason: Reason::Backup, host: "a".into(), closed_unix_ms: 7, changed }
    }

    fn numbers(line: &[Generation]) -> Vec<u64> {
        line.iter().map(|generation| generation.at.number).collect()
    }

    #[test]
    fn what_is_sent_comes_per_image() {
        let lines = vec![vec![generation(1, 3), generation(2, 5)], vec![], vec![generation(9, 1)]];
        assert_eq!(per_image(to_send(lines.clone()), 3), lines);
        assert_eq!(per_image(to_send(lines.clone()), 1), lines[..1]);
    }

    #[test]
    fn of_what_is_too_much_the_oldest_of_the_largest_line_is_forgotten() {
        let most = MAX_PARTS / 2;
        let large = (1..=3).map(|number| generation(number, most)).collect();
        let lines = per_image(to_send(vec![large, vec![generation(9, 1)]]), 2);
        assert_eq!((numbers(&lines[0]), numbers(&lines[1])), (vec![2, 3], vec![9]));
        assert!(lines[0][0].changed.is_empty() && !lines[0][1].changed.is_empty());
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_off() {
        let closed = (0..).map(|number| Closed { image: 0, generation: generation(number, 0) });
        let lines = per_image(closed.take(MAX_PAST + 1).collect(), 1);
        assert_eq!(lines[0].len(), MAX_PAST);
    }
}
