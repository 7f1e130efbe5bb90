//! `mirror`: everything is copied once, and each write to what was copied is sent as well.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "mirror",
    summary: "All blocks are copied once, and each write to a copied block is sent at once",
    syncs: true,
    mirrors: true,
    ..StrategyTraits::ONCE
};
