//! Asking for hashes before blocks: what this host has anywhere need not cross the link in Backfill
//! either.
//!
//! A run that was asked about is as missing as before, and takes no room in the window. Nothing that
//! a guest does waits for the answer: what it reads is fetched at once, what it writes is present and
//! stays as it is, because only missing blocks are ever filled. What is found is filled in by the
//! shell, like a run that has arrived; what lacks waits in `lacking` for room, is looked up in the live
//! map once more, and is fetched. Whatever goes wrong with a question, its blocks are fetched.
//!
//! Of a piece that lacks most blocks may be here all the same; then its blocks are asked about in turn.
//!
//! Hashes stay true for as long as Backfill lasts: nobody writes to the source's copy any more.

use super::fetching::{BACKFILL_RUN, Backfill};
use super::receiving::{found_blocks, pieces};
use super::{Arrival, Target, TargetEffect};
use crate::reuse::{NextRun, Reuse};
use crate::{SECOND, Time};
use dray_types::{BlockRange, BlockSet, ImageIndex};
use dray_wire::ToSource;
use dray_wire::frame::PIECE_BLOCKS;
use std::collections::{BTreeMap, VecDeque};

/// A question that has no answer after this long is given up: what looks for content waits for other
/// images 5 s at most, and a disk that takes longer than this is no help.
const PATIENCE: u64 = 30 * SECOND;

/// A run whose hashes were asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    image: ImageIndex,
    range: BlockRange,
    at: Time,
    /// About blocks, not about pieces.
    blocks: bool,
}

impl Ask {
    fn pieces(self) -> u64 {
        self.range.len / PIECE_BLOCKS
    }
}

/// Blocks that were asked about and are not here: they wait for room in the window.
#[derive(Clone, Copy, Debug)]
struct Lacking {
    image: ImageIndex,
    range: BlockRange,
    /// Pieces that [`Reuse`] counts until these blocks are fetched.
    pieces: u64,
}

/// What is being asked, and what came of it.
pub(super) struct Asking {
    pub(super) reuse: Reuse,
    asks: BTreeMap<u64, Ask>,
    lacking: VecDeque<Lacking>,
    /// Per image: blocks that were found here and so not fetched.
    pub(super) found: Vec<u64>,
    /// Per image: blocks of which its own file may hold some version.
    in_place: Vec<BlockSet>,
}

impl Asking {
    pub(super) fn new(images: usize) -> Self {
        Self {
            reuse: Reuse::new(0),
            asks: BTreeMap::new(),
            lacking: VecDeque::new(),
            found: vec![0; images],
            in_place: vec![BlockSet::new(); images],
        }
    }

    /// Nothing waits to be fetched.
    pub(super) fn lacks_nothing(&self) -> bool {
        self.lacking.is_empty()
    }

    /// No question is open.
    pub(super) fn is_idle(&self) -> bool {
        self.asks.is_empty() && self.lacking.is_empty()
    }

    /// Whether questions may go out while there is no room for blocks.
    pub(super) fn runs_ahead(&self) -> bool {
        self.reuse.in_step() && self.reuse.has_room()
    }

    /// What waits to be fetched.
    pub(super) fn first_lacking(&self) -> Option<(ImageIndex, BlockRange)> {
        self.lacking.front().map(|first| (first.image, first.range))
    }

    /// Of the first that waits to be fetched nothing before `end` needs to wait any more.
    fn cut_first(&mut self, end: u64) {
        let Some(first) = self.lacking.front_mut() else { return };
        let left = first.range.end().saturating_sub(end);
        if left > 0 {
            first.range = BlockRange::new(end, left);
            return;
        }
        self.reuse.let_go(first.pieces);
        self.lacking.pop_front();
    }

    /// The answer that a tag belongs to.
    pub(super) fn take(&mut self, tag: u64) -> Option<Ask> {
        self.asks.remove(&tag)
    }
}

impl Backfill {
    /// The session is gone, and with it every question: nothing is known of what they were about.
    pub(super) fn forget_asking(&mut self) {
        let asks = std::mem::take(&mut self.asking.asks).into_values();
        let lacking = std::mem::take(&mut self.asking.lacking).into_iter();
        let asked = asks.map(|ask| (ask.image, ask.range));
        let all: Vec<_> =
            asked.chain(lacking.map(|lacking| (lacking.image, lacking.range))).collect();
        all.into_iter().for_each(|(image, range)| self.put_off(image, range));
        self.asking.reuse.forget();
        self.asking.reuse.known = false;
    }

