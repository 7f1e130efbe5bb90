//! Backfill: fetching what is missing, what a guest waits for first.
//!
//! The live map of missing blocks belongs to the disk, where the guest's own writes shrink it. The
//! engine keeps `left`: the blocks of the agreed map that it has neither asked for nor found to be
//! here. A block leaves `left` when it is asked for, or when the live map says that it is not
//! missing; present never becomes missing again. So when `left` is empty, everything that is still
//! missing is under way, or asked about ([`super::asking`]), and each block crosses the wire once
//! unless the link is lost.

use super::asking::Asking;
use super::receiving::SAVE_INTERVAL;
use super::{Arrival, BackfillControl, Guest, Stage, Target, TargetEffect, TargetNotice};
use crate::order::{Waiting, next_image};
use crate::record::TargetRecord;
use crate::window::Window;
use crate::{Phase, SECOND, Time};
use dray_types::{BlockRange, BlockSet, ImageIndex, MAX_RUN_BLOCKS, Schedule};
use dray_wire::{ImageHandover, ToSource};
use std::collections::BTreeMap;

/// Longest run fetched in the background: a demand read waits behind the one being sent.
pub(crate) const BACKFILL_RUN: u64 = 64;
/// Fetches under way at most, however small they are.
const MAX_FETCHES: usize = 1024;
/// Blocks that could not be read or arrived damaged are asked for again after this long.
const RETRY_AFTER: u64 = SECOND;
/// How far Backfill goes on behind a block that a guest waited for, in blocks: 4 MiB, the smallest
/// chunk that heat counts.
const MIN_FOCUS: u64 = 1024;
/// How far once demands follow each other, in blocks: 1 MiB, twice as far each time.
const STREAM_FOCUS: u64 = 256;
/// Demanded bytes that the link carries in so many seconds delay a demand behind them hardly.
const QUICK: f64 = 0.005;
/// The same where the link's rate is not known.
const FEW_BYTES: u64 = 65_536;
/// Demands follow each other over a gap of so many blocks: 64 KiB.
const STREAM_GAP: u64 = 16;
/// How far at most when the guest's demands follow each other: 64 MiB.
const MAX_FOCUS: u64 = 16_384;

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
    /// A question about the live map is out: which of these blocks are missing.
    Asked(ImageIndex, BlockRange),
    /// The same of blocks that were asked about and are not here.
    Lacking(ImageIndex, BlockRange),
    /// Everything missing is under way.
    Exhausted,
    /// The final checkpoint, with this number, is under way.
    Closing(u64),
}

/// Where a guest waited: what it reads next is likely what lies behind.
#[derive(Clone, Copy, Debug)]
struct Focus {
    image: ImageIndex,
    until: u64,
    from: u64,
    span: u64,
}

impl Focus {
    /// Whether a demand at `start` follows the one that this is about.
    fn reaches(&self, image: ImageIndex, start: u64) -> bool {
        let gap = self.span.max(STREAM_GAP);
        let near = self.from.saturating_sub(gap)..=self.until.saturating_add(gap);
        self.image == image && near.contains(&start)
    }
}

