//! What `dray migrate`'s parameters of hot-set mean in a simulation.

use crate::commands::hot_set::HotSetArgs;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_sim::replay::{HotSet, Settings};
use dray_types::{BLOCK_SIZE, ByteSize};

/// What they are, and how much Sync sends at a time.
#[derive(clap::Args, Debug)]
pub struct SyncArgs {
    #[command(flatten)]
    hot_set: HotSetArgs,
    /// Size of the pieces that are sent again when a block of them was written [default: 4KiB]
    #[arg(long, value_name = "SIZE")]
    sync_unit: Option<ByteSize>,
}

impl SyncArgs {
    /// Puts them into the settings.
    pub fn apply(&self, settings: &mut Settings) -> ApiResult<()> {
        let given = &self.hot_set;
        let mut rule = settings.hot_set.rule;
        rule.threshold = given.threshold.unwrap_or(rule.threshold);
        rule.segment = given.segment.map_or(rule.segment, |size| size.0);
        rule.read_weight = given.read_weight.unwrap_or(rule.read_weight);
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
            observed: given.observe.map(|time| time.as_nanos() as u64),
            handover_size: given.handover_size.map(|size| size.0),
            endless: false,
        };
        Ok(())
    }
}

fn invalid(option: &str, why: &str) -> Refusal {
    Refusal::new(ErrorKind::Invalid, format!("cannot use {option}"), why)
}