    /// Blocks that were asked about, and need not be fetched before their turn.
    fn put_off(&mut self, image: ImageIndex, range: BlockRange) {
        let blocks = self.wanted(image, range);
        self.left[image.ix()].union_with(&blocks);
        self.scan_again();
    }

    /// Of what was asked about these blocks have to be fetched.
    fn lack(&mut self, image: ImageIndex, blocks: &BlockSet) {
        if self.asking.reuse.only_samples() {
            return blocks.runs().for_each(|run| self.put_off(image, run));
        }
        let mut pieces = blocks.len().div_ceil(PIECE_BLOCKS);
        self.asking.reuse.keep(pieces);
        for range in blocks.runs() {
            // Counted until the last of them is fetched, or nearly so.
            let counted = pieces.min(range.len.div_ceil(PIECE_BLOCKS));
            pieces -= counted;
            self.asking.lacking.push_back(Lacking { image, range, pieces: counted });
        }
        self.scan_again();
    }

    /// It is not known whether these blocks are here, and nobody asks again.
    fn unanswered(&mut self, now: Time, ask: Ask) {
        self.asking.reuse.no_answer(now, ask.pieces());
        self.lack(ask.image, &[ask.range].into_iter().collect());
    }

    /// Blocks that were asked about are here.
    fn found(&mut self, image: ImageIndex, blocks: &BlockSet) {
        for run in blocks.runs() {
            // A guest's demand may have been faster, and what it has asked for crosses the link.
            self.asking.found[image.ix()] += self.wanted(image, run).len();
        }
        self.arrived_blocks[image.ix()].union_with(blocks);
        self.arrived |= !blocks.is_empty();
    }
}

impl Target {
    /// The source answers questions in this session.
    pub(super) fn describes(
        &mut self,
        together: bool,
        link_rate: u64,
        in_place: &[ImageIndex],
        out: &mut Vec<TargetEffect>,
    ) {
        let Asking { reuse, in_place: places, .. } = &mut self.backfill.asking;
        reuse.known = true;
        reuse.together = together || self.plan.images.len() > 1;
        reuse.measured(link_rate as f64);
        for image in in_place {
            if let (Some(place), Some(offer)) =
                (places.get_mut(image.ix()), self.plan.images.get(image.ix()))
            {
                place.insert(BlockRange::whole(offer.len));
            }
        }
        self.fill_window(out);
    }

    /// Asks about what is left of the sample; true while nothing else may be asked or fetched in the
    /// background.
    pub(super) fn ask_sample(&mut self, out: &mut Vec<TargetEffect>) -> bool {
        if !self.backfill.asking.reuse.known {
            return false;
        }
        let lens: Vec<_> =
            self.plan.images.iter().map(|offer| BlockRange::whole(offer.len).len).collect();
        self.backfill.asking.reuse.begin(self.now, &lens);
        while let Some((image, range)) = self.backfill.asking.reuse.next_sample() {
            if self.backfill.left[image.ix()].blocks().contains_range(range) {
                self.ask_about(image, range, out);
            }
        }
        self.backfill.asking.reuse.samples(self.now)
    }

    fn ask_about(&mut self, image: ImageIndex, range: BlockRange, out: &mut Vec<TargetEffect>) {
        self.backfill.left[image.ix()].remove(range);
        self.backfill.asking.reuse.described(self.now, range.len / PIECE_BLOCKS);
        self.ask_for_hashes(Ask { image, range, at: self.now, blocks: false }, out);
    }

    fn ask_for_hashes(&mut self, ask: Ask, out: &mut Vec<TargetEffect>) {
        let Ask { image, range, blocks, .. } = ask;
        let tag = self.backfill.new_tag();
        self.backfill.asking.asks.insert(tag, ask);
        self.send(ToSource::Describe { tag, image, range, blocks }, out);
    }

    /// `run` is missing and not on its way: asks about it or fetches it, or the first part of it. False
    /// when there is no room for that.
    pub(super) fn ask_or_fetch(
        &mut self,
        image: ImageIndex,
        run: BlockRange,
        out: &mut Vec<TargetEffect>,
    ) -> bool {
        let Asking { reuse, in_place, .. } = &self.backfill.asking;
        match reuse.next_run(run, &in_place[image.ix()]) {
            NextRun::Describe(range) if self.backfill.asking.reuse.has_room() => {
                self.ask_about(image, range, out);
            }
            NextRun::Send(range) if self.backfill.has_room() => {
                self.backfill.asking.reuse.sent(range.len);
                self.fetch(image, range, out);
            }
            _ => return false,
        }
        true
    }

