//! The text of `blkparse` in its default format:
//! `8,0  3  1  0.000000000  697  Q  WS 223490 + 8 [kjournald]`.
//!
//! A request shows up several times: queued (Q), issued to the driver (D), completed (C). One of
//! them counts: Q, the guest's own request at the time it was made, before merging. A trace without
//! any Q near its beginning was recorded without them; then D counts, and without D it is C.
//! Discards, flushes without data and messages are passed over; so are other devices than the one
//! of the first event that counts (a partition's requests show up again on its disk). What follows
//! the line `CPU0 (...)` is a summary.

use super::{Parsed, number};
use crate::error::Fault;
use crate::record::{Op, Record};

/// Bytes in a sector, whatever the device.
const SECTOR: u64 = 512;
const HINT: &str = "give the output of blkparse in its default format";

/// Whether the first line of a file is one of this format.
pub(super) fn looks_like(line: &[u8]) -> bool {
    let mut fields = fields(line);
    let device = fields.next().unwrap_or_default();
    let pair = device.split(|&byte| byte == b',').filter(|part| number::whole(part).is_some());
    let cpu = fields.next().and_then(number::whole);
    let sequence = fields.next().and_then(number::whole);
    let time = fields.next().and_then(number::seconds);
    pair.count() == 2 && cpu.is_some() && sequence.is_some() && time.is_some()
}

fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty())
}

/// The parser.
pub(super) struct Blktrace {
    /// The action that counts.
    action: u8,
    /// The device of the first event.
    device: Option<Vec<u8>>,
}

impl Blktrace {
    /// Chooses the action that counts from the beginning of the file.
    pub(super) fn new(head: &[u8]) -> Self {
        let seen = |action: u8| {
            head.split(|&byte| byte == b'\n').any(|line| fields(line).nth(5) == Some(&[action]))
        };
        let action = [b'Q', b'D', b'C'].into_iter().find(|&action| seen(action)).unwrap_or(b'Q');
        Self { action, device: None }
    }

    /// One line.
    pub(super) fn line(&mut self, line: &[u8]) -> Result<Parsed, Fault> {
        let mut fields = fields(line);
        let Some(device) = fields.next() else { return Ok(Parsed::Nothing) };
        if device.starts_with(b"CPU") || device == b"Total" {
            return Ok(Parsed::End);
        }
        let (_cpu, _sequence) = (fields.next(), fields.next());
        let time = fields.next().and_then(number::seconds);
        let (_pid, action) = (fields.next(), fields.next());
        let (Some(time_ns), Some(action)) = (time, action) else {
            return Err(Fault::new("not an event of blktrace", HINT));
        };
        if action != [self.action] {
            return Ok(Parsed::Nothing);
        }
        let kind = fields.next().unwrap_or_default();
        let Some(op) = operation(kind) else { return Ok(Parsed::Nothing) };
        let sector = fields.next().and_then(number::whole);
        let plus = fields.next() == Some(b"+");
        let count = fields.next().and_then(number::whole);
        let (Some(sector), true, Some(count)) = (sector, plus, count) else {
            // A flush carries no place.
            return if kind.contains(&b'F') { Ok(Parsed::Nothing) } else { Err(no_place()) };
        };
        let bytes = |sectors: u64| sectors.checked_mul(SECTOR).ok_or_else(no_place);
        let (offset, length) = (bytes(sector)?, bytes(count)?);
        match &self.device {
            Some(known) if known != device => return Ok(Parsed::Nothing),
            Some(_) => {}
            None => self.device = Some(device.to_owned()),
        }
        Ok(Parsed::Record(Record { time_ns, op, offset, length }))
    }
}

fn no_place() -> Fault {
    Fault::new("an event without 'sector + count'", HINT)
}

/// Data that moves; none for discards and flushes.
fn operation(kind: &[u8]) -> Option<Op> {
    if kind.contains(&b'D') {
        None
    } else if kind.contains(&b'W') {
        Some(Op::Write)
    } else if kind.contains(&b'R') {
        Some(Op::Read)
    } else {
        None
    }
}
