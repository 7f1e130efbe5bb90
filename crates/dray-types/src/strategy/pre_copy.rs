//! `pre-copy`: everything moves first, until the rest fits the downtime limit: all is equal at handover.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "pre-copy",
    summary: "All blocks move first; the guest moves when the rest fits the downtime limit",
    syncs: true,
    ..StrategyTraits::ONCE
};
