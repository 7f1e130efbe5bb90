//! CSV: `time_s,op,offset,length`.

use super::{Parsed, number};
use crate::error::Fault;
use crate::record::{Op, Record};

/// The line that may stand first.
pub const HEAD: &str = "time_s,op,offset,length";
const HINT: &str =
    "write 'time_s,op,offset,length': seconds, R or W, bytes, bytes; 0.25,W,4096,8192";

/// Whether a line has nothing in it that counts.
pub(super) fn is_comment(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    line.is_empty() || line[0] == b'#'
}

/// Whether the first line of a file is one of this format.
pub(super) fn looks_like(line: &[u8]) -> bool {
    line.iter().filter(|&&byte| byte == b',').count() >= 3 && !line.contains(&b' ')
}

/// The parser.
#[derive(Default)]
pub(super) struct Csv {
    begun: bool,
}

impl Csv {
    /// One line.
    #[inline]
    pub(super) fn line(&mut self, line: &[u8]) -> Result<Parsed, Fault> {
        if let Some(record) = record(line) {
            self.begun = true;
            return Ok(Parsed::Record(record));
        }
        if is_comment(line) {
            return Ok(Parsed::Nothing);
        }
        if !std::mem::replace(&mut self.begun, true) && line == HEAD.as_bytes() {
            return Ok(Parsed::Nothing);
        }
        Err(fault(line))
    }
}

fn operation(text: &[u8]) -> Option<Op> {
    match text {
        b"R" | b"r" | b"Read" | b"read" => Some(Op::Read),
        b"W" | b"w" | b"Write" | b"write" => Some(Op::Write),
        _ => None,
    }
}

#[inline]
fn field<'a>(line: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    let rest = line.get(*at..)?;
    let len = rest.iter().position(|&byte| byte == b',').unwrap_or(rest.len());
    *at += len + 1;
    Some(&rest[..len])
}

#[inline]
fn record(line: &[u8]) -> Option<Record> {
    let mut at = 0;
    let time_ns = number::seconds(field(line, &mut at)?)?;
    let op = operation(field(line, &mut at)?)?;
    let offset = number::whole(field(line, &mut at)?)?;
    let length = number::whole(field(line, &mut at)?)?;
    (at > line.len()).then_some(Record { time_ns, op, offset, length })
}

/// Which field it was.
fn fault(line: &[u8]) -> Fault {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b',').collect();
    let [time, op, offset, length] = fields[..] else {
        let plural = if fields.len() == 1 { "" } else { "s" };
        return Fault::new(format!("{} field{plural} and not 4", fields.len()), HINT);
    };
    let show = |text: &[u8]| String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
    let what = if number::seconds(time).is_none() {
        format!("'{}' is not a time in seconds", show(time))
    } else if operation(op).is_none() {
        format!("'{}' is neither R nor W", show(op))
    } else if number::whole(offset).is_none() {
        format!("'{}' is not an offset in bytes", show(offset))
    } else {
        format!("'{}' is not a length in bytes", show(length))
    };
    Fault::new(what, HINT)
}
