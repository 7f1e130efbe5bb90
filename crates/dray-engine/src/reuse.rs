//! Whether it pays to ask the target for content before sending it.
//!
//! A run that is described costs hashing at the source, a round trip, and at the target reading,
//! hashing and writing; what the target has costs no link. All of that is seen in one number, the bytes
//! whose description was answered per second of waiting for answers; descriptions are pipelined, so it
//! is what the whole path carries. Time in which the link carried what lacked is no cost of describing:
//! images that have something in common wait for it to come.
//!
//! Before the handover the source decides: it describes or sends. After it the target does: Backfill
//! asks for hashes or fetches. Either begins with a sample of pieces spread over the images, goes on
//! describing as long as the share that is found is worth more link time than describing takes, and
//! otherwise sends as always, with a probe now and then.

use crate::basis::Basis;
use crate::{MILLISECOND, SECOND, Time};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex};
use dray_wire::frame::{MAX_PIECES, PIECE_BLOCKS};
use std::collections::VecDeque;

/// Pieces whose content the source keeps until it is known whether the target has them: 32 MiB. In
/// Backfill, pieces that were asked about and are not answered, or lack and are not fetched yet.
pub const MAX_KEPT: u64 = 512;
/// Pieces that a sample has, all images together, and of one image at least.
const SAMPLE: u64 = 128;
const SAMPLE_OF_IMAGE: u64 = 16;
/// A sample is judged after this long by what was answered. Nothing else is sent until then: what
/// images have in common would cross for each of them, and of a small one a window is most.
const SAMPLE_TIME: u64 = 250 * MILLISECOND;
/// Pieces that are answered between two judgements.
const EPOCH: u64 = 256;
/// Blocks sent without being described between two probes of a run: 512 MiB, so that probes cost
/// less than a three-hundredth where hashing is half as fast as the link.
const PROBE_EVERY: u64 = 131_072;
/// Describing that is this many times as fast as the link costs next to no time, because it goes on
/// while the link is busy: it may go on where little is found.
const FREE: f64 = 4.0;
/// A sample of which at least so much was found is followed by an epoch of describing, unless that is
/// slower than sending: what images have in common but for a few blocks is found only once it is known
/// where to look.
const PROMISING: f64 = 0.125;
/// Of the time in which descriptions were answered so much at least was theirs.
const LEAST_BUSY: f64 = 1.0 / 16.0;
/// Bytes of a piece.
const PIECE: u64 = PIECE_BLOCKS * BLOCK_SIZE;

/// What is done with what Copy sends.
#[derive(Debug, PartialEq)]
enum Mode {
    /// Before the first session that can, or the sample's time is over.
    Idle,
    /// Pieces to be described, and since when they are.
    Sampling { left: VecDeque<(ImageIndex, BlockRange)>, asked: u64, since: Time },
    /// Everything that can be is described.
    On,
    /// Nothing but probes is.
    Off,
}

/// What to do with a run that is next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextRun {
    /// Send it, or its first part.
    Send(BlockRange),
    /// Describe it, or its first part.
    Describe(BlockRange),
}

/// Descriptions under way and what came of earlier ones.
#[derive(Debug)]
pub(crate) struct Reuse {
    /// The session agreed on the word.
    pub(crate) known: bool,
    /// Other images move to the same target.
    pub(crate) together: bool,
    mode: Mode,
    /// The link's best rate, in bytes a second; zero while nothing is known.
    link: f64,
    /// What the describing path carries, in bytes a second; zero before the first judgement.
    speed: f64,
    /// Pieces whose answers are awaited, and since when there are any.
    awaited: u64,
    since: Time,
    kept: u64,
    answered: u64,
    /// Blocks of them.
    found: u64,
    busy: u64,
    /// Bytes of data that arrived while answers were awaited.
    carried: u64,
    ever_found: bool,
    unprobed: u64,
    /// What came of describing blocks of pieces that lack.
    pub(crate) basis: Basis,
}

impl Reuse {
    /// Nothing known but the rate that the link had in earlier migrations, in bytes a second.
    pub(crate) fn new(link: u64) -> Self {
        Self {
            known: false,
            together: false,
            mode: Mode::Idle,
            link: link as f64,
            speed: 0.0,
            awaited: 0,
            since: Time(0),
            kept: 0,
            answered: 0,
            found: 0,
            busy: 0,
            carried: 0,
            ever_found: false,
            unprobed: 0,
            basis: Basis::default(),
        }
    }

    /// Copy begins with images of these lengths in blocks.
    pub(crate) fn begin(&mut self, now: Time, lens: &[u64]) {
        if self.known && self.mode == Mode::Idle {
            self.mode = Mode::Sampling { left: sample(lens), asked: 0, since: now };
        }
    }

