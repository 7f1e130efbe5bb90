//! Strategies: which blocks move before the guest and which after it. What each does is its row in [`Strategy::traits`].

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A named way to move the blocks of images.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Everything moves first, until the rest fits the downtime limit: all is equal at handover.
    PreCopy,
    /// The guest moves first, with a map of everything; its blocks follow.
    PostCopy,
    /// Everything is copied once, the guest moves with a map of what it wrote meanwhile, and that follows
    /// (pre+post-copy in the scheduling literature).
    Hybrid,
    /// The guest moves first; only the blocks that it asks for follow, until the operator starts Backfill
    /// (decoupled storage migration, DLSM).
    Deferred,
    /// What is used most is copied and kept in step, the guest moves with a map of the rest (LiveFS). With
    /// everything copied it is pre-copy, with nothing copied post-copy.
    HotSet,
    /// Everything is copied once, and each write to what was copied goes to both sides: all is equal at
    /// handover (I/O mirroring).
    Mirror,
    /// What is cheaper to copy before handover than after it is copied, block by block; the rest follows.
    #[default]
    Auto,
}

/// What a strategy does with blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StrategyTraits {
    /// As it is written.
    pub name: &'static str,
    /// What it does, in one line for people.
    pub summary: &'static str,
    /// Blocks are copied before the handover.
    pub copies: bool,
    /// What was written meanwhile is sent again before the handover, round by round.
    pub syncs: bool,
    /// A write to what was copied is sent at once.
    pub mirrors: bool,
    /// Which blocks are copied is chosen; the others wait for Backfill.
    pub chooses: bool,
    /// The handover may leave what is dirty, up to a size, if one is given.
    pub leaves_some: bool,
    /// Backfill waits for the operator.
    pub defers: bool,
    /// Zeros are named at once, whatever is left for Backfill.
    pub names_zeros: bool,
}

impl StrategyTraits {
    /// Nothing is copied before the handover.
    const NOTHING: Self = Self {
        name: "",
        summary: "",
        copies: false,
        syncs: false,
        mirrors: false,
        chooses: false,
        leaves_some: false,
        defers: false,
        names_zeros: false,
    };
    /// Everything is copied once.
    const ONCE: Self = Self { copies: true, ..Self::NOTHING };
}

impl Strategy {
    /// All of them, in the order in which they are listed to people.
    pub const ALL: [Self; 7] = [
        Self::PreCopy,
        Self::PostCopy,
        Self::Hybrid,
        Self::HotSet,
        Self::Deferred,
        Self::Mirror,
        Self::Auto,
    ];

    /// What it does.
    pub const fn traits(self) -> StrategyTraits {
        match self {
            Self::PreCopy => StrategyTraits {
                name: "pre-copy",
                summary: "Everything moves first, the guest when the rest fits the downtime limit",
                syncs: true,
                ..StrategyTraits::ONCE
            },
            Self::PostCopy => StrategyTraits {
                name: "post-copy",
                summary: "The guest moves first, its blocks follow",
                ..StrategyTraits::NOTHING
            },
            Self::Hybrid => StrategyTraits {
                name: "hybrid",
                summary: "Everything is copied once, the guest moves, what it wrote meanwhile follows",
                ..StrategyTraits::ONCE
            },
            Self::Deferred => StrategyTraits {
                name: "deferred",
                summary: "The guest moves first; the rest stays until `dray backfill start`",
                defers: true,
                ..StrategyTraits::NOTHING
            },
            Self::HotSet => StrategyTraits {
                name: "hot-set",
                summary: "What the guest uses most is copied and kept in step, the guest moves, the rest follows",
                syncs: true,
                chooses: true,
                leaves_some: true,
                ..StrategyTraits::ONCE
            },
            Self::Mirror => StrategyTraits {
                name: "mirror",
                summary: "Everything is copied once, and what the guest writes is sent on at once",
                syncs: true,
                mirrors: true,
                ..StrategyTraits::ONCE
            },
            Self::Auto => StrategyTraits {
                name: "auto",
                summary: "What is cheaper to copy before the guest moves is copied, the rest follows",
                chooses: true,
                names_zeros: true,
                ..StrategyTraits::ONCE
            },
        }
    }

    /// As it is written.
    pub const fn name(self) -> &'static str {
        self.traits().name
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no strategy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnknownStrategy(String);

impl fmt::Display for UnknownStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Strategy::ALL.map(Strategy::name).join(", ");
        write!(f, "'{}' is not a strategy; use one of {names}", self.0)
    }
}

impl std::error::Error for UnknownStrategy {}

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, UnknownStrategy> {
        let named = Self::ALL.into_iter().find(|strategy| strategy.name() == text);
        named.ok_or_else(|| UnknownStrategy(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }
        let why = "fast".parse::<Strategy>().unwrap_err().to_string();
        assert!(why.contains("pre-copy, post-copy, hybrid, hot-set, deferred, mirror, auto"));
    }

    #[test]
    fn what_is_kept_in_step_was_copied() {
        for traits in Strategy::ALL.map(Strategy::traits) {
            let after = traits.syncs || traits.mirrors || traits.chooses || traits.leaves_some;
            assert!(traits.copies || !after, "{}", traits.name);
            assert!(!(traits.copies && traits.defers), "{}", traits.name);
        }
    }
}
