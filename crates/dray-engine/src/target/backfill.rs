//! Backfill: fetching what is missing, what a guest waits for first.
//!
//! The live map of missing blocks belongs to the disk, where the guest's own writes shrink it; the
//! engine asks it for the next run and never fetches a block that is already under way, so each
//! block crosses the wire once unless the link is lost.

use super::receiving::SAVE_INTERVAL;
use super::{Arrival, Guest, Stage, Target, TargetEffect, TargetNotice};
use crate::order::Order;
use crate::record::TargetRecord;
use crate::window::Window;
use crate::{Phase, SECOND, Time};
use dray_types::{BlockRange, BlockSet, ImageIndex, MAX_RUN_BLOCKS};
use dray_wire::ToSource;
use std::collections::BTreeMap;

/// Longest run fetched in the background: a demand read waits behind the one being sent.
const BACKFILL_RUN: u64 = 64;
/// Fetches under way at most, however small they are.
const MAX_FETCHES: usize = 1024;
/// Blocks that could not be read or arrived damaged are asked for again after this long.
const RETRY_AFTER: u64 = SECOND;

#[derive(Clone, Copy, Debug)]
struct Fetch {
    image: ImageIndex,
    range: BlockRange,
    urgent: bool,
    sent_at: Time,
}

#[derive(PartialEq, Eq, Clone, Copy, Debug)]
enum Scan {
    /// The next question may be asked.
    Idle,
    /// A question about the live map is out.
    Asked,
    /// Everything missing is under way.
    Exhausted,
    /// The final checkpoint, with this number, is under way.
    Closing(u64),
}

/// What is being fetched.
pub(super) struct Backfill {
    fetches: BTreeMap<u64, Fetch>,
    /// Per image: blocks under way.
    under_way: Vec<BlockSet>,
    /// Per image: blocks that arrived in this life. An answer or a demand may be older than their
    /// arrival, and present never becomes missing again.
    arrived_blocks: Vec<BlockSet>,
    /// Fetches that failed and when to try again.
    later: Vec<(Time, ImageIndex, BlockRange, bool)>,
    window: Window,
    order: Box<dyn Order + Send>,
    scan: Scan,
    /// Where the scan of the live map stands.
    image: usize,
    from: u64,
    /// Whether this pass over all images started a fetch; one that did not has seen everything.
    launched: bool,
    /// No questions before this time: something went wrong and is tried again.
    pause_until: Time,
    /// Blocks arrived since the last checkpoint.
    arrived: bool,
    checkpoint_at: Time,
    next_checkpoint: u64,
    next_tag: u64,
    demands: u64,
}

impl Backfill {
    pub(super) fn new(images: usize, window: Window, order: Box<dyn Order + Send>) -> Self {
        Self {
            fetches: BTreeMap::new(),
            under_way: vec![BlockSet::new(); images],
            arrived_blocks: vec![BlockSet::new(); images],
            later: Vec::new(),
            window,
            order,
            scan: Scan::Idle,
            image: 0,
            from: 0,
            launched: false,
            pause_until: Time(0),
            arrived: false,
            checkpoint_at: Time(0),
            next_checkpoint: 1,
            next_tag: 1,
            demands: 0,
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.fetches.len()
    }

    pub(super) fn rate(&self) -> f64 {
        self.window.rate()
    }

    pub(super) fn demands(&self) -> u64 {
        self.demands
    }

    pub(super) fn new_route(&mut self) {
        self.window.new_route();
    }

    fn launch(&mut self, now: Time, image: ImageIndex, range: BlockRange, urgent: bool) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.window.sent(range.byte_len());
        self.under_way[image.ix()].insert(range);
        self.fetches.insert(tag, Fetch { image, range, urgent, sent_at: now });
        tag
    }

    /// What of `run` is neither here nor on its way.
    fn wanted(&self, image: ImageIndex, run: BlockRange) -> BlockSet {
        let mut wanted = self.under_way[image.ix()].complement_in(run);
        wanted.subtract(&self.arrived_blocks[image.ix()]);
        wanted
    }

    fn land(&mut self, tag: u64) -> Option<Fetch> {
        let fetch = self.fetches.remove(&tag)?;
        self.under_way[fetch.image.ix()].remove(fetch.range);
        Some(fetch)
    }
}

