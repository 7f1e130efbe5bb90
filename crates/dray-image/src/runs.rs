//! Moving runs of blocks between an image and a buffer, as a copier does: whole blocks, zeros
//! found and written as zeros, the odd tail of an image padded.

use crate::{Error, ErrorKind, Extent, ExtentKind, Image, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, MAX_RUN_BLOCKS};

/// Extents asked for at once.
const EXTENTS_AT_ONCE: usize = 1024;

/// One bit for each block of a run: the block is all zeros.
pub type ZeroMask = [u64; (MAX_RUN_BLOCKS / 64) as usize];

fn invalid(what: &str, range: BlockRange, why: &str) -> Error {
    let context = format!("{what} blocks {} to {}", range.start, range.end());
    Error::new(ErrorKind::Invalid, context, why)
}

/// Bytes of `range` that the image has.
fn bytes_in(image: &dyn Image, range: BlockRange) -> u64 {
    image.geometry().len.saturating_sub(range.byte_offset()).min(range.byte_len())
}

/// Reads a run into `buf`, which must be as long as the run; what lies past the image's end is
/// zeros.
///
/// # Errors
/// What the image reports; `Invalid` for a buffer of another length.
pub fn read_run(image: &dyn Image, range: BlockRange, buf: &mut [u8]) -> Result<()> {
    if buf.len() as u64 != range.byte_len() {
        return Err(invalid("reading", range, "the buffer has another length"));
    }
    let (inside, outside) = buf.split_at_mut(bytes_in(image, range) as usize);
    outside.fill(0);
    if inside.is_empty() { Ok(()) } else { image.read_at(inside, range.byte_offset()) }
}

/// True when all of `data` is zeros.
pub fn is_zero(data: &[u8]) -> bool {
    // Wide enough for the compiler to use vectors, short enough to stop early in real data.
    let (pieces, rest) = data.as_chunks::<256>();
    pieces.iter().all(|piece| {
        let (words, _) = piece.as_chunks::<8>();
        words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0
    }) && rest.iter().all(|&byte| byte == 0)
}

/// Which blocks of `data`, a run of at most 256 blocks, are all zeros; a last part block counts.
pub fn zero_bitmap(data: &[u8]) -> ZeroMask {
    let mut mask = ZeroMask::default();
    for (nth, block) in data.chunks(BLOCK_SIZE as usize).take(MAX_RUN_BLOCKS as usize).enumerate() {
        if is_zero(block) {
            mask[nth / 64] |= 1 << (nth % 64);
        }
    }
    mask
}

fn is_marked(zeros: &ZeroMask, nth: u64) -> bool {
    zeros[(nth / 64) as usize] & (1 << (nth % 64)) != 0
}

/// Writes a run of at most 256 blocks: blocks marked in `zeros` become zeros without being
/// written, the others get their part of `data`. What lies past the image's end is dropped.
///
/// # Errors
/// What the image reports; `Invalid` when the run is too long or `data` has another length.
pub fn write_run(
    image: &dyn Image,
    range: BlockRange,
    data: &[u8],
    zeros: &ZeroMask,
) -> Result<()> {
    if range.len > MAX_RUN_BLOCKS || data.len() as u64 != range.byte_len() {
        return Err(invalid("writing", range, "the data has another length, or is too long"));
    }
    let end = bytes_in(image, range);
    let mut from = 0;
    while from < range.len {
        let zero = is_marked(zeros, from);
        let to = (from..range.len).find(|&n| is_marked(zeros, n) != zero).unwrap_or(range.len);
        let part = from * BLOCK_SIZE..(to * BLOCK_SIZE).min(end);
        from = to;
        if part.is_empty() {
            continue;
        }
        let offset = range.byte_offset() + part.start;
        if zero {
            image.zero(offset, part.end - part.start, ZeroMode::MayUnmap, false)?;
        } else {
            image.write_at(&data[part.start as usize..part.end as usize], offset, false)?;
        }
    }
    Ok(())
}

/// Writes what `from` holds in `run` to the same place in `to`, which has its length: holes become
/// zeros without being written. Memory is taken for a whole extent, so runs are to be short.
///
/// # Errors
/// What either image reports.
pub fn copy_run(from: &dyn Image, to: &dyn Image, run: BlockRange) -> Result<()> {
    let mut at = run.byte_offset();
    let end = at + bytes_in(from, run);
    let mut buf = Vec::new();
    while at < end {
        let pieces = from.extents(at, end - at, 1)?;
        let whole = Extent { len: end - at, kind: ExtentKind::Data };
        let piece = pieces.first().copied().unwrap_or(whole);
        if piece.kind == ExtentKind::Data {
            buf.resize(piece.len as usize, 0);
            from.read_at(&mut buf, at)?;
            to.write_at(&buf, at, false)?;
        } else {
            to.zero(at, piece.len, ZeroMode::MayUnmap, false)?;
        }
        at += piece.len;
    }
    Ok(())
}

/// The blocks of `range` that may hold something else than zeros: those that touch a data extent.
///
/// # Errors
/// What the image reports.
pub fn data_blocks(image: &dyn Image, range: BlockRange) -> Result<BlockSet> {
    let mut found = BlockSet::new();
    let mut at = range.byte_offset();
    let end = at + bytes_in(image, range);
    while at < end {
        let extents = image.extents(at, end - at, EXTENTS_AT_ONCE)?;
        if extents.is_empty() {
            return Err(invalid("mapping", range, "the image cannot report its holes"));
        }
        for Extent { len, kind } in extents {
            if kind == ExtentKind::Data {
                found.insert(BlockRange::covering(at, len));
            }
            at += len;
        }
    }
    Ok(found)
}
