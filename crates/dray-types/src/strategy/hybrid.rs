//! `hybrid`: everything is copied once, the guest moves with a map of what it wrote meanwhile.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "hybrid",
    summary: "Everything is copied once, the guest moves, what it wrote meanwhile follows",
    ..StrategyTraits::ONCE
};
