//! The steps of a trace, as the console gives them.

use std::time::Duration;

use dray_guest::content::BLOCK;

use crate::disk::Blocks;

/// The most blocks of one step: 1 MiB.
const MAX_BLOCKS: u64 = 256;

/// One access.
#[derive(Clone, Copy)]
pub struct Step {
    /// When, from the beginning.
    pub at: Duration,
    /// A write; else a read that is checked.
    pub write: bool,
    /// Where.
    pub blocks: Blocks,
}

/// Accesses in order of time.
#[derive(Default)]
pub struct Steps(Vec<Step>);

impl Steps {
    /// Adds `MILLISECONDS W|R FIRST COUNT`, in blocks. Longer ones than 1 MiB are cut off.
    pub fn push(&mut self, text: &str) -> Result<(), String> {
        let words: Vec<&str> = text.split(' ').collect();
        let [at, op @ ("W" | "R"), first, count] = words[..] else {
            return Err("a step is MILLISECONDS W|R FIRST COUNT".to_owned());
        };
        let number = |word: &str| word.parse::<u64>().map_err(|e| format!("{word}: {e}"));
        let blocks = Blocks { first: number(first)?, count: number(count)?.clamp(1, MAX_BLOCKS) };
        self.0.push(Step { at: Duration::from_millis(number(at)?), write: op == "W", blocks });
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The `n`th.
    pub fn get(&self, n: u64) -> Option<&Step> {
        self.0.get(n as usize)
    }

    /// Whether all lie on a disk of so many blocks.
    pub fn fit(&self, disk: u64) -> bool {
        self.0.iter().all(|s| s.blocks.first.saturating_add(s.blocks.count) <= disk)
    }

    /// Bytes of the longest.
    pub fn longest(&self) -> usize {
        self.0.iter().map(|s| s.blocks.count as usize).max().unwrap_or(0) * BLOCK
    }
}
