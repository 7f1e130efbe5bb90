//! Replay of a block trace through the engine of the agents, in virtual time.
//!
//! [`replay()`] takes a trace, skips to the start of a migration, feeds the accesses before it to
//! the heat, and then lets the trace go on while [`dray_engine::Source`] and [`dray_engine::Target`]
//! migrate the disk over a simulated link. Disks are sets of blocks; nothing is stored. The method
//! is that of section 7.1 of the scheduling paper (Zheng, Ng and Sripanidkulchai, VEE 2011);
//! `docs/explanation/simulation.md` says where the engine differs from the paper's simulator.
//!
//! * [`settings`]: what is migrated and how. [`outcome`]: what it cost.
//! * `world`: time and events. `source`, `target`: what the agents' shells do, on sets of blocks.
//! * `orders`, `tuning`: what the history says. `guest`: where an access goes and what it waits for. `link`: bandwidth, delay, the penalty.
//! * [`livefs`]: guests of the LiveFS paper's experiments. [`oracle`]: orders that know the future.
//! * [`picture`]: time against block number. [`study`]: many replays in one table.

mod guest;
mod link;
pub mod livefs;
pub mod oracle;
mod orders;
pub mod outcome;
pub mod picture;
pub mod settings;
mod source;
pub mod study;
mod target;
mod tuning;
mod world;

pub use dray_engine::throttle::Mode as Throttling;
pub use outcome::Outcome;
pub use picture::Picture;
pub use settings::{Chunks, Given, HotSet, Order, Settings};

use dray_engine::Tuning;
use dray_heat::Op as HeatOp;
use dray_trace::{Op, Record};
use dray_types::BLOCK_SIZE;
use orders::Orders;
use std::collections::VecDeque;
use std::fmt;
use tuning::Recent;
use world::World;

/// Why a replay came to nothing.
#[derive(Debug)]
pub enum ReplayError<E> {
    /// The trace could not be read.
    Trace(E),
    /// The trace accesses the disk behind its end.
    DiskTooSmall {
        /// One past the last byte of the access.
        end: u64,
    },
    /// The engine broke an invariant: a bug.
    Broken(String),
}

impl<E: fmt::Display> fmt::Display for ReplayError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trace(why) => why.fmt(f),
            Self::DiskTooSmall { end } => {
                write!(f, "the trace accesses byte {}, which lies behind the disk's end", end - 1)
            }
            Self::Broken(why) => write!(f, "an invariant is broken: {why}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for ReplayError<E> {}

/// Replays the records of a trace, in order of time, through one migration.
pub fn replay<E>(
    settings: &Settings,
    records: impl IntoIterator<Item = Result<Record, E>>,
) -> Result<Outcome, ReplayError<E>> {
    let mut trace = Trace { records: records.into_iter(), end: settings.disk, count: 0 };
    let (orders, recent, tuning, mut next) = trace.history(settings)?;
    let mut world = World::new(settings, orders, recent, tuning);
    while !world.is_over() {
        while let Some(record) = next {
            let time = record.time_ns.saturating_sub(settings.start);
            // Asked each time: what the access before this one set off may come before it.
            if time > world.next_event() {
                break;
            }
            world.access(time, &record);
            next = trace.next()?;
        }
        if next.is_none() {
            world.trace_is_over();
        }
        world.step();
        if let Some(why) = world.broken() {
            return Err(ReplayError::Broken(why));
        }
    }
    let records = trace.count;
    Ok(world.outcome(records))
}

/// A trace that is being read.
struct Trace<I> {
    records: I,
    /// No access may end behind this byte.
    end: u64,
    count: u64,
}

impl<E, I: Iterator<Item = Result<Record, E>>> Trace<I> {
    #[inline]
    fn next(&mut self) -> Result<Option<Record>, ReplayError<E>> {
        let Some(record) = self.records.next() else { return Ok(None) };
        let record = record.map_err(ReplayError::Trace)?;
        self.count += 1;
        if record.end() > self.end {
            return Err(ReplayError::DiskTooSmall { end: record.end() });
        }
        Ok(Some(record))
    }

    /// Reads up to the start; returns what the last accesses before it say, and the first after.
    fn history(
        &mut self,
        settings: &Settings,
    ) -> Result<(Orders, Recent, Tuning, Option<Record>), ReplayError<E>> {
        let mut recent = VecDeque::with_capacity(settings.history.min(1 << 20));
        let mut first = None;
        while let Some(record) = self.next()? {
            if record.time_ns >= settings.start {
                first = Some(record);
                break;
            }
            if recent.len() == settings.history {
                recent.pop_front();
            }
            if settings.history > 0 {
                recent.push_back(record);
            }
        }
        let tuning = tuning::tuning(settings, recent.iter());
        let orders = Orders::new(settings, recent.iter());
        Ok((orders, Recent::new(settings, recent), tuning, first))
    }
}

fn heat_op(op: Op) -> HeatOp {
    match op {
        Op::Read => HeatOp::Read,
        Op::Write => HeatOp::Write,
    }
}

/// Bytes in so many blocks.
fn bytes(blocks: u64) -> u64 {
    blocks * BLOCK_SIZE
}
