//! The words of dray as types: blocks, ranges, sets of blocks, ids, epochs, sizes and rates.
//!
//! Nothing here does I/O, reads a clock or draws a random number; every other crate may depend on
//! this one and this one depends on none of them.
//!
//! * [`range`]: a run of 4 KiB blocks, and how byte ranges map onto blocks.
//! * [`set`]: [`BlockSet`], the set of blocks that plans, maps and journals are made of.
//! * [`ids`]: random 128-bit ids, epochs and attempts.
//! * [`list`]: lists and sets of a peer, bounded while they are decoded.
//! * [`refusal`]: [`Refusal`], why something was not done.
//! * [`schedule`]: [`Schedule`], an order in which the blocks of an image move.
//! * [`size`]: what an operator types (`800Mbit`, `2GiB`) and what it means.
//! * [`strategy`]: [`Strategy`], which blocks move before the guest and which after it.
//! * [`text`]: what others say, as it may be shown.

#![forbid(unsafe_code)]

pub mod endpoint;
pub mod ids;
pub mod list;
pub mod range;
pub mod refusal;
pub mod schedule;
pub mod set;
pub mod size;
pub mod strategy;
pub mod text;

pub use endpoint::{Endpoint, EndpointKind};
pub use ids::{Ancestor, Attempt, BatchId, Epoch, GenerationId, ImageId, ImageIndex, MigrationId};
pub use range::{BLOCK_SIZE, BlockRange, MAX_RUN_BLOCKS};
pub use refusal::{ErrorKind, Refusal};
pub use schedule::Schedule;
pub use set::BlockSet;
pub use size::{BitRate, ByteSize};
pub use strategy::{Choice, Strategy, StrategyTraits};
pub use text::Why;

/// Most images of one chain, the active one among them: QEMU's own commands make chains of a few tens at most.
pub const MAX_CHAIN: usize = 200;
