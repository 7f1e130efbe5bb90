//! Options of `dray migrate` that only some strategies use; the agent refuses the others.

use super::hot_set::HotSetArgs;
use super::migrate::duration;
use clap::ValueEnum;
use dray_api::{HotSet, Throttle, Tuning};
use std::time::Duration;

/// What they are.
#[derive(clap::Args, Debug)]
pub struct TuningArgs {
    /// Slow the guest's writes from the end of the copy until the handover (pre-copy, mirror, hot-set)
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    throttle: ThrottleArg,
    /// Slow the migration down before the guest's writes take longer by more than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_added_latency: Option<Duration>,
    #[command(flatten)]
    hot_set: HotSetArgs,
}

/// How a guest is slowed, as it is typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
enum ThrottleArg {
    /// Do not slow the guest
    #[default]
    None,
    /// When the guest writes more on average than the link can send again
    Soft,
    /// After each write, until the link could have sent it again
    Aggressive,
}

impl TuningArgs {
    /// The same for the agent.
    pub fn resolve(&self) -> Tuning {
        Tuning {
            throttle: match self.throttle {
                ThrottleArg::None => Throttle::None,
                ThrottleArg::Soft => Throttle::Soft,
                ThrottleArg::Aggressive => Throttle::Aggressive,
            },
            hot_set: self.hot_set(),
            max_added_latency_ms: self.max_added_latency.map(|time| time.as_secs_f64() * 1e3),
        }
    }

    /// None when none of its options was given.
    fn hot_set(&self) -> Option<HotSet> {
        let HotSetArgs { observe, threshold, segment, read_weight, handover_size } = &self.hot_set;
        let given = observe.is_some()
            || threshold.is_some()
            || segment.is_some()
            || read_weight.is_some()
            || handover_size.is_some();
        let usual = HotSet::default();
        let hot_set = HotSet {
            observe_ms: observe.map_or(usual.observe_ms, |time| time.as_millis() as u64),
            threshold: threshold.unwrap_or(usual.threshold),
            segment: segment.map_or(usual.segment, |size| size.0),
            read_weight: read_weight.unwrap_or(usual.read_weight),
            handover_size: handover_size.map(|size| size.0),
        };
        given.then_some(hot_set)
    }
}
