//! How to migrate beyond the strategy and the order.

use super::command::Strategy;
use super::error::{ApiError, ErrorKind};
use dray_engine::hotset::Rule;
use dray_types::BLOCK_SIZE;
use serde::{Deserialize, Serialize};

/// Whether the guest's writes are slowed while dirty blocks are sent again.
pub use dray_engine::throttle::Mode as Throttle;

/// Settings that some strategies use.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tuning {
    /// Slows the guest's writes during Sync.
    pub throttle: Throttle,
    /// What hot-set copies; its defaults when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_set: Option<HotSet>,
    /// Most milliseconds that the migration may add to the guest's writes; it slows down before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_added_latency_ms: Option<f64>,
}

/// Which blocks hot-set copies before the handover, and when it hands over (LiveFS).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HotSet {
    /// Milliseconds for which the guest is observed first, beyond what was counted before.
    pub observe_ms: u64,
    /// Segments with this score and more are copied; with 0 all of them.
    pub threshold: f64,
    /// Bytes of a segment, a multiple of 4 KiB.
    pub segment: u64,
    /// Weight of a block that was read, from 0 to 1; that of one that was written is the rest.
    pub read_weight: f64,
    /// Hand over as soon as no more bytes than this are dirty, and fetch those later; none: when
    /// the rest can be sent within the downtime, and send it first.
    pub handover_size: Option<u64>,
}

impl Default for HotSet {
    fn default() -> Self {
        let Rule { read_weight, segment, threshold } = Rule::default();
        Self { observe_ms: 0, threshold, segment, read_weight, handover_size: None }
    }
}

impl HotSet {
    /// The same for the engine.
    pub fn rule(&self) -> Rule {
        let Self { read_weight, segment, threshold, .. } = *self;
        Rule { read_weight, segment, threshold }
    }

    fn check(&self) -> Result<(), ApiError> {
        let wrong = |option: &str, why: &str| {
            Err(ApiError::new(ErrorKind::Invalid, format!("cannot use this {option}"), why))
        };
        if !(0.0..=1.0).contains(&self.read_weight) {
            return wrong("--read-weight", "it is not between 0 and 1");
        }
        if self.threshold.is_nan() || self.threshold < 0.0 {
            return wrong("--threshold", "it is not a number from 0 on");
        }
        if self.segment == 0 || !self.segment.is_multiple_of(BLOCK_SIZE) {
            return wrong("--segment", "it is not a multiple of 4 KiB");
        }
        Ok(())
    }
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
                .hint("leave --throttle out, or use pre-copy, mirror or hot-set"));
        }
        let copies = !matches!(strategy, Strategy::PostCopy | Strategy::Deferred);
        if self.max_added_latency_ms.is_some() && !copies {
            let why = format!("{strategy} copies nothing while the guest runs at the source");
            return Err(refused("--max-added-latency", strategy, &why)
                .hint("leave it out, or limit the rate with --bandwidth"));
        }
        if self.max_added_latency_ms.is_some_and(|ms| !(0.001..=60_000.0).contains(&ms)) {
            let why = "it is not a time from a microsecond to a minute";
            let what = "cannot use this --max-added-latency";
            return Err(ApiError::new(ErrorKind::Invalid, what, why));
        }
        if let Some(hot_set) = &self.hot_set {
            if strategy != Strategy::HotSet {
                let why = "only hot-set chooses blocks by what the guest uses";
                return Err(refused("options of hot-set", strategy, why).hint(
                    "leave --observe, --threshold, --segment, --read-weight and --handover-size \
                     out, or use --strategy hot-set",
                ));
            }
            hot_set.check()?;
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
        let slowed = Tuning { throttle: Throttle::Soft, ..Tuning::default() };
        for strategy in [Strategy::PreCopy, Strategy::Mirror, Strategy::HotSet] {
            slowed.check(strategy).unwrap();
        }
        for strategy in [Strategy::PostCopy, Strategy::Hybrid, Strategy::Deferred] {
            let error = slowed.check(strategy).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            assert!(error.what.contains("--throttle") && error.hint.is_some(), "{error:?}");
            Tuning::default().check(strategy).unwrap();
        }
        let hot = Tuning { hot_set: Some(HotSet::default()), ..Tuning::default() };
        hot.check(Strategy::HotSet).unwrap();
        let error = hot.check(Strategy::PreCopy).unwrap_err();
        assert!(error.hint.is_some_and(|hint| hint.contains("--observe")));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let check = |hot_set: HotSet| {
            let tuning = Tuning { hot_set: Some(hot_set), ..Tuning::default() };
            tuning.check(Strategy::HotSet).unwrap_err().what
        };
        let wrong = HotSet { read_weight: 1.5, ..HotSet::default() };
        assert!(check(wrong).contains("--read-weight"));
        assert!(check(HotSet { threshold: -1.0, ..HotSet::default() }).contains("--threshold"));
        assert!(check(HotSet { segment: 5000, ..HotSet::default() }).contains("--segment"));
        assert!(check(HotSet { segment: 0, ..HotSet::default() }).contains("--segment"));
        let paced = Tuning { max_added_latency_ms: Some(2.0), ..Tuning::default() };
        paced.check(Strategy::Hybrid).unwrap();
        assert!(paced.check(Strategy::PostCopy).unwrap_err().hint.is_some());
        for wrong in [0.0, -1.0, f64::NAN, 1e9] {
            let tuning = Tuning { max_added_latency_ms: Some(wrong), ..Tuning::default() };
            let what = tuning.check(Strategy::Hybrid).unwrap_err().what;
            assert!(what.contains("--max-added-latency"), "{what}");
        }
    }
}
