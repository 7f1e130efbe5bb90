//! Derives the order in which blocks should move from a guest's accesses.
//!
//! [`Heat`] counts the accesses to one image and gives [`Schedule`](dray_types::Schedule)s at any
//! time. It is pure: the caller says what happened, nothing here reads a clock. "The paper" is
//! *Workload-aware live storage migration for clouds* (Zheng, Ng, Sripanidkulchai; VEE 2011), the
//! "Scheduling paper" elsewhere in dray.
//!
//! ```
//! use dray_heat::{AccessLog, Heat, HeatConfig, Op};
//! use dray_types::BlockRange;
//!
//! // On the I/O path: any thread, never waits.
//! let log = AccessLog::new(8192);
//! log.push(Op::Write, BlockRange::covering(5 << 30, 65536));
//! // Now and then, in one place.
//! let mut heat = Heat::new(BlockRange::whole(32 << 30).len, HeatConfig::default());
//! log.drain_into(&mut heat);
//! // At any time.
//! let last = *heat.copy_schedule().ranges().last().unwrap();
//! assert!(last.contains(BlockRange::covering(5 << 30, 65536)));
//! ```
//!
//! # How it counts
//! Reads and writes are apart. A chunk's frequency is the number of its blocks that were accessed.
//! Chunks with a count sit in a list of frequencies (the paper's figure 10); an access moves its
//! chunk from one frequency to another, without a sort. After N operations a round ends. With
//! [`HeatConfig::paper`] the round's bitmaps choose the chunk size of the next one (figure 11) and
//! schedules are made of the finished round; before the first has ended, of what there is. The
//! default keeps chunks of 128 KiB and halves every count at the end of a round, once in N operations
//! and in time proportional to the chunks with a count, so that nothing is thrown away at once.
//!
//! # How it orders
//! *Copy*: what was never written first, then from least to most written. *Backfill*: from most to
//! least read, then the rest. The paper chooses one chunk size and takes what was never accessed in
//! address order. The default gives every chunk a density of accesses, a mixture of what chunks of
//! nine sizes foretell (`density`), because no one size is right: replayed over four real traces and
//! five generated loads, the best fixed size was 128 KiB for some and 16 MiB for others, and which it
//! was differed between reads and writes. What lies ahead of streams (`streams`: logs, files that grow)
//! is part of the mixture as well: it may never have been accessed, and will be next. The weights of
//! the parts are learnt from how well each foretold the accesses of the trials below. Neighbours that
//! differ little are joined (`joined`) until the schedule's jumps take no more than a 56th of the time
//! of a copy, and where a jump delays more than it gains; what one costs is the caller's to say ([`Heat::set_jump`]). [`ColdOrder::FarFirst`] is what a single size can do:
//! by frequency, then by nearness to an access.
//!
//! # When it does not order
//! Two guards, the paper's section 4.2. Before a migration: schedules made of the first part of the
//! history are held against the accesses of the next ([`Regret`] has the formula), again and again
//! with parts of 256 operations up to half a round; a schedule that does worse than address order,
//! jumps included, is not given out. That goes on for as long as the guest is at the source; when a
//! migration begins, a trial that is not under way begins at once ([`Heat::try_now`]). Accesses that begin somewhere else and were worse with the
//! schedule than in address order, by more than chance explains, end a trial at once: what the guest did
//! before counts half then, as often as they say so. Where it
//! reads from the target, the engine holds the reads that wait against the order it was given
//! (`dray_engine::watch`).
//!
//! # What it costs
//! Memory follows the chunks with a count, never the image. With the default settings the counts,
//! trials and bitmaps of an image stay below 12 MiB whatever the guest does (an image of 16 TiB under
//! random accesses is the test); past [`HeatConfig::max_chunks`] the chunk size doubles. An
//! [`AccessLog`] takes 8 bytes a place. An access is counted in constant time: a table finds its chunk
//! (`index`), another one the bucket of a low frequency (`lows`), a third the stream that it goes on
//! (`heads`). `cargo run --release -p dray-heat --example cost` measures the time of a push, of a
//! count part by part, and of a schedule. [`DrainPause`] says how often to drain a log, so that a guest
//! that makes more accesses than a 200th of the machine can count is counted in samples.
//!
//! # What lives where
//! `frequency` the list (`index`, `lows`), `round` and `track` the rounds, `coverage` the paper's chunk size, `density`
//! the mixture, `streams` (`heads`) what goes on by address, `order` the schedules, `joined` fewer jumps, `positions` and `trial` the guard, `segments` scores for the hot set,
//! `encode` the durable form, `log` the I/O path, `drain` how often it is emptied, [`offline`] the paper's algorithms as written.

#![forbid(unsafe_code)]

mod chunks;
mod config;
mod coverage;
mod density;
mod drain;
mod encode;
mod frequency;
mod heads;
mod heat;
mod index;
mod joined;
mod log;
mod lows;
pub mod offline;
mod op;
mod order;
mod positions;
mod round;
mod segments;
mod spread;
mod streams;
mod track;
mod trial;

pub use config::{ColdOrder, Count, HeatConfig, History};
pub use coverage::CandidateCoverage;
pub use drain::DrainPause;
pub use encode::DecodeError;
pub use heat::{Heat, MAX_ACCESS_BLOCKS};
pub use log::AccessLog;
pub use op::Op;
pub use segments::SegmentScore;
pub use trial::Regret;
