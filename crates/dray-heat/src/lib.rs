//! What a guest's accesses say about the order in which its blocks should move.
//!
//! [`Heat`] counts the accesses to one image and gives [`Schedule`](dray_types::Schedule)s at any
//! time. It is pure: the caller says what happened, nothing here reads a clock.
//!
//! "The paper" is *Workload-aware live storage migration for clouds* (Zheng, Ng, Sripanidkulchai;
//! VEE 2011), the "Scheduling paper" elsewhere in dray.

#![forbid(unsafe_code)]

mod chunks;
mod config;
mod coverage;
mod encode;
mod frequency;
mod heat;
mod log;
pub mod offline;
mod order;
mod positions;
mod round;
mod segments;
mod spread;
mod track;
mod trial;
mod watch;

pub use config::{ColdOrder, Count, HeatConfig, History};
pub use coverage::CandidateCoverage;
pub use encode::DecodeError;
pub use heat::{Heat, MAX_ACCESS_BLOCKS, Op};
pub use log::AccessLog;
pub use segments::SegmentScore;
pub use trial::Regret;
pub use watch::Watch;
