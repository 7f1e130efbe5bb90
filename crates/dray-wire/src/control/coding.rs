//! Control messages as bytes, and the limits that hold for what comes in.

use super::{
    Envelope, MAX_CONTROL, MAX_IMAGES, MAX_ORDER, MAX_PEEK, MAX_SHORT, MAX_TAGS, MapHash, ToSource,
    ToTarget,
};
use crate::error::WireError;
use crate::frame::PIECE_BLOCKS;
use dray_types::ids::MAX_COUNT;
use dray_types::{Attempt, BlockRange, Epoch};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a message with its length in front.
///
/// # Errors
/// `TooLong` when the message is longer than a peer would accept.
pub fn encode<T: Serialize>(message: &Envelope<T>) -> Result<Vec<u8>, WireError> {
    let body = postcard::to_allocvec(message)
        .map_err(|why| WireError::malformed("control message", why))?;
    let len = body.len() as u64;
    if len > u64::from(MAX_CONTROL) {
        let limit = MAX_CONTROL.into();
        return Err(WireError::TooLong { what: "control message", len, limit });
    }
    let mut out = Vec::with_capacity(4 + body.len());
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(body);
    Ok(out)
}

/// Checks the length that precedes a message.
///
/// # Errors
/// `TooLong` when it is over [`MAX_CONTROL`].
pub fn decode_len(bytes: [u8; 4]) -> Result<usize, WireError> {
    let len = u32::from_le_bytes(bytes);
    if len > MAX_CONTROL {
        let limit = MAX_CONTROL.into();
        return Err(WireError::TooLong { what: "control message", len: len.into(), limit });
    }
    Ok(len as usize)
}

/// Bytes that tell the kind of a message, at most: two numbers of 64 bits, and one of 32.
pub const KIND_LEN: usize = 25;

/// Checks whether a message that begins with these bytes, at least [`KIND_LEN`] of them if it has so many, may have
/// this length.
///
/// # Errors
/// `TooLong` when its kind is one of the short ones and it is over [`MAX_SHORT`], `Malformed` when it has no kind.
pub fn check_kind<T: Bounded>(head: &[u8], len: usize) -> Result<(), WireError> {
    if len <= MAX_SHORT as usize {
        return Ok(());
    }
    let (_, _, kind) = postcard::take_from_bytes::<(Epoch, Attempt, u32)>(head)
        .map_err(|why| WireError::malformed("control message", why))?
        .0;
    if T::LONG.contains(&kind) {
        return Ok(());
    }
    let limit = MAX_SHORT.into();
    Err(WireError::TooLong { what: "control message of its kind", len: len as u64, limit })
}

/// Decodes the bytes that follow a length; all of them must be used.
///
/// # Errors
/// `Malformed` when they are not a message, `TooLong` when a list in it is over its limit.
pub fn decode<T: DeserializeOwned + Bounded>(body: &[u8]) -> Result<Envelope<T>, WireError> {
    let (message, rest): (Envelope<T>, _) = postcard::take_from_bytes(body)
        .map_err(|why| WireError::malformed("control message", why))?;
    if !rest.is_empty() {
        return Err(WireError::malformed("control message", "bytes after its end"));
    }
    fair_counts(message.epoch, message.attempt)?;
    message.body.check()?;
    Ok(message)
}

/// Whoever has to count on from a number of a peer must be able to.
fn fair_counts(epoch: Epoch, attempt: Attempt) -> Result<(), WireError> {
    if epoch.0.max(attempt.0) <= MAX_COUNT {
        return Ok(());
    }
    Err(WireError::malformed("control message", "an epoch or attempt as high as nobody counts"))
}

/// Limits that decoding alone does not enforce (I7).
pub trait Bounded {
    /// The numbers of the kinds that hold sets of blocks, and so may be longer than [`MAX_SHORT`].
    const LONG: &'static [u32];

    /// Checks every list and range of the message.
    ///
    /// # Errors
    /// `TooLong` or `Malformed` for a value outside its limit.
    fn check(&self) -> Result<(), WireError>;
}

fn at_most(what: &'static str, len: usize, limit: usize) -> Result<(), WireError> {
    if len <= limit {
        return Ok(());
    }
    Err(WireError::TooLong { what, len: len as u64, limit: limit as u64 })
}

fn one_run(range: &BlockRange) -> Result<(), WireError> {
    let limit = dray_types::MAX_RUN_BLOCKS;
    if range.is_empty() || range.len > limit {
        return Err(WireError::TooLong { what: "run", len: range.len, limit });
    }
    if range.start > u64::MAX / dray_types::BLOCK_SIZE - limit {
        return Err(WireError::malformed("run", "block number"));
    }
    Ok(())
}

fn whole_pieces(range: &BlockRange) -> Result<(), WireError> {
    let whole = |blocks: u64| blocks.is_multiple_of(PIECE_BLOCKS);
    if whole(range.start) && whole(range.len) {
        return Ok(());
    }
    Err(WireError::malformed("described run", "not made of whole pieces"))
}

impl Bounded for ToTarget {
    /// `Prepare`, and `Vm` with the lines of the images.
    const LONG: &'static [u32] = &[1, 8];

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Open(open) => {
                at_most("list of images", open.images.len(), MAX_IMAGES)?;
                let mut over = open.handed_over.iter();
                over.try_for_each(|over| fair_counts(over.epoch, over.attempt))
            }
            Self::Commit(over) => fair_counts(over.epoch, over.attempt),
            Self::Prepare { images, map_hash } => {
                at_most("list of images", images.len(), MAX_IMAGES)?;
                if MapHash::of(images) != *map_hash {
                    return Err(WireError::Hash);
                }
                Ok(())
            }
            Self::Hashed { hashes, .. } => at_most("list of hashes", hashes.len(), MAX_TAGS),
            Self::Order { ranges, .. } => at_most("order of Backfill", ranges.len(), MAX_ORDER),
            Self::Peeked { data: Ok(data), .. } => at_most("peek", data.len(), MAX_PEEK as usize),
            _ => Ok(()),
        }
    }
}

impl Bounded for ToSource {
    /// `Opened`.
    const LONG: &'static [u32] = &[0];

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Opened { images, .. } => at_most("list of images", images.len(), MAX_IMAGES),
            Self::Received { tags } => at_most("list of tags", tags.len(), MAX_TAGS),
            Self::Fetch { range, .. } => one_run(range),
            Self::Describe { range, .. } => one_run(range).and_then(|()| whole_pieces(range)),
            Self::Peek { len, .. } => at_most("peek", *len as usize, MAX_PEEK as usize),
            Self::Hash { ranges, .. } => {
                at_most("list of ranges", ranges.len(), MAX_TAGS)?;
                ranges.iter().try_for_each(one_run)
            }
            _ => Ok(()),
        }
    }
}
