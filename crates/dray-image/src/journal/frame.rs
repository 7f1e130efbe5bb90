//! The bytes of a journal: its header, its frames, and telling a torn tail from damage.

use super::MAX_RECORD_LEN;
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"DRAYJRNL";
const VERSION: u32 = 1;
pub(super) const HEADER_LEN: usize = 24;
const FRAME_LEN: usize = 24;
/// Longest body of a frame; what its length field can say is more than any journal needs.
const MAX_BODY: usize = u32::MAX as usize;

/// What is in a journal.
pub(super) struct Content {
    pub(super) records: Vec<Vec<u8>>,
    /// Length of the valid part.
    pub(super) len: usize,
    /// Where its last frame begins; where the header begins when there is none.
    pub(super) last: usize,
    /// Number of the next frame.
    pub(super) next: u64,
}

fn checksum(parts: &[&[u8]]) -> [u8; 8] {
    let mut hasher = Xxh3::new();
    parts.iter().for_each(|part| hasher.update(part));
    hasher.digest().to_le_bytes()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

pub(super) fn header() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(checksum(&[&bytes[..16]]));
    bytes
}

/// One frame with all `records`, unless they are too long.
pub(super) fn encode(number: u64, records: &[&[u8]]) -> Option<Vec<u8>> {
    let mut body = Vec::with_capacity(records.iter().map(|record| record.len() + 4).sum());
    for record in records {
        if record.len() > MAX_RECORD_LEN {
            return None;
        }
        body.extend((record.len() as u32).to_le_bytes());
        body.extend_from_slice(record);
    }
    if body.len() > MAX_BODY {
        return None;
    }
    let mut bytes = Vec::with_capacity(FRAME_LEN + body.len());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend((records.len() as u32).to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(checksum(&[&bytes, &body]));
    bytes.extend(body);
    Some(bytes)
}

/// A frame as its lengths have it.
struct Frame<'a> {
    number: u64,
    end: usize,
    records: Vec<&'a [u8]>,
}

/// How much looking for a frame may cost, in bytes. Bytes that look like the beginning of a long
/// frame at every place would otherwise be hashed again and again.
struct Budget(usize);

/// Looking may cost this many times the length of what is looked through.
const LOOKS: usize = 4;

impl Budget {
    /// Pays `cost`; false when it is used up.
    fn pay(&mut self, cost: usize) -> bool {
        self.0 = self.0.saturating_sub(cost);
        self.0 > 0
    }
}

/// The records of a body, when their lengths add up to it.
fn split<'a>(mut rest: &'a [u8], count: u32, budget: &mut Budget) -> Option<Vec<&'a [u8]>> {
    let mut records = Vec::new();
    for _ in 0..count {
        let len = u32_at(rest, 0)? as usize;
        let record = rest.get(4..4 + len).filter(|_| budget.pay(1))?;
        records.push(record);
        rest = &rest[4 + len..];
    }
    rest.is_empty().then_some(records)
}

/// A valid frame at `at`. Its checksum is looked at last: hashing is what costs.
fn decode<'a>(
    bytes: &'a [u8],
    at: usize,
    plausible: impl Fn(u64) -> bool,
    budget: &mut Budget,
) -> Option<Frame<'a>> {
    let body_len = u32_at(bytes, at)? as usize;
    let number = u64_at(bytes, at + 8).filter(|&number| plausible(number))?;
    let end = (at + FRAME_LEN).checked_add(body_len)?;
    let body = bytes.get(at + FRAME_LEN..end)?;
    let records = split(body, u32_at(bytes, at + 4)?, budget)?;
    if !budget.pay(FRAME_LEN + body_len) {
        return None;
    }
    let valid = checksum(&[&bytes[at..at + 16], body]) == bytes[at + 16..at + 24];
    valid.then_some(Frame { number, end, records })
}

/// Why bytes are no journal that can be believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Damage {
    /// There are none: a journal is made with its header in it.
    #[error("it is empty; restore it from a copy")]
    Empty,
    /// They are something else.
    #[error("it is not a journal of dray")]
    Foreign,
    /// The header's checksum does not match.
    #[error("its header is damaged")]
    Header,
    /// A newer dray has written it.
    #[error("its format is version {0}, this dray knows {VERSION}")]
    Version(u32),
    /// What follows a bad frame would take too long to look through.
    #[error(
        "it is damaged at byte {0}, and the bytes after it may contain records; restore it from a copy"
    )]
    Unclear(usize),
    /// The frame that begins here is the last one, and was written as a whole.
    #[error("its last record is damaged, at byte {0}; restore it from a copy")]
    Last(usize),
    /// A valid frame follows a bad one.
    #[error(
        "it is damaged at byte {at}: a valid record follows at byte {next}; restore it from a copy"
    )]
    Inside {
        /// Where the bad one begins.
        at: usize,
        /// Where the valid one begins.
        next: usize,
    },
}

