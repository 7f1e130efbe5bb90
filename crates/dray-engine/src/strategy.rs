//! What a strategy and the settings that shape it come to: which blocks move before the handover and which after.

use crate::throttle;
use dray_types::{BlockSet, StrategyTraits};

/// Bytes of mirrored writes that may wait or be under way, unless said otherwise: 8 ms of a 1 GB/s
/// disk, or 70 ms of a 1 Gbit link.
pub const MIRROR_WINDOW: u64 = 8 << 20;

/// Settings of a source beyond its strategy. The default is each strategy as its name says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// `hot-set` and `auto`: per image, the blocks to copy before handover; none: all of them. What
    /// is not among them waits for Backfill, also when it is written. For hot-set see
    /// [`crate::hotset`], for auto [`crate::plan`]. A restarted source may be given another choice.
    pub copy_only: Option<Vec<BlockSet>>,
    /// `hot-set`: with a size in bytes, Sync ends as soon as no more than this is dirty of what was
    /// copied, and that rest is handed over in the map (LiveFS's handover-size). Without one Sync
    /// ends when the rest fits the downtime, and it is sent before the target serves, as for
    /// pre-copy.
    pub handover_size: Option<u64>,
    /// `hot-set`: Sync goes on until no more than the handover size is dirty, for ever if need be, as
    /// LiveFS does. Without it a guest that writes too fast is handed over with a larger map.
    pub endless: bool,
    /// Whether the guest's writes are slowed during Sync.
    pub throttle: throttle::Mode,
    /// `mirror`: bytes of mirrored writes that may wait or be under way; a write that finds it full
    /// stays dirty and is sent in a round of Sync.
    pub mirror_window: u64,
    /// Content that the target has somewhere need not be sent: Copy may describe runs, and Backfill ask
    /// for hashes, once `SourceEvent::Reuse` has said that the session can.
    pub reuse: bool,
    /// What the link carried in earlier migrations, in bytes a second; zero when nobody knows. What
    /// this one measures counts as well.
    pub link_rate: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        let throttle = throttle::Mode::None;
        Self {
            copy_only: None,
            handover_size: None,
            endless: false,
            throttle,
            mirror_window: MIRROR_WINDOW,
            reuse: false,
            link_rate: 0,
        }
    }
}

/// What a strategy and its settings come to: its row in `docs/explanation/strategies.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Scheme {
    /// Blocks are copied before handover at all.
    pub(crate) copies: bool,
    /// What was written meanwhile is sent again, round by round.
    pub(crate) syncs: bool,
    /// What was copied is equal at handover; else the map names what is not.
    pub(crate) equal: bool,
    /// Sync ends when no more than this many bytes are dirty; none: what fits the downtime.
    pub(crate) handover_size: Option<u64>,
    /// Zeros are named at once, whatever is left for Backfill: they cost nothing.
    pub(crate) names_zeros: bool,
}

impl Scheme {
    pub(crate) fn of(traits: StrategyTraits, tuning: &Tuning) -> Self {
        let chosen = tuning.copy_only.as_ref().filter(|_| traits.chooses());
        let copies =
            traits.copies && chosen.is_none_or(|sets| sets.iter().any(|set| !set.is_empty()));
        let syncs = copies && traits.syncs;
        let handover_size = tuning.handover_size.filter(|_| traits.leaves_some);
        let equal = syncs && handover_size.is_none();
        Self { copies, syncs, equal, handover_size, names_zeros: traits.names_zeros }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{BlockRange, Strategy};

    /// LiveFS, section V: pre-copy and post-copy are settings of its parameters.
    #[test]
    fn pre_copy_and_post_copy_are_settings_of_hot_set() {
        let none = Tuning::default();
        let of = |set: BlockSet| {
            let copy_only = Some(vec![set]);
            Scheme::of(Strategy::HotSet.into(), &Tuning { copy_only, ..Tuning::default() })
        };
        let all = of([BlockRange::new(0, 1 << 20)].into_iter().collect());
        assert_eq!(all, Scheme::of(Strategy::PreCopy.into(), &none));
        assert_eq!(of(BlockSet::new()), Scheme::of(Strategy::PostCopy.into(), &none));
    }
}
