//! [`StrategyTraits`]: what can be said of a strategy.

use super::Strategy;

/// What a strategy does with blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StrategyTraits {
    /// As it is written.
    pub name: &'static str,
    /// What it does, in one line for people.
    pub summary: &'static str,
    /// Blocks are copied before the handover.
    pub copies: bool,
    /// Which of them; the others wait for Backfill.
    pub choice: Choice,
    /// What was written meanwhile is sent again before the handover, round by round.
    pub syncs: bool,
    /// A write to what was copied is sent at once.
    pub mirrors: bool,
    /// The handover may leave what is dirty, up to a size, if one is given.
    pub leaves_some: bool,
    /// Backfill waits for the operator.
    pub defers: bool,
    /// Zeros are named at once, whatever is left for Backfill.
    pub names_zeros: bool,
    /// The strategy that moves about the same blocks, when nothing can be predicted of this one before the
    /// guest is observed.
    pub resembles: Option<Strategy>,
}

/// Which blocks a strategy copies before the handover.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// All of them.
    All,
    /// Those that are used most, chosen once.
    Hot,
    /// Those that are cheaper to copy before the handover than after it, chosen again while Copy goes on.
    Planned,
}

impl StrategyTraits {
    /// Nothing is copied before the handover.
    pub const NOTHING: Self = Self {
        name: "",
        summary: "",
        copies: false,
        choice: Choice::All,
        syncs: false,
        mirrors: false,
        leaves_some: false,
        defers: false,
        names_zeros: false,
        resembles: None,
    };
    /// Everything is copied once.
    pub const ONCE: Self = Self { copies: true, ..Self::NOTHING };

    /// Whether some blocks are copied and others are not.
    pub fn chooses(&self) -> bool {
        self.choice != Choice::All
    }

    /// Whether it can be done: what is kept in step was copied, and what is mirrored is kept in step.
    pub fn is_sound(&self) -> bool {
        let of_what_is_copied = self.syncs || self.chooses() || self.names_zeros;
        let of_what_is_synced = self.mirrors || self.leaves_some;
        (self.copies || !of_what_is_copied) && (self.syncs || !of_what_is_synced)
    }
}
