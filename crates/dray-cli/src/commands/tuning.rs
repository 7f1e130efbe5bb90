//! Options of `dray migrate` that only some strategies use; the agent refuses the others.

use clap::ValueEnum;
use dray_agent::api::{Throttle, Tuning};

/// What they are.
#[derive(clap::Args, Debug)]
pub struct TuningArgs {
    /// Slow the guest's writes while they are sent again (pre-copy, mirror)
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    throttle: ThrottleArg,
}

/// How a guest is slowed, as it is typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
enum ThrottleArg {
    /// Not at all
    #[default]
    None,
    /// When it writes more than can be sent again on average
    Soft,
    /// After each write, until that could have been sent again
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
        }
    }
}
