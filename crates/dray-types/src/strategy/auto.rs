//! `auto`: what is cheaper to copy before the handover than after it is copied once.

use super::{Choice, StrategyTraits};

pub(super) const TRAITS: StrategyTraits = StrategyTraits {
    name: "auto",
    summary: "Blocks that are cheaper to copy before the guest moves are copied; the rest follows",
    choice: Choice::Planned,
    names_zeros: true,
    ..StrategyTraits::ONCE
};