/// What is being fetched.
pub(super) struct Backfill {
    fetches: BTreeMap<u64, Fetch>,
    /// Per image: blocks that may be missing and were not asked for.
    pub(super) left: Vec<Waiting>,
    /// Per image: blocks under way.
    under_way: Vec<BlockSet>,
    /// Per image: blocks that arrived in this life. An answer or a demand may be older than their
    /// arrival, and present never becomes missing again.
    pub(super) arrived_blocks: Vec<BlockSet>,
    /// Per image: blocks asked for in this life.
    asked_blocks: Vec<BlockSet>,
    /// Fetches that failed and when to try again.
    later: Vec<(Time, ImageIndex, BlockRange, bool)>,
    window: Window,
    /// Blocks whose hashes are asked for first.
    pub(super) asking: Asking,
    scan: Scan,
    focus: Option<Focus>,
    /// The source has named an order, even if it knows nothing of the guest: not address order as
    /// such, which fetches what is demanded and goes on where it was (Scheduling, section 7.1).
    pub(super) ordered: bool,
    /// Only what a guest waits for is fetched.
    pub(super) paused: bool,
    /// No questions before this time: something went wrong and is tried again.
    pause_until: Time,
    /// Blocks arrived since the last checkpoint.
    pub(super) arrived: bool,
    checkpoint_at: Time,
    next_checkpoint: u64,
    next_tag: u64,
    demands: u64,
    /// Bytes under way that guests wait for, or that were asked for with such.
    urgent_bytes: u64,
    pub(super) blocks_fetched: u64,
    pub(super) blocks_refetched: u64,
}

impl Backfill {
    pub(super) fn new(images: usize, window: Window) -> Self {
        Self {
            fetches: BTreeMap::new(),
            left: vec![Waiting::default(); images],
            under_way: vec![BlockSet::new(); images],
            arrived_blocks: vec![BlockSet::new(); images],
            asked_blocks: vec![BlockSet::new(); images],
            later: Vec::new(),
            window,
            asking: Asking::new(images),
            scan: Scan::Idle,
            focus: None,
            ordered: false,
            paused: false,
            pause_until: Time(0),
            arrived: false,
            checkpoint_at: Time(0),
            next_checkpoint: 1,
            next_tag: 1,
            demands: 0,
            urgent_bytes: 0,
            blocks_fetched: 0,
            blocks_refetched: 0,
        }
    }

    /// This is what may be missing.
    pub(super) fn begin(&mut self, agreed: &[ImageHandover]) {
        for (ix, image) in agreed.iter().enumerate() {
            self.left[ix].take();
            self.left[ix].union_with(&image.missing);
            self.left[ix].subtract(&self.under_way[ix]);
            self.left[ix].begin_round();
        }
        self.scan = Scan::Idle;
    }

    pub(super) fn set_order(&mut self, image: ImageIndex, order: &Schedule, whole: BlockRange) {
        if let Some(left) = self.left.get_mut(image.ix()) {
            left.set_order(order, whole);
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
        let tag = self.new_tag();
        self.window.sent(range.byte_len());
        self.left[image.ix()].remove(range);
        self.under_way[image.ix()].insert(range);
        self.urgent_bytes += if urgent { range.byte_len() } else { 0 };
        self.fetches.insert(tag, Fetch { image, range, urgent, sent_at: now });
        tag
    }

    pub(super) fn new_tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag - 1
    }

    /// Whether blocks may be fetched in the background.
    pub(super) fn has_room(&self) -> bool {
        self.window.open() && self.fetches.len() < MAX_FETCHES
    }

    /// A fetch is really sent.
    fn count(&mut self, image: ImageIndex, range: BlockRange) {
        let asked = &mut self.asked_blocks[image.ix()];
        self.blocks_fetched += range.len;
        self.blocks_refetched += asked.intersection(range).len();
        asked.insert(range);
    }

    /// What of `run` is neither here nor on its way.
    pub(super) fn wanted(&self, image: ImageIndex, run: BlockRange) -> BlockSet {
        let mut wanted = self.under_way[image.ix()].complement_in(run);
        wanted.subtract(&self.arrived_blocks[image.ix()].intersection(run));
        wanted
    }

    /// The same without what was asked about.
    fn unasked(&self, image: ImageIndex, run: BlockRange) -> BlockSet {
        let mut unasked = self.left[image.ix()].blocks().intersection(run);
        unasked.subtract(&self.under_way[image.ix()].intersection(run));
        unasked.subtract(&self.arrived_blocks[image.ix()].intersection(run));
        unasked
    }

