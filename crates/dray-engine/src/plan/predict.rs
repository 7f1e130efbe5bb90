//! What a migration will take: the model that the choice is made with, for any strategy.

use super::{Chunk, Goals, Load};
use crate::source::{MAX_ROUNDS, Rounds, Verdict};
use crate::{SECOND, Time};
use dray_types::StrategyTraits;

/// Handover without the guest's memory: its steps take three round trips and three durable records,
/// in seconds, round trips apart (a record takes about 5 ms).
const HANDOVER: f64 = 0.015;

/// What will come of a migration, times in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Prediction {
    /// Until the source is not needed any more.
    pub total: f64,
    /// Until the guest runs at the target.
    pub handover: f64,
    /// How long the guest stands still.
    pub downtime: f64,
    /// It ends: neither memory nor blocks are written faster than they are sent.
    pub converges: bool,
    /// Bytes of blocks that cross, repetitions included.
    pub bytes: f64,
    /// Bytes that cross again because they were written after they were sent.
    pub extra: f64,
    /// Reads that wait for the source.
    pub remote_reads: f64,
    /// By how much the mean read is slower while blocks are missing.
    pub added_latency: f64,
}

/// Places of chunks in the order of Copy: least written first.
pub(super) fn by_writes(load: &Load) -> Vec<usize> {
    let mut order: Vec<usize> = (0..load.chunks.len()).collect();
    order.sort_by(|&a, &b| {
        load.chunks[a].written.total_cmp(&load.chunks[b].written).then(a.cmp(&b))
    });
    order
}

/// Places of chunks in the order of Backfill: most read first.
pub(super) fn by_reads(load: &Load) -> Vec<usize> {
    let mut order: Vec<usize> = (0..load.chunks.len()).collect();
    order.sort_by(|&a, &b| load.chunks[b].reads.total_cmp(&load.chunks[a].reads).then(a.cmp(&b)));
    order
}

/// Seconds that the guest's memory takes, the round that is sent while it stands still included;
/// none when it is written faster than it can be sent.
fn memory_time(load: &Load, link: f64) -> Option<f64> {
    (load.memory_dirty < link).then(|| load.memory / (link - load.memory_dirty))
}

/// When a chunk's blocks are sent, one after another, in seconds from the start.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Sent {
    pub(super) from: f64,
    pub(super) to: f64,
}

/// When each chunk is sent, or would be, and when the guest moves; `left` bytes of each are not.
pub(super) fn copy_times(
    load: &Load,
    link: f64,
    left: &[f64],
    by_writes: &[usize],
) -> (Vec<Sent>, f64) {
    let mut at = 0.0;
    let mut times = vec![Sent::default(); load.chunks.len()];
    for &ix in by_writes {
        let chunk = &load.chunks[ix];
        times[ix] = Sent { from: at, to: at + chunk.bytes as f64 / link };
        at += (chunk.bytes as f64 - left[ix]).max(0.0) / link;
    }
    (times, at + memory_time(load, link).unwrap_or(load.memory / link))
}

/// How long after the handover each chunk is there, when `bytes` of it are missing.
pub(super) fn backfill_times(
    load: &Load,
    link: f64,
    by_reads: &[usize],
    bytes: impl Fn(usize, &Chunk) -> f64,
) -> Vec<f64> {
    let mut at = 0.0;
    let mut times = vec![0.0; load.chunks.len()];
    for &ix in by_reads {
        at += bytes(ix, &load.chunks[ix]) / link;
        times[ix] = at;
    }
    times
}

/// What the strategy will take. `copied` says for each chunk whether it is copied before handover,
/// for strategies that choose; the others copy all or nothing.
pub fn predict(
    strategy: impl Into<StrategyTraits>,
    load: &Load,
    goals: &Goals,
    copied: Option<&[bool]>,
) -> Prediction {
    let link = goals.link(load);
    let traits = strategy.into();
    let copies = traits.copies;
    let left: Vec<f64> = match copied.filter(|_| traits.chooses()) {
        Some(copied) => Chunk::all_left(load, copied),
        None if copies => vec![0.0; load.chunks.len()],
        None => load.chunks.iter().map(|chunk| chunk.bytes as f64).collect(),
    };
    let all = vec![copies; load.chunks.len()];
    let copied = copied.filter(|_| traits.chooses()).unwrap_or(&all);
    let (sent, handover) = copy_times(load, link, &left, &by_writes(load));
    let mut prediction = Prediction {
        handover,
        downtime: stop(load, goals, link),
        converges: memory_time(load, link).is_some(),
        ..Prediction::default()
    };
    prediction.bytes = sum(load, |ix, chunk| chunk.bytes as f64 - left[ix]);
    if traits.mirrors {
        mirror(load, copied, &sent, link, &mut prediction);
    } else if traits.syncs {
        sync(load, goals, copied, &sent, &mut prediction);
    }
    let equal = traits.syncs;
    let missing = |ix: usize, chunk: &Chunk| match (copied[ix], equal) {
        (true, true) => 0.0,
        (true, false) => chunk.dirty(sent[ix], handover),
        (false, _) => left[ix] + chunk.dirty_held(handover),
    };
    if !equal {
        prediction.extra = sum(load, |ix, chunk| if copied[ix] { missing(ix, chunk) } else { 0.0 });
    }
    backfill(load, link, first_block(load, goals, link), missing, &mut prediction);
    prediction
}

