//! What Backfill has asked for, what it has not, and where it looks next.
//!
//! A block leaves `left` when it is asked for, or when it turns out to be here. What is asked for is
//! `under_way` until it has arrived, and again while it waits to be asked for once more.

use super::focus::Follow;
use super::hash_questions::Asking;
use super::watching::Watched;
use crate::Time;
use crate::order::{Waiting, next_image};
use crate::window::Window;
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex, Schedule};
use dray_wire::ImageHandover;
use std::collections::BTreeMap;

/// Longest run fetched in the background: a demand read waits behind the one being sent.
pub(crate) const BACKFILL_RUN: u64 = 64;
/// Fetches under way at most, however small they are.
const MAX_FETCHES: usize = 1024;
/// Demanded bytes that the link carries in so many seconds delay a demand behind them hardly.
const QUICK: f64 = 0.005;
/// The same where the link's rate is not known.
const FEW_BYTES: u64 = 65_536;

#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) image: ImageIndex,
    pub(super) range: BlockRange,
    pub(super) urgent: bool,
    pub(super) sent_at: Time,
}

#[derive(PartialEq, Eq, Clone, Copy, Debug)]
pub(super) enum Scan {
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

/// What is being fetched.
pub(super) struct Backfill {
    pub(super) fetches: BTreeMap<u64, Fetch>,
    /// Per image: blocks that may be missing and were not asked for.
    pub(super) left: Vec<Waiting>,
    /// Per image: blocks under way.
    pub(super) under_way: Vec<BlockSet>,
    /// Per image: blocks that arrived in this life. An answer or a demand may be older than their
    /// arrival, and present never becomes missing again.
    pub(super) arrived_blocks: Vec<BlockSet>,
    /// Per image: blocks asked for in this life.
    asked_blocks: Vec<BlockSet>,
    /// Fetches that failed and when to try again.
    pub(super) later: Vec<(Time, ImageIndex, BlockRange, bool)>,
    pub(super) window: Window,
    /// Blocks whose hashes are asked for first.
    pub(super) asking: Asking,
    pub(super) scan: Scan,
    pub(super) follow: Follow,
    /// Per image: whether the guest waits for what its schedule brings first.
    pub(super) watched: Vec<Watched>,
    /// What may be missing at the beginning, in bytes.
    pub(super) bytes: u64,
    /// The source has named an order, even if it knows nothing of the guest: not address order as
    /// such, which fetches what is demanded and goes on where it was (Scheduling, section 7.1).
    pub(super) ordered: bool,
    /// Only what a guest waits for is fetched.
    pub(super) paused: bool,
    /// No questions before this time: something went wrong and is tried again.
    pub(super) pause_until: Time,
    /// Blocks arrived since the last checkpoint.
    pub(super) arrived: bool,
    pub(super) checkpoint_at: Time,
    pub(super) next_checkpoint: u64,
    next_tag: u64,
    pub(super) demands: u64,
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
            follow: Follow::new(),
            watched: vec![Watched::default(); images],
            bytes: 0,
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
        self.bytes = self.left.iter().map(|left| left.blocks().len() * BLOCK_SIZE).sum();
        self.scan = Scan::Idle;
    }

    pub(super) fn set_order(&mut self, image: ImageIndex, order: &Schedule, whole: BlockRange) {
        if let Some(left) = self.left.get_mut(image.ix()) {
            left.set_order(order, whole);
            self.watched[image.ix()].forget_order();
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

    pub(super) fn launch(
        &mut self,
        now: Time,
        image: ImageIndex,
        range: BlockRange,
        urgent: bool,
    ) -> u64 {
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
    pub(super) fn count(&mut self, image: ImageIndex, range: BlockRange) {
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
    pub(super) fn unasked(&self, image: ImageIndex, run: BlockRange) -> BlockSet {
        let mut unasked = self.left[image.ix()].blocks().intersection(run);
        unasked.subtract(&self.under_way[image.ix()].intersection(run));
        unasked.subtract(&self.arrived_blocks[image.ix()].intersection(run));
        unasked
    }

    /// A guest waits for what of `run` is under way or comes again later, so a pause must not leave
    /// it behind. Answers the fetches that were not urgent before.
    pub(super) fn hurry(&mut self, image: ImageIndex, run: BlockRange) -> Vec<u64> {
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

    pub(super) fn land(&mut self, tag: u64) -> Option<Fetch> {
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
        let quick = (self.window.capacity() * QUICK) as u64;
        self.ordered && self.urgent_bytes <= quick.max(FEW_BYTES)
    }

    /// The next place to look in: behind guests' demands, else where the schedule says.
    pub(super) fn place(&mut self) -> Option<(ImageIndex, BlockRange)> {
        if let Some(place) = self.followed() {
            return Some(place);
        }
        let ix = next_image(self.left.iter())?;
        let (run, piece) = self.left[ix].next_in_piece(BACKFILL_RUN)?;
        let range = BlockRange::new(run.start, piece.end() - run.start);
        Some((ImageIndex(ix as u16), range))
    }

    /// What is fetched in the background is left for later.
    pub(super) fn shelve(&mut self) {
        let tags: Vec<u64> =
            self.fetches.iter().filter(|(_, fetch)| !fetch.urgent).map(|(&tag, _)| tag).collect();
        for tag in tags {
            if let Some(fetch) = self.land(tag) {
                self.window.lost(fetch.range.byte_len());
                self.put_back(fetch.image, fetch.range);
            }
        }
    }

    pub(super) fn put_back(&mut self, image: ImageIndex, range: BlockRange) {
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