    /// A guest waits for what of `run` is under way or comes again later, so a pause must not leave
    /// it behind. Answers the fetches that were not urgent before.
    fn hurry(&mut self, image: ImageIndex, run: BlockRange) -> Vec<u64> {
        let mut hurried = Vec::new();
        if !self.under_way[image.ix()].intersects(run) {
            return hurried;
        }
        let meant =
            |of: ImageIndex, range: BlockRange| of == image && !range.intersect(run).is_empty();
        for (&tag, fetch) in &mut self.fetches {
            if !fetch.urgent && meant(fetch.image, fetch.range) {
                fetch.urgent = true;
                self.urgent_bytes += fetch.range.byte_len();
                hurried.push(tag);
            }
        }
        for (_, of, range, urgent) in &mut self.later {
            *urgent |= meant(*of, *range);
        }
        hurried
    }

    fn land(&mut self, tag: u64) -> Option<Fetch> {
        let fetch = self.fetches.remove(&tag)?;
        self.under_way[fetch.image.ix()].remove(fetch.range);
        if fetch.urgent {
            self.urgent_bytes -= fetch.range.byte_len();
        }
        Some(fetch)
    }

    /// Whether a demand may bring more than a guest waits for: what lies around it delays the demands
    /// behind it, so it comes along only while next to nothing is demanded.
    pub(super) fn has_room_around(&self) -> bool {
        let quick = (self.window.rate() * QUICK) as u64;
        self.ordered && self.urgent_bytes <= quick.max(FEW_BYTES)
    }

    /// The next place to look in: around a guest's last demand, else where the schedule says.
    fn place(&mut self) -> Option<(ImageIndex, BlockRange)> {
        // It stays when nothing is left of it, so that the next demand is seen to follow it.
        if let Some(Focus { image, from, until, .. }) = self.focus
            && let Some(block) = self.left[image.ix()].blocks().next(from)
            && block < until
        {
            return Some((image, BlockRange::new(block, until - block)));
        }
        let ix = next_image(self.left.iter())?;
        let (run, piece) = self.left[ix].next_in_piece(BACKFILL_RUN)?;
        let range = BlockRange::new(run.start, piece.end() - run.start);
        Some((ImageIndex(ix as u16), range))
    }

    /// A guest waited for blocks from `start` to `end`: what it reads next is likely what lies behind.
    ///
    /// Where a schedule says what the guest reads, one demand says nothing more and the schedule goes
    /// on; only demands that follow each other, as of a guest that reads a file, are followed. Where
    /// nothing is known each demand is. In address order as such none is.
    fn focus_on(&mut self, image: ImageIndex, start: u64, end: u64) {
        if !self.ordered {
            return;
        }
        let first = if self.left[image.ix()].is_scheduled() { 0 } else { MIN_FOCUS };
        let span = match self.focus {
            Some(focus) if focus.reaches(image, start) => {
                (focus.span * 2).clamp(STREAM_FOCUS, MAX_FOCUS)
            }
            _ => first,
        };
        self.focus = Some(Focus { image, from: end, until: end.saturating_add(span), span });
    }

    /// What is fetched in the background is left for later.
    fn shelve(&mut self) {
        let tags: Vec<u64> =
            self.fetches.iter().filter(|(_, fetch)| !fetch.urgent).map(|(&tag, _)| tag).collect();
        for tag in tags {
            if let Some(fetch) = self.land(tag) {
                self.window.lost(fetch.range.byte_len());
                self.put_back(fetch.image, fetch.range);
            }
        }
    }

    fn put_back(&mut self, image: ImageIndex, range: BlockRange) {
        self.under_way[image.ix()].remove(range);
        self.left[image.ix()].insert(range);
        self.scan_again();
    }

    /// Something waits that did not before.
    pub(super) fn scan_again(&mut self) {
        if self.scan == Scan::Exhausted {
            self.scan = Scan::Idle;
        }
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
            Arrival::Failed(why) => {
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
        result: Result<(), String>,
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
