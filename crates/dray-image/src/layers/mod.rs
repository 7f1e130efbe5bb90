//! Layers that a user or a test can put over an image: faults, delays, a rate limit, a recording.
//!
//! A layer sees every request before the image does, may hold it up or refuse it, and never
//! changes it. A request that must not wait is never done through a layer, so that every request
//! is seen exactly once.

mod delay;
mod fault;
mod rate;
mod record;

pub use delay::Delay;
pub use fault::{Fault, Faults, When};
pub use rate::Rate;
pub use record::Recording;

use crate::{Client, Extent, Geometry, Image, Result, WriteBackError, ZeroMode};
use std::sync::Arc;

/// Kinds of request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Zero.
    Zero,
    /// Discard.
    Discard,
    /// A guest's flush; it has no range.
    Flush,
    /// A sync of dray's own; it has no range.
    Sync,
    /// Ask what is allocated.
    Extents,
}

/// A request as a layer sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The kind of the operation.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// It must be durable on return.
    pub fua: bool,
}

/// What a layer does before a request.
pub trait Layer: Send + Sync {
    /// Called before `request` goes on; may take its time.
    ///
    /// # Errors
    /// The request then fails with this error and does not go on.
    fn before(&self, request: Request) -> Result<()>;
}

/// An image with a layer over it.
pub struct Layered<L> {
    inner: Arc<dyn Image>,
    layer: L,
}

impl<L: Layer> Layered<L> {
    /// Puts `layer` over `inner`.
    pub fn new(inner: Arc<dyn Image>, layer: L) -> Self {
        Self { inner, layer }
    }

    /// The layer.
    pub fn layer(&self) -> &L {
        &self.layer
    }

    fn before(&self, op: Op, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.layer.before(Request { op, offset, len, fua })
    }
}

impl<L: Layer> Image for Layered<L> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.before(Op::Read, offset, buf.len() as u64, false)?;
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.before(Op::Write, offset, data.len() as u64, fua)?;
        self.inner.write_at(data, offset, fua)
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.before(Op::Zero, offset, len, fua)?;
        self.inner.zero(offset, len, mode, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.before(Op::Discard, offset, len, fua)?;
        self.inner.discard(offset, len, fua)
    }

    fn flush(&self) -> Result<()> {
        self.before(Op::Flush, 0, 0, false)?;
        self.inner.flush()
    }

    fn flush_with_time(&self) -> Result<()> {
        self.before(Op::Flush, 0, 0, false)?;
        self.inner.flush_with_time()
    }

    fn sync(&self) -> Result<()> {
        self.before(Op::Sync, 0, 0, false)?;
        self.inner.sync()
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.inner.look_at(client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.inner.write_back_error()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.before(Op::Extents, offset, len, false)?;
        self.inner.extents(offset, len, max)
    }

    fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.prefetch(offset, len)
    }

    fn start_writeback(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.start_writeback(offset, len)
    }

    fn forget_cached(&self, offset: u64, len: u64) -> Result<()> {
        self.inner.forget_cached(offset, len)
    }
}
