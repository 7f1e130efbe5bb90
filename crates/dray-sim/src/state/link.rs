//! The network between the agents: one control stream each way, several data streams, sessions.
//!
//! Control messages keep their order; data streams keep theirs but overtake each other. When a
//! session dies, each stream still delivers some prefix of what was under way.

use crate::faults::{Setup, Side};
use crate::rng::Rng;
use dray_engine::SECOND;

/// A frame as it crosses the wire.
pub(crate) struct Frame {
    pub(crate) header: [u8; dray_wire::frame::HEADER_LEN],
    pub(crate) payload: Vec<u8>,
}

/// State of the network.
pub(crate) struct Link {
    pub(crate) up: bool,
    /// The youngest session that was ever made.
    pub(crate) session: u64,
    /// That session is broken, whether or not the agents know.
    pub(crate) broken: bool,
    /// Per direction: arrival of the last control message.
    control_last: [u64; 2],
    stream_last: Vec<u64>,
    pipe_free: u64,
    latency: u64,
    jitter: u64,
    bandwidth: u64,
    /// After these times nothing of the broken session arrives: control both ways, then data.
    cut: Vec<u64>,
}

impl Link {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            up: true,
            session: 0,
            broken: true,
            control_last: [0; 2],
            stream_last: vec![0; setup.streams],
            pipe_free: 0,
            latency: setup.latency,
            jitter: setup.jitter,
            bandwidth: setup.bandwidth,
            cut: vec![0; 2 + setup.streams],
        }
    }

    /// A new session; returns its number.
    pub(crate) fn connect(&mut self, now: u64) -> u64 {
        self.session += 1;
        self.broken = false;
        self.control_last = [now; 2];
        self.stream_last.fill(now);
        self.pipe_free = now;
        self.cut.fill(u64::MAX);
        self.session
    }

    /// The session breaks; false when it already was.
    pub(crate) fn break_session(&mut self, now: u64, rng: &mut Rng) -> bool {
        if self.broken {
            return false;
        }
        self.broken = true;
        let longest = 2 * (self.latency + self.jitter) + 1;
        for cut in &mut self.cut {
            *cut = now + rng.below(longest);
        }
        true
    }

    /// When a control message to `side` arrives.
    pub(crate) fn control_arrival(&mut self, now: u64, to: Side, rng: &mut Rng) -> u64 {
        let last = &mut self.control_last[to as usize];
        *last = (now + self.latency + rng.below(self.jitter + 1)).max(*last + 1);
        *last
    }

    /// When a frame of `bytes` arrives on a stream of the sender's choice.
    pub(crate) fn data_arrival(&mut self, now: u64, bytes: u64, rng: &mut Rng) -> (usize, u64) {
        self.pipe_free = self.pipe_free.max(now) + bytes * SECOND / self.bandwidth;
        let stream = rng.below(self.stream_last.len() as u64) as usize;
        let last = &mut self.stream_last[stream];
        *last = (self.pipe_free + self.latency + rng.below(self.jitter + 1)).max(*last + 1);
        (stream, *last)
    }

    /// Whether a control message of `session` still arrives now.
    pub(crate) fn control_lives(&self, session: u64, to: Side, now: u64) -> bool {
        session == self.session && now <= self.cut[to as usize]
    }

    /// Whether a frame of `session` still arrives now.
    pub(crate) fn data_lives(&self, session: u64, stream: usize, now: u64) -> bool {
        session == self.session && now <= self.cut[2 + stream]
    }
}
