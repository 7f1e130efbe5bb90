//! Strategies: which blocks move before the guest and which after it. What each does is in its file: a row of
//! the table [`StrategyTraits`], which the engine takes. [`Strategy`] is the list of those that have a name.

mod auto;
mod deferred;
mod hot_set;
mod hybrid;
mod mirror;
mod post_copy;
mod pre_copy;
mod traits;

pub use traits::{Choice, StrategyTraits};

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

    /// The row of the strategy: its name, its line of help, and how it treats blocks.
    pub const fn traits(self) -> StrategyTraits {
        match self {
            Self::PreCopy => pre_copy::TRAITS,
            Self::PostCopy => post_copy::TRAITS,
            Self::Hybrid => hybrid::TRAITS,
            Self::Deferred => deferred::TRAITS,
            Self::HotSet => hot_set::TRAITS,
            Self::Mirror => mirror::TRAITS,
            Self::Auto => auto::TRAITS,
        }
    }

    /// As it is written.
    pub const fn name(self) -> &'static str {
        self.traits().name
    }
}

impl From<Strategy> for StrategyTraits {
    fn from(strategy: Strategy) -> Self {
        strategy.traits()
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
    fn each_does_what_can_be_done() {
        for strategy in Strategy::ALL {
            assert!(strategy.traits().is_sound(), "{strategy}");
            let like = strategy.traits().resembles.map(Strategy::traits);
            assert!(like.is_none_or(|like| like.resembles.is_none()), "{strategy}");
        }
    }
}
