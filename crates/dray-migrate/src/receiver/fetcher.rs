//! Fetches missing blocks from the source for disks at the target.

use super::{Input, TargetLoop};
use dray_image::{Error, ErrorKind, Fetcher};
use dray_types::{Attempt, BlockRange, Epoch, ImageIndex, Why};
use dray_wire::control::MAX_PEEK;
use dray_wire::{Envelope, ToSource};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::time::Duration;

/// A QEMU that opens a disk before the source can be asked waits this long, then gets an error.
const PEEK_TIMEOUT: Duration = Duration::from_secs(30);

/// One question, and where its answer goes.
pub struct Peek {
    image: ImageIndex,
    offset: u64,
    len: u32,
    answer: SyncSender<Result<Vec<u8>, Why>>,
}

/// The fetcher of one image's disk.
pub struct ImageFetcher {
    image: ImageIndex,
    inputs: Sender<Input>,
}

impl ImageFetcher {
    /// Asks through the loop.
    pub fn new(image: ImageIndex, inputs: Sender<Input>) -> Arc<Self> {
        Arc::new(Self { image, inputs })
    }

    fn ask(&self, offset: u64, buf: &mut [u8]) -> Result<(), Why> {
        let (answer, answered) = sync_channel(1);
        let peek = Peek { image: self.image, offset, len: buf.len() as u32, answer };
        self.inputs.send(Input::Peek(peek)).map_err(|_| "the migration has ended")?;
        let late = |_| format!("the source did not answer in {} s", PEEK_TIMEOUT.as_secs());
        let data = answered.recv_timeout(PEEK_TIMEOUT).map_err(late)??;
        if data.len() != buf.len() {
            return Err("the source's answer has another length".into());
        }
        buf.copy_from_slice(&data);
        Ok(())
    }
}

impl Fetcher for ImageFetcher {
    fn demand(&self, range: BlockRange) {
        // A loop that has ended has failed its disks before.
        let _ = self.inputs.send(Input::Demand(self.image, range));
    }

    fn peek(&self, offset: u64, buf: &mut [u8]) -> dray_image::Result<()> {
        for (nth, part) in buf.chunks_mut(MAX_PEEK as usize).enumerate() {
            let at = offset + nth as u64 * u64::from(MAX_PEEK);
            self.ask(at, part).map_err(|why| {
                Error::with_source(ErrorKind::Unavailable, "reading from the source", why)
            })?;
        }
        Ok(())
    }
}

/// Questions that wait for a session or an answer.
#[derive(Default)]
pub struct Peeks {
    next: u64,
    open: BTreeMap<u64, Peek>,
}

impl TargetLoop {
    pub(super) fn peek(&mut self, peek: Peek) {
        let tag = self.peeks.next;
        self.peeks.next += 1;
        self.ask_source(tag, &peek);
        self.peeks.open.insert(tag, peek);
    }

    /// Asks again what was not answered in the last session.
    pub(super) fn ask_peeks_again(&mut self) {
        for (&tag, peek) in &self.peeks.open {
            self.ask_source(tag, peek);
        }
    }

    fn ask_source(&self, tag: u64, peek: &Peek) {
        let Peek { image, offset, len, .. } = *peek;
        self.send_aside(ToSource::Peek { tag, image, offset, len });
    }

    pub(super) fn peeked(&mut self, tag: u64, data: Result<Vec<u8>, Why>) {
        if let Some(peek) = self.peeks.open.remove(&tag) {
            // The disk may have given up waiting.
            let _ = peek.answer.send(data);
        }
    }

    /// Sends a message that changes no ownership.
    pub(super) fn send_aside(&self, body: ToSource) {
        if let Some(session) = &self.session {
            let epoch = Epoch::HIGHEST;
            // A link that is down reports itself.
            let _ = session.control.send(&Envelope { epoch, attempt: Attempt(0), body });
        }
    }
}
