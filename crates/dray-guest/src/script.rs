//! What a client does to an image, computed from a seed: so whoever knows how many of its requests
//! were answered knows what the image must hold, sector by sector.

use crate::content::{BLOCK, Base, SEQ_BASE, Written, mix};
use std::ops::Range;

/// What a disk writes as a whole.
pub const SECTOR: u64 = 512;
/// Sectors of a block.
pub const BLOCK_SECTORS: u64 = BLOCK as u64 / SECTOR;
/// Lanes of a client: each does one request after the other, where no other lane does any.
pub const LANES: usize = 2;
/// Blocks in a row that belong to one lane; requests stay inside.
const GROUP: u64 = 16;

/// An image and the requests of its client.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    /// The number in the contents of its blocks.
    pub image: u64,
    /// Blocks that the client uses.
    pub blocks: u64,
    /// Of these, the first so many hold seeded content at the beginning.
    pub seeded: u64,
    /// Where the requests come from.
    pub seed: u64,
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Writes.
    Write,
    /// Writes zeros.
    Zero,
    /// Discards; dray's disks read as zeros then.
    Trim,
}

/// One request, and what follows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Op {
    /// What it does.
    pub kind: Kind,
    /// The first sector.
    pub first: u64,
    /// Sectors.
    pub count: u64,
    /// It is answered when it is durable.
    pub forced: bool,
    /// A flush follows.
    pub flush: bool,
}

impl Op {
    /// Its sectors.
    #[must_use]
    pub fn sectors(&self) -> Range<u64> {
        self.first..self.first + self.count
    }
}

impl Script {
    /// The `n`th request of a lane.
    #[must_use]
    pub fn op(&self, lane: usize, n: u64) -> Op {
        let mut state = mix(mix(mix(self.seed ^ self.image) ^ lane as u64) ^ n);
        let mut below = |limit: u64| {
            state = mix(state);
            state % limit
        };
        let groups = self.blocks / GROUP / LANES as u64;
        let group = below(groups) * LANES as u64 + lane as u64;
        let count = 1 + below(GROUP);
        let block = group * GROUP + below(GROUP - count + 1);
        let what = below(20);
        let kind = match what {
            0..2 => Kind::Trim,
            2..4 => Kind::Zero,
            _ => Kind::Write,
        };
        let (mut first, mut count) = (block * BLOCK_SECTORS, count * BLOCK_SECTORS);
        // Some writes touch a block only in part.
        if (4..9).contains(&what) {
            first += below(BLOCK_SECTORS);
            count = 1 + below(block * BLOCK_SECTORS + count - first);
        }
        Op { kind, first, count, forced: what >= 18, flush: below(8) == 0 }
    }

    /// The lane to which a sector belongs.
    #[must_use]
    pub fn lane(&self, sector: u64) -> usize {
        (sector / BLOCK_SECTORS / GROUP % LANES as u64) as usize
    }

    /// What a sector holds after the `n`th request of its lane, or at the beginning.
    #[must_use]
    pub fn content(&self, sector: u64, after: Option<u64>) -> [u8; SECTOR as usize] {
        let block = sector / BLOCK_SECTORS;
        let seq = match after {
            Some(n) if self.op(self.lane(sector), n).kind != Kind::Write => None,
            // The beginning is number zero.
            Some(n) => u32::try_from(n + 1).ok(),
            None => (Base::of(block, self.seeded) == Base::Seeded).then_some(SEQ_BASE),
        };
        let mut bytes = [0; SECTOR as usize];
        if let Some(seq) = seq {
            let mut whole = [0; BLOCK];
            Written { image: self.image, block, seq }.fill(&mut whole);
            let at = (sector % BLOCK_SECTORS * SECTOR) as usize;
            bytes.copy_from_slice(&whole[at..at + SECTOR as usize]);
        }
        bytes
    }

    /// The bytes that the `n`th request of a lane writes.
    #[must_use]
    pub fn bytes(&self, lane: usize, n: u64) -> Vec<u8> {
        let op = self.op(lane, n);
        let (start, end) = (op.first * SECTOR, (op.first + op.count) * SECTOR);
        let (first, last) = (op.first / BLOCK_SECTORS, (op.first + op.count - 1) / BLOCK_SECTORS);
        let mut bytes = vec![0; (last + 1 - first) as usize * BLOCK];
        let seq = u32::try_from(n + 1).unwrap_or(u32::MAX);
        for (block, chunk) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            if op.kind == Kind::Write {
                Written { image: self.image, block, seq }.fill(chunk);
            }
        }
        let skip = start - first * BLOCK as u64;
        bytes[skip as usize..(skip + end - start) as usize].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_keep_to_their_own_sectors() {
        let script = Script { image: 1, blocks: 256, seeded: 128, seed: 7 };
        for lane in 0..LANES {
            for n in 0..100 {
                let op = script.op(lane, n);
                assert!(op.count > 0 && op.sectors().end <= 256 * BLOCK_SECTORS, "{op:?}");
                assert!(op.sectors().all(|sector| script.lane(sector) == lane), "{op:?}");
                let bytes = op.sectors().flat_map(|sector| script.content(sector, Some(n)));
                assert!(script.bytes(lane, n) == bytes.collect::<Vec<u8>>(), "{op:?}");
            }
        }
    }

    #[test]
    fn contents_tell_when_they_were_written() {
        let script = Script { image: 1, blocks: 256, seeded: 128, seed: 7 };
        let writes = |n: &u64| script.op(0, *n).kind == Kind::Write;
        let mut seen = std::collections::HashSet::from([script.content(3, None).to_vec()]);
        for n in (0..50).filter(writes) {
            assert!(seen.insert(script.content(3, Some(n)).to_vec()));
        }
        assert_eq!(script.content(200 * BLOCK_SECTORS, None), [0; SECTOR as usize]);
    }
}
