//! Receiving: bytes in, replies to those who wait out. Nothing that does not fit is used.

use super::error::ClientError;
use super::waiting::{Asked, Waiting};
use crate::limits::MAX_STRING;
use crate::proto::{CHUNK_MAGIC, SIMPLE_REPLY_MAGIC, chunk};
use std::io::{BufReader, Read};
use std::os::unix::net::UnixStream;

/// Receives until the connection ends, and then tells everybody.
pub(super) fn receive(stream: UnixStream, waiting: &Waiting) {
    let mut from = Replies { from: BufReader::with_capacity(BUFFER, stream), waiting };
    let why = loop {
        if let Err(why) = from.one() {
            break why;
        }
    };
    waiting.fail(why);
    // Who sends next finds out at once, and not when the server's buffer is full.
    let _ = from.from.get_ref().shutdown(std::net::Shutdown::Both);
}

struct Replies<'a, R> {
    from: BufReader<R>,
    waiting: &'a Waiting,
}

impl<R: Read> Replies<'_, R> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ClientError> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Receives one reply, or one chunk of one.
    fn one(&mut self) -> Result<(), ClientError> {
        match u32::from_be_bytes(self.take()?) {
            SIMPLE_REPLY_MAGIC => self.simple(),
            CHUNK_MAGIC => self.chunk(),
            _ => Err(ClientError::Protocol("wrong magic of a reply")),
        }
    }

    fn simple(&mut self) -> Result<(), ClientError> {
        let errno = u32::from_be_bytes(self.take()?);
        let cookie = u64::from_be_bytes(self.take()?);
        let result = match (self.asked(cookie)?, errno) {
            (Asked::Done, 0) => Ok(()),
            // Reads and statuses have structured replies, their failures included.
            (_, 0) => return Err(ClientError::Protocol("simple reply where none may be")),
            (_, errno) => Err(ClientError::server(errno, &[])),
        };
        self.waiting.done(cookie, result);
        Ok(())
    }

    fn chunk(&mut self) -> Result<(), ClientError> {
        let flags = u16::from_be_bytes(self.take()?);
        let kind = u16::from_be_bytes(self.take()?);
        let cookie = u64::from_be_bytes(self.take()?);
        let len = u32::from_be_bytes(self.take()?);
        let asked = self.asked(cookie)?;
        match (kind, asked) {
            (chunk::NONE, _) if len == 0 => {}
            (chunk::OFFSET_DATA, Asked::Read { offset, len: of }) => {
                self.data(cookie, len, offset, of)?;
            }
            (chunk::OFFSET_HOLE, Asked::Read { offset, len: of }) => {
                self.hole(cookie, len, offset, of)?;
            }
            (chunk::BLOCK_STATUS, Asked::Status { id }) => self.extents(cookie, len, id)?,
            (kind, _) if kind >> 15 == 1 => self.error(cookie, len)?,
            _ => return Err(ClientError::Protocol("chunk of a kind that was not asked for")),
        }
        if flags & chunk::FLAG_DONE != 0 {
            self.end(cookie, asked);
        }
        Ok(())
    }

    fn asked(&self, cookie: u64) -> Result<Asked, ClientError> {
        self.waiting.asked(cookie).ok_or(ClientError::Protocol("reply that nobody waits for"))
    }

    /// The place of a chunk's bytes in the read's buffer.
    fn place(at: u64, len: u64, offset: u64, of: usize) -> Result<usize, ClientError> {
        let from = at
            .checked_sub(offset)
            .filter(|from| from.checked_add(len).is_some_and(|end| end <= of as u64));
        from.map(|from| from as usize).ok_or(ClientError::Protocol("data outside what was read"))
    }

    fn data(&mut self, cookie: u64, len: u32, offset: u64, of: usize) -> Result<(), ClientError> {
        let len = len.checked_sub(8).ok_or(ClientError::Protocol("data without an offset"))?;
        let at = u64::from_be_bytes(self.take()?);
        let place = Self::place(at, u64::from(len), offset, of)?;
        let mut bytes = vec![0; len as usize];
        self.from.read_exact(&mut bytes)?;
        self.waiting.update(cookie, |reply| {
            reply.data[place..place + bytes.len()].copy_from_slice(&bytes);
            reply.filled += bytes.len();
        });
        Ok(())
    }

    fn hole(&mut self, cookie: u64, len: u32, offset: u64, of: usize) -> Result<(), ClientError> {
        if len != 12 {
            return Err(ClientError::Protocol("hole of a wrong length"));
        }
        let at = u64::from_be_bytes(self.take()?);
        let size = u32::from_be_bytes(self.take()?);
        let place = Self::place(at, u64::from(size), offset, of)?;
        self.waiting.update(cookie, |reply| {
            reply.data[place..place + size as usize].fill(0);
            reply.filled += size as usize;
        });
        Ok(())
    }

    fn extents(&mut self, cookie: u64, len: u32, id: u32) -> Result<(), ClientError> {
        let count = len.checked_sub(4).filter(|rest| rest % 8 == 0).map(|rest| rest / 8);
        let count = count.filter(|count| *count <= MAX_EXTENTS);
        let count = count.ok_or(ClientError::Protocol("block status of a wrong length"))?;
        if u32::from_be_bytes(self.take()?) != id {
            // Another context of this connection.
            let mut rest = (&mut self.from).take(u64::from(count) * 8);
            std::io::copy(&mut rest, &mut std::io::sink())?;
            return Ok(());
        }
        let mut extents = Vec::with_capacity(count as usize);
        for _ in 0..count {
            extents.push((u32::from_be_bytes(self.take()?), u32::from_be_bytes(self.take()?)));
        }
        self.waiting.update(cookie, |reply| reply.extents.extend(extents));
        Ok(())
    }

    fn error(&mut self, cookie: u64, len: u32) -> Result<(), ClientError> {
        if !(6..=6 + 8 + MAX_STRING as u32).contains(&len) {
            return Err(ClientError::Protocol("error of a wrong length"));
        }
        let errno = u32::from_be_bytes(self.take()?);
        let text = usize::from(u16::from_be_bytes(self.take()?));
        let mut rest = vec![0; len as usize - 6];
        self.from.read_exact(&mut rest)?;
        let text = rest.get(..text).ok_or(ClientError::Protocol("error without its text"))?;
        let error = ClientError::server(errno, text);
        self.waiting.update(cookie, |reply| {
            reply.failed.get_or_insert(error);
        });
        Ok(())
    }

    fn end(&mut self, cookie: u64, asked: Asked) {
        let mut reply = (None, 0);
        self.waiting.update(cookie, |of| reply = (of.failed.take(), of.filled));
        let result = match (reply, asked) {
            ((Some(error), _), _) => Err(error),
            ((None, filled), Asked::Read { len, .. }) if filled != len => {
                Err(ClientError::Protocol("read with a part missing"))
            }
            _ => Ok(()),
        };
        self.waiting.done(cookie, result);
    }
}

/// Extents in one reply; QEMU sends up to 2^17 (1 MiB).
const MAX_EXTENTS: u32 = 1 << 18;

/// Bytes received at a time, so that small replies do not cost a system call each.
const BUFFER: usize = 256 << 10;
