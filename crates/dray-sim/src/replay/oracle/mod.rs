//! Orders that no scheduler can know: of Copy, made of what the guest is going to write, and of
//! Backfill ([`Reads`]), made of what it is going to read.
//!
//! They say how much of the extra traffic, or of the reads that wait, any order could save, and how
//! much of that takes knowledge of the moments of single accesses, which no history has.

mod reads;

pub use reads::Reads;

use super::bytes;
use super::settings::Settings;
use dray_engine::SECOND;
use dray_trace::{Op, Record};
use dray_types::{BlockRange, BlockSet, Schedule};
use std::collections::BTreeMap;

/// What is written to one block between the start and the handover.
#[derive(Clone, Copy, Default, Debug)]
struct Writes {
    count: u32,
    /// When it is written last, in nanoseconds after the start.
    last: u64,
}

/// What a guest writes during one migration.
#[derive(Clone, Debug)]
pub struct Future {
    blocks: u64,
    /// Nanoseconds in which the link carries one block.
    each: f64,
    written: BTreeMap<u64, Writes>,
}

/// Nanoseconds in which the link carries one block.
fn each_block(settings: &Settings) -> f64 {
    bytes(1) as f64 * SECOND as f64 / settings.bandwidth.max(1) as f64
}

impl Future {
    /// Of a migration by `settings` that hands over `handover` nanoseconds after its start.
    ///
    /// # Errors
    /// Those of the records.
    pub fn read<E>(
        settings: &Settings,
        handover: u64,
        records: impl IntoIterator<Item = Result<Record, E>>,
    ) -> Result<Self, E> {
        let mut written: BTreeMap<u64, Writes> = BTreeMap::new();
        let end = settings.start.saturating_add(handover);
        for record in records {
            let record = record?;
            if record.time_ns >= end {
                break;
            }
            if record.time_ns < settings.start || record.op != Op::Write {
                continue;
            }
            let range = record.blocks();
            for block in range.start..range.end() {
                let writes = written.entry(block).or_default();
                writes.count += 1;
                writes.last = record.time_ns - settings.start;
            }
        }
        let blocks = BlockRange::whole(settings.disk).len;
        Ok(Self { blocks, each: each_block(settings), written })
    }

    /// By how often each block is written during the migration, the least first: what a scheduler
    /// could do that knew every block's rate.
    pub fn by_count(&self) -> Schedule {
        let mut order: Vec<(u32, u64)> =
            self.written.iter().map(|(&block, writes)| (writes.count, block)).collect();
        order.sort_unstable();
        self.behind_the_rest(Schedule::default(), order.into_iter().map(|(_, block)| block))
    }

    /// The order with the fewest blocks sent twice. A block need not be sent again when it is sent
    /// after its last write. The block that is written last goes last, and so on towards the front,
    /// each where it is early enough; those for which no place is left are sent twice whatever the
    /// order, and go first, where they are in nobody's way.
    pub fn fewest(&self) -> Schedule {
        let mut latest: Vec<(u64, u64)> =
            self.written.iter().map(|(&block, writes)| (writes.last, block)).collect();
        latest.sort_unstable();
        let (mut hopeless, mut saved) = (BlockSet::new(), Vec::new());
        let mut place = self.blocks;
        for (last, block) in latest.into_iter().rev() {
            if place.saturating_sub(1) as f64 * self.each >= last as f64 {
                place -= 1;
                saved.push(block);
            } else {
                hopeless.insert(BlockRange::new(block, 1));
            }
        }
        self.behind_the_rest(hopeless.runs().collect(), saved.into_iter().rev())
    }

    /// `first`, what is never written by address, then the blocks of `last`.
    fn behind_the_rest(&self, first: Schedule, last: impl Iterator<Item = u64>) -> Schedule {
        let mut schedule = first;
        let mut from = 0;
        for &block in self.written.keys().chain([&self.blocks]) {
            schedule.push(BlockRange::new(from, block.saturating_sub(from)));
            from = block + 1;
        }
        last.for_each(|block| schedule.push(BlockRange::new(block, 1)));
        schedule
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Order;
    use dray_types::Strategy;
    use std::convert::Infallible;

    /// A disk of ten blocks of which the link carries one a second.
    fn future(writes: &[(u64, u64)]) -> Future {
        let mut settings = Settings::new(Strategy::Hybrid, Order::Sequential, bytes(10), bytes(1));
        settings.start = 100 * SECOND;
        let record = |&(second, block): &(u64, u64)| Record {
            time_ns: (100 + second) * SECOND,
            op: Op::Write,
            offset: bytes(block),
            length: bytes(1),
        };
        let records = writes.iter().map(record).map(Ok::<_, Infallible>);
        Future::read(&settings, 12 * SECOND, records).unwrap()
    }

    fn order(schedule: &Schedule) -> Vec<u64> {
        schedule.ranges().iter().flat_map(|range| range.start..range.end()).collect()
    }

    #[test]
    fn counts_order_what_is_written_behind_the_rest() {
        let future = future(&[(1, 3), (2, 0), (3, 3), (11, 5), (12, 7)]);
        assert_eq!(order(&future.by_count()), [1, 2, 4, 6, 7, 8, 9, 0, 5, 3]);
    }

    #[test]
    fn the_last_write_decides_and_the_hopeless_go_first() {
        // Block 5 is written after its last place, 9 s; of 3 and 4, written at 9 s, one has a place.
        let future = future(&[(1, 3), (2, 0), (9, 3), (9, 4), (11, 5)]);
        let order = order(&future.fewest());
        assert_eq!(order, [3, 5, 1, 2, 6, 7, 8, 9, 0, 4]);
    }

    #[test]
    fn without_writes_it_is_address_order() {
        assert_eq!(order(&future(&[]).fewest()), (0..10).collect::<Vec<_>>());
    }
}
