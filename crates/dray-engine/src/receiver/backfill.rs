//! Backfill: fetching what is missing, what a guest waits for first.
//!
//! The live map of missing blocks belongs to the disk, where the guest's own writes shrink it. The
//! engine keeps `left`: the blocks of the agreed map that it has neither asked for nor found to be
//! here. A block leaves `left` when it is asked for, or when the live map says that it is not
//! missing; present never becomes missing again. So when `left` is empty, everything that is still
//! missing is under way, or asked about ([`super::hash_questions`]), and each block crosses the wire once
//! unless the link is lost.

use super::fetching::{BACKFILL_RUN, Fetch, Scan};
use super::receiving::SAVE_INTERVAL;
use super::{
    Arrival, BackfillControl, DiskFault, Guest, Stage, Target, TargetEffect, TargetNotice,
};
use crate::order::Waiting;
use crate::record::TargetRecord;
use crate::{Phase, SECOND, Time};
use dray_types::{BlockRange, BlockSet, ImageIndex, MAX_RUN_BLOCKS, Schedule, Why};
use dray_wire::ToSource;

/// Blocks that could not be read or arrived damaged are asked for again after this long.
const RETRY_AFTER: u64 = SECOND;

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
        if let Some(first) = runs.first() {
            self.backfill.watch(image, first.start);
        }
        for &run in runs {
            let hurried = self.backfill.hurry(image, run);
            if self.opened {
                hurried.into_iter().for_each(|tag| self.send(ToSource::Hurry { tag }, out));
            }
            let wanted = self.backfill.wanted(image, run);
            for range in wanted.runs_up_to(MAX_RUN_BLOCKS) {
                self.backfill.demands += 1;
                let tag = self.backfill.launch(self.now, image, range, true);
                self.ask(tag, image, range, true, out);
            }
        }
        if let (Some(first), Some(last)) = (runs.first(), runs.last()) {
            self.backfill.focus_on(image, first.start, last.end());
        }
    }

    /// Asks the live map what is missing while the window has room.
    pub(super) fn fill_window(&mut self, out: &mut Vec<TargetEffect>) {
        if !self.fetches() || self.backfill.scan != Scan::Idle {
            return;
        }
        let backfill = &mut self.backfill;
        if backfill.left.iter().all(Waiting::is_empty) && backfill.asking.lacks_nothing() {
            backfill.scan = Scan::Exhausted;
            return self.close_when_done(out);
        }
        let waits = backfill.paused || self.now < backfill.pause_until;
        if waits || self.ask_sample(out) {
            return;
        }
        self.scan_on(out);
    }

    fn scan_on(&mut self, out: &mut Vec<TargetEffect>) {
        let backfill = &mut self.backfill;
        let room = backfill.has_room();
        if room && let Some((image, range)) = backfill.asking.first_lacking() {
            backfill.scan = Scan::Lacking(image, range);
            return out.push(TargetEffect::AskMissing { image, range, max: range.len });
        }
        if !room && !backfill.asking.runs_ahead() {
            return;
        }
        let Some((image, range)) = backfill.place() else { return };
        let whole = BlockRange::whole(self.plan.images[image.ix()].len);
        // Past the end nothing is missing; a map that says otherwise is looked at block by block.
        let range = match range.intersect(whole) {
            inside if inside.is_empty() => BlockRange::new(range.start, BACKFILL_RUN),
            inside => inside,
        };
        backfill.scan = Scan::Asked(image, range);
        out.push(TargetEffect::AskMissing { image, range, max: BACKFILL_RUN });
    }

    pub(super) fn next_missing(
        &mut self,
        image: ImageIndex,
        run: Option<BlockRange>,
        out: &mut Vec<TargetEffect>,
    ) {
        let (Scan::Asked(asked, range) | Scan::Lacking(asked, range)) = self.backfill.scan else {
            return;
        };
        if asked != image {
            return;
        }
        let lacking = self.backfill.scan == Scan::Lacking(asked, range);
        self.backfill.scan = Scan::Idle;
        let run = run.map(|run| run.intersect(range)).filter(|run| !run.is_empty());
        let goes_on = match run {
            _ if lacking => {
                self.fetch_lacking((image, range), run, out);
                true
            }
            Some(run) => self.fetch_next(image, range.start, run, out),
            None => {
                self.backfill.left[image.ix()].remove(range);
                true
            }
        };
        if goes_on {
            self.fill_window(out);
        }
    }

    /// `run` is missing and nothing between `from` and it: ask about or fetch what of it is not under
    /// way. False when there is no room for that.
    fn fetch_next(
        &mut self,
        image: ImageIndex,
        from: u64,
        run: BlockRange,
        out: &mut Vec<TargetEffect>,
    ) -> bool {
        let range = self.backfill.unasked(image, run).next_run(run.start, BACKFILL_RUN);
        // Up to here everything is present, under way or asked about.
        let end = range.map_or(run.end(), |range| range.start);
        self.backfill.left[image.ix()].remove(BlockRange::new(from, end - from));
        match range {
            None => true,
            // Paused between question and answer, or the session was lost.
            Some(_) if self.backfill.paused || !self.fetches() => false,
            Some(range) => self.ask_or_fetch(image, range, out),
        }
    }

    /// Fetches blocks in the background.
    pub(super) fn fetch(
        &mut self,
        image: ImageIndex,
        range: BlockRange,
        out: &mut Vec<TargetEffect>,
    ) {
        let tag = self.backfill.launch(self.now, image, range, false);
        self.ask(tag, image, range, false, out);
    }

    /// Asks for a fetch now, or leaves it to `refetch` when the session is not open yet.
    fn ask(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        urgent: bool,
        out: &mut Vec<TargetEffect>,
    ) {
        if self.opened {
            self.backfill.count(image, range);
            self.send(ToSource::Fetch { tag, image, range, urgent }, out);
        }
    }

    /// Complete is the last record, so it waits for the one that says that the guest runs: a restart
    /// that reads it has nothing left to start.
    pub(super) fn close_when_done(&mut self, out: &mut Vec<TargetEffect>) {
        if self.stage != Stage::Owner(Guest::Running) {
            return;
        }
        let backfill = &mut self.backfill;
        let fetched = backfill.fetches.is_empty() && backfill.later.is_empty();
        let landed = fetched && backfill.asking.is_idle();
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
        if let Some(ask) = self.backfill.asking.take(tag) {
            return self.looked_up(ask, arrival, out);
        }
        let Some(fetch) = self.backfill.land(tag) else { return };
        let bytes = fetch.range.byte_len();
        match arrival {
            Arrival::Written => {
                self.backfill.arrived = true;
                self.backfill.arrived_blocks[fetch.image.ix()].insert(fetch.range);
                self.backfill.window.arrived(self.now, fetch.sent_at, bytes);
                self.backfill.asking.reuse.carried(bytes);
                self.backfill.asking.reuse.measured(self.backfill.window.rate());
            }
            // Nobody describes what was fetched.
            Arrival::Damaged | Arrival::Partly { .. } | Arrival::SomeBlocks { .. } => {
                self.postpone(fetch);
            }
            Arrival::Failed(DiskFault { why, .. }) => {
                self.postpone(fetch);
                self.complain(fetch, format!("writing at the target failed: {why}"), out);
            }
        }
        self.close_when_done(out);
        self.fill_window(out);
    }

    pub(super) fn unreadable(&mut self, tag: u64, why: String, out: &mut Vec<TargetEffect>) {
        if self.indescribable(tag, out) {
            return;
        }
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
            if self.backfill.paused && !urgent {
                self.backfill.put_back(image, range);
                continue;
            }
            let tag = self.backfill.launch(now, image, range, urgent);
            self.ask(tag, image, range, urgent, out);
        }
        self.give_up_asking();
        self.close_when_done(out);
        self.fill_window(out);
        let backfill = &self.backfill;
        let closing = matches!(backfill.scan, Scan::Closing(_));
        if backfill.arrived && !closing && now.since(backfill.checkpoint_at) >= SAVE_INTERVAL {
            self.start_checkpoint(out);
        }
    }

    /// The operator lets Backfill begin, or wait. Durable before it counts.
    pub(super) fn control(&mut self, control: BackfillControl, out: &mut Vec<TargetEffect>) {
        if !matches!(self.stage, Stage::Owner(_)) {
            let why = match self.stage {
                Stage::Complete => "every block is already here",
                _ => "the target does not own the images yet",
            };
            return out.push(TargetEffect::Notice(TargetNotice::Refused { why: why.into() }));
        }
        let paused = control == BackfillControl::Pause;
        if self.backfill.paused != paused {
            self.backfill.paused = paused;
            out.push(TargetEffect::Journal(vec![TargetRecord::BackfillPaused { paused }]));
        }
        self.fill_window(out);
    }

    /// The source knows a better order (I7: clipped and bounded, never trusted).
    pub(super) fn order(&mut self, image: ImageIndex, order: &Schedule) {
        let Some(offer) = self.plan.images.get(image.ix()) else { return };
        self.backfill.ordered = true;
        self.backfill.set_order(image, order, BlockRange::whole(offer.len));
    }

    /// After a lost link: everything under way is asked for again, urgent ones first.
    pub(super) fn refetch(&mut self, out: &mut Vec<TargetEffect>) {
        if !matches!(self.stage, Stage::Owner(_)) {
            return;
        }
        if self.backfill.paused {
            self.backfill.shelve();
        }
        let mut again: Vec<_> = self.backfill.fetches.iter().map(|(&t, &f)| (t, f)).collect();
        again.sort_by_key(|(tag, fetch)| (!fetch.urgent, *tag));
        for (tag, Fetch { image, range, urgent, .. }) in again {
            self.ask(tag, image, range, urgent, out);
        }
        self.fill_window(out);
    }

    pub(super) fn checkpointed(
        &mut self,
        id: u64,
        result: Result<(), Why>,
        out: &mut Vec<TargetEffect>,
    ) {
        if self.backfill.scan != Scan::Closing(id) {
            return;
        }
        if let Err(why) = result {
            // Looked through again later; the guest learns of a broken disk by its own writes.
            // Nothing is under way, so the live map's answers are younger than any arrival.
            self.backfill.arrived_blocks.fill(BlockSet::new());
            self.backfill.begin(&self.agreed);
            self.backfill.pause_until = Time(self.now.0 + RETRY_AFTER);
            let why = why.to_string();
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
