//! Mirroring: every order in which writes, frames and acknowledgements of one block can happen.

mod support;

use dray_engine::{SECOND, SourceEffect, SourceEvent, Tuning};
use dray_types::{BlockRange, BlockSet, Strategy};
use dray_wire::ToSource;
use std::collections::BTreeSet;
use support::*;

const BLOCK: u64 = 5;

/// One block on both sides, and everything about it that is under way.
struct World {
    source: S,
    /// Versions of the block.
    written: u64,
    at_source: u64,
    at_target: u64,
    dirty: bool,
    /// Runs that are to be read, by tag.
    reading: Vec<u64>,
    /// Frames on their streams: tag and version. Any of them may arrive next.
    flying: Vec<(u64, u64)>,
    /// Acknowledgements, and writes that the shell has not told of.
    acks: Vec<u64>,
    untold: u32,
    answers: Vec<SourceEvent>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write,
    Tell,
    Read(usize),
    Arrive(usize),
    Ack,
    Answer,
}

impl World {
    fn new(window: u64) -> Self {
        let mut plan = source_plan(Strategy::Mirror);
        plan.tuning = Tuning { mirror_window: window, ..Tuning::default() };
        let source = S { machine: dray_engine::Source::new(plan), now: SECOND };
        let mut world = Self {
            source,
            written: 1,
            at_source: 1,
            at_target: 0,
            dirty: false,
            reading: Vec::new(),
            flying: Vec::new(),
            acks: Vec::new(),
            untold: 0,
            answers: Vec::new(),
        };
        world.tell(SourceEvent::Start);
        world.answers.clear();
        world.tell(SourceEvent::ImagesSynced(Ok(())));
        world.tell(SourceEvent::LinkUp);
        let effects = world.source.opened(&BlockSet::new());
        world.carry_out(effects);
        let data = set(&[(BLOCK, 1)]);
        world.tell(SourceEvent::Scanned { image: IMAGE, data });
        world
    }

    fn tell(&mut self, event: SourceEvent) {
        let effects = self.source.step(event);
        self.carry_out(effects);
    }

    fn carry_out(&mut self, effects: Vec<SourceEffect>) {
        for effect in effects {
            match effect {
                SourceEffect::SendRun { tag, range, clear_dirty, .. } => {
                    assert_eq!(range, BlockRange::new(BLOCK, 1));
                    assert!(clear_dirty);
                    self.dirty = false;
                    self.reading.push(tag);
                    let under_way = self.reading.len() + self.flying.len();
                    assert_eq!(under_way, 1, "two versions under way could overtake each other");
                }
                SourceEffect::TakeDirty { image } => {
                    let taken = std::mem::take(&mut self.dirty);
                    let blocks = if taken { set(&[(BLOCK, 1)]) } else { BlockSet::new() };
                    self.answers.push(SourceEvent::DirtyTaken { image, blocks });
                }
                SourceEffect::Quiesce => {
                    self.answers.push(SourceEvent::Quiesced { lens: vec![LEN] });
                }
                SourceEffect::SyncImages => self.answers.push(SourceEvent::ImagesSynced(Ok(()))),
                _ => {}
            }
        }
    }

    fn possible(&self, writes: u64) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.written <= writes {
            steps.push(Step::Write);
        }
        if self.untold > 0 {
            steps.push(Step::Tell);
        }
        steps.extend((0..self.reading.len()).map(Step::Read));
        steps.extend((0..self.flying.len()).map(Step::Arrive));
        if !self.acks.is_empty() {
            steps.push(Step::Ack);
        }
        if !self.answers.is_empty() {
            steps.push(Step::Answer);
        }
        steps
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Write => {
                self.written += 1;
                self.at_source = self.written;
                self.dirty = true;
                self.untold += 1;
            }
            Step::Tell => {
                self.untold -= 1;
                let range = BlockRange::new(BLOCK, 1);
                self.tell(SourceEvent::Written { image: IMAGE, range });
            }
            Step::Read(nth) => self.flying.push((self.reading.remove(nth), self.at_source)),
            Step::Arrive(nth) => {
                let (tag, version) = self.flying.remove(nth);
                assert!(version >= self.at_target, "an older version came over a younger one");
                self.at_target = version;
                self.acks.push(tag);
            }
            Step::Ack => {
                let tags = vec![self.acks.remove(0)];
                let effects = self.source.hear(EPOCH, 0, ToSource::Received { tags });
                self.carry_out(effects);
            }
            Step::Answer => {
                let answer = self.answers.remove(0);
                self.tell(answer);
            }
        }
    }

    /// Everything that is under way happens, then the guest stops: the target must be equal.
    fn finish(&mut self) {
        for step in 0.. {
            assert!(step < 200, "it goes on and on");
            match self.possible(0).first() {
                Some(&step) => self.take(step),
                None if self.source.machine.is_ready() => break,
                None => self.tell(SourceEvent::Tick),
            }
        }
        self.tell(SourceEvent::BeginHandover);
        while let Some(&step) = self.possible(0).first() {
            self.take(step);
        }
        assert_eq!(self.source.machine.phase(), dray_engine::Phase::Handover);
        assert_eq!(self.at_target, self.at_source, "everything is equal at handover");
    }
}

/// Walks through every order of at most `depth` steps; returns how many orders and how far apart
/// the versions sent were.
fn walk(window: u64, writes: u64, depth: usize) -> (u64, BTreeSet<u64>) {
    let (mut orders, mut mirrored) = (0, BTreeSet::new());
    let mut path: Vec<(usize, usize)> = Vec::new();
    loop {
        let mut world = World::new(window);
        for nth in 0..depth {
            let steps = world.possible(writes);
            if steps.is_empty() {
                break;
            }
            if path.len() == nth {
                path.push((0, steps.len()));
            }
            world.take(steps[path[nth].0]);
        }
        world.finish();
        orders += 1;
        mirrored.insert(world.source.machine.status().blocks_mirrored);
        while path.last().is_some_and(|&(choice, of)| choice + 1 == of) {
            path.pop();
        }
        let Some((choice, _)) = path.last_mut() else { return (orders, mirrored) };
        *choice += 1;
    }
}

