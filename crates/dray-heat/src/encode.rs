//! The durable form of [`Heat`].
//!
//! ```text
//! "dheat" 2 (6 bytes) | blocks | reads | writes | FNV-1a 64 of all before (8 bytes, little endian)
//! reads, writes: kind (1 byte: 0 decayed, 1 previous round) | chunk blocks | operations in round |
//!   weight | operations in all | regret scheduled, sequential (8 bytes each, little endian f64) |
//!   number of chunks | per chunk, least frequent first: number, increase of frequency |
//!   operations until the next trial | number of weights | each (8 bytes, little endian f64) |
//!   number of streams | per stream, the one that went on last behind: head, blocks come |
//!   number of what may become one | per place, the last behind: 0 if it is gone, else head + 1,
//!   blocks come
//! ```
//! Numbers without a length are LEB128. The bitmaps of the round under way and the trial under way are
//! not kept: they begin anew. Version 1 ended each track with its chunks; it is still read.

use crate::config::{HeatConfig, History};
use crate::density::Weights;
use crate::frequency::FrequencyList;
use crate::heat::Heat;
use crate::round::Round;
use crate::streams::{self, Streams};
use crate::track::Track;
use std::fmt;

const MAGIC: &[u8; 5] = b"dheat";
const VERSION: u8 = 2;
/// Without weights and streams.
const COUNTS_ONLY: u8 = 1;
/// More weights than a mixture will ever have.
const MAX_WEIGHTS: usize = 64;
/// Chunk numbers stay below this, so that no block number can overflow.
const MAX_BLOCKS: u64 = 1 << 56;

/// Why bytes are not heat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Not written by this version of `encode`.
    Version,
    /// Cut short or changed since they were written.
    Damaged,
    /// Written with other settings (history, smallest chunk size, or more chunks than now).
    Settings,
    /// Counted over an image with more blocks.
    Image,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "not heat, or of another version",
            Self::Damaged => "damaged heat",
            Self::Settings => "heat counted with other settings",
            Self::Image => "heat of a larger image",
        })
    }
}

impl std::error::Error for DecodeError {}

impl Heat {
    /// The counts as bytes, for [`Heat::decode`]. A few bytes for each chunk with a count.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        number(&mut bytes, self.blocks);
        encode_track(&mut bytes, &self.reads);
        encode_track(&mut bytes, &self.writes);
        let sum = checksum(&bytes);
        bytes.extend(sum.to_le_bytes());
        bytes
    }

    /// Heat of an image of `blocks` blocks as it was encoded, when the image had as many or fewer;
    /// counted on with `config`. A round that was under way is kept with [`History::Decayed`]; with
    /// [`History::PreviousRound`] a new one begins. Any bytes are safe, from wherever they come:
    /// what is not right is an error, and time and memory stay within the bytes and
    /// `config.max_chunks`.
    ///
    /// # Errors
    /// See [`DecodeError`].
    pub fn decode(bytes: &[u8], blocks: u64, config: HeatConfig) -> Result<Self, DecodeError> {
        let body = bytes.strip_prefix(MAGIC).ok_or(DecodeError::Version)?;
        let (&version, body) = body.split_first().ok_or(DecodeError::Version)?;
        if !(COUNTS_ONLY..=VERSION).contains(&version) {
            return Err(DecodeError::Version);
        }
        let (_, sum) = body.split_last_chunk::<8>().ok_or(DecodeError::Damaged)?;
        if checksum(&bytes[..bytes.len() - 8]) != u64::from_le_bytes(*sum) {
            return Err(DecodeError::Damaged);
        }
        let mut input = Input(&body[..body.len() - 8]);
        let counted = input.number()?;
        if counted > blocks.min(MAX_BLOCKS) {
            return Err(DecodeError::Image);
        }
        let mut heat = Self::new(counted, config);
        for track in [&mut heat.reads, &mut heat.writes] {
            decode_counts(&mut input, track, counted)?;
            if version > COUNTS_ONLY {
                decode_learnt(&mut input, track, counted)?;
            }
        }
        heat.grow(blocks);
        if input.0.is_empty() { Ok(heat) } else { Err(DecodeError::Damaged) }
    }
}

fn kind(history: History) -> u8 {
    match history {
        History::Decayed => 0,
        History::PreviousRound => 1,
    }
}

/// The largest candidate for a chunk size.
fn candidate(config: HeatConfig) -> u64 {
    let times = 1 << (config.candidates - 1);
    config.smallest_chunk_blocks.saturating_mul(times).min(MAX_BLOCKS)
}

fn encode_track(bytes: &mut Vec<u8>, track: &Track) {
    let round = track.scheduled();
    bytes.push(kind(track.config.history));
    number(bytes, round.chunk_blocks);
    number(bytes, u64::from(round.operations));
    number(bytes, round.weight);
    number(bytes, track.operations);
    bytes.extend(track.regret.scheduled.to_le_bytes());
    bytes.extend(track.regret.sequential.to_le_bytes());
    number(bytes, round.list.len() as u64);
    let mut before = 0;
    for (id, frequency) in round.list.ascending_oldest_first() {
        number(bytes, id);
        number(bytes, frequency - before);
        before = frequency;
    }
    encode_learnt(bytes, track);
}

