//! The planner behind `auto`: which blocks to copy before handover, and what will come of it.
//!
//! Everything is computed from what was counted of the guest's accesses ([`Load`]), in seconds, and
//! the same numbers give the same answer. What a block costs is compared chunk by chunk:
//!
//! ```text
//! d = f · (1 − e^(−w·t/f))          bytes dirty again when the guest moves, t after they were sent
//! n(x) = a · (1 − e^(−r·(x/f)·b/a)) reads that wait, a = x ÷ 64 KiB
//! send  = d ÷ link  +  q · fetch · n(d)
//! leave = risk · f ÷ link  +  q · fetch · n(f)
//! ```
//! `f` bytes of the chunk are written at all and not at the target from the start ([`Footprint`]): only these can be dirty again, so only
//! these are ever left, and the rest of the chunk is copied in any case. `w` bytes are
//! written a second (anywhere in `f`: each write hits a random block, so the dirty share follows the
//! exponential), `r` reads a second go there too, `b` is the time from
//! the guest's stop until Backfill has brought it (most read first). A read that waits brings the 64 KiB round it, so that
//! no place is waited for twice. Sending costs the link what must cross twice, and the guest the
//! reads of what is dirty again; leaving costs the guest a fetch for each read that waits, and ties
//! it to the source for longer. What is written is sent now when `send ≤ leave`; `q` weighs the
//! guest's waiting against the link's time, 1 unless a goal asks for more or less.
//!
//! `t` and `b` depend on the choice, so it is made a few times over until it stands still. The blocks
//! chosen are copied once, in the order of their writes; nothing is sent a second time before
//! handover, and what is left or dirty again is fetched by read heat after it.

mod footprint;
mod predict;

pub use footprint::Footprint;
pub use predict::{Prediction, predict};

use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex, Strategy};
use predict::Sent;

/// How much one byte left behind costs, as a share of sending it: a block that the guest never reads
/// is copied now unless it is more likely than this to be written again before the handover.
pub const RISK: f64 = 0.01;
/// Bytes that a read of a missing block brings at once: what lies round it is fetched with it.
const FETCHED: f64 = (64 << 10) as f64;
/// The choice is made over at most this often: it stands still after three or four times.
const ROUNDS: usize = 8;
/// `q` is raised at most this often, by a factor of four each,
const RAISES: usize = 6;
const RAISE: f64 = 4.0;
/// and then the last raise is halved this often, as far as less of it does.
const HALVINGS: usize = 3;
/// No more reads may wait than hybrid would make wait, and so many: what is saved of the link is the
/// operator's, and the reads are the guest's. In ten migrations not one more waits for the rest.
const MORE_READS: f64 = 0.1;

/// What is known of a chunk of blocks.
#[derive(Clone, PartialEq, Debug)]
pub struct Chunk {
    /// Which image.
    pub image: ImageIndex,
    /// Which blocks.
    pub range: BlockRange,
    /// Bytes of it that hold data and must cross.
    pub bytes: u64,
    /// Bytes written to it in a second.
    pub written: f64,
    /// What of it is written at all, in address order; all of it when nobody knows.
    pub areas: Vec<BlockRange>,
    /// Bytes of that which the target has as they are: they cross once they are written.
    pub held: u64,
    /// Reads of it in a second.
    pub reads: f64,
    /// The share of these that are of what is written.
    pub read_there: f64,
}

impl Chunk {
    /// Bytes of it that are written at all.
    fn footprint(&self) -> f64 {
        self.areas.iter().map(|area| area.len * BLOCK_SIZE).sum::<u64>() as f64
    }

    /// Bytes that wait for Backfill when it is left, and hold data now.
    fn left(&self) -> f64 {
        self.unheld().min(self.bytes as f64)
    }

    /// Bytes that are written and that the target does not have.
    fn unheld(&self) -> f64 {
        (self.footprint() - self.held as f64).max(0.0)
    }

    /// Bytes left of each chunk when these are copied as a whole.
    fn all_left(load: &Load, copied: &[bool]) -> Vec<f64> {
        let left = |(chunk, &copied): (&Self, &bool)| if copied { 0.0 } else { chunk.left() };
        load.chunks.iter().zip(copied).map(left).collect()
    }

    /// How many times each byte of the footprint is written in so many seconds.
    fn writes(&self, seconds: f64) -> f64 {
        let size = self.footprint();
        if size == 0.0 { 0.0 } else { self.written * seconds.max(0.0) / size }
    }

    /// Bytes of the chunk that are dirty at a time, in seconds, when what the target did not have was
    /// `sent` one after another.
    fn dirty(&self, sent: Sent, at: f64) -> f64 {
        self.dirty_sent(self.unheld(), sent, at) + self.dirty_held(at)
    }

