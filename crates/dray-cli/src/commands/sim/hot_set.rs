//! Options of a simulation that only hot-set uses, as those of `dray migrate`.

use crate::commands::migrate::duration;
use dray_agent::api::{ApiError, ApiResult, ErrorKind};
use dray_sim::replay::{HotSet, Settings};
use dray_types::{BLOCK_SIZE, ByteSize};
use std::time::Duration;

/// What they are.
#[derive(clap::Args, Debug)]
pub struct HotSetArgs {
    /// hot-set: count what the guest used for so long before the start [default: the history]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    observe: Option<Duration>,
    /// hot-set: copy segments with this score and more; 0 copies all [default: 1]
    #[arg(long, value_name = "SCORE")]
    threshold: Option<f64>,
    /// hot-set: size of a segment [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    segment: Option<ByteSize>,
    /// hot-set: weight of reads in the score, from 0 to 1 [default: 0.5]
    #[arg(long, value_name = "WEIGHT")]
    read_weight: Option<f64>,
    /// hot-set: hand over when no more than this is dirty, and fetch that later
    #[arg(long, value_name = "SIZE")]
    handover_size: Option<ByteSize>,
    /// Send whole pieces of this size again of which a block was written [default: 4KiB]
    #[arg(long, value_name = "SIZE")]
    sync_unit: Option<ByteSize>,
}

impl HotSetArgs {
    /// Puts them into the settings.
    pub fn apply(&self, settings: &mut Settings) -> ApiResult<()> {
        let mut rule = settings.hot_set.rule;
        rule.threshold = self.threshold.unwrap_or(rule.threshold);
        rule.segment = self.segment.map_or(rule.segment, |size| size.0);
        rule.read_weight = self.read_weight.unwrap_or(rule.read_weight);
        let unit = self.sync_unit.map_or(settings.sync_unit, |size| size.0);
        for (name, size) in [("--segment", rule.segment), ("--sync-unit", unit)] {
            if size == 0 || !size.is_multiple_of(BLOCK_SIZE) {
                return Err(invalid(name, "a size is a multiple of 4 KiB"));
            }
        }
        if !(0.0..=1.0).contains(&rule.read_weight) {
            return Err(invalid("--read-weight", "a weight is from 0 to 1"));
        }
        if rule.threshold.is_nan() || rule.threshold < 0.0 {
            return Err(invalid("--threshold", "a score is not below zero"));
        }
        settings.sync_unit = unit;
        settings.hot_set = HotSet {
            rule,
            observed: self.observe.map(|time| time.as_nanos() as u64),
            handover_size: self.handover_size.map(|size| size.0),
        };
        Ok(())
    }
}

fn invalid(option: &str, why: &str) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("cannot use {option}"), why)
}
