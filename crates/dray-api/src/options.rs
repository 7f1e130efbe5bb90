//! The options of a migration other than its strategy and order.

use dray_engine::hotset::Rule;
/// Whether the guest's writes are slowed while dirty blocks are sent again.
pub use dray_engine::throttle::Mode as Throttle;
use serde::{Deserialize, Serialize};
use std::fmt;

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
}

impl Tuning {
    /// Whether nothing was asked for.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// In which order blocks move.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// By what the guest does: before the handover what it writes most comes last, after it what it
    /// reads most comes first.
    #[default]
    WorkloadAware,
    /// By address.
    Sequential,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::WorkloadAware => "workload-aware",
            Self::Sequential => "sequential",
        })
    }
}
