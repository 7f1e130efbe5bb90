//! The guest: where an access of the trace goes, and what it waits for.
//!
//! Accesses are independent: one that waits does not delay the next one (section 7.1 of the paper).
//! At the source they cost nothing. While the guest is stopped they wait for its start. At the
//! target a read of missing blocks waits for them; a write of whole blocks makes them present, and a
//! block that is written in part is fetched first.

use super::bytes;
use super::picture::Layer;
use super::world::{IMAGE, World};
use dray_engine::{SourceEvent, Time};
use dray_trace::{Op, Record};
use dray_types::{BlockRange, BlockSet};
use std::collections::BTreeMap;

/// Where the guest is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum GuestLocation {
    #[default]
    Source,
    Stopped,
    Target,
}

/// An access that waits for blocks.
#[derive(Clone, Copy)]
struct Waiter {
    since: u64,
    range: BlockRange,
    op: Op,
}

#[derive(Default)]
pub(super) struct Guest {
    pub(super) place: GuestLocation,
    stopped_at: u64,
    /// Accesses that came while it was stopped.
    stopped: Vec<Record>,
    /// By the first block that each waits for.
    waiters: BTreeMap<u64, Vec<Waiter>>,
}

impl Guest {
    pub(super) fn stops(&mut self, now: u64) {
        self.place = GuestLocation::Stopped;
        self.stopped_at = now;
    }

    pub(super) fn waits(&self) -> bool {
        !self.waiters.is_empty()
    }

    fn wait(&mut self, block: u64, waiter: Waiter) {
        self.waiters.entry(block).or_default().push(waiter);
    }

    /// Takes those that wait for one of these blocks.
    fn take(&mut self, range: BlockRange) -> Vec<Waiter> {
        let mut taken = Vec::new();
        while let Some((&block, _)) = self.waiters.range(range.start..range.end()).next() {
            taken.extend(self.waiters.remove(&block).into_iter().flatten());
        }
        taken
    }
}

impl World {
    /// An access of the trace, `time` nanoseconds after the start.
    #[inline]
    pub(super) fn access(&mut self, time: u64, record: &Record) {
        self.now = self.now.max(time);
        let range = record.blocks();
        if let Some(picture) = &mut self.picture {
            let layer = if record.op == Op::Read { Layer::Read } else { Layer::Write };
            picture.paint(layer, self.now, range);
        }
        self.orders_learn(record, range);
        if self.guest.place == GuestLocation::Source
            && record.op == Op::Write
            && self.source.throttle.active()
        {
            let new = self.source.dirty.complement_in(range).len();
            let wait = self.source.throttle.delay(Time(self.now), bytes(new));
            if wait > 0 {
                return self.hold_back(wait, *record);
            }
        }
        self.carry_out(record, range);
    }

    fn orders_learn(&mut self, record: &Record, range: BlockRange) {
        if self.guest.place == GuestLocation::Source {
            self.orders.access(record, range);
            self.recent.access(record);
        }
    }

    /// The access happens where the guest is now.
    #[inline]
    pub(super) fn carry_out(&mut self, record: &Record, range: BlockRange) {
        match self.guest.place {
            GuestLocation::Source => self.at_source(record, range),
            GuestLocation::Stopped => {
                self.out.stopped += 1;
                self.guest.stopped.push(*record);
            }
            GuestLocation::Target => self.at_target(record, range),
        }
    }

    fn at_source(&mut self, record: &Record, range: BlockRange) {
        if record.op == Op::Write {
            if self.source.tracking {
                self.source.dirty.insert(range);
            }
            self.stale.insert(range);
            if self.source.mirrors {
                self.source.told.insert(range);
                self.tell_source(SourceEvent::Written { image: IMAGE, range });
            }
        }
    }

    fn at_target(&mut self, record: &Record, range: BlockRange) {
        if !self.target.missing.intersects(range) {
            return;
        }
        match record.op {
            Op::Read => {
                let missing = self.target.missing.intersection(range);
                self.out.reads.begins(bytes(missing.len()));
                self.wait_for(range, Op::Read);
            }
            Op::Write => self.write_missing(record, range),
        }
    }

    fn write_missing(&mut self, record: &Record, range: BlockRange) {
        let whole = BlockRange::inside(record.offset, record.length);
        self.stale.remove(whole);
        self.fill(whole);
        if self.target.missing.intersects(range) {
            let missing = self.target.missing.intersection(range).len();
            self.out.writes.begins(bytes(missing));
            self.wait_for(range, Op::Write);
        }
    }

    fn wait_for(&mut self, range: BlockRange, op: Op) {
        let missing = self.target.missing.intersection(range);
        let Some(first) = missing.next(0) else { return };
        self.guest.wait(first, Waiter { since: self.now, range, op });
        for run in missing.runs() {
            let around = self.target.around();
            let around = neighbourhood(run, around, &self.target.missing);
            self.demand(around);
        }
    }

    /// These blocks are at the target now, from the source or from the guest.
    pub(super) fn fill(&mut self, range: BlockRange) {
        self.target.missing.remove(range);
        for waiter in self.guest.take(range) {
            let left = self.target.missing.next(waiter.range.start);
            if let Some(block) = left.filter(|&block| block < waiter.range.end()) {
                self.guest.wait(block, waiter);
                continue;
            }
            let waits = match waiter.op {
                Op::Read => &mut self.out.reads,
                Op::Write => &mut self.out.writes,
            };
            waits.ends(self.now - waiter.since);
        }
    }

    /// The guest runs at the target; what came meanwhile is done now.
    pub(super) fn start_guest(&mut self) {
        self.guest.place = GuestLocation::Target;
        self.out.downtime = self.now - self.guest.stopped_at;
        self.out.handover = Some(self.now);
        for record in std::mem::take(&mut self.guest.stopped) {
            self.at_target(&record, record.blocks());
        }
    }
}

/// The missing runs among `run` and its neighbours, to this alignment.
fn neighbourhood(run: BlockRange, alignment: u64, missing: &BlockSet) -> Vec<BlockRange> {
    let start = run.start / alignment * alignment;
    let end = run.end().next_multiple_of(alignment);
    missing.intersection(BlockRange::new(start, end - start)).runs().collect()
}