#[test]
fn every_order_of_writes_frames_and_acknowledgements_ends_equal() {
    let (orders, mirrored) = walk(1 << 20, 2, 11);
    assert!(orders > 500, "only {orders} orders");
    // The two writes, or one when the second falls on the first, which still waits.
    assert_eq!(mirrored, [1, 2].into());
    println!("{orders} orders");
}

#[test]
fn so_does_every_order_when_no_write_finds_room() {
    let (orders, mirrored) = walk(0, 2, 10);
    assert!(orders > 200, "only {orders} orders");
    assert_eq!(mirrored, [0].into());
}

fn written(source: &mut S, start: u64, len: u64) -> Vec<SourceEffect> {
    source.step(SourceEvent::Written { image: IMAGE, range: BlockRange::new(start, len) })
}

#[test]
fn a_write_is_sent_if_its_blocks_were_and_only_then() {
    let (mut source, effects) = S::begin(Strategy::Mirror, &set(&[(0, 600)]));
    assert!(runs(&written(&mut source, 10, 2)).is_empty(), "that version is under way");
    let again = source.received(&effects);
    assert_eq!(runs(&again), set(&[(10, 2)]), "as soon as the older one has landed");
    source.received(&again);
    assert_eq!(runs(&written(&mut source, 800, 1)), set(&[(800, 1)]), "it was a hole");
    assert_eq!(runs(&written(&mut source, 995, 500)), set(&[(995, 5)]), "clipped");
    assert_eq!(source.machine.status().blocks_mirrored, 2 + 1 + 5);
}

#[test]
fn other_strategies_do_not_listen_to_writes() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    assert!(written(&mut source, 10, 2).is_empty());
}

#[test]
fn a_full_window_leaves_the_rest_to_sync() {
    let mut plan = source_plan(Strategy::Mirror);
    plan.tuning.mirror_window = 3 * 4096;
    let mut source = S { machine: dray_engine::Source::new(plan), now: SECOND };
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let data = set(&[(0, 1)]);
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    source.received(&effects);
    let effects = written(&mut source, 100, 8);
    assert_eq!(runs(&effects), set(&[(100, 3)]), "room for three blocks");
    assert!(runs(&written(&mut source, 200, 1)).is_empty());
    source.received(&effects);
    assert_eq!(runs(&written(&mut source, 300, 1)), set(&[(300, 1)]), "room again");
    source.step(SourceEvent::LinkDown);
    assert!(written(&mut source, 400, 1).is_empty());
}

/// A guest that always has more writes than the link carries, over the blocks from 0 to `hot`.
/// Every frame arrives 10 ms after the one before it.
fn flood(blocks: u64, hot: u64, seconds: u64) -> (S, Vec<SourceEffect>) {
    let len = blocks * dray_types::BLOCK_SIZE;
    let mut plan = source_plan(Strategy::Mirror);
    plan.images[0].len = len;
    plan.tuning = Tuning { mirror_window: 8 << 20, ..Tuning::default() };
    let mut source = S { machine: dray_engine::Source::new(plan), now: SECOND };
    let mut effects = source.step(SourceEvent::Start);
    effects.extend(source.step(SourceEvent::ImagesSynced(Ok(()))));
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let data = set(&[(0, blocks)]);
    effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    let (mut frames, mut dirty) = (std::collections::VecDeque::new(), BlockSet::new());
    let (mut all, mut at) = (Vec::new(), 0);
    let end = source.now + seconds * SECOND;
    while source.now < end {
        let mut next = Vec::new();
        for effect in std::mem::take(&mut effects) {
            match &effect {
                SourceEffect::SendRun { tag, range, .. } => {
                    dirty.remove(*range);
                    frames.push_back(*tag);
                }
                SourceEffect::TakeDirty { .. } => {
                    next.extend(source.dirty(&std::mem::take(&mut dirty)));
                }
                _ => {}
            }
            all.push(effect);
        }
        for _ in 0..4 {
            let range = BlockRange::new(at % (hot / 256) * 256, 256);
            at += 1;
            dirty.insert(range);
            next.extend(source.step(SourceEvent::Written { image: IMAGE, range }));
        }
        source.now += 10_000_000;
        if let Some(tag) = frames.pop_front() {
            next.extend(source.hear(EPOCH, 0, ToSource::Received { tags: vec![tag] }));
        }
        next.extend(source.step(SourceEvent::Tick));
        effects = next;
    }
    (source, all)
}

#[test]
fn a_guest_that_writes_more_than_the_link_carries_does_not_starve_copy() {
    // 512 MiB at 100 frames of 1 MiB a second, half of them mirrored writes.
    let (_, effects) = flood(1 << 17, 1 << 13, 14);
    let copied: BlockSet = runs(&effects);
    assert!(copied.len() > 9 << 13, "{} blocks", copied.len());
}

#[test]
fn a_mirror_that_cannot_keep_up_says_so() {
    let (source, effects) = flood(1 << 16, 1 << 15, 400);
    assert!(source.machine.is_over(), "{:?}", source.machine.phase());
    let gives_up = effects.iter().any(|effect| {
        matches!(effect, SourceEffect::Notice(dray_engine::source::SourceNotice::Abandoned { why: Some(why) })
            if why.in_words().contains("--strategy hybrid"))
    });
    assert!(gives_up);
}
