//! Encoding of everything the server sends. Pure: appends bytes to a buffer.

use crate::proto::{
    BASE_ALLOCATION_ID, CHUNK_MAGIC, Errno, OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, chunk, state,
};
use dray_image::{Extent, ExtentKind};

/// Bytes in a simple reply's header.
pub(crate) const SIMPLE_LEN: usize = 16;
/// Bytes in a structured chunk's header.
const CHUNK_LEN: usize = 20;
/// Bytes before the data in a chunk of read data.
pub(crate) const DATA_CHUNK_LEN: usize = CHUNK_LEN + 8;

/// Appends an option reply.
pub(crate) fn option_reply(out: &mut Vec<u8>, option: u32, kind: u32, payload: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(payload);
}

/// A simple reply: the whole answer, or the header before a read's data.
pub(crate) fn simple(cookie: u64, errno: Option<Errno>) -> [u8; SIMPLE_LEN] {
    let mut out = [0; SIMPLE_LEN];
    out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&errno.map_or(0, |e| e as u32).to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

fn chunk_header(flags: u16, kind: u16, cookie: u64, len: u32) -> [u8; CHUNK_LEN] {
    let mut out = [0; CHUNK_LEN];
    out[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..].copy_from_slice(&len.to_be_bytes());
    out
}

/// The header before `len` bytes of read data from `offset`; `last` ends the reply.
pub(crate) fn data_chunk(cookie: u64, offset: u64, len: u32, last: bool) -> [u8; DATA_CHUNK_LEN] {
    let flags = if last { chunk::FLAG_DONE } else { 0 };
    let mut out = [0; DATA_CHUNK_LEN];
    out[..CHUNK_LEN].copy_from_slice(&chunk_header(flags, chunk::OFFSET_DATA, cookie, len + 8));
    out[CHUNK_LEN..].copy_from_slice(&offset.to_be_bytes());
    out
}

/// The reply of a structured read of nothing.
pub(crate) fn none_chunk(cookie: u64) -> [u8; CHUNK_LEN] {
    chunk_header(chunk::FLAG_DONE, chunk::NONE, cookie, 0)
}

/// Appends a structured error that ends the reply.
pub(crate) fn error_chunk(out: &mut Vec<u8>, cookie: u64, errno: Errno, why: &str) {
    let why = shorten(why);
    let len = 6 + why.len() as u32;
    out.extend_from_slice(&chunk_header(chunk::FLAG_DONE, chunk::ERROR, cookie, len));
    out.extend_from_slice(&(errno as u32).to_be_bytes());
    out.extend_from_slice(&(why.len() as u16).to_be_bytes());
    out.extend_from_slice(why.as_bytes());
}

/// The protocol's limit on strings, cut at a character.
pub(crate) fn shorten(text: &str) -> &str {
    &text[..text.floor_char_boundary(crate::limits::MAX_STRING)]
}

/// Appends the block status of `extents`, neighbours of one kind joined.
pub(crate) fn status_chunk(out: &mut Vec<u8>, cookie: u64, extents: &[Extent]) {
    let mut joined: Vec<(u32, u32)> = Vec::with_capacity(extents.len());
    for extent in extents {
        // A request is at most 4 GiB - 1 long and extents do not reach past it.
        let len = u32::try_from(extent.len).unwrap_or(u32::MAX);
        match joined.last_mut() {
            Some(last) if last.1 == state_flags(extent.kind) => last.0 = last.0.saturating_add(len),
            _ => joined.push((len, state_flags(extent.kind))),
        }
    }
    let len = 4 + 8 * joined.len() as u32;
    out.extend_from_slice(&chunk_header(chunk::FLAG_DONE, chunk::BLOCK_STATUS, cookie, len));
    out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
    for (len, flags) in joined {
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
    }
}

fn state_flags(kind: ExtentKind) -> u32 {
    match kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => state::ZERO,
        ExtentKind::Hole => state::HOLE | state::ZERO,
    }
}