    /// The next piece of the sample.
    pub(crate) fn next_sample(&mut self) -> Option<(ImageIndex, BlockRange)> {
        let room = self.has_room();
        match &mut self.mode {
            Mode::Sampling { left, .. } if room => left.pop_front(),
            _ => None,
        }
    }

    /// Whether the sample is still being answered and nothing else may be sent; judges it when it is
    /// over.
    pub(crate) fn samples(&mut self, now: Time) -> bool {
        let Mode::Sampling { left, asked, since } = &self.mode else { return false };
        let over = left.is_empty() && self.answered >= *asked;
        if over || now.since(*since) > SAMPLE_TIME {
            self.judge(now);
            return false;
        }
        true
    }

    /// Whether what the sample lacks can wait for its turn: nobody else waits for it to come.
    pub(crate) fn only_samples(&self) -> bool {
        !self.together && matches!(self.mode, Mode::Sampling { .. })
    }

    /// Whether images go in step, so that what they have in common is asked for in one go.
    pub(crate) fn in_step(&self) -> bool {
        self.known && self.mode == Mode::On
    }

    /// What to do with `run`, which is next; the target has some version of the blocks in `in_place`.
    pub(crate) fn next_run(&self, run: BlockRange, in_place: &BlockSet) -> NextRun {
        let begin = run.start.next_multiple_of(PIECE_BLOCKS);
        let end = run.end() / PIECE_BLOCKS * PIECE_BLOCKS;
        if !self.known || begin >= end {
            return NextRun::Send(run);
        }
        let probes = self.mode == Mode::Off && self.unprobed >= PROBE_EVERY;
        let known_there = || in_place.contains_range(BlockRange::new(begin, end - begin));
        if self.mode != Mode::On && !probes && !known_there() {
            return NextRun::Send(run);
        }
        if begin > run.start {
            return NextRun::Send(BlockRange::new(run.start, begin - run.start));
        }
        NextRun::Describe(BlockRange::new(begin, end - begin))
    }

    /// Whether another run may be described.
    pub(crate) fn has_room(&self) -> bool {
        self.kept + MAX_PIECES <= MAX_KEPT
    }

    /// `blocks` are sent without having been described.
    pub(crate) fn sent(&mut self, blocks: u64) {
        self.unprobed += blocks;
    }

    /// `pieces` are described.
    pub(crate) fn described(&mut self, now: Time, pieces: u64) {
        if self.awaited == 0 {
            self.since = now;
        }
        self.awaited += pieces;
        self.kept += pieces;
        self.unprobed = 0;
        if let Mode::Sampling { asked, .. } = &mut self.mode {
            *asked += pieces;
        }
    }

    /// The target has answered for `pieces` and found so many of their blocks; so many of the pieces
    /// are kept until what lacks of them is sent.
    pub(crate) fn answer(&mut self, now: Time, pieces: u64, found: u64, kept: u64) {
        self.no_answer(now, pieces);
        self.kept += kept;
        self.answered += pieces;
        self.found += found;
        self.ever_found |= found > 0;
        if !matches!(self.mode, Mode::Sampling { .. }) && self.answered >= self.epoch() {
            self.judge(now);
        }
    }

    /// Pieces of an epoch: one probe is enough to begin again.
    fn epoch(&self) -> u64 {
        if self.mode == Mode::Off { MAX_PIECES } else { EPOCH }
    }

    /// `pieces` will not be answered: a damaged frame, a disk error.
    pub(crate) fn no_answer(&mut self, now: Time, pieces: u64) {
        self.busy += now.since(self.since);
        self.since = now;
        self.awaited = self.awaited.saturating_sub(pieces);
        self.kept = self.kept.saturating_sub(pieces);
    }

    /// Something was not answered in any reasonable time: nothing but probes until one is.
    pub(crate) fn too_slow(&mut self) {
        (self.mode, self.speed) = (Mode::Off, 0.0);
    }

    /// `pieces` of what was answered, or was not, lack and wait to be fetched.
    pub(crate) fn keep(&mut self, pieces: u64) {
        self.kept += pieces;
    }

    /// The content of `pieces` that the target lacks is sent, and need not be kept.
    pub(crate) fn let_go(&mut self, pieces: u64) {
        self.kept = self.kept.saturating_sub(pieces);
    }

    /// Whatever is under way is lost; the next link may be another one.
    pub(crate) fn forget(&mut self) {
        (self.awaited, self.kept) = (0, 0);
        if let Mode::Sampling { left, asked, .. } = &mut self.mode {
            // What was answered is the whole sample.
            left.clear();
            *asked = 0;
        }
    }