impl Target {
    fn fetches(&self) -> bool {
        self.opened && matches!(self.stage, Stage::Owner(Guest::Running | Guest::Starting))
    }

    /// A guest waits: these go at once, whatever the window says.
    pub(super) fn demand(
        &mut self,
        image: ImageIndex,
        runs: &[BlockRange],
        out: &mut Vec<TargetEffect>,
    ) {
        if !matches!(self.stage, Stage::Owner(_)) || image.ix() >= self.plan.images.len() {
            return;
        }
        for &run in runs {
            let wanted = self.backfill.wanted(image, run);
            for range in wanted.runs_up_to(MAX_RUN_BLOCKS) {
                self.backfill.demands += 1;
                let tag = self.backfill.launch(self.now, image, range, true);
                self.ask(tag, image, range, true, out);
            }
        }
        // What a guest reads next is likely what lies behind: go on from there.
        if let Some(last) = runs.last()
            && self.backfill.scan == Scan::Idle
        {
            self.backfill.image = image.ix();
            self.backfill.from = last.end();
            // The pass has left blocks out: another one must follow.
            self.backfill.launched = true;
        }
    }

    /// Asks the live map what is missing while the window has room.
    pub(super) fn fill_window(&mut self, out: &mut Vec<TargetEffect>) {
        let backfill = &mut self.backfill;
        let room = backfill.window.open() && backfill.fetches.len() < MAX_FETCHES;
        let may = room && backfill.scan == Scan::Idle && self.now >= backfill.pause_until;
        if !may || !self.fetches() {
            return;
        }
        let backfill = &mut self.backfill;
        backfill.scan = Scan::Asked;
        let image = ImageIndex(backfill.image as u16);
        out.push(TargetEffect::AskMissing { image, from: backfill.from, max: BACKFILL_RUN });
    }

    pub(super) fn next_missing(
        &mut self,
        image: ImageIndex,
        run: Option<BlockRange>,
        out: &mut Vec<TargetEffect>,
    ) {
        if self.backfill.scan != Scan::Asked {
            return;
        }
        self.backfill.scan = Scan::Idle;
        match run {
            Some(run) => self.fetch_next(image, run, out),
            None => self.scan_on(out),
        }
        self.fill_window(out);
    }

    fn fetch_next(&mut self, image: ImageIndex, run: BlockRange, out: &mut Vec<TargetEffect>) {
        self.backfill.from = run.end();
        let wanted = self.backfill.wanted(image, run);
        let Some(range) = self.backfill.order.next(image, &wanted, BACKFILL_RUN) else { return };
        self.backfill.from = range.end();
        self.backfill.launched = true;
        let tag = self.backfill.launch(self.now, image, range, false);
        self.ask(tag, image, range, false, out);
    }

    /// Asks for a fetch now, or leaves it to `refetch` when the session is not open yet.
    fn ask(
        &self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        urgent: bool,
        out: &mut Vec<TargetEffect>,
    ) {
        if self.opened {
            self.send(ToSource::Fetch { tag, image, range, urgent }, out);
        }
    }

    /// Nothing more in this image from here: the next image, or another pass.
    fn scan_on(&mut self, out: &mut Vec<TargetEffect>) {
        let backfill = &mut self.backfill;
        backfill.from = 0;
        backfill.image = (backfill.image + 1) % self.plan.images.len();
        if backfill.image > 0 {
            return;
        }
        if !std::mem::take(&mut backfill.launched) {
            // Present never becomes missing again, so what is under way is all there is.
            backfill.scan = Scan::Exhausted;
            self.close_when_done(out);
        }
    }

    /// Complete is the last record, so it waits for the one that says that the guest runs: a restart
    /// that reads it has nothing left to start.
    pub(super) fn close_when_done(&mut self, out: &mut Vec<TargetEffect>) {
        if self.stage != Stage::Owner(Guest::Running) {
            return;
        }
        let backfill = &mut self.backfill;
        let landed = backfill.fetches.is_empty() && backfill.later.is_empty();
        if backfill.scan == Scan::Exhausted && landed {
            let id = self.start_checkpoint(out);
            self.backfill.scan = Scan::Closing(id);
        }
    }

    fn start_checkpoint(&mut self, out: &mut Vec<TargetEffect>) -> u64 {
        let id = self.backfill.next_checkpoint;
        self.backfill.next_checkpoint += 1;
        self.backfill.arrived = false;
        self.backfill.checkpoint_at = self.now;
        out.push(TargetEffect::Checkpoint { id });
        id
    }

