//! The receiving end of a connection: many small requests in one system call, long payloads
//! straight to where they belong.

use crate::channel::Channel;
use crate::limits::RECEIVE_BUFFER;
use crate::patience::Patience;
use dray_image::{Client, Origin};
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::time::Instant;

/// Bytes received past a long payload or while long payloads are expected: room for the next
/// header, but little of the next payload, which would have to be copied.
const SPILL: usize = 4096;

/// A receive buffer over a channel.
pub(crate) struct Inbound {
    channel: Arc<dyn Channel>,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// Receive at most this much beyond what is asked for.
    ahead: usize,
    deadline: Option<Instant>,
    patience: Patience,
}

impl Inbound {
    pub(crate) fn new(channel: Arc<dyn Channel>) -> Self {
        let bytes = vec![0; RECEIVE_BUFFER].into_boxed_slice();
        Self {
            channel,
            bytes,
            start: 0,
            end: 0,
            ahead: RECEIVE_BUFFER,
            deadline: None,
            patience: Patience::default(),
        }
    }

    pub(crate) fn channel(&self) -> &Arc<dyn Channel> {
        &self.channel
    }

    /// Whoever is at the other end, as images know him; `origin` is his process, if it is known.
    pub(crate) fn client(&self, origin: Option<Origin>) -> Arc<Client> {
        let channel = Arc::clone(&self.channel);
        Client::of(origin, Arc::new(move || !channel.has_hung_up()))
    }

    /// Goes on with another channel. Nothing may have been received ahead: those bytes came
    /// without the new channel's protection.
    pub(crate) fn replace_channel(&mut self, channel: Arc<dyn Channel>) {
        debug_assert!(self.buffered().is_empty());
        self.channel = channel;
    }

    /// After `deadline` receiving fails.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.deadline = deadline;
        if deadline.is_none() {
            self.channel.receive_within(None)?;
        }
        Ok(())
    }

    /// What has been received and not consumed.
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.end - self.start);
        self.start += len;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Expect long payloads (receive headers only) or short requests (receive all there is).
    pub(crate) fn expect_long(&mut self, long: bool) {
        self.ahead = if long { SPILL } else { RECEIVE_BUFFER };
    }

    fn arm(&self) -> io::Result<()> {
        let Some(deadline) = self.deadline else { return Ok(()) };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.channel.receive_within(Some(left))
    }

    /// Waits until `len` bytes (at most the buffer's size) are here; false when the stream ends
    /// before the first of them.
    pub(crate) fn need(&mut self, len: usize) -> io::Result<bool> {
        if self.bytes.len() - self.start < len {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < len {
            self.arm()?;
            let limit = self.bytes.len().min(self.start + len + self.ahead);
            let into = &mut [IoSliceMut::new(&mut self.bytes[self.end..limit])];
            let channel = &self.channel;
            let received = match self.patience.look_for(|| channel.receive_now(into))? {
                Some(received) => received,
                None => channel.receive(into)?,
            };
            match received {
                0 if self.start == self.end => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => self.end += got,
            }
        }
        Ok(true)
    }

    /// Takes exactly `N` bytes.
    pub(crate) fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        if !self.need(N)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut out = [0; N];
        out.copy_from_slice(&self.buffered()[..N]);
        self.consume(N);
        Ok(out)
    }

    /// Fills `into`, past this buffer where possible.
    pub(crate) fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        let mut done = self.buffered().len().min(into.len());
        into[..done].copy_from_slice(&self.buffered()[..done]);
        self.consume(done);
        while done < into.len() {
            self.arm()?;
            let rest = &mut into[done..];
            let wanted = rest.len();
            let spill = &mut self.bytes[..SPILL];
            let mut parts = [IoSliceMut::new(rest), IoSliceMut::new(spill)];
            let channel = &self.channel;
            let received = match self.patience.look_for(|| channel.receive_now(&mut parts))? {
                Some(received) => received,
                None => channel.receive(&mut parts)?,
            };
            match received {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got if got > wanted => {
                    done += wanted;
                    self.end = got - wanted;
                }
                got => done += got,
            }
        }
        Ok(())
    }

    /// Throws `len` bytes away.
    pub(crate) fn skip(&mut self, len: u64) -> io::Result<()> {
        let mut left = len;
        while left > 0 {
            let now = left.min(self.buffered().len() as u64);
            self.consume(now as usize);
            left -= now;
            if left > 0 && !self.need(1)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}
