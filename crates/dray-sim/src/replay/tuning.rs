//! Settings of the engine that follow from the history: what hot-set and auto copy first.

use super::settings::{HotSet, Settings};
use dray_engine::hotset::Counts;
use dray_engine::plan::{self, Chunk, Footprint, Goals, Load};
use dray_engine::{SECOND, Tuning};
use dray_trace::{Op, Record};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, Choice, ImageIndex};
use std::collections::VecDeque;

/// Chunks that auto decides about, in blocks: 4 MiB, the smallest that heat counts.
const AUTO_CHUNK: u64 = 1024;

/// The settings of a migration that begins after these accesses.
pub(super) fn tuning<'a>(
    settings: &Settings,
    history: impl Iterator<Item = &'a Record> + Clone,
) -> Tuning {
    let copy_only = match settings.strategy.traits().choice {
        Choice::Hot => Some(vec![hot(settings, history)]),
        Choice::Planned => Some(auto(settings, settings.start, history)),
        Choice::All => None,
    };
    let HotSet { handover_size, endless, .. } = settings.hot_set;
    let throttle = settings.throttle;
    Tuning { copy_only, handover_size, endless, throttle, ..Tuning::default() }
}

/// The accesses that auto's choice is made of while the guest goes on.
pub(super) struct Recent {
    accesses: VecDeque<Record>,
    most: usize,
}

impl Recent {
    /// What is known at the start; nothing where nobody will ask.
    pub(super) fn new(settings: &Settings, history: VecDeque<Record>) -> Self {
        let chooses = settings.strategy.traits().choice == Choice::Planned;
        let most = if chooses { settings.history } else { 0 };
        Self { accesses: if chooses { history } else { VecDeque::new() }, most }
    }

    /// The guest went on.
    #[inline]
    pub(super) fn access(&mut self, record: &Record) {
        if self.most == 0 {
            return;
        }
        if self.accesses.len() == self.most {
            self.accesses.pop_front();
        }
        self.accesses.push_back(*record);
    }

    /// The planner's choice by now, in nanoseconds of the trace; none where nothing is chosen.
    pub(super) fn choice(&self, settings: &Settings, now: u64) -> Option<BlockSet> {
        let chooses = self.most > 0;
        chooses.then(|| auto(settings, now, self.accesses.iter()).swap_remove(0))
    }
}

/// LiveFS's rule; the end of the history is the observation period.
fn hot<'a>(settings: &Settings, history: impl Iterator<Item = &'a Record>) -> BlockSet {
    let rule = settings.hot_set.rule;
    let since = settings.hot_set.observed.map_or(0, |time| settings.start.saturating_sub(time));
    let segments = settings.disk.div_ceil(rule.segment) as usize;
    let mut counts = vec![Counts::default(); segments];
    for record in history.filter(|record| record.time_ns >= since) {
        let Some(counts) = counts.get_mut((record.offset / rule.segment) as usize) else {
            continue;
        };
        match record.op {
            Op::Read => counts.reads += 1,
            Op::Write => counts.writes += 1,
        }
    }
    rule.hot(&counts, settings.disk)
}

/// The planner's choice at a time, from the rates that the accesses before it show.
fn auto<'a>(
    settings: &Settings,
    now: u64,
    history: impl Iterator<Item = &'a Record> + Clone,
) -> Vec<BlockSet> {
    let whole = BlockRange::whole(settings.disk);
    let first = history.clone().next().map_or(now, |record| record.time_ns);
    let seconds = (now.saturating_sub(first) as f64 / SECOND as f64).max(1.0);
    let mut written = Footprint::default();
    let mut chunks: Vec<Chunk> = whole.pieces(AUTO_CHUNK).map(cold).collect();
    for record in history {
        let Some(chunk) = chunks.get_mut((record.blocks().start / AUTO_CHUNK) as usize) else {
            continue;
        };
        match record.op {
            Op::Read => {
                chunk.reads += 1.0 / seconds;
                written.note_read(record.blocks());
            }
            Op::Write => {
                chunk.written += record.length as f64 / seconds;
                written.note(record.blocks());
            }
        }
    }
    for chunk in chunks.iter_mut().filter(|chunk| chunk.written > 0.0) {
        chunk.areas = written.areas(chunk.range);
        chunk.read_there = written.share_read(chunk.range);
    }
    let load = Load {
        chunks,
        images: 1,
        link: settings.bandwidth as f64,
        rtt: 2.0 * settings.delay as f64 / SECOND as f64,
        memory: settings.memory as f64,
        memory_dirty: 0.0,
    };
    plan::choose(&load, &goals(settings), &[whole]).copy_only
}

fn goals(settings: &Settings) -> Goals {
    let seconds = |nanos: u64| nanos as f64 / SECOND as f64;
    Goals {
        max_downtime: Some(seconds(settings.max_downtime)),
        max_added_latency: settings.max_added_latency.map(seconds),
        deadline: settings.deadline.map(seconds),
        bandwidth: None,
    }
}

fn cold(range: BlockRange) -> Chunk {
    let bytes = range.len * BLOCK_SIZE;
    let image = ImageIndex(0);
    let areas = vec![range];
    Chunk { image, range, bytes, written: 0.0, areas, held: 0, reads: 0.0, read_there: 1.0 }
}