    /// So many bytes of data have arrived.
    pub(crate) fn carried(&mut self, bytes: u64) {
        if self.awaited > 0 {
            self.carried += bytes;
        }
    }

    /// The link carries this many bytes a second at times.
    pub(crate) fn measured(&mut self, rate: f64) {
        self.link = self.link.max(rate);
        let little = self.mode == Mode::Off && self.speed > 0.0;
        if little && (self.together || self.ever_found) && self.is_free() {
            self.mode = Mode::On;
        }
    }

    fn is_free(&self) -> bool {
        self.link > 0.0 && self.speed > FREE * self.link
    }

    fn judge(&mut self, now: Time) {
        if self.awaited > 0 {
            self.busy += now.since(self.since);
            self.since = now;
        }
        if self.answered > 0 {
            let speed = (self.answered * PIECE * SECOND) as f64 / self.took();
            // A probe goes alone: its round trip says little of what many at once carry.
            let alone = self.mode == Mode::Off;
            self.speed = if alone { speed.max(self.speed) } else { speed };
        }
        let share = self.found as f64 / (self.answered * PIECE_BLOCKS).max(1) as f64;
        // A found piece saves its time on the link; describing takes time for every piece.
        let saves = share > 0.0 && share * self.speed > self.link;
        let free = (self.together || self.ever_found) && self.is_free();
        let sampled = matches!(self.mode, Mode::Sampling { .. });
        let promising = sampled && share >= PROMISING && self.speed > self.link;
        self.mode = if saves || free || promising { Mode::On } else { Mode::Off };
        (self.answered, self.found, self.busy, self.carried) = (0, 0, 0, 0);
    }

    /// Nanoseconds that describing took, without those that the link needed for data meanwhile.
    fn took(&self) -> f64 {
        let busy = self.busy.max(1) as f64;
        if self.link <= 0.0 {
            return busy;
        }
        let sending = self.carried as f64 * SECOND as f64 / self.link;
        (busy - sending).max(busy * LEAST_BUSY)
    }
}

