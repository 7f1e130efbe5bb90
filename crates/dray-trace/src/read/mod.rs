//! Reading traces: formats told apart by their first bytes, one record at a time.
//!
//! | format | taken as |
//! |---|---|
//! | CSV | lines `time_s,op,offset,length`; seconds, `R` or `W`, bytes; the head line may be absent |
//! | blktrace | the text of `blkparse`; see [`blktrace`] for which events count |
//! | fio | iolog version 2 and 3; see [`fio`] |
//!
//! Each of them may be zstd-compressed. Lines, accesses and times have upper bounds, and whatever a
//! file holds, the answer is a record or an error with the number of its line. A time may lie up to
//! one second before its predecessor (traces of several CPUs are merged like that) and is then
//! taken as equal to it; more is an error.

pub mod blktrace;
pub mod csv;
pub mod fio;
mod lines;
mod number;

use crate::error::{Fault, TraceError};
use crate::record::{MAX_END, MAX_LENGTH, MAX_TIME, Record};
use lines::Lines;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// How far a time may lie before its predecessor, in nanoseconds.
const MAX_STEP_BACK: u64 = 1_000_000_000;
/// The first bytes of a zstd frame (RFC 8878).
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The first bytes of a binary blktrace file on a little-endian machine, without its version.
const BLKTRACE_MAGIC: [u8; 3] = [0x74, 0x61, 0x65];
const CUT_HINT: &str =
    "the file was cut off or damaged on its way: copy it again, or try zstd -t FILE";
const FORMATS_HINT: &str = "give CSV lines 'time_s,op,offset,length', the output of blkparse, or \
                            a fio iolog; each may be compressed with zstd";

/// What a line held.
enum Parsed {
    Record(Record),
    /// Nothing to replay: a head line, a comment, an event of another kind.
    Nothing,
    /// The rest of the file holds no records.
    End,
}

/// The formats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// `time_s,op,offset,length`.
    Csv,
    /// The text of `blkparse`.
    Blktrace,
    /// A fio iolog of this version.
    Fio(u8),
}

enum Parser {
    Csv(csv::Csv),
    Blktrace(blktrace::Blktrace),
    Fio(fio::Fio),
}

/// Reads records one after another, in the order of their times.
pub struct Reader {
    path: PathBuf,
    lines: Lines,
    parser: Parser,
    format: Format,
    last: u64,
    over: bool,
}

impl Reader {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|why| TraceError::io(path, "cannot open", why))?;
        Self::new(path, file)
    }

    /// Reads from anything; `path` is what errors call it.
    pub fn new(path: &Path, source: impl Read + Send + 'static) -> Result<Self, TraceError> {
        let failed = |why| TraceError::io(path, "cannot read", why);
        let mut lines = Lines::new(Box::new(source));
        let head = lines.peek().map_err(failed)?;
        if head.starts_with(&ZSTD_MAGIC) {
            let decoder = zstd::Decoder::new(lines.into_read())
                .map_err(|why| TraceError::io(path, "cannot decompress", why))?;
            lines = Lines::new(Box::new(decoder));
        }
        let number = lines.number();
        let head = lines.peek().map_err(|why| unreadable(path, number, why))?;
        let format = detect(head).map_err(|fault| TraceError::bad(path, None, fault))?;
        let parser = match format {
            Format::Csv => Parser::Csv(csv::Csv::default()),
            Format::Blktrace => Parser::Blktrace(blktrace::Blktrace::new(head)),
            Format::Fio(version) => Parser::Fio(fio::Fio::new(version)),
        };
        Ok(Self { path: path.to_owned(), lines, parser, format, last: 0, over: false })
    }

    /// What the file turned out to be.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The next record; none at the end.
    pub fn next_record(&mut self) -> Result<Option<Record>, TraceError> {
        while !self.over {
            let line = match self.lines.next_line() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(lines::LineError::Io(why)) => {
                    self.over = true;
                    return Err(unreadable(&self.path, self.lines.number(), why));
                }
                Err(lines::LineError::TooLong) => return Err(self.bad(lines::too_long())),
            };
            let parsed = match &mut self.parser {
                Parser::Csv(csv) => csv.line(line),
                Parser::Blktrace(blktrace) => blktrace.line(line),
                Parser::Fio(fio) => fio.line(line),
            };
            match parsed.and_then(|line| checked(line, self.last)) {
                Ok(Parsed::Record(record)) => {
                    self.last = record.time_ns;
                    return Ok(Some(record));
                }
                Ok(Parsed::Nothing) => {}
                Ok(Parsed::End) => break,
                Err(fault) => return Err(self.bad(fault)),
            }
        }
        self.over = true;
        Ok(None)
    }

    fn bad(&mut self, fault: Fault) -> TraceError {
        self.over = true;
        TraceError::bad(&self.path, Some(self.lines.number()), fault)
    }
}

