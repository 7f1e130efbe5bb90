//! What the history before a start says of the order: the agent's heat, or the paper's algorithms.

use super::heat_op;
use super::settings::{Chunks, Given, Order, Settings};
use dray_engine::SECOND;
use dray_heat::{ColdOrder, Heat, HeatConfig, Op, offline};
use dray_trace::Record;
use dray_types::{BLOCK_SIZE, BlockRange, Schedule};

/// The share of the history that the paper's estimator of chunk sizes learns from (section 7.1).
const ALPHA: f64 = 0.7;

/// Makes schedules.
pub(super) enum Orders {
    /// Address order.
    None,
    /// What the agent does; it goes on learning.
    Heat(Box<Heat>),
    /// Made once, at the start, or given.
    Fixed {
        copy: Schedule,
        backfill: Schedule,
        /// Chunk sizes in bytes, of writes and of reads.
        chunks: (u64, u64),
    },
}

impl Orders {
    /// From the accesses before the start.
    pub(super) fn new<'a>(
        settings: &Settings,
        history: impl Iterator<Item = &'a Record> + Clone,
    ) -> Self {
        match &settings.given {
            Some(Given::Copy(copy)) => {
                let (copy, backfill) = (copy.clone(), Schedule::SEQUENTIAL);
                return Self::Fixed { copy, backfill, chunks: (0, 0) };
            }
            Some(Given::Backfill(_)) => return Self::None,
            None => {}
        }
        match settings.order {
            Order::Sequential => Self::None,
            Order::WorkloadAware | Order::PaperIncremental => {
                let mut heat = Heat::new(BlockRange::whole(settings.disk).len, config(settings));
                history.for_each(|record| heat.access(heat_op(record.op), record.blocks()));
                heat.try_now();
                Self::Heat(Box::new(heat))
            }
            Order::Paper => {
                let (copy, writes) = paper(settings, history.clone(), Op::Write);
                let (backfill, reads) = paper(settings, history, Op::Read);
                Self::Fixed { copy, backfill, chunks: (writes, reads) }
            }
        }
    }

    /// The order of Copy by now; none in address order.
    pub(super) fn copy(&self) -> Option<Schedule> {
        match self {
            Self::None => None,
            Self::Heat(heat) => Some(heat.copy_schedule()),
            Self::Fixed { copy, .. } => Some(copy.clone()),
        }
    }

    /// The order of Backfill by now; none in address order.
    pub(super) fn backfill(&self) -> Option<Schedule> {
        match self {
            Self::None => None,
            Self::Heat(heat) => Some(heat.backfill_schedule()),
            Self::Fixed { backfill, .. } => Some(backfill.clone()),
        }
    }

    /// Chunk sizes in bytes, of writes and of reads; zero without.
    pub(super) fn chunks(&self) -> (u64, u64) {
        match self {
            Self::None => (0, 0),
            Self::Heat(heat) => {
                let size = |op| heat.chunk_blocks(op) * BLOCK_SIZE;
                (size(Op::Write), size(Op::Read))
            }
            Self::Fixed { chunks, .. } => *chunks,
        }
    }

    /// Whether they change while the guest goes on.
    pub(super) fn learns(&self) -> bool {
        matches!(self, Self::Heat(_))
    }

    /// The guest went on.
    #[inline]
    pub(super) fn access(&mut self, record: &Record, range: BlockRange) {
        if let Self::Heat(heat) = self {
            heat.access(heat_op(record.op), range);
        }
    }
}

/// The agent's settings, with what a jump costs on this link; or the paper's.
fn config(settings: &Settings) -> HeatConfig {
    if settings.order == Order::PaperIncremental {
        return match settings.chunks {
            Chunks::Selected => HeatConfig::paper(),
            Chunks::Fixed(bytes) => HeatConfig {
                smallest_chunk_blocks: (bytes / BLOCK_SIZE).max(1),
                candidates: 1,
                ..HeatConfig::paper()
            },
        };
    }
    let jump = u128::from(settings.seek) * u128::from(settings.bandwidth) / u128::from(SECOND);
    let jump_blocks = (jump / u128::from(BLOCK_SIZE)) as u64;
    let config = HeatConfig { jump_blocks, ..settings.heat };
    match settings.chunks {
        Chunks::Selected => config,
        Chunks::Fixed(bytes) => HeatConfig {
            smallest_chunk_blocks: (bytes / BLOCK_SIZE).max(1),
            candidates: 1,
            cold: ColdOrder::FarFirst,
            ..config
        },
    }
}

/// The paper's figures 7 and 9 over the recorded history; also the chunk size in bytes.
fn paper<'a>(
    settings: &Settings,
    history: impl Iterator<Item = &'a Record>,
    op: Op,
) -> (Schedule, u64) {
    let blocks = BlockRange::whole(settings.disk).len;
    let accesses: Vec<(f64, BlockRange)> = history
        .filter(|record| heat_op(record.op) == op)
        .map(|record| (record.time_ns as f64 / SECOND as f64, record.blocks()))
        .collect();
    let chunk = match settings.chunks {
        Chunks::Fixed(bytes) => Some((bytes / BLOCK_SIZE).max(1)),
        Chunks::Selected => offline::chunk_size(&accesses, ALPHA, blocks, offline::BOUNDS)
            .map(|estimate| estimate.chunk_blocks),
    };
    // Without a history, or one too short to be split, there is nothing to order by.
    let Some(chunk) = chunk else { return (Schedule::SEQUENTIAL, 0) };
    let ranges: Vec<BlockRange> = accesses.into_iter().map(|(_, range)| range).collect();
    (offline::schedule(op, &ranges, chunk, blocks), chunk * BLOCK_SIZE)
}
