//! `hot-set`: what is used most is copied and kept in step, the rest follows.

use super::{Choice, Strategy, StrategyTraits};

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "hot-set",
    summary: "The blocks that the guest uses most are copied and kept equal; the guest moves; the rest follows",
    choice: Choice::Hot,
    syncs: true,
    leaves_some: true,
    resembles: Some(Strategy::Hybrid),
    ..StrategyTraits::ONCE
};
