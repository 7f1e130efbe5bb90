//! Hot-set's parameters as they are typed, for `dray migrate` and for a simulation.

use super::migrate::duration;
use dray_types::ByteSize;
use std::time::Duration;

/// What they are; each has a default of its own where it is used.
#[derive(clap::Args, Debug)]
pub struct HotSetArgs {
    /// hot-set: count the guest's accesses for this time before the copy
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub observe: Option<Duration>,
    /// hot-set: copy segments with at least this score; 0 copies all [default: 1]
    #[arg(long, value_name = "SCORE")]
    pub threshold: Option<f64>,
    /// hot-set: size of a segment [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub segment: Option<ByteSize>,
    /// hot-set: weight of reads in the score, from 0 to 1 [default: 0.5]
    #[arg(long, value_name = "WEIGHT")]
    pub read_weight: Option<f64>,
    /// hot-set: hand over when no more than this is dirty; the target fetches it later
    #[arg(long, value_name = "SIZE")]
    pub handover_size: Option<ByteSize>,
}
