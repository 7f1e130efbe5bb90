//! How to migrate beyond the strategy and the order.

use dray_engine::hotset::Rule;
use dray_engine::throttle::Mode;
use serde::{Deserialize, Serialize};

/// Settings that some strategies use.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tuning {
    /// Slows the guest's writes during Sync.
    pub throttle: Mode,
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
}

impl Tuning {
    /// Whether nothing was asked for.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
