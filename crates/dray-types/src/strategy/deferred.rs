//! `deferred`: the guest moves first, with a map of everything; Backfill waits for the operator.

use super::{Strategy, StrategyTraits};

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "deferred",
    summary: "The guest moves first; blocks that it does not read stay until `dray backfill start`",
    defers: true,
    resembles: Some(Strategy::PostCopy),
    ..StrategyTraits::NOTHING
};
