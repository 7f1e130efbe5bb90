//! What data streams deliver: written into partial images before handover, filled into missing
//! blocks after it. Runs on the streams' threads; the loop only hears what became of each frame.

use super::Input;
use crate::lineage::REGION_BLOCKS;
use crate::migration::intents::IntentFile;
use crate::net::{NetError, RunSink};
use dray_engine::TargetEvent;
use dray_engine::target::Arrival;
use dray_image::{Disk, FileImage, Fill, Image, IntentLog, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, Epoch};
use dray_wire::FrameHeader;
use dray_wire::frame::mask_bit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError, RwLock};

/// Where an image's blocks go.
pub struct Place {
    /// The disk, for missing blocks.
    pub disk: Arc<Disk>,
    /// The partial file.
    pub file: Arc<FileImage>,
    /// Exported length in bytes.
    pub len: u64,
    /// Where a file that was a replica is written into: noted before it is.
    pub overwritten: Option<IntentFile>,
}

/// The sink of a migration. Frames of a session that is no longer the current one are dropped, and
/// a new session waits until none of them is being written: else an old frame could land on a newer
/// one.
pub struct Sink {
    session: RwLock<u64>,
    places: RwLock<Vec<Place>>,
    inputs: Sender<Input>,
    /// Zero while receiving; else the epoch in which this host owns the images.
    owner_epoch: AtomicU64,
}

impl Sink {
    /// Delivers to `places`.
    pub fn new(places: Vec<Place>, inputs: Sender<Input>) -> Arc<Self> {
        let (session, places) = (RwLock::new(0), RwLock::new(places));
        Arc::new(Self { session, places, inputs, owner_epoch: AtomicU64::new(0) })
    }

    /// Nothing is delivered any more, and nobody's files are kept open for it.
    pub fn let_go(&self) {
        self.close();
        self.places.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Frames are written into the partial images.
    pub fn receive(&self) {
        self.owner_epoch.store(0, Ordering::SeqCst);
    }

    /// Frames fill missing blocks; those of an earlier epoch are dropped (I1).
    pub fn fill(&self, epoch: Epoch) {
        self.owner_epoch.store(epoch.0, Ordering::SeqCst);
    }

    /// No frames are taken any more, and none is being written.
    pub fn close(&self) {
        self.admit(u64::MAX);
    }

    /// Frames of session `number` are taken from now on, of others no more.
    pub fn admit(&self, number: u64) {
        *self.session.write().unwrap_or_else(PoisonError::into_inner) = number;
    }

    /// The sink of one session's data streams.
    pub fn of_session(self: &Arc<Self>, number: u64) -> Arc<SessionSink> {
        Arc::new(SessionSink { sink: Arc::clone(self), number })
    }

    fn deliver(&self, number: u64, header: &FrameHeader, payload: Option<&[u8]>) {
        let session = self.session.read().unwrap_or_else(PoisonError::into_inner);
        if *session != number {
            return;
        }
        let owner = self.owner_epoch.load(Ordering::SeqCst);
        if owner > 0 && header.epoch < Epoch(owner) {
            return;
        }
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let arrival = match place(&places, header) {
            Err(why) => Arrival::Failed(why),
            Ok(place) => match deliver(place, header, payload, owner > 0) {
                Ok(()) => Arrival::Written,
                Err(why) => Arrival::Failed(why.to_string()),
            },
        };
        self.report(header, arrival);
    }

    fn report(&self, header: &FrameHeader, arrival: Arrival) {
        let FrameHeader { tag, image, range, .. } = *header;
        let event = TargetEvent::RunArrived { tag, image, range, arrival };
        // A loop that has ended needs no more blocks.
        let _ = self.inputs.send(Input::Engine(event));
    }
}

fn place<'a>(places: &'a [Place], header: &FrameHeader) -> Result<&'a Place, String> {
    let place = places.get(usize::from(header.image.0));
    place
        .filter(|place| BlockRange::whole(place.len).contains(header.range))
        .ok_or_else(|| "a frame lies outside the image".to_owned())
}

