//! Where extents lie on a disk.

use crate::rng::Rng;

/// A disk of block groups, each used from its beginning up to some point.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    /// Size of the disk in bytes.
    pub disk: u64,
    /// Size of a block group in bytes; ext2 to ext4 have 128 MiB.
    pub group: u64,
    /// Bytes of each group that hold data.
    pub used: u64,
    /// Bytes behind them in which single extents may lie.
    pub fringe: u64,
}

impl Layout {
    /// A random place for an extent of `extent` bytes on a disk whose last `reserved` bytes are
    /// taken: in the used part of a group, or with `outside` in an unused one.
    pub(super) fn place(&self, extent: u64, reserved: u64, outside: bool, rng: &mut Rng) -> u64 {
        let groups = ((self.disk - reserved.min(self.disk)) / self.group).max(1);
        let start = rng.below(groups) * self.group;
        let (from, to) =
            if outside { (self.used, self.used + self.fringe) } else { (0, self.used) };
        let cells = ((to - from) / extent).max(1);
        start + from.next_multiple_of(extent).min(self.group - extent) + rng.below(cells) * extent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_stay_inside_their_part() {
        let layout = Layout { disk: 1 << 30, group: 128 << 20, used: 56 << 20, fringe: 30 << 20 };
        let mut rng = Rng::new(1);
        for _ in 0..10_000 {
            let inside = layout.place(192 << 10, 32 << 20, false, &mut rng);
            let outside = layout.place(192 << 10, 32 << 20, true, &mut rng);
            assert!(inside % layout.group + (192 << 10) <= layout.used);
            assert!(outside % layout.group >= layout.used);
            assert!(outside % layout.group <= layout.used + layout.fringe);
            assert!(inside.max(outside) + (192 << 10) <= (1 << 30) - (32 << 20));
        }
    }
}