/// What a track has learnt besides its counts.
fn encode_learnt(bytes: &mut Vec<u8>, track: &Track) {
    number(bytes, track.pause());
    let weights = track.weights.numbers();
    number(bytes, weights.len() as u64);
    weights.iter().for_each(|weight| bytes.extend(weight.to_le_bytes()));
    let grown = track.streams.grown();
    number(bytes, grown.len() as u64);
    for (head, come) in grown {
        number(bytes, head);
        number(bytes, come);
    }
    let young = track.streams.young();
    number(bytes, young.len() as u64);
    for it in young {
        number(bytes, it.map_or(0, |(head, _)| head + 1));
        if let Some((_, come)) = it {
            number(bytes, come);
        }
    }
}

fn decode_learnt(input: &mut Input, track: &mut Track, blocks: u64) -> Result<(), DecodeError> {
    track.restore_pause(input.number()?);
    let weights: Vec<f64> = input.list(MAX_WEIGHTS, Input::weight)?;
    // Another mixture has learnt nothing yet.
    track.weights = Weights::of(&weights).unwrap_or_default();
    let grown = input.list(streams::MOST, |input| Ok((input.number()?, input.number()?)))?;
    let young = input.list(streams::YOUNG, |input| match input.number()?.checked_sub(1) {
        Some(head) => Ok(Some((head, input.number()?))),
        None => Ok(None),
    })?;
    track.streams = Streams::restored(&grown, &young, blocks).ok_or(DecodeError::Damaged)?;
    Ok(())
}

fn decode_counts(input: &mut Input, track: &mut Track, blocks: u64) -> Result<(), DecodeError> {
    let config = track.config;
    if input.byte()? != kind(config.history) {
        return Err(DecodeError::Settings);
    }
    let chunk_blocks = input.number()?;
    let times = chunk_blocks / config.smallest_chunk_blocks;
    // A chunk that holds the whole image is never doubled.
    let largest = config.smallest_chunk_blocks.max(2 * blocks);
    if chunk_blocks > largest.max(candidate(config))
        || config.smallest_chunk_blocks.checked_mul(times) != Some(chunk_blocks)
        || !times.is_power_of_two()
    {
        return Err(DecodeError::Settings);
    }
    let mut round = Round::new(chunk_blocks);
    let operations = u32::try_from(input.number()?).map_err(|_| DecodeError::Damaged)?;
    round.operations = operations;
    round.weight = input.number()?;
    track.restore_operations(input.number()?);
    track.regret.scheduled = input.finite()?;
    track.regret.sequential = input.finite()?;
    let chunks = input.number()?;
    if chunks > config.max_chunks as u64 {
        return Err(DecodeError::Settings);
    }
    // Two bytes at least for each, and each there once.
    if chunks > input.0.len() as u64 / 2 || chunks > blocks.div_ceil(chunk_blocks) {
        return Err(DecodeError::Damaged);
    }
    let (mut list, mut frequency) = (FrequencyList::default(), 0u64);
    for _ in 0..chunks {
        let id = input.number()?;
        frequency = frequency.checked_add(input.number()?).ok_or(DecodeError::Damaged)?;
        if id >= blocks.div_ceil(chunk_blocks) || !list.push_highest(id, frequency) {
            return Err(DecodeError::Damaged);
        }
    }
    round.list = list;
    match config.history {
        History::Decayed => {
            round.operations = round.operations.min(config.round_operations - 1);
            track.current = round;
        }
        History::PreviousRound if round.list.len() > 0 => track.previous = Some(round),
        History::PreviousRound => {}
    }
    Ok(())
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Result<u8, DecodeError> {
        let (&byte, rest) = self.0.split_first().ok_or(DecodeError::Damaged)?;
        self.0 = rest;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Damaged);
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(DecodeError::Damaged)
    }

    /// A number of things, no more than `most`, and then each of them.
    fn list<T>(
        &mut self,
        most: usize,
        one: impl Fn(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = self.number()?;
        if count > most as u64 {
            return Err(DecodeError::Damaged);
        }
        (0..count).map(|_| one(self)).collect()
    }

    /// A weight of the mixture: none is ever less than what [`Weights::update`] leaves of it.
    fn weight(&mut self) -> Result<f64, DecodeError> {
        let value = self.finite()?;
        if value >= 0.5 { Ok(value) } else { Err(DecodeError::Damaged) }
    }

    /// A number that is not negative and not absurd.
    fn finite(&mut self) -> Result<f64, DecodeError> {
        let (bytes, rest) = self.0.split_first_chunk::<8>().ok_or(DecodeError::Damaged)?;
        self.0 = rest;
        let value = f64::from_le_bytes(*bytes);
        if (0.0..1e18).contains(&value) { Ok(value) } else { Err(DecodeError::Damaged) }
    }
}

fn number(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
