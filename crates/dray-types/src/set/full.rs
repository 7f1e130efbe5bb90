//! Runs of leaves that are full.

use std::collections::BTreeMap;

/// Leaves that are full, as runs: a full image of any size is one.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct FullLeaves {
    /// By the first leaf of each run, the one behind its last; no run touches the next.
    runs: BTreeMap<u64, u64>,
}

impl FullLeaves {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// How many leaves.
    pub(super) fn len(&self) -> u64 {
        self.runs.iter().map(|(start, end)| end - start).sum()
    }

    /// How many of the leaves `start .. end`.
    pub(super) fn count(&self, start: u64, end: u64) -> u64 {
        let first = self.run_at(start).map_or(start, |(first, _)| first);
        let inside = self.runs.range(first..end.max(first));
        inside.map(|(&from, &to)| to.min(end).saturating_sub(from.max(start))).sum()
    }

    /// The run that `leaf` is in.
    pub(super) fn run_at(&self, leaf: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.runs.range(..=leaf).next_back()?;
        (end > leaf).then_some((start, end))
    }

    /// The run that `leaf` is in, or else the first one behind it.
    pub(super) fn next_run(&self, leaf: u64) -> Option<(u64, u64)> {
        let behind = || self.runs.range(leaf..).next().map(|(&start, &end)| (start, end));
        self.run_at(leaf).or_else(behind)
    }

    /// All runs, in order.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.runs.iter().map(|(&start, &end)| (start, end))
    }

    /// The leaves `start .. end` are full.
    pub(super) fn insert(&mut self, start: u64, end: u64) {
        let (mut first, mut behind) = (start, end);
        while let Some((&from, &to)) = self.runs.range(..=behind).next_back() {
            if to < first {
                break;
            }
            self.runs.remove(&from);
            (first, behind) = (first.min(from), behind.max(to));
        }
        self.runs.insert(first, behind);
    }

    /// The leaves `start .. end` are not full.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        while let Some((&from, &to)) = self.runs.range(..end).next_back() {
            if to <= start {
                return;
            }
            self.runs.remove(&from);
            if to > end {
                self.runs.insert(end, to);
            }
            if from < start {
                self.runs.insert(from, start);
            }
        }
    }
}
