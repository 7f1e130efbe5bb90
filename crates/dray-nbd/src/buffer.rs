//! Aligned buffers for long payloads, used again and again.

use crate::limits::{KEPT_BUFFER_SIZE, KEPT_BUFFERS};
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};

/// Data starts at a multiple of this, so that direct I/O needs no copy.
const ALIGN: usize = 4096;

/// Bytes that start at a multiple of 4 KiB. What they hold at first is unspecified, but never
/// anything from another connection.
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        // A zeroed vector of this size comes straight from the kernel: no pass over the memory.
        let bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, start, len }
    }

    fn capacity(&self) -> usize {
        self.bytes.len() - ALIGN
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// The idle buffers of one connection.
#[derive(Default)]
pub(crate) struct Buffers {
    idle: Mutex<Vec<Buffer>>,
}

impl Buffers {
    /// A buffer of `len` bytes.
    pub(crate) fn get(&self, len: usize) -> Buffer {
        let mut idle = self.idle.lock();
        if let Some(at) = idle.iter().rposition(|buffer| buffer.capacity() >= len) {
            let mut buffer = idle.swap_remove(at);
            buffer.len = len;
            return buffer;
        }
        // All idle ones are too small; let one go so that sizes adapt to the client.
        if idle.len() >= KEPT_BUFFERS / 2 {
            idle.swap_remove(0);
        }
        drop(idle);
        Buffer::new(len)
    }

    /// Keeps `buffer` for later, if it is of a size worth keeping.
    pub(crate) fn put(&self, buffer: Buffer) {
        let mut idle = self.idle.lock();
        if buffer.capacity() <= KEPT_BUFFER_SIZE && idle.len() < KEPT_BUFFERS {
            idle.push(buffer);
        }
    }
}