    /// Of what the target had at the start.
    fn dirty_held(&self, at: f64) -> f64 {
        (self.footprint() - self.unheld()) * -(-self.writes(at)).exp_m1()
    }

    /// Of `size` bytes that were `sent` one after another: the mean of the exponential over the time
    /// since.
    fn dirty_sent(&self, size: f64, sent: Sent, at: f64) -> f64 {
        let (least, most) = (self.writes(at - sent.to), self.writes(at - sent.from));
        if most - least < 1e-6 {
            return size * -(-most).exp_m1();
        }
        size * (1.0 - ((-least).exp() - (-most).exp()) / (most - least))
    }

    /// Bytes that are dirty after a round of Sync of so many seconds that sent `dirty` of them: these
    /// all through it, the others were clean when it began.
    fn dirty_again(&self, dirty: f64, seconds: f64) -> f64 {
        let clean = (self.footprint() - dirty).max(0.0);
        let again = Sent { from: 0.0, to: seconds };
        self.dirty_sent(dirty, again, seconds) + clean * -(-self.writes(seconds)).exp_m1()
    }

    /// Reads that wait when `missing` bytes of it are, until they are there after `seconds`.
    fn waiting_reads(&self, missing: f64, seconds: f64) -> f64 {
        let areas = missing / FETCHED;
        if areas <= 0.0 {
            return 0.0;
        }
        let reads = self.reads * self.share_of_reads(missing);
        areas * -(-reads * seconds.max(0.0) / areas).exp_m1()
    }

    /// The share of its reads that are of `missing` bytes: what is written is missing first.
    fn share_of_reads(&self, missing: f64) -> f64 {
        let written = self.footprint();
        let others = missing - written;
        let share = if others <= 0.0 {
            self.read_there * missing / written
        } else {
            let all = self.bytes as f64 - written;
            self.read_there + (1.0 - self.read_there) * others / all.max(others)
        };
        share.min(1.0)
    }
}

/// A guest and the way to the target.
#[derive(Clone, PartialEq, Debug)]
pub struct Load {
    /// All chunks of all images that hold data or are written.
    pub chunks: Vec<Chunk>,
    /// Number of images.
    pub images: usize,
    /// Bytes a second that the link carries.
    pub link: f64,
    /// Round trip to the source, in seconds.
    pub rtt: f64,
    /// Bytes of guest memory to move.
    pub memory: f64,
    /// Bytes of it written in a second.
    pub memory_dirty: f64,
}

impl Load {
    /// Seconds that a read of a missing block waits: for the source's answer, the bytes, and half of
    /// the run of Backfill that is being sent.
    fn fetch(&self, link: f64) -> f64 {
        let run = (crate::receiver::BACKFILL_RUN * BLOCK_SIZE) as f64;
        self.rtt + (FETCHED + run / 2.0) / link
    }
}

/// What the operator wants. None of them: the least cost as the formulas say.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Goals {
    /// Longest downtime, in seconds; 0.3 when none is named.
    pub max_downtime: Option<f64>,
    /// Longest time by which the mean read may be slower while blocks are missing, in seconds.
    pub max_added_latency: Option<f64>,
    /// Longest total time, in seconds.
    pub deadline: Option<f64>,
    /// Bytes a second that the migration may use.
    pub bandwidth: Option<f64>,
}

impl Goals {
    fn link(&self, load: &Load) -> f64 {
        self.bandwidth.unwrap_or(f64::INFINITY).min(load.link).max(1.0)
    }

    /// Which of them this will miss, in words for people.
    pub fn missed_by(&self, prediction: &Prediction) -> Vec<String> {
        let mut missed = Vec::new();
        let mut check = |what: &str, is: f64, goal: Option<f64>| {
            if let Some(goal) = goal.filter(|&goal| is > goal) {
                missed.push(format!("{what} will be about {is:.3} s instead of {goal:.3} s"));
            }
        };
        check("the downtime", prediction.downtime, self.max_downtime);
        check("the added latency", prediction.added_latency, self.max_added_latency);
        check("the total time", prediction.total, self.deadline);
        missed
    }

    fn downtime(&self) -> f64 {
        self.max_downtime.unwrap_or(0.3)
    }
}

/// A goal that changed the choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forced {
    /// More is copied, and sent again, than would be cheapest: reads must not be that slow.
    AddedLatency,
    /// Less is copied twice, and more is read from the source, than would be cheapest.
    Deadline,
}

/// What `auto` will do.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Per image: the blocks to copy before handover, for `Tuning::copy_only`. Blocks that are not
    /// known to be written are among them.
    pub copy_only: Vec<BlockSet>,
    /// What will come of it.
    pub prediction: Prediction,
    /// The goal that made it other than the cheapest.
    pub forced: Option<Forced>,
    /// Goals that it is predicted to miss all the same, in words for people.
    pub missed: Vec<String>,
}

