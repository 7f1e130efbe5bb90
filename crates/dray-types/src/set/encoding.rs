//! The canonical encoding of a set: equal sets have equal bytes.
//!
//! The number of parts, then the parts in order. A part begins with its distance in leaves from the end of the
//! part before, and its kind: 1, full leaves, and how many; 2, a leaf as a bitmap of 4096 bytes; 3, a leaf as the
//! number of its runs and each run's gap and length. A leaf of kind 3 takes less than 4096 bytes, and no part of
//! kind 1 follows another one at distance 0. Numbers are LEB128.

use super::leaf::Leaf;
use super::{BlockSet, LEAF_BLOCKS};
use std::fmt;

/// Parts that a decoded set may have at most: an image of 128 TiB of which every leaf has something in it.
const MAX_PARTS: u64 = 1 << 20;
/// Leaves of a decoded set that take a whole bitmap, at most: 256 MiB of memory.
const MAX_LARGE: u64 = 1 << 16;
/// Highest leaf number that a decoded set may name: an image of 2^60 bytes.
const MAX_LEAF: u64 = (1 << 48) / LEAF_BLOCKS;
/// Bytes of a bitmap.
const BITMAP: usize = (LEAF_BLOCKS / 8) as usize;

const FULL: u8 = 1;
const BITS: u8 = 2;
const RUNS: u8 = 3;

/// Why bytes are not a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeSetError;

impl fmt::Display for DecodeSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a canonical block set")
    }
}

impl std::error::Error for DecodeSetError {}

/// A run of full leaves, or one that is neither full nor empty.
enum Part<'a> {
    Full(u64, u64),
    Mixed(u64, &'a Leaf),
}

impl Part<'_> {
    fn first(&self) -> u64 {
        match self {
            Self::Full(first, _) | Self::Mixed(first, _) => *first,
        }
    }

    fn end(&self) -> u64 {
        match self {
            Self::Full(_, end) => *end,
            Self::Mixed(leaf, _) => leaf + 1,
        }
    }
}

/// The parts of a set, in order.
fn parts(set: &BlockSet) -> Vec<Part<'_>> {
    let full = set.full.runs().map(|(start, end)| Part::Full(start, end));
    let mixed = set.mixed.iter().map(|(&leaf, content)| Part::Mixed(leaf, content));
    let mut all: Vec<_> = full.chain(mixed).collect();
    all.sort_unstable_by_key(Part::first);
    all
}

pub(super) fn encode(set: &BlockSet) -> Vec<u8> {
    let parts = parts(set);
    let mut out = Vec::new();
    put_varint(&mut out, parts.len() as u64);
    let mut at = 0;
    for part in parts {
        put_varint(&mut out, part.first() - at);
        at = part.end();
        match part {
            Part::Full(start, end) => {
                out.push(FULL);
                put_varint(&mut out, end - start);
            }
            Part::Mixed(_, leaf) => encode_leaf(&mut out, leaf),
        }
    }
    out
}

fn encode_leaf(out: &mut Vec<u8>, leaf: &Leaf) {
    let (mut runs, mut count, mut at) = (Vec::new(), 0u64, 0);
    for (start, end) in leaf.spans() {
        put_varint(&mut runs, start - at);
        put_varint(&mut runs, end - start);
        at = end;
        count += 1;
        if runs.len() >= BITMAP {
            out.push(BITS);
            out.extend(leaf.bits().iter().flat_map(|word| word.to_le_bytes()));
            return;
        }
    }
    out.push(RUNS);
    put_varint(out, count);
    out.extend(runs);
}

pub(super) fn decode(bytes: &[u8]) -> Result<BlockSet, DecodeSetError> {
    let mut input = bytes;
    let count = take_varint(&mut input)?;
    if count > MAX_PARTS {
        return Err(DecodeSetError);
    }
    let mut set = BlockSet::new();
    let (mut at, mut large) = (0u64, 0);
    for _ in 0..count {
        let first = at.checked_add(take_varint(&mut input)?).filter(|&leaf| leaf <= MAX_LEAF);
        let first = first.ok_or(DecodeSetError)?;
        at = first + 1;
        match take(&mut input, 1)?[0] {
            FULL => {
                let end = first.checked_add(take_varint(&mut input)?);
                at = end.filter(|&end| end > first && end <= MAX_LEAF + 1).ok_or(DecodeSetError)?;
                set.full.insert(first, at);
            }
            kind => {
                let leaf = decode_leaf(kind, &mut input)?;
                large += u64::from(leaf.is_large());
                if large > MAX_LARGE {
                    return Err(DecodeSetError);
                }
                set.mixed.insert(first, leaf);
            }
        }
    }
    if !input.is_empty() || encode(&set) != bytes {
        return Err(DecodeSetError);
    }
    Ok(set)
}

fn decode_leaf(kind: u8, input: &mut &[u8]) -> Result<Leaf, DecodeSetError> {
    let leaf = match kind {
        BITS => {
            let mut bits = Box::new([0; BITMAP / 8]);
            for word in bits.iter_mut() {
                let bytes = take(input, 8)?;
                *word = u64::from_le_bytes(bytes.try_into().map_err(|_| DecodeSetError)?);
            }
            Leaf::of_bits(bits)
        }
        RUNS => decode_runs(input)?,
        _ => return Err(DecodeSetError),
    };
    let is_mixed = leaf.len() > 0 && leaf.len() < LEAF_BLOCKS;
    is_mixed.then_some(leaf).ok_or(DecodeSetError)
}

fn decode_runs(input: &mut &[u8]) -> Result<Leaf, DecodeSetError> {
    let (mut leaf, mut at) = (None::<Leaf>, 0u64);
    for _ in 0..take_varint(input)? {
        let start = at.checked_add(take_varint(input)?).ok_or(DecodeSetError)?;
        let len = take_varint(input)?;
        at = start.checked_add(len).filter(|&end| end <= LEAF_BLOCKS).ok_or(DecodeSetError)?;
        if len == 0 {
            return Err(DecodeSetError);
        }
        match &mut leaf {
            Some(leaf) => leaf.insert(start, at),
            None => leaf = Some(Leaf::of(start, at)),
        }
    }
    leaf.ok_or(DecodeSetError)
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take<'a>(input: &mut &'a [u8], count: usize) -> Result<&'a [u8], DecodeSetError> {
    let (head, tail) = input.split_at_checked(count).ok_or(DecodeSetError)?;
    *input = tail;
    Ok(head)
}

fn take_varint(input: &mut &[u8]) -> Result<u64, DecodeSetError> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = take(input, 1)?[0];
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return Err(DecodeSetError);
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(DecodeSetError)
}
