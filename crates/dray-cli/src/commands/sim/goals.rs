//! What `dray migrate`'s goals mean in a simulation.

use crate::commands::migrate::duration;
use dray_sim::replay::Settings;
use std::time::Duration;

/// What they are. A simulation has no reads of its own disk to slow down, so that the added latency is
/// that of reads that wait for a block, and only `auto` chooses by it.
#[derive(clap::Args, Debug)]
pub struct GoalArgs {
    /// Longest stop of the guest to aim for, in milliseconds or as 300ms or 1.5s [default: 300ms]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_downtime: Option<Duration>,
    /// auto: reads may take longer on average by this much while blocks are missing
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_added_latency: Option<Duration>,
    /// auto: longest duration of the migration to aim for, as 90s or 10m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
}

impl GoalArgs {
    /// Puts them into the settings.
    pub fn apply(&self, settings: &mut Settings) {
        let nanos = |time: Duration| time.as_nanos().min(u128::from(u64::MAX)) as u64;
        settings.max_downtime = self.max_downtime.map_or(settings.max_downtime, nanos);
        settings.max_added_latency = self.max_added_latency.map(nanos);
        settings.deadline = self.deadline.map(nanos);
    }
}