/// Chooses the blocks to copy. `whole` names all blocks of each image.
pub fn choose(load: &Load, goals: &Goals, whole: &[BlockRange]) -> Plan {
    let predicted = |copied: &[bool]| predict(Strategy::Auto, load, goals, Some(copied));
    let late = |p: &Prediction| goals.deadline.is_some_and(|goal| p.total > goal);
    let (mut copied, mut forced) = spare_reads(load, goals);
    if late(&predicted(&copied)) {
        let quickest = settle(load, goals, 0.0);
        if predicted(&quickest).total < predicted(&copied).total {
            copied = quickest;
            forced = Some(Forced::Deadline);
        }
    }
    let prediction = predicted(&copied);
    Plan {
        copy_only: blocks(load, &copied, whole),
        prediction,
        forced,
        missed: goals.missed_by(&prediction),
    }
}

/// The cheapest choice that lets few enough reads wait, and whether the operator's goal was dearer.
fn spare_reads(load: &Load, goals: &Goals) -> (Vec<bool>, Option<Forced>) {
    let predicted = |copied: &[bool]| predict(Strategy::Auto, load, goals, Some(copied));
    let most = predict(Strategy::Hybrid, load, goals, None).remote_reads + MORE_READS;
    let slow = |p: &Prediction| goals.max_added_latency.is_some_and(|goal| p.added_latency > goal);
    let mut copied = settle(load, goals, 1.0);
    let mut forced = None;
    let mut weight = 1.0;
    for _ in 0..RAISES {
        let now = predicted(&copied);
        if !slow(&now) && now.remote_reads <= most {
            break;
        }
        weight *= RAISE;
        let more = settle(load, goals, weight);
        let then = predicted(&more);
        let slower = then.added_latency >= now.added_latency;
        if slower && (slow(&now) || then.remote_reads >= now.remote_reads) {
            continue;
        }
        copied = more;
        forced = slow(&now).then_some(Forced::AddedLatency).or(forced);
    }
    // Less than the last raise may do.
    let fits = |p: &Prediction| !slow(p) && p.remote_reads <= most;
    let mut least = weight / RAISE;
    for _ in 0..HALVINGS {
        if weight == 1.0 || !fits(&predicted(&copied)) {
            break;
        }
        let between = (least * weight).sqrt();
        let fewer = settle(load, goals, between);
        if fits(&predicted(&fewer)) {
            (copied, weight) = (fewer, between);
        } else {
            least = between;
        }
    }
    (copied, forced)
}

/// Makes the choice until it stands still.
fn settle(load: &Load, goals: &Goals, weight: f64) -> Vec<bool> {
    let link = goals.link(load);
    let first = predict::first_block(load, goals, link);
    let by_writes = predict::by_writes(load);
    let by_reads = predict::by_reads(load);
    let mut copied = vec![true; load.chunks.len()];
    for _ in 0..ROUNDS {
        let left = Chunk::all_left(load, &copied);
        let (sent, handover) = predict::copy_times(load, link, &left, &by_writes);
        let dirty = |ix: usize, chunk: &Chunk| {
            // What is not copied would make the copy as much longer.
            let longer = if copied[ix] { 0.0 } else { chunk.left() / link };
            chunk.dirty_sent(chunk.unheld(), sent[ix], handover + longer)
        };
        let behind = predict::backfill_times(load, link, &by_reads, |ix, chunk| {
            let left = if copied[ix] { dirty(ix, chunk) } else { chunk.left() };
            left + chunk.dirty_held(handover)
        });
        let decide = |(ix, chunk): (usize, &Chunk)| {
            let left = chunk.left();
            let dirty = dirty(ix, chunk);
            // Of what the target has the same crosses either way.
            let held = chunk.dirty_held(handover);
            // The time at which it would come if it were left, behind what is read more.
            let until = first + behind[ix] + if copied[ix] { left / link } else { 0.0 };
            let fetch = weight * load.fetch(link);
            let cost = |missing: f64| fetch * chunk.waiting_reads(missing + held, until);
            let send = dirty / link + cost(dirty);
            let leave = RISK * left / link + cost(left);
            send <= leave
        };
        let next: Vec<bool> = load.chunks.iter().enumerate().map(decide).collect();
        if next == copied {
            break;
        }
        copied = next;
    }
    copied
}

/// All blocks but what is written of the chunks that are left.
fn blocks(load: &Load, copied: &[bool], whole: &[BlockRange]) -> Vec<BlockSet> {
    let mut sets: Vec<BlockSet> = whole.iter().map(|&all| [all].into_iter().collect()).collect();
    for (chunk, _) in load.chunks.iter().zip(copied).filter(|(_, copied)| !**copied) {
        if let Some(set) = sets.get_mut(chunk.image.ix()) {
            chunk.areas.iter().for_each(|&area| set.remove(area));
        }
    }
    sets
}

#[cfg(test)]
mod tests;
