//! Parsing the negotiation: option headers and option payloads. Pure: bytes in, meaning out.

use crate::limits::{MAX_META_QUERIES, MAX_STRING};
use crate::proto::OPTION_MAGIC;

/// Bytes in an option's header.
pub(crate) const HEADER_LEN: usize = 16;

/// An option's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OptionHeader {
    pub option: u32,
    pub len: u32,
}

/// What INFO and GO carry.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct InfoRequest<'a> {
    pub name: &'a str,
    pub items: Vec<u16>,
}

/// What LIST_META_CONTEXT and SET_META_CONTEXT carry.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct MetaRequest<'a> {
    pub name: &'a str,
    pub queries: Vec<&'a [u8]>,
}

/// Why a payload is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Malformed {
    /// It ends early, goes on too long, or is not UTF-8.
    Invalid(&'static str),
    /// One part is over its limit.
    TooBig(&'static str),
}

impl OptionHeader {
    /// The header in `bytes`, or `None` when the magic is wrong.
    pub(crate) fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let mut rest = Cursor(bytes);
        let (Ok(high), Ok(low)) = (rest.u32(), rest.u32()) else { return None };
        if u64::from(high) << 32 | u64::from(low) != OPTION_MAGIC {
            return None;
        }
        Some(Self { option: rest.u32().ok()?, len: rest.u32().ok()? })
    }
}

/// Reads big-endian numbers off the front of a slice.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) =
            self.0.split_at_checked(len).ok_or(Malformed::Invalid("the option ends early"))?;
        self.0 = tail;
        Ok(head)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(self.take(4)?.iter().fold(0, |n, b| n << 8 | u32::from(*b)))
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(self.take(2)?.iter().fold(0, |n, b| n << 8 | u16::from(*b)))
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()? as usize;
        let bytes = self.take(len)?;
        if len > MAX_STRING {
            return Err(Malformed::TooBig("a string is longer than 4096 bytes"));
        }
        Ok(bytes)
    }

    fn name(&mut self) -> Result<&'a str, Malformed> {
        export_name(self.string()?)
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Invalid("the option is too long")) }
    }
}

/// An export's name: UTF-8 of bounded length without NUL.
pub(crate) fn export_name(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > MAX_STRING {
        return Err(Malformed::TooBig("an export name is longer than 4096 bytes"));
    }
    let name = std::str::from_utf8(bytes)
        .map_err(|_| Malformed::Invalid("the export name is not utf-8"))?;
    if name.contains('\0') {
        return Err(Malformed::Invalid("the export name contains a zero byte"));
    }
    Ok(name)
}

/// The payload of INFO or GO.
pub(crate) fn info_request(payload: &[u8]) -> Result<InfoRequest<'_>, Malformed> {
    let mut rest = Cursor(payload);
    let name = rest.name()?;
    let count = rest.u16()?;
    let items = (0..count).map(|_| rest.u16()).collect::<Result<_, _>>()?;
    rest.end()?;
    Ok(InfoRequest { name, items })
}

/// The payload of LIST_META_CONTEXT or SET_META_CONTEXT.
pub(crate) fn meta_request(payload: &[u8]) -> Result<MetaRequest<'_>, Malformed> {
    let mut rest = Cursor(payload);
    let name = rest.name()?;
    let count = rest.u32()?;
    if count > MAX_META_QUERIES {
        return Err(Malformed::TooBig("too many metadata queries"));
    }
    let queries = (0..count).map(|_| rest.string()).collect::<Result<_, _>>()?;
    rest.end()?;
    Ok(MetaRequest { name, queries })
}
