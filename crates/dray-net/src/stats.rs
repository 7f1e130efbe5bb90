//! The bytes on the wire, by kind. Bytes are counted at the socket, below TLS; their kinds are
//! counted where frames are made and read.

use dray_wire::StreamKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one migration, shared by all its streams.
#[derive(Debug, Default)]
pub struct NetStats {
    sent: [AtomicU64; 7],
    received: [AtomicU64; 7],
    /// Frames sent or received.
    pub frames: AtomicU64,
    /// Frames among them that a guest waited for (known to the sending side only).
    pub urgent_frames: AtomicU64,
    /// Payload bytes that crossed as they were.
    pub raw_bytes: AtomicU64,
    /// Payload bytes that crossed compressed, before compression.
    pub compressed_in: AtomicU64,
    /// The same, after compression.
    pub compressed_out: AtomicU64,
    /// Blocks that were named as zeros instead of being carried.
    pub zero_blocks: AtomicU64,
    /// Blocks whose content was carried.
    pub data_blocks: AtomicU64,
    /// Guest memory, both ways, as QEMU wrote it.
    pub memory_bytes: AtomicU64,
    /// Runs that did not match their hash.
    pub mismatches: AtomicU64,
    /// Bytes of hashes that described runs. Not among the totals, which travel between agents.
    pub hash_bytes: AtomicU64,
}

fn slot(kind: StreamKind) -> usize {
    match kind {
        StreamKind::Control => 0,
        StreamKind::Data => 1,
        StreamKind::Memory => 2,
        StreamKind::Request => 3,
        StreamKind::Store => 4,
        StreamKind::Replica => 5,
        StreamKind::Probe => 6,
    }
}

/// The counters at one moment.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NetTotals {
    /// Bytes on the wire of control streams, sent.
    pub control_sent: u64,
    /// Bytes on the wire of control streams, received.
    pub control_received: u64,
    /// Bytes on the wire of data streams, sent.
    pub data_sent: u64,
    /// Bytes on the wire of data streams, received.
    pub data_received: u64,
    /// Bytes on the wire of the memory stream, sent.
    pub memory_sent: u64,
    /// Bytes on the wire of the memory stream, received.
    pub memory_received: u64,
    /// Frames.
    pub frames: u64,
    /// Frames that a guest waited for.
    pub urgent_frames: u64,
    /// Payload bytes that crossed as they were.
    pub raw_bytes: u64,
    /// Payload bytes that crossed compressed, before compression.
    pub compressed_in: u64,
    /// The same, after compression.
    pub compressed_out: u64,
    /// Blocks named as zeros.
    pub zero_blocks: u64,
    /// Blocks carried.
    pub data_blocks: u64,
    /// Guest memory as QEMU wrote it.
    pub memory_bytes: u64,
    /// Runs that did not match their hash.
    pub mismatches: u64,
}

impl NetTotals {
    /// All bytes on the wire, both ways.
    pub fn wire_bytes(&self) -> u64 {
        self.control_sent
            + self.control_received
            + self.data_sent
            + self.data_received
            + self.memory_sent
            + self.memory_received
    }

    /// The sum of both: what two processes of one agent counted.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            control_sent: self.control_sent + other.control_sent,
            control_received: self.control_received + other.control_received,
            data_sent: self.data_sent + other.data_sent,
            data_received: self.data_received + other.data_received,
            memory_sent: self.memory_sent + other.memory_sent,
            memory_received: self.memory_received + other.memory_received,
            frames: self.frames + other.frames,
            urgent_frames: self.urgent_frames + other.urgent_frames,
            raw_bytes: self.raw_bytes + other.raw_bytes,
            compressed_in: self.compressed_in + other.compressed_in,
            compressed_out: self.compressed_out + other.compressed_out,
            zero_blocks: self.zero_blocks + other.zero_blocks,
            data_blocks: self.data_blocks + other.data_blocks,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            mismatches: self.mismatches + other.mismatches,
        }
    }
}

impl NetStats {
    pub(crate) fn wire_sent(&self, kind: StreamKind, bytes: u64) {
        self.sent[slot(kind)].fetch_add(bytes, Relaxed);
    }

    pub(crate) fn wire_received(&self, kind: StreamKind, bytes: u64) {
        self.received[slot(kind)].fetch_add(bytes, Relaxed);
    }

    /// Reads all counters.
    pub fn totals(&self) -> NetTotals {
        let sent = |kind| self.sent[slot(kind)].load(Relaxed);
        let received = |kind| self.received[slot(kind)].load(Relaxed);
        NetTotals {
            control_sent: sent(StreamKind::Control),
            control_received: received(StreamKind::Control),
            data_sent: sent(StreamKind::Data),
            data_received: received(StreamKind::Data),
            memory_sent: sent(StreamKind::Memory),
            memory_received: received(StreamKind::Memory),
            frames: self.frames.load(Relaxed),
            urgent_frames: self.urgent_frames.load(Relaxed),
            raw_bytes: self.raw_bytes.load(Relaxed),
            compressed_in: self.compressed_in.load(Relaxed),
            compressed_out: self.compressed_out.load(Relaxed),
            zero_blocks: self.zero_blocks.load(Relaxed),
            data_blocks: self.data_blocks.load(Relaxed),
            memory_bytes: self.memory_bytes.load(Relaxed),
            mismatches: self.mismatches.load(Relaxed),
        }
    }
}
