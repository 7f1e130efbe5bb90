//! The link: a fixed bandwidth, a fixed delay, and who goes first.
//!
//! A frame that begins at *t* arrives at *t* + size ÷ bandwidth + delay. Runs for which a guest
//! waits go before everything that has not begun (the auxiliary queue of the paper); guest memory
//! and other runs share the link by halves. Messages of the agents take the delay and no bandwidth.

use super::bytes;
use dray_engine::SECOND;
use dray_types::BlockRange;
use std::collections::VecDeque;

/// Guest memory moves in pieces of this many bytes.
const MEMORY_PIECE: u64 = 256 << 10;

/// Blocks on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) tag: u64,
    pub(super) range: BlockRange,
    pub(super) urgent: bool,
    /// The guest has just written it, and it is mirrored: nothing is read for it.
    pub(super) written: bool,
}

/// What the link carries next.
pub(super) enum Piece {
    Blocks(Frame),
    /// Guest memory; true for the last of it.
    Memory(bool),
}

pub(super) struct Link {
    bandwidth: u64,
    pub(super) delay: u64,
    /// What a run costs that does not follow its predecessor.
    seek: u64,
    pub(super) busy: bool,
    urgent: VecDeque<Frame>,
    bulk: VecDeque<Frame>,
    memory_left: u64,
    /// Bytes of memory less those of runs, since both have been waiting.
    memory_ahead: i64,
    /// Where the last run that was not urgent ended.
    followed: Option<u64>,
    pub(super) seeks: u64,
}

impl Link {
    pub(super) fn new(bandwidth: u64, delay: u64, seek: u64) -> Self {
        Self {
            bandwidth: bandwidth.max(1),
            delay,
            seek,
            busy: false,
            urgent: VecDeque::new(),
            bulk: VecDeque::new(),
            memory_left: 0,
            memory_ahead: 0,
            followed: None,
            seeks: 0,
        }
    }

    pub(super) fn push(&mut self, frame: Frame) {
        if frame.urgent { self.urgent.push_back(frame) } else { self.bulk.push_back(frame) }
    }

    /// A guest waits for a run that waits among the others.
    pub(super) fn hurry(&mut self, tag: u64) {
        let Some(at) = self.bulk.iter().position(|frame| frame.tag == tag) else { return };
        self.urgent.extend(self.bulk.remove(at).map(|frame| Frame { urgent: true, ..frame }));
    }

    pub(super) fn push_memory(&mut self, bytes: u64) {
        self.memory_left += bytes;
    }

    /// The next piece and how long it keeps the link busy, in nanoseconds. `waits` says whether this
    /// pass has yet to send blocks of a range, those apart that are in the queue.
    pub(super) fn next(&mut self, waits: impl Fn(BlockRange) -> bool) -> Option<(Piece, u64)> {
        if let Some(frame) = self.urgent.pop_front() {
            let time = self.time(bytes(frame.range.len));
            return Some((Piece::Blocks(frame), time));
        }
        let both = self.memory_left > 0 && !self.bulk.is_empty();
        self.memory_ahead = if both { self.memory_ahead } else { 0 };
        if self.memory_left > 0 && self.memory_ahead <= 0 {
            let piece = self.memory_left.min(MEMORY_PIECE);
            self.memory_left -= piece;
            self.memory_ahead += piece as i64;
            return Some((Piece::Memory(self.memory_left == 0), self.time(piece)));
        }
        let frame = self.bulk.pop_front()?;
        self.memory_ahead -= bytes(frame.range.len) as i64;
        let jump = if frame.written { 0 } else { self.penalty(frame.range, waits) };
        let time = self.time(bytes(frame.range.len)) + jump;
        Some((Piece::Blocks(frame), time))
    }

    /// A pass over the blocks that wait begins: in any order it has to go where the first of them lies.
    pub(super) fn begin_pass(&mut self) {
        self.followed = None;
    }

    /// A run follows its predecessor when it is what address order would have sent next: no block
    /// that this pass has yet to send lies between them. In a pass over a whole disk that is the
    /// paper's "immediately preceded"; among scattered dirty blocks it charges for the jumps that a
    /// schedule makes and not for the gaps that every order has, which the paper's sequential order
    /// passes free of charge.
    fn penalty(&mut self, range: BlockRange, waits: impl Fn(BlockRange) -> bool) -> u64 {
        let Some(end) = self.followed.replace(range.end()) else { return 0 };
        if self.seek == 0 {
            return 0;
        }
        let gap = BlockRange::new(end, range.start.saturating_sub(end));
        let queued = || self.bulk.iter().any(|frame| !frame.range.intersect(gap).is_empty());
        if end <= range.start && (gap.is_empty() || !waits(gap) && !queued()) {
            return 0;
        }
        self.seeks += 1;
        self.seek
    }

    fn time(&self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(SECOND) / u128::from(self.bandwidth)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(start: u64, urgent: bool) -> Frame {
        Frame { tag: start, range: BlockRange::new(start, 256), urgent, written: false }
    }

    #[test]
    fn urgent_first_then_memory_and_runs_by_halves_and_jumps_cost() {
        let mut link = Link::new(1 << 20, 0, 10);
        let starts = [0, 256, 1024, 2048];
        starts.iter().for_each(|&start| link.push(frame(start, false)));
        link.push(Frame { written: true, ..frame(1290, false) });
        // Between 512 and 1024 nothing waits any more, between 1280 and 2048 one block does.
        let waits = |range: BlockRange| range.contains(BlockRange::new(1300, 1));
        link.push_memory(5 * MEMORY_PIECE + 1);
        link.push(frame(9999, false));
        link.hurry(9999);
        link.hurry(1 << 40);
        let mut seen = Vec::new();
        while let Some((piece, time)) = link.next(waits) {
            seen.push(match piece {
                Piece::Blocks(frame) => (frame.tag, time),
                Piece::Memory(last) => (u64::from(last), time),
            });
        }
        let run = SECOND;
        let wanted = [
            (9999, run),
            (0, run / 4),
            (0, run),
            (0, run / 4),
            (0, run / 4),
            (0, run / 4),
            (0, run / 4),
            (256, run),
            (1, 953),
            (1024, run),
            (2048, run + 10),
            (1290, run),
        ];
        assert_eq!(seen, wanted);
        assert_eq!(link.seeks, 1);
    }
}