fn check_header(bytes: &[u8]) -> Result<(), Damage> {
    if bytes.get(..8) != Some(MAGIC) {
        return Err(Damage::Foreign);
    }
    let sum = bytes.get(16..HEADER_LEN);
    if sum != Some(&checksum(&[&bytes[..bytes.len().min(16)]])) {
        return Err(Damage::Header);
    }
    match u32_at(bytes, 8) {
        Some(VERSION) => Ok(()),
        version => Err(Damage::Version(version.unwrap_or_default())),
    }
}

/// Where a frame begins behind byte `torn`, if there is one; why that cannot be told, otherwise.
fn behind(
    bytes: &[u8],
    torn: usize,
    plausible: impl Fn(u64) -> bool,
    budget: &mut Budget,
) -> Result<Option<usize>, Damage> {
    let mut places = torn + 1..bytes.len();
    let found = places.find(|&at| decode(bytes, at, &plausible, budget).is_some());
    if budget.0 == 0 {
        return Err(Damage::Unclear(torn));
    }
    Ok(found)
}

/// What a disk writes as a whole.
const SECTOR: usize = 512;

/// Whether a crash can have left the frame at `at` as it is: of one that was being written a sector is missing,
/// which reads as zeros, or the file's end does not lie behind it yet. Of a frame that was written as a whole
/// none is, whatever has become of it since.
fn is_torn(bytes: &[u8], at: usize) -> bool {
    let body = u32_at(bytes, at).unwrap_or(0) as usize;
    let Some(mut rest) = (at + FRAME_LEN).checked_add(body).and_then(|end| bytes.get(at..end))
    else {
        return true;
    };
    let mut from = at;
    while !rest.is_empty() {
        let (sector, behind) = rest.split_at((SECTOR - from % SECTOR).min(rest.len()));
        if sector.iter().all(|&byte| byte == 0) {
            return true;
        }
        (from, rest) = (from + sector.len(), behind);
    }
    false
}

/// Reads a whole journal; why it is none, otherwise.
pub(super) fn read(bytes: &[u8]) -> Result<Content, Damage> {
    read_within(bytes, &mut Budget(LOOKS * bytes.len() + 1))
}

fn read_within(bytes: &[u8], budget: &mut Budget) -> Result<Content, Damage> {
    check_header(bytes)?;
    let mut content = Content { records: Vec::new(), len: HEADER_LEN, last: 0, next: 1 };
    let mut first = true;
    while let Some(frame) =
        decode(bytes, content.len, |number| first || number == content.next, budget)
    {
        first = false;
        content.records.extend(frame.records.into_iter().map(<[u8]>::to_vec));
        content.last = content.len;
        content.len = frame.end;
        content.next = frame.number + 1;
    }
    // A valid frame behind a bad one can only be a later one.
    let most = (bytes.len() / FRAME_LEN) as u64;
    let later = |number: u64| {
        if first { number > 0 } else { number > content.next && number - content.next <= most }
    };
    match behind(bytes, content.len, later, budget)? {
        None if is_torn(bytes, content.len) => Ok(content),
        None => Err(Damage::Last(content.len)),
        Some(next) => Err(Damage::Inside { at: content.len, next }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A journal whose only frame holds `record`, without its last byte.
    fn torn(record: &[u8]) -> Vec<u8> {
        let mut bytes = header();
        bytes.extend(encode(1, &[record]).unwrap());
        bytes.pop();
        bytes
    }

    /// What looking through `bytes` costs.
    fn cost(bytes: &[u8]) -> usize {
        let whole = usize::MAX / 2;
        let mut budget = Budget(whole);
        assert!(read_within(bytes, &mut budget).is_ok_and(|content| content.records.is_empty()));
        whole - budget.0
    }

    #[test]
    fn a_torn_first_frame_costs_no_more_than_its_length() {
        for len in [1 << 10, 1 << 16, 1 << 20] {
            // At every fourth byte what looks like the length of half the journal.
            let number = (len as u32 / 2).to_le_bytes();
            let record: Vec<u8> = number.iter().copied().cycle().take(len).collect();
            assert!(cost(&torn(&record)) <= 2 * len, "of {len} bytes");
            assert!(cost(&torn(&vec![1; len])) <= 2 * len);
            assert!(cost(&torn(&vec![0; len])) <= 2 * len);
        }
    }

    #[test]
    fn what_looks_like_frames_everywhere_is_damage() {
        // Long frames, each inside the one before, all but their checksums right.
        let mut record = Vec::new();
        for _ in 0..1000_u32 {
            let rest = 999_000 - record.len() as u32 - FRAME_LEN as u32;
            record.extend(rest.to_le_bytes());
            record.extend(1_u32.to_le_bytes());
            record.extend(7_u64.to_le_bytes());
            record.extend([0; 8]);
            record.extend((rest - 4).to_le_bytes());
        }
        record.resize(1_000_000, 9);
        let bytes = torn(&record);
        assert_eq!(read(&bytes).err(), Some(Damage::Unclear(HEADER_LEN)));
    }
}
