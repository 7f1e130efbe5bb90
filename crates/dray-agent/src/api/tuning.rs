//! How to migrate beyond the strategy and the order.

use super::command::Strategy;
use super::error::{ApiError, ErrorKind};
use serde::{Deserialize, Serialize};

/// Whether the guest's writes are slowed while dirty blocks are sent again.
pub use dray_engine::throttle::Mode as Throttle;

/// Settings that some strategies use.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tuning {
    /// Slows the guest's writes during Sync.
    pub throttle: Throttle,
}

impl Tuning {
    /// Whether nothing was asked for.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the strategy uses everything that was asked for.
    ///
    /// # Errors
    /// `Invalid`, naming the first option that it does not use.
    pub fn check(&self, strategy: Strategy) -> Result<(), ApiError> {
        if self.throttle != Throttle::None && !syncs(strategy) {
            let why = format!("{strategy} does not send what the guest writes before the handover");
            return Err(refused("--throttle", strategy, &why)
                .hint("leave --throttle out, or use pre-copy or mirror"));
        }
        Ok(())
    }
}

/// Whether dirty blocks are sent again, round by round, while the guest runs at the source.
const fn syncs(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::PreCopy | Strategy::Mirror | Strategy::HotSet)
}

fn refused(option: &str, strategy: Strategy, why: &str) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("cannot use {option} with {strategy}"), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_strategy_uses_is_accepted() {
        let slowed = Tuning { throttle: Throttle::Soft };
        for strategy in [Strategy::PreCopy, Strategy::Mirror, Strategy::HotSet] {
            slowed.check(strategy).unwrap();
        }
        for strategy in [Strategy::PostCopy, Strategy::Hybrid, Strategy::Deferred] {
            let error = slowed.check(strategy).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            assert!(error.what.contains("--throttle") && error.hint.is_some(), "{error:?}");
            Tuning::default().check(strategy).unwrap();
        }
    }
}