/// Pieces spread over the images, those at the same place in each next to each other: what two
/// copies of one disk have in common is found in the sample already.
fn sample(lens: &[u64]) -> VecDeque<(ImageIndex, BlockRange)> {
    let each = (SAMPLE / lens.len().max(1) as u64).max(SAMPLE_OF_IMAGE);
    let mut all = Vec::new();
    for (ix, len) in lens.iter().enumerate() {
        let pieces = len / PIECE_BLOCKS;
        let wanted = each.min(pieces.div_ceil(4));
        for nth in 0..wanted {
            let piece = nth * pieces / wanted;
            let range = BlockRange::new(piece * PIECE_BLOCKS, PIECE_BLOCKS);
            all.push((ImageIndex(ix as u16), range));
        }
    }
    all.sort_by_key(|(image, range)| (range.start, *image));
    all.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A sample in which `found` of 100 pieces are there, answered at `speed` bytes a second.
    fn judged(found: u64, speed: u64, link: u64, together: bool) -> bool {
        let mut reuse = Reuse::new(link);
        (reuse.known, reuse.together) = (true, together);
        reuse.begin(Time(0), &[]);
        reuse.described(Time(0), 100);
        let now = Time(100 * PIECE * SECOND / speed);
        reuse.answer(now, 100, found * PIECE_BLOCKS, 100 - found);
        assert!(!reuse.samples(now));
        reuse.in_step()
    }

    #[test]
    fn it_goes_on_when_what_is_found_saves_more_than_describing_costs() {
        assert!(!judged(0, 500 * MIB, 0, true), "nothing found, nothing known of the link");
        assert!(judged(1, 500 * MIB, 0, false), "found, nothing known of the link");
        assert!(judged(30, 500 * MIB, 119 * MIB, false));
        assert!(!judged(10, 500 * MIB, 200 * MIB, false), "a quarter of what it would have to be");
        assert!(judged(30, 500 * MIB, 200 * MIB, false), "worth another look");
        assert!(!judged(90, 500 * MIB, 1000 * MIB, true), "sending is faster than looking");
        assert!(judged(1, 500 * MIB, 119 * MIB, false), "looking costs nothing on a slow link");
        assert!(!judged(0, 500 * MIB, 119 * MIB, false), "and is of no use when nothing is found");
        assert!(judged(0, 500 * MIB, 119 * MIB, true), "unless somebody else sends the same");
    }

    #[test]
    fn what_the_link_carries_meanwhile_is_no_cost_of_describing() {
        let mut reuse = Reuse::new(100 * MIB);
        (reuse.known, reuse.mode) = (true, Mode::On);
        // Half is found; the other half crosses meanwhile, which takes all the time there is.
        let half = EPOCH / 2 * PIECE;
        let now = Time(half * SECOND / (100 * MIB));
        reuse.described(Time(0), EPOCH);
        reuse.carried(half);
        reuse.answer(now, EPOCH, EPOCH / 2 * PIECE_BLOCKS, 0);
        assert!(reuse.in_step());
        // It takes three times as long as sending everything would.
        let later = Time(now.0 * 7);
        reuse.described(now, EPOCH);
        reuse.carried(half);
        reuse.answer(later, EPOCH, EPOCH / 2 * PIECE_BLOCKS, 0);
        assert!(!reuse.in_step());
    }

    #[test]
    fn it_begins_again_when_the_link_turns_out_to_be_slow_or_a_probe_finds_something() {
        let mut reuse = Reuse::new(0);
        (reuse.known, reuse.together) = (true, true);
        reuse.begin(Time(0), &[]);
        reuse.described(Time(0), 10);
        reuse.answer(Time(MILLISECOND), 10, 0, 10);
        assert!(!reuse.samples(Time(MILLISECOND)) && !reuse.in_step());
        reuse.measured(400e6);
        assert!(!reuse.in_step());
        let mut slow = Reuse::new(0);
        (slow.known, slow.together, slow.mode, slow.speed) = (true, true, Mode::Off, 1e9);
        slow.measured(1e8);
        assert!(slow.in_step());

        let (run, none) = (BlockRange::new(0, 256), BlockSet::new());
        assert_eq!(reuse.next_run(run, &none), NextRun::Send(run));
        reuse.sent(PROBE_EVERY);
        assert_eq!(reuse.next_run(run, &none), NextRun::Describe(run));
        reuse.described(Time(SECOND), 16);
        assert_eq!(reuse.next_run(run, &none), NextRun::Send(run), "one probe at a time");
        reuse.answer(Time(SECOND + 1000), 16, 256, 0);
        assert!(reuse.in_step());
    }

    #[test]
    fn only_whole_pieces_are_described() {
        let mut reuse = Reuse::new(0);
        (reuse.known, reuse.mode) = (true, Mode::On);
        let way = |start, len| reuse.next_run(BlockRange::new(start, len), &BlockSet::new());
        assert_eq!(way(5, 40), NextRun::Send(BlockRange::new(5, 11)));
        assert_eq!(way(16, 40), NextRun::Describe(BlockRange::new(16, 32)));
        assert_eq!(way(16, 15), NextRun::Send(BlockRange::new(16, 15)));
        assert_eq!(way(20, 20), NextRun::Send(BlockRange::new(20, 20)));
        reuse.known = false;
        let (run, there) = (BlockRange::new(0, 40), [BlockRange::new(0, 32)].into_iter().collect());
        assert_eq!(reuse.next_run(run, &there), NextRun::Send(run));
        (reuse.known, reuse.mode) = (true, Mode::Off);
        assert_eq!(reuse.next_run(run, &there), NextRun::Describe(BlockRange::new(0, 32)));
        assert_eq!(
            reuse.next_run(BlockRange::new(0, 48), &there),
            NextRun::Send(BlockRange::new(0, 48))
        );
    }

    #[test]
    fn what_is_kept_is_bounded_until_it_is_found_or_sent() {
        let mut reuse = Reuse::new(0);
        let mut pieces = 0;
        while reuse.has_room() {
            reuse.described(Time(0), MAX_PIECES);
            pieces += MAX_PIECES;
        }
        assert_eq!(pieces, MAX_KEPT);
        reuse.answer(Time(1), MAX_PIECES, 0, MAX_PIECES);
        assert!(!reuse.has_room(), "what lacks waits to be sent");
        reuse.let_go(MAX_PIECES);
        assert!(reuse.has_room());
        reuse.forget();
        assert_eq!(reuse.kept, 0);
    }

    #[test]
    fn a_sample_is_spread_and_the_same_in_copies() {
        let picked = sample(&[1 << 20, 1 << 20, 40]);
        let of = |ix| picked.iter().filter(move |(image, _)| image.0 == ix);
        assert_eq!((of(0).count(), of(1).count(), of(2).count()), (42, 42, 1));
        assert!(of(0).map(|(_, range)| range).eq(of(1).map(|(_, range)| range)));
        assert!(of(0).any(|(_, range)| range.start > 900_000));
        assert!(picked.iter().all(|(_, range)| range.start % 16 == 0 && range.len == 16));
    }
}
