//! [`Capacity`]: what the link carries, told from what has arrived and when.
//!
//! What arrives in a tenth of a second says little. A limit lets a run of 1 MiB through at once and
//! waits afterwards, streams share the link, and acknowledgements that were held up come together:
//! each of these makes a short time look several times as fast as the link is. So a time is long
//! enough, and it is looked at together with what was under way in it:
//!
//! * While enough is under way, the link is **busy**, and stays so until that has arrived. The average
//!   over such times is what it carries, be it more or less than was thought. The first moments after
//!   a pause do not count: a limit may have saved up for them.
//! * In other times the sender may have left the link idle, and what arrives is only the least that it
//!   carries.
//!
//! A guest that is slowed to a share of this number relies on both directions. Rounds of Sync are
//! short, and a number that is too large lets the guest make them dirty faster than they are sent:
//! they themselves must be able to correct it.

use crate::{MILLISECOND, SECOND, Time};

/// What the link takes this long for keeps it busy, whatever else an acknowledgement waits for on its
/// way: disks, threads, the network. And shorter times say nothing.
pub(crate) const FILLING: u64 = 100 * MILLISECOND;
/// A pause that is shorter counts as busy: between two rounds the disks are asked what is dirty.
const PAUSE: u64 = FILLING / 10;
/// Time that is averaged over. At 4 MiB/s, a run of 1 MiB that came too early is an eighth of what
/// arrives in it.
const AVERAGED: u64 = 2 * SECOND;

/// The measurement; see the module.
#[derive(Default, Debug)]
pub(crate) struct Capacity {
    /// Busy time in nanoseconds, at most [`AVERAGED`], and the bytes that arrived in it.
    time: f64,
    bytes: f64,
    /// When something arrived last.
    last: Option<Time>,
    /// Since then nothing has been under way, or something has been sent.
    drained: bool,
    refilled: bool,
    busy_since: Option<Time>,
    /// Since when the link may have been idle now and then, and the bytes that arrived since.
    other: Option<(Time, u64)>,
}

impl Capacity {
    /// In bytes a second; zero until enough has arrived.
    pub(crate) fn bytes_per_second(&self) -> f64 {
        if self.time < FILLING as f64 { 0.0 } else { self.bytes / self.time * SECOND as f64 }
    }

    /// Something was sent.
    pub(crate) fn sent(&mut self) {
        self.refilled = true;
    }

    /// Nothing is under way any more.
    pub(crate) fn drained(&mut self) {
        self.drained = true;
    }

    /// `bytes` sent at `sent_at` have arrived. Until then `enough` was under way to keep the link busy,
    /// or not.
    pub(crate) fn arrived(&mut self, now: Time, sent_at: Time, bytes: u64, enough: bool) {
        let last = self.last.replace(now).unwrap_or(sent_at);
        let paused = std::mem::take(&mut self.drained) && sent_at.since(last) > PAUSE;
        let refilled = std::mem::take(&mut self.refilled);
        let began = if paused { sent_at } else { last };
        // What is sent while the last filling drains keeps the link busy only if it is enough itself.
        if paused || refilled && !enough {
            self.busy_since = None;
        }
        if enough {
            self.busy_since.get_or_insert(began);
        }
        if self.busy_since.is_some_and(|since| now.since(since) >= FILLING) {
            self.other = None;
            self.add(now.since(began), bytes);
        } else {
            self.carried_at_least(now, last, bytes);
        }
    }

    fn carried_at_least(&mut self, now: Time, last: Time, bytes: u64) {
        let (since, before) = self.other.unwrap_or((last, 0));
        let (span, bytes) = (now.since(since), before + bytes);
        self.other = (span < AVERAGED).then_some((since, bytes));
        let more = bytes as f64 * SECOND as f64 > self.bytes_per_second() * span as f64;
        if span >= AVERAGED && more {
            self.add(span, bytes);
        }
    }

    /// The link has carried `bytes` in this time.
    fn add(&mut self, span: u64, bytes: u64) {
        self.time += span as f64;
        self.bytes += bytes as f64;
        if self.time > AVERAGED as f64 {
            self.bytes *= AVERAGED as f64 / self.time;
            self.time = AVERAGED as f64;
        }
    }
}
