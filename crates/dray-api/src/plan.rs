//! Planning: what a migration is predicted to take.

use super::command::{Chain, Subject};
use dray_engine::plan::Prediction;
use dray_types::BitRate;
use dray_types::Strategy;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Predicts what a migration would take with each strategy, and moves nothing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// What would be moved.
    pub subject: Subject,
    /// Name of the target host.
    pub to: String,
    /// What becomes of a chain of images.
    #[serde(default, skip_serializing_if = "Chain::is_keep")]
    pub chain: Chain,
    /// Bytes a second that it may send; what a link usually carries when absent.
    #[serde(default)]
    pub bandwidth: Option<BitRate>,
    /// Longest stop of the guest to aim for, in milliseconds; the agent's default when absent.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// Longest time that it may take, in milliseconds.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// Most milliseconds by which the guest's requests may become slower.
    #[serde(default)]
    pub max_added_latency_ms: Option<f64>,
    /// Nothing is asked of backups and other hosts: what lies at the target is all that it begins with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_backups: bool,
    /// Pool at the target; its default one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Names at the target, by image or device here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
}

/// Where the rate of a link is from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkFrom {
    /// The limit that was given.
    Limit,
    /// The last migration to this peer.
    Measured,
    /// Nothing is known of it: 1 Gbit/s.
    Assumed,
}

/// What will come of a migration, or what came of it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Predicted {
    /// Until the source is not needed any more.
    pub total_seconds: f64,
    /// Until the guest runs at the target.
    pub handover_seconds: f64,
    /// How long the guest stands still.
    pub downtime_ms: f64,
    /// It ends: nothing is written faster than it is sent.
    pub converges: bool,
    /// Bytes of blocks that cross, repetitions included.
    pub bytes: u64,
    /// Bytes that cross again because they were written after they were sent.
    pub bytes_twice: u64,
    /// Reads that wait for the source.
    pub remote_reads: u64,
    /// By how much the mean read is slower while blocks are missing, in milliseconds; only predicted.
    pub added_latency_ms: f64,
    /// Bytes a second that were reckoned with, or that were sent on the mean.
    pub link: u64,
    /// Where the rate is from that was reckoned with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_from: Option<LinkFrom>,
    /// Goals that it will miss, or has missed, in words.
    pub missed: Vec<String>,
}

impl Predicted {
    /// The planner's prediction as it is shown.
    pub fn new(
        prediction: &Prediction,
        (link, from): (f64, LinkFrom),
        missed: Vec<String>,
    ) -> Self {
        Self {
            total_seconds: prediction.total,
            handover_seconds: prediction.handover,
            downtime_ms: prediction.downtime * 1e3,
            converges: prediction.converges,
            bytes: prediction.bytes as u64,
            bytes_twice: prediction.extra as u64,
            remote_reads: prediction.remote_reads as u64,
            added_latency_ms: prediction.added_latency * 1e3,
            link: link as u64,
            link_from: Some(from),
            missed,
        }
    }
}

/// The prediction for one strategy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PlannedStrategy {
    /// The strategy.
    pub strategy: Strategy,
    /// What will come of it.
    pub predicted: Predicted,
}

/// Where an image would come from.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PlannedImage {
    /// Its name here.
    pub image: String,
    /// Bytes of data in it.
    pub data: u64,
    /// Number of the generation that it would begin with at the target.
    pub generation: Option<u64>,
    /// Bytes of data that lie at the target and need not be sent.
    pub at_target: u64,
    /// They lie in a file of this content, which is used where it is.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// Bytes of data that each provider would give first, by its name at the target.
    pub given: BTreeMap<String, u64>,
    /// Bytes of data that the source would send; what is written meanwhile comes to that.
    pub source: u64,
    /// What cannot be used and what is not known before, for people.
    pub notes: Vec<String>,
}

/// What a migration would take.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Planned {
    /// Name of the target host.
    pub to: String,
    /// Bytes a second that were reckoned with.
    pub link: u64,
    /// Where that is from.
    pub link_from: LinkFrom,
    /// Round trip to the target, in milliseconds.
    pub rtt_ms: f64,
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes of it that the guest writes in a second.
    pub memory_written: u64,
    /// Bytes of data in the images.
    pub data: u64,
    /// Bytes a second that guests write to them; none when an agent does not see it, because a disk is not under
    /// dray. The prediction takes it for nothing then.
    pub written: Option<u64>,
    /// Where each image would come from.
    #[serde(default)]
    pub images: Vec<PlannedImage>,
    /// Bytes of content that the target knows by hash. How much of it is the same as in the images is
    /// unknown until they move; absent when the target did not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexed: Option<u64>,
    /// Why the target cannot say what it has, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
    /// Each strategy.
    pub strategies: Vec<PlannedStrategy>,
}

/// Bytes of data that came from one place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Provided {
    /// A repository, `replica at HOST`, `base image at HOST`, `same content at HOST` or `source`.
    pub provider: String,
    /// Bytes that were predicted to; absent where nobody can know before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<u64>,
    /// Bytes that did.
    pub bytes: u64,
}
