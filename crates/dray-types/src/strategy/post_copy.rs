//! `post-copy`: the guest moves first, with a map of everything; its blocks follow.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "post-copy",
    summary: "The guest moves first; its blocks follow",
    ..StrategyTraits::NOTHING
};
