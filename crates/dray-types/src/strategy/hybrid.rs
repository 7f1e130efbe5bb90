//! `hybrid`: everything is copied once, the guest moves with a map of what it wrote meanwhile.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "hybrid",
    summary: "All blocks are copied once; the guest moves; the blocks that it wrote meanwhile follow",
    ..StrategyTraits::ONCE
};