fn each(load: &Load, value: impl Fn(usize, &Chunk) -> f64) -> Vec<f64> {
    load.chunks.iter().enumerate().map(|(ix, chunk)| value(ix, chunk)).collect()
}

fn sum(load: &Load, value: impl Fn(usize, &Chunk) -> f64) -> f64 {
    load.chunks.iter().enumerate().map(|(ix, chunk)| value(ix, chunk)).sum()
}

/// What the guest's memory and the steps of the handover take while it stands still: QEMU stops the
/// guest when the rest of its memory fits half of the downtime.
fn stop(load: &Load, goals: &Goals, link: f64) -> f64 {
    let rest = (load.memory / link)
        .min(goals.downtime() / 2.0)
        .min(load.memory_dirty * goals.downtime() / link);
    rest + HANDOVER + 3.0 * load.rtt
}

/// Until Backfill's first block can be there, from the guest's stop: what it reads meanwhile is read
/// when it runs. The block is asked for, and comes.
pub(super) fn first_block(load: &Load, goals: &Goals, link: f64) -> f64 {
    stop(load, goals, link) + load.rtt
}

/// Rounds of Sync: each takes as long as what was written in the one before, and they end when the
/// engine would end them.
fn sync(load: &Load, goals: &Goals, copied: &[bool], sent: &[Sent], out: &mut Prediction) {
    let link = goals.link(load);
    let copy_end = sum(load, |ix, c| if copied[ix] { c.bytes as f64 } else { 0.0 }) / link;
    let affordable = (link * goals.downtime() / 2.0).max((2 << 20) as f64);
    let mut rounds = Rounds::default();
    let mut at = copy_end;
    let mut dirty: Vec<f64> =
        each(load, |ix, chunk| if copied[ix] { chunk.dirty(sent[ix], copy_end) } else { 0.0 });
    let mut rest: f64 = dirty.iter().sum();
    loop {
        let now = Time((at * SECOND as f64) as u64);
        match rounds.judge(now, rest as u64, affordable as u64) {
            Verdict::Another => {}
            verdict => {
                out.converges &= verdict == Verdict::Fits;
                break;
            }
        }
        out.extra += rest;
        at += rest / link;
        dirty = each(load, |ix, chunk| match copied[ix] {
            true => chunk.dirty_again(dirty[ix], rest / link),
            false => 0.0,
        });
        rest = dirty.iter().sum();
    }
    out.extra += rest;
    out.downtime += rest / link;
    out.handover += at - copy_end + rest / link;
}

/// Each write to what was already copied crosses as it is; they share the link with the copy.
fn mirror(load: &Load, copied: &[bool], sent: &[Sent], link: f64, out: &mut Prediction) {
    let rate = sum(load, |ix, chunk| if copied[ix] { chunk.written } else { 0.0 });
    out.converges &= rate < link;
    let stretch = if rate < link { link / (link - rate) } else { f64::from(MAX_ROUNDS) };
    let mirrored = sum(load, |ix, chunk| {
        let middle = f64::midpoint(sent[ix].from, sent[ix].to);
        // What the target has is mirrored from the start.
        let held = 1.0 - chunk.unheld() / chunk.footprint().max(1.0);
        chunk.written * (out.handover - middle * (1.0 - held)).max(0.0)
    });
    out.extra = mirrored * stretch;
    out.handover += out.extra / link;
}

/// After the handover: what is missing comes most read first, the first block of it `first` seconds
/// after the guest's stop, and reads of it wait until then.
fn backfill(
    load: &Load,
    link: f64,
    first: f64,
    missing: impl Fn(usize, &Chunk) -> f64,
    out: &mut Prediction,
) {
    let times = backfill_times(load, link, &by_reads(load), &missing);
    let rest = sum(load, &missing);
    out.bytes = out.bytes.max(0.0) + if out.extra > 0.0 && rest == 0.0 { out.extra } else { rest };
    out.total = out.handover + rest / link;
    // On the mean a block is there halfway through its chunk.
    let remote = |ix: usize, chunk: &Chunk| {
        let bytes = missing(ix, chunk);
        chunk.waiting_reads(bytes, first + times[ix] - bytes / link / 2.0)
    };
    out.remote_reads = sum(load, remote);
    let reads = sum(load, |_, chunk| chunk.reads) * (first + rest / link);
    out.added_latency = if reads > 0.0 { out.remote_reads / reads * load.fetch(link) } else { 0.0 };
}