    /// The live map says what is still missing of the first run that lacks: its first missing part,
    /// or nothing.
    pub(super) fn fetch_lacking(
        &mut self,
        asked: (ImageIndex, BlockRange),
        run: Option<BlockRange>,
        out: &mut Vec<TargetEffect>,
    ) {
        // Between question and answer the session may have been lost, or Backfill paused.
        if self.backfill.asking.first_lacking() != Some(asked) || self.backfill.paused {
            return;
        }
        let (image, range) = asked;
        let Some(run) = run else { return self.backfill.asking.cut_first(range.end()) };
        let wanted = self.backfill.wanted(image, run).next_run(run.start, BACKFILL_RUN);
        self.backfill.asking.cut_first(wanted.map_or(run.end(), BlockRange::end));
        if let Some(wanted) = wanted {
            self.fetch(image, wanted, out);
        }
    }

    /// What was described was looked up, or could not be.
    pub(super) fn looked_up(&mut self, ask: Ask, arrival: Arrival, out: &mut Vec<TargetEffect>) {
        match arrival {
            Arrival::Written if ask.blocks => self.blocks_looked_up(ask, &[0; 4]),
            Arrival::Written => self.pieces_looked_up(ask, 0, 0, out),
            Arrival::Partly { lacking, near } if !ask.blocks => {
                self.pieces_looked_up(ask, lacking, near, out);
            }
            Arrival::SomeBlocks { lacking } if ask.blocks => self.blocks_looked_up(ask, &lacking),
            // A disk that refuses to be written says so again when the blocks come.
            _ => self.backfill.unanswered(self.now, ask),
        }
        self.close_when_done(out);
        self.fill_window(out);
    }

    fn pieces_looked_up(&mut self, ask: Ask, lacking: u16, near: u16, out: &mut Vec<TargetEffect>) {
        let Ask { image, range, .. } = ask;
        // A Backfill that is paused asks nothing.
        let near = if self.backfill.paused { 0 } else { lacking & near };
        let basis = &mut self.backfill.asking.reuse.basis;
        let similar = pieces(range, near);
        let similar: Vec<_> =
            similar.runs().filter(|run| basis.tries(run.len / PIECE_BLOCKS)).collect();
        let mut lacks = pieces(range, lacking);
        similar.iter().for_each(|&run| lacks.remove(run));
        let here = pieces(range, !lacking);
        let answered = (here.len() + lacks.len()) / PIECE_BLOCKS;
        self.backfill.asking.reuse.answer(self.now, answered, here.len(), 0);
        self.backfill.found(image, &here);
        self.backfill.lack(image, &lacks);
        for range in similar {
            self.ask_for_hashes(Ask { image, range, at: self.now, blocks: true }, out);
        }
    }

    fn blocks_looked_up(&mut self, ask: Ask, lacking: &[u64; 4]) {
        let Ask { image, range, .. } = ask;
        let here = found_blocks(range, lacking);
        let reuse = &mut self.backfill.asking.reuse;
        reuse.answer(self.now, ask.pieces(), here.len(), 0);
        reuse.basis.answer(ask.pieces(), here.len());
        self.backfill.found(image, &here);
        self.backfill.lack(image, &here.complement_in(range));
    }

    /// The source cannot read what it was asked about: true when that is what `tag` was.
    pub(super) fn indescribable(&mut self, tag: u64, out: &mut Vec<TargetEffect>) -> bool {
        let Some(ask) = self.backfill.asking.take(tag) else { return false };
        self.backfill.unanswered(self.now, ask);
        self.fill_window(out);
        true
    }

    /// Questions that nobody answers are given up.
    pub(super) fn give_up_asking(&mut self) {
        let now = self.now;
        let late = |_: &u64, ask: &mut Ask| now.since(ask.at) >= PATIENCE;
        let late: Vec<_> = self.backfill.asking.asks.extract_if(.., late).collect();
        for (_, ask) in late {
            self.backfill.asking.reuse.too_slow();
            self.backfill.unanswered(now, ask);
        }
    }
}
