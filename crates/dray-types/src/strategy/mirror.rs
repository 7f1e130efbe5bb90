//! `mirror`: everything is copied once, and each write to what was copied is sent as well.

use super::StrategyTraits;

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "mirror",
    summary: "Everything is copied once, and what the guest writes is sent on at once",
    syncs: true,
    mirrors: true,
    ..StrategyTraits::ONCE
};
