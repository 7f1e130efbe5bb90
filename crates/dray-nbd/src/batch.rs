//! Replies collected for one send.

use crate::limits::KEPT_BUFFER_SIZE;
use crate::writer::Writer;
use std::io::{self, IoSlice};

/// Reply bytes not sent yet. Its memory is cleared once, when it grows, not for every reply.
#[derive(Default)]
pub(crate) struct Batch {
    bytes: Vec<u8>,
    used: usize,
}

impl Batch {
    /// Bytes waiting to be sent.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// Room for `len` bytes behind those that wait; [`commit`](Self::commit) adds them.
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        let end = self.used + len;
        if self.bytes.len() < end {
            self.grow(end);
        }
        &mut self.bytes[self.used..end]
    }

    #[cold]
    fn grow(&mut self, end: usize) {
        // A fresh zeroed vector costs no pass over its memory, growing the old one would.
        let mut bytes = vec![0; end.next_power_of_two()];
        bytes[..self.used].copy_from_slice(&self.bytes[..self.used]);
        self.bytes = bytes;
    }

    /// Adds the first `len` bytes of the last room.
    pub(crate) fn commit(&mut self, len: usize) {
        self.used += len;
    }

    /// Adds `bytes`.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.room(bytes.len()).copy_from_slice(bytes);
        self.commit(bytes.len());
    }

    /// Sends everything.
    pub(crate) fn send(&mut self, writer: &Writer) -> io::Result<()> {
        if self.used == 0 {
            return Ok(());
        }
        let sent = writer.send(&mut [IoSlice::new(&self.bytes[..self.used])]);
        self.used = 0;
        if self.bytes.len() > KEPT_BUFFER_SIZE {
            self.bytes = Vec::new();
        }
        sent
    }
}
