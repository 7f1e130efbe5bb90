//! Parsing a request's header, and deciding whether it is allowed. Pure: bytes in, verdict out.

use crate::limits::MAX_PAYLOAD;
use crate::proto::{Errno, REQUEST_MAGIC, cmd, cmd_flag};

/// Bytes in a request's header.
pub(crate) const HEADER_LEN: usize = 28;

/// A request as it came, not yet judged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

/// What the rules depend on: the export and what this connection negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rules {
    /// Length of the export.
    pub len: u64,
    /// Offsets and lengths must be multiples of this.
    pub min_block: u32,
    pub read_only: bool,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// `base:allocation` was negotiated.
    pub allocation: bool,
    /// The export advertised fast zeroing.
    pub fast_zero: bool,
}

/// Why a request is refused: the number for programs, the words for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub errno: Errno,
    pub why: &'static str,
}

const fn refuse(errno: Errno, why: &'static str) -> Result<(), Refusal> {
    Err(Refusal { errno, why })
}

fn be<const N: usize>(bytes: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

impl Request {
    /// The request in `bytes`; `None` when they do not start with a request's magic, after which
    /// nothing that follows can be trusted.
    pub(crate) fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        if u32::from_be_bytes(be(bytes, 0)) != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: u16::from_be_bytes(be(bytes, 4)),
            command: u16::from_be_bytes(be(bytes, 6)),
            cookie: u64::from_be_bytes(be(bytes, 8)),
            offset: u64::from_be_bytes(be(bytes, 16)),
            len: u32::from_be_bytes(be(bytes, 24)),
        })
    }

    /// Bytes of payload that follow the header, whatever becomes of the request.
    pub(crate) fn payload(&self) -> u32 {
        if self.command == cmd::WRITE { self.len } else { 0 }
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether `rules` allow this request.
    ///
    /// # Errors
    /// The refusal to be sent to the client.
    pub(crate) fn check(&self, rules: &Rules) -> Result<(), Refusal> {
        self.check_flags(rules)?;
        if matches!(self.command, cmd::FLUSH | cmd::DISC) {
            return Ok(());
        }
        self.check_read_only(rules)?;
        self.check_length()?;
        self.check_place(rules)
    }

    fn check_flags(&self, rules: &Rules) -> Result<(), Refusal> {
        let known = match self.command {
            cmd::READ if rules.structured => cmd_flag::FUA | cmd_flag::DF,
            cmd::BLOCK_STATUS => cmd_flag::FUA | cmd_flag::REQ_ONE,
            cmd::WRITE_ZEROES if rules.fast_zero => {
                cmd_flag::FUA | cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO
            }
            cmd::WRITE_ZEROES => cmd_flag::FUA | cmd_flag::NO_HOLE,
            cmd::READ | cmd::WRITE | cmd::DISC | cmd::FLUSH | cmd::TRIM | cmd::CACHE => {
                cmd_flag::FUA
            }
            _ => return refuse(Errno::Inval, "unknown request type"),
        };
        if self.flags & !known != 0 {
            return refuse(Errno::Inval, "a flag that this request does not have");
        }
        if self.command == cmd::BLOCK_STATUS && !rules.allocation {
            return refuse(Errno::Inval, "block status needs a negotiated metadata context");
        }
        Ok(())
    }

    fn writes(&self) -> bool {
        matches!(self.command, cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES)
    }

    fn check_read_only(&self, rules: &Rules) -> Result<(), Refusal> {
        if self.writes() && rules.read_only {
            return refuse(Errno::Perm, "the export is read-only");
        }
        Ok(())
    }

    fn check_length(&self) -> Result<(), Refusal> {
        match self.command {
            cmd::READ if self.len > MAX_PAYLOAD && self.has(cmd_flag::DF) => {
                refuse(Errno::Overflow, "too long for one chunk; the limit is 64 MiB")
            }
            cmd::READ | cmd::WRITE if self.len > MAX_PAYLOAD => {
                refuse(Errno::Inval, "longer than the limit of 64 MiB")
            }
            cmd::BLOCK_STATUS if self.len == 0 => refuse(Errno::Inval, "block status of nothing"),
            _ => Ok(()),
        }
    }

    fn check_place(&self, rules: &Rules) -> Result<(), Refusal> {
        let end = self.offset.checked_add(u64::from(self.len));
        if end.is_none_or(|end| end > rules.len) {
            let grows = matches!(self.command, cmd::WRITE | cmd::WRITE_ZEROES);
            let errno = if grows { Errno::NoSpace } else { Errno::Inval };
            return refuse(errno, "reaches past the end of the export");
        }
        let min = u64::from(rules.min_block);
        if !self.offset.is_multiple_of(min) || !u64::from(self.len).is_multiple_of(min) {
            return refuse(Errno::Inval, "not aligned to the export's minimum block size");
        }
        Ok(())
    }
}
