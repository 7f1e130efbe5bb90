//! [`Positions`]: when a schedule comes to a block.

use dray_types::{BlockRange, Schedule};

/// The place of every block in a schedule, as work done before it: blocks sent, and for each jump
/// the blocks that could have been sent in its time.
#[derive(Clone, Debug)]
pub(crate) struct Positions {
    /// First block, length and work before it of each range, by first block.
    ranges: Vec<(u64, u64, u64)>,
    total: u64,
    blocks: u64,
}

impl Positions {
    pub(crate) fn new(schedule: &Schedule, blocks: u64, jump_blocks: u64) -> Self {
        let mut named: Vec<_> = schedule.ranges().iter().map(|r| (r.start, r.len)).collect();
        named.sort_unstable();
        let (mut at, mut rest) = (0, Vec::new());
        for (start, len) in named.into_iter().chain([(blocks, 0)]) {
            if at < start {
                rest.push(BlockRange::new(at, start - at));
            }
            at = start + len;
        }
        let mut ranges = Vec::with_capacity(schedule.ranges().len() + rest.len());
        let (mut work, mut next) = (0, 0);
        for range in schedule.ranges().iter().chain(&rest) {
            if range.start != next {
                work += jump_blocks;
            }
            ranges.push((range.start, range.len, work));
            work += range.len;
            next = range.end();
        }
        ranges.sort_unstable();
        Self { ranges, total: work.max(1), blocks: blocks.max(1) }
    }

    /// Share of the work that is done before the block, 0 to 1.
    pub(crate) fn share(&self, block: u64) -> f64 {
        let after = self.ranges.partition_point(|&(start, _, _)| start <= block);
        match after.checked_sub(1).map(|at| self.ranges[at]) {
            Some((start, len, work)) if block - start < len => {
                (work + block - start) as f64 / self.total as f64
            }
            // Past the image's end as it was: sent last.
            _ => 1.0,
        }
    }

    /// Work of the whole schedule against address order: 1 when it has no jump.
    pub(crate) fn longer(&self) -> f64 {
        self.total as f64 / self.blocks as f64
    }

    pub(crate) fn memory(&self) -> usize {
        self.ranges.capacity() * size_of::<(u64, u64, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_ranges_come_first_the_rest_follows_and_jumps_cost() {
        let schedule: Schedule =
            [(6, 2), (0, 2)].map(|(s, l)| BlockRange::new(s, l)).into_iter().collect();
        let at = Positions::new(&schedule, 10, 10);
        // 6 7 | 0 1 2 3 4 5 | 8 9, with a jump before each part.
        let work = |block| at.share(block) * 40.0;
        assert_eq!([6, 7, 0, 1, 2, 5, 8, 9].map(work), [10., 11., 22., 23., 24., 27., 38., 39.]);
        assert_eq!((at.longer(), at.share(10)), (4.0, 1.0));
        let address = Positions::new(&Schedule::SEQUENTIAL, 10, 10);
        assert_eq!((address.share(5), address.longer()), (0.5, 1.0));
    }
}