    pub(super) fn filled(&mut self, tag: u64, arrival: Arrival, out: &mut Vec<TargetEffect>) {
        let Some(fetch) = self.backfill.land(tag) else { return };
        let bytes = fetch.range.byte_len();
        match arrival {
            Arrival::Written => {
                self.backfill.arrived = true;
                self.backfill.arrived_blocks[fetch.image.ix()].insert(fetch.range);
                self.backfill.window.arrived(self.now, fetch.sent_at, bytes);
            }
            Arrival::Damaged => self.postpone(fetch),
            Arrival::Failed(why) => {
                self.postpone(fetch);
                self.complain(fetch, format!("writing at the target failed: {why}"), out);
            }
        }
        self.close_when_done(out);
        self.fill_window(out);
    }

    pub(super) fn unreadable(&mut self, tag: u64, why: String, out: &mut Vec<TargetEffect>) {
        let Some(fetch) = self.backfill.land(tag) else { return };
        self.postpone(fetch);
        self.complain(fetch, format!("reading at the source failed: {why}"), out);
    }

    /// Stalls, never invents: the blocks are asked for again until they come (I5).
    fn postpone(&mut self, fetch: Fetch) {
        self.backfill.window.lost(fetch.range.byte_len());
        // Still under way: the scan must not ask again before its time.
        self.backfill.under_way[fetch.image.ix()].insert(fetch.range);
        let when = Time(self.now.0 + RETRY_AFTER);
        self.backfill.later.push((when, fetch.image, fetch.range, fetch.urgent));
    }

    fn complain(&self, fetch: Fetch, why: String, out: &mut Vec<TargetEffect>) {
        let Fetch { image, range, .. } = fetch;
        out.push(TargetEffect::Notice(TargetNotice::Unreadable { image, range, why }));
    }

    pub(super) fn tick_backfill(&mut self, out: &mut Vec<TargetEffect>) {
        if !self.fetches() {
            return;
        }
        let now = self.now;
        let (due, later): (Vec<_>, Vec<_>) =
            self.backfill.later.drain(..).partition(|&(when, ..)| when <= now);
        self.backfill.later = later;
        for (_, image, range, urgent) in due {
            let tag = self.backfill.launch(now, image, range, urgent);
            self.ask(tag, image, range, urgent, out);
        }
        self.close_when_done(out);
        self.fill_window(out);
        let backfill = &self.backfill;
        let closing = matches!(backfill.scan, Scan::Closing(_));
        if backfill.arrived && !closing && now.since(backfill.checkpoint_at) >= SAVE_INTERVAL {
            self.start_checkpoint(out);
        }
    }

    /// After a lost link: everything under way is asked for again, urgent ones first.
    pub(super) fn refetch(&mut self, out: &mut Vec<TargetEffect>) {
        if !matches!(self.stage, Stage::Owner(_)) {
            return;
        }
        let mut again: Vec<_> = self.backfill.fetches.iter().map(|(&t, &f)| (t, f)).collect();
        again.sort_by_key(|(tag, fetch)| (!fetch.urgent, *tag));
        for (tag, Fetch { image, range, urgent, .. }) in again {
            self.send(ToSource::Fetch { tag, image, range, urgent }, out);
        }
        self.fill_window(out);
    }

    pub(super) fn checkpointed(
        &mut self,
        id: u64,
        result: Result<(), String>,
        out: &mut Vec<TargetEffect>,
    ) {
        if self.backfill.scan != Scan::Closing(id) {
            return;
        }
        if let Err(why) = result {
            // Looked through again later; the guest learns of a broken disk by its own writes.
            self.backfill.scan = Scan::Idle;
            self.backfill.pause_until = Time(self.now.0 + RETRY_AFTER);
            return out.push(TargetEffect::Notice(TargetNotice::Failed { why }));
        }
        out.push(TargetEffect::Journal(vec![TargetRecord::Complete]));
        self.stage = Stage::Complete;
        out.push(TargetEffect::Finish);
        self.send(ToSource::Complete, out);
        out.push(TargetEffect::Notice(TargetNotice::Phase(Phase::Release)));
        out.push(TargetEffect::Notice(TargetNotice::Complete));
    }
}
