//! Orders of Backfill that no scheduler can know: made of what the guest is going to read.

use super::each_block;
use crate::replay::settings::Settings;
use dray_trace::{Op, Record};
use dray_types::{BlockRange, BlockSet, Schedule};
use std::collections::BinaryHeap;

/// A read of blocks that nothing touched between the handover and it.
#[derive(Clone, Debug)]
struct Wanted {
    /// Nanoseconds after the handover.
    at: u64,
    blocks: u64,
    runs: Vec<BlockRange>,
}

/// What a guest reads after the handover, until Backfill has ended.
#[derive(Clone, Debug)]
pub struct Reads {
    blocks: u64,
    /// Nanoseconds in which the link carries one block.
    each: f64,
    /// Nanoseconds from the handover until the first block asked for can be there.
    lead: f64,
    /// In order of time; no block is in two of them.
    wanted: Vec<Wanted>,
    /// Per block, how often it is read before it is written.
    counts: Vec<u32>,
}

impl Reads {
    /// Of a migration by `settings` that hands over `handover` nanoseconds after its start and has
    /// everything at the target `end` nanoseconds after it.
    ///
    /// # Errors
    /// Those of the records.
    pub fn read<E>(
        settings: &Settings,
        handover: u64,
        end: u64,
        records: impl IntoIterator<Item = Result<Record, E>>,
    ) -> Result<Self, E> {
        let blocks = BlockRange::whole(settings.disk).len;
        let mut counts = vec![0u32; blocks as usize];
        let mut wanted = Vec::new();
        let (mut touched, mut written) = (BlockSet::new(), BlockSet::new());
        let from = settings.start.saturating_add(handover);
        for record in records {
            let record = record?;
            if record.time_ns >= settings.start.saturating_add(end) {
                break;
            }
            if record.time_ns < from {
                continue;
            }
            let range = record.blocks();
            let new = touched.complement_in(range);
            touched.insert(range);
            if record.op == Op::Write {
                written.insert(range);
                continue;
            }
            written.complement_in(range).runs().for_each(|run| count(&mut counts, run));
            if !new.is_empty() {
                let runs = new.runs().collect();
                wanted.push(Wanted { at: record.time_ns - from, blocks: new.len(), runs });
            }
        }
        let lead = 2.0 * settings.delay as f64;
        Ok(Self { blocks, each: each_block(settings), lead, wanted, counts })
    }

    /// By how often each block is read until the end, the most first: what a scheduler could do that
    /// knew every block's rate.
    pub fn by_count(&self) -> Schedule {
        let read = (0..self.blocks).filter(|&block| self.counts[block as usize] > 0);
        let mut order: Vec<u64> = read.collect();
        order.sort_by_key(|&block| std::cmp::Reverse(self.counts[block as usize]));
        order.into_iter().map(|block| BlockRange::new(block, 1)).collect()
    }

    /// The order in which the fewest reads wait, and how many wait at least: blocks come in the order
    /// in which they are read; where one comes too late, the longest read so far is given up (Moore
    /// and Hodgson's rule for the fewest late jobs), and its blocks come when it waits for them.
    pub fn fewest(&self) -> (Schedule, u64) {
        let mut kept: BinaryHeap<(u64, usize)> = BinaryHeap::new();
        let mut time = self.lead;
        let mut late = vec![false; self.wanted.len()];
        for (ix, read) in self.wanted.iter().enumerate() {
            kept.push((read.blocks, ix));
            time += read.blocks as f64 * self.each;
            while time > read.at as f64
                && let Some((blocks, longest)) = kept.pop()
            {
                time -= blocks as f64 * self.each;
                late[longest] = true;
            }
        }
        let reads = self.wanted.iter().zip(&late);
        let in_time = reads.clone().filter(|(_, late)| !**late);
        let schedule = in_time.flat_map(|(read, _)| read.runs.iter().copied()).collect();
        (schedule, late.iter().filter(|&&late| late).count() as u64)
    }
}

fn count(counts: &mut [u32], run: BlockRange) {
    for block in run.start..run.end().min(counts.len() as u64) {
        counts[block as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Order;
    use dray_engine::SECOND;
    use dray_types::{BLOCK_SIZE, Strategy};
    use std::convert::Infallible;

    /// A disk of ten blocks of which the link carries one a second, without a delay.
    fn reads(accesses: &[(u64, Op, u64, u64)]) -> Reads {
        let (order, disk) = (Order::Sequential, 10 * BLOCK_SIZE);
        let mut settings = Settings::new(Strategy::PostCopy, order, disk, BLOCK_SIZE);
        (settings.start, settings.delay) = (100 * SECOND, 0);
        let record = |&(second, op, block, len): &(u64, Op, u64, u64)| Record {
            time_ns: (105 + second) * SECOND,
            op,
            offset: block * BLOCK_SIZE,
            length: len * BLOCK_SIZE,
        };
        let records = accesses.iter().map(record).map(Ok::<_, Infallible>);
        Reads::read(&settings, 5 * SECOND, 20 * SECOND, records).unwrap()
    }

    fn order(schedule: &Schedule) -> Vec<u64> {
        schedule.ranges().iter().flat_map(|range| range.start..range.end()).collect()
    }

    #[test]
    fn counts_order_what_is_read_and_not_written_before() {
        let (r, w) = (Op::Read, Op::Write);
        let all = [(1, r, 7, 2), (2, r, 8, 1), (2, w, 3, 1), (3, r, 3, 2), (19, r, 1, 1)];
        assert_eq!(order(&reads(&all).by_count()), [8, 4, 7]);
    }

    #[test]
    fn the_longest_read_is_given_up_where_not_all_come_in_time() {
        let r = Op::Read;
        // At 4 s five blocks would have to be there, at 6 s four without the longest read.
        let (schedule, late) =
            reads(&[(1, r, 9, 1), (4, r, 0, 4), (5, r, 5, 2), (6, r, 4, 1)]).fewest();
        assert_eq!((order(&schedule), late), (vec![9, 5, 6, 4], 1));
        let (schedule, late) = reads(&[(1, r, 9, 2), (1, r, 9, 1)]).fewest();
        assert_eq!((order(&schedule), late), (vec![], 1), "the same block waits once");
    }
}
