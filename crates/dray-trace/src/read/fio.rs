//! fio iologs, as `--write_iolog` makes and `--read_iolog` takes them.
//!
//! Version 2 has `file action offset length`; it carries no times but those of `file wait N` lines
//! (N microseconds since the wait before), so without them all accesses stand at time 0.
//! Version 3 has `time file action offset length` with the time in microseconds. Reads and writes
//! count, on the first file that has any; `add`, `open`, `close`, `sync`, `datasync` and `trim` are
//! passed over.

use super::{Parsed, number};
use crate::error::Fault;
use crate::record::{Op, Record};

const HINT: &str = "give a file that fio's --write_iolog has made";
/// Nanoseconds in a microsecond.
const MICRO: u64 = 1000;

/// The parser.
pub(super) struct Fio {
    version: u8,
    /// Version 2: the time that waits have added up to.
    time_ns: u64,
    file: Option<Vec<u8>>,
}

impl Fio {
    /// For a file of this version.
    pub(super) fn new(version: u8) -> Self {
        Self { version, time_ns: 0, file: None }
    }

    /// One line.
    pub(super) fn line(&mut self, line: &[u8]) -> Result<Parsed, Fault> {
        if line.starts_with(b"fio version") || line.trim_ascii().is_empty() {
            return Ok(Parsed::Nothing);
        }
        let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
        if self.version == 3 {
            let time = fields.next().and_then(number::whole);
            let time = time.and_then(|micros| micros.checked_mul(MICRO));
            self.time_ns = time.ok_or_else(|| Fault::new("no time in microseconds", HINT))?;
        }
        let (Some(file), Some(action)) = (fields.next(), fields.next()) else {
            return Err(Fault::new("neither a file nor an action", HINT));
        };
        let op = match action {
            b"read" => Op::Read,
            b"write" => Op::Write,
            b"wait" => return self.wait(fields.next()),
            b"add" | b"open" | b"close" | b"sync" | b"datasync" | b"trim" | b"sync_file_range" => {
                return Ok(Parsed::Nothing);
            }
            _ => return Err(Fault::new("an action that fio does not know", HINT)),
        };
        let place = (fields.next().and_then(number::whole), fields.next().and_then(number::whole));
        let (Some(offset), Some(length)) = place else {
            return Err(Fault::new("no offset and length", HINT));
        };
        match &self.file {
            Some(known) if known != file => return Ok(Parsed::Nothing),
            Some(_) => {}
            None => self.file = Some(file.to_owned()),
        }
        Ok(Parsed::Record(Record { time_ns: self.time_ns, op, offset, length }))
    }

    fn wait(&mut self, micros: Option<&[u8]>) -> Result<Parsed, Fault> {
        if self.version == 2 {
            let nanos = micros.and_then(number::whole).and_then(|micros| micros.checked_mul(MICRO));
            let time = nanos.and_then(|nanos| self.time_ns.checked_add(nanos));
            self.time_ns = time.ok_or_else(|| Fault::new("a wait without microseconds", HINT))?;
        }
        Ok(Parsed::Nothing)
    }
}
