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

/// A valid frame at `at`: its number, its end and its records. `plausible` is asked first, so that
/// looking everywhere does not hash everything everywhere.
fn decode(
    bytes: &[u8],
    at: usize,
    plausible: impl Fn(u64) -> bool,
) -> Option<(u64, usize, Vec<Vec<u8>>)> {
    let body_len = u32_at(bytes, at)? as usize;
    let number = u64_at(bytes, at + 8)?;
    let end = (at + FRAME_LEN).checked_add(body_len)?;
    let body = bytes.get(at + FRAME_LEN..end)?;
    if !plausible(number) || checksum(&[&bytes[at..at + 16], body]) != bytes[at + 16..at + 24] {
        return None;
    }
    let mut records = Vec::new();
    let mut rest = body;
    for _ in 0..u32_at(bytes, at + 4)? {
        let len = u32_at(rest, 0)? as usize;
        records.push(rest.get(4..4 + len)?.to_vec());
        rest = &rest[4 + len..];
    }
    rest.is_empty().then_some((number, end, records))
}

fn check_header(bytes: &[u8]) -> Result<(), String> {
    if bytes.get(..8) != Some(MAGIC) {
        return Err("it is not a journal of dray".to_owned());
    }
    let sum = bytes.get(16..HEADER_LEN);
    if sum != Some(&checksum(&[&bytes[..bytes.len().min(16)]])) {
        return Err("its header is damaged".to_owned());
    }
    match u32_at(bytes, 8) {
        Some(VERSION) => Ok(()),
        version => Err(format!(
            "its format is version {}, this dray knows {VERSION}",
            version.unwrap_or_default()
        )),
    }
}

/// Reads a whole journal; why it is none, otherwise.
pub(super) fn read(bytes: &[u8]) -> Result<Content, String> {
    check_header(bytes)?;
    let mut content = Content { records: Vec::new(), len: HEADER_LEN, last: 0, next: 1 };
    let mut first = true;
    while let Some((number, end, records)) =
        decode(bytes, content.len, |number| first || number == content.next)
    {
        first = false;
        content.records.extend(records);
        content.last = content.len;
        content.len = end;
        content.next = number + 1;
    }
    // A valid frame behind a bad one can only be a later one.
    let most = (bytes.len() / FRAME_LEN) as u64;
    let later = |number: u64| first || (number > content.next && number - content.next <= most);
    let behind = (content.len + 1..bytes.len()).find(|&at| decode(bytes, at, later).is_some());
    match behind {
        None => Ok(content),
        Some(at) => Err(format!(
            "it is damaged at byte {}: a valid record follows at byte {at}; restore it from a copy",
            content.len
        )),
    }
}