/// Writes the data and zero parts of a run one after the other.
fn deliver(
    place: &Place,
    header: &FrameHeader,
    payload: Option<&[u8]>,
    owner: bool,
) -> dray_image::Result<()> {
    if let Some(overwritten) = place.overwritten.as_ref().filter(|_| !owner) {
        note(overwritten, header.range)?;
    }
    let Some(payload) = payload else { return zeros(place, header.range, owner) };
    let mut rest = payload;
    for (range, zero) in parts(header) {
        if zero {
            zeros(place, range, owner)?;
        } else {
            let (data, tail) = rest.split_at(range.byte_len() as usize);
            rest = tail;
            bytes(place, range, data, owner)?;
        }
    }
    Ok(())
}

/// From here on the regions of `range` may hold something else than the replica did.
fn note(overwritten: &IntentFile, range: BlockRange) -> dray_image::Result<()> {
    let last = range.end().saturating_sub(1) / REGION_BLOCKS;
    (range.start / REGION_BLOCKS..=last).try_for_each(|region| overwritten.open_region(region))
}

/// The run cut where data and zeros meet.
fn parts(header: &FrameHeader) -> impl Iterator<Item = (BlockRange, bool)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= header.range.len {
            return None;
        }
        let zero = mask_bit(&header.zero_mask, at);
        let start = at;
        while at < header.range.len && mask_bit(&header.zero_mask, at) == zero {
            at += 1;
        }
        Some((BlockRange::new(header.range.start + start, at - start), zero))
    })
}

fn bytes(place: &Place, range: BlockRange, data: &[u8], owner: bool) -> dray_image::Result<()> {
    if owner {
        return place.disk.fill(range, Fill::Data(data)).map(drop);
    }
    let len = range.byte_len().min(place.len - range.byte_offset());
    // Two versions of a block are never in flight at once, and no guest runs here yet. What the
    // sync at handover finds left to do is downtime, so little stays in the page cache.
    place.file.write_bulk(&data[..len as usize], range.byte_offset())
}

fn zeros(place: &Place, range: BlockRange, owner: bool) -> dray_image::Result<()> {
    if owner {
        return place.disk.fill(range, Fill::Zero).map(drop);
    }
    let len = (range.len * BLOCK_SIZE).min(place.len - range.byte_offset());
    place.file.zero(range.byte_offset(), len, ZeroMode::MayUnmap, false)
}

/// What the data streams of one session deliver to.
pub struct SessionSink {
    sink: Arc<Sink>,
    number: u64,
}

impl RunSink for SessionSink {
    fn run(&self, header: &FrameHeader, payload: &[u8]) {
        self.sink.deliver(self.number, header, Some(payload));
    }

    fn zero(&self, header: &FrameHeader) {
        self.sink.deliver(self.number, header, None);
    }

    fn mismatch(&self, header: &FrameHeader) {
        let session = self.sink.session.read().unwrap_or_else(PoisonError::into_inner);
        if *session == self.number {
            self.sink.report(header, Arrival::Damaged);
        }
    }

    fn ended(&self, why: Option<NetError>) {
        // The control stream of the same session says that the link is down.
        if let Some(why) = why {
            tracing::debug!(%why, "a data stream ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::ImageIndex;
    use dray_wire::{Encoding, FrameKind};

    #[test]
    fn a_run_is_cut_where_data_and_zeros_meet() {
        let header = FrameHeader {
            kind: FrameKind::Run,
            encoding: Encoding::Raw,
            image: ImageIndex(0),
            epoch: Epoch(1),
            tag: 1,
            range: BlockRange::new(10, 6),
            zero_mask: [0b011001, 0, 0, 0],
            payload_len: 3 * 4096,
            hash: 0,
        };
        let cut: Vec<_> = parts(&header).map(|(run, zero)| (run.start, run.len, zero)).collect();
        assert_eq!(cut, [(10, 1, true), (11, 2, false), (13, 2, true), (15, 1, false)]);
    }
}