impl Iterator for Reader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_record().transpose()
    }
}

/// What failed: the system, or zstd, which says of contents that it cannot decompress that they end too
/// early or are of another kind, without a number of the system's. `lines` were read before.
fn unreadable(path: &Path, lines: u64, why: io::Error) -> TraceError {
    if why.raw_os_error().is_some() {
        return TraceError::io(path, "cannot read", why);
    }
    let what = match why.kind() {
        io::ErrorKind::UnexpectedEof => "the compressed data end in the middle".to_owned(),
        _ => format!("the compressed data cannot be read: {why}"),
    };
    let line = (lines > 0).then_some(lines + 1);
    TraceError::bad(path, line, Fault::new(what, CUT_HINT))
}

/// Bounds of what any format may say, and times that never go back.
fn checked(line: Parsed, last: u64) -> Result<Parsed, Fault> {
    let Parsed::Record(mut record) = line else { return Ok(line) };
    if record.length == 0 {
        return Ok(Parsed::Nothing);
    }
    if record.length > MAX_LENGTH {
        let what = format!("an access of {} bytes; 1 GiB is the most", record.length);
        return Err(Fault::new(what, "lengths are in bytes"));
    }
    if record.offset > MAX_END - record.length {
        let what = format!("an access at byte {}; disks end at 1 PiB here", record.offset);
        return Err(Fault::new(what, "offsets are in bytes"));
    }
    if record.time_ns > MAX_TIME {
        return Err(Fault::new(
            "a time more than 100 years on",
            "times count from the first record",
        ));
    }
    if record.time_ns < last {
        if last - record.time_ns > MAX_STEP_BACK {
            let back = (last - record.time_ns) as f64 / 1e9;
            let what = format!("the time goes back by {back:.3} s");
            return Err(Fault::new(what, "sort the trace by time"));
        }
        record.time_ns = last;
    }
    Ok(Parsed::Record(record))
}

fn detect(head: &[u8]) -> Result<Format, Fault> {
    if head.len() >= 4 && (head[..3] == BLKTRACE_MAGIC || head[1..4] == [0x65, 0x61, 0x74]) {
        let hint = "turn it into text first: blkparse -i FILE -o FILE.txt";
        return Err(Fault::new("a binary blktrace file", hint));
    }
    for (version, name) in [(2, "fio version 2 iolog"), (3, "fio version 3 iolog")] {
        if head.starts_with(name.as_bytes()) {
            return Ok(Format::Fio(version));
        }
    }
    let mut lines = head.split(|&byte| byte == b'\n').filter(|line| !csv::is_comment(line));
    let Some(first) = lines.next() else {
        return Err(Fault::new("there is nothing in it", FORMATS_HINT));
    };
    if csv::looks_like(first) {
        Ok(Format::Csv)
    } else if blktrace::looks_like(first) {
        Ok(Format::Blktrace)
    } else {
        Err(Fault::new("not a trace of a known format", FORMATS_HINT))
    }
}
