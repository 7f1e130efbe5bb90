//! Takes the frames of the data streams: writes them into partial images before the handover, and
//! into missing blocks after it. It runs on the streams' threads; the loop only gets the result for
//! each frame.

use super::Input;
use super::basis::BlockJob;
use super::finder::{Finder, Job};
use super::images::fault;
use dray_engine::TargetEvent;
use dray_engine::receiver::Arrival;
use dray_host::folder::intents::IntentFile;
use dray_host::lineage::REGION_BLOCKS;
use dray_image::{Disk, Fill, ImageFile, ZeroMode};
use dray_net::{NetError, RunSink};
use dray_provider::reuse::{Asker, FileRef, Reuse, Spot, Wanted};
use dray_types::{BLOCK_SIZE, BlockRange, Epoch, ImageIndex};
use dray_wire::frame::{PIECE_BLOCKS, PieceHash, mask_bit};
use dray_wire::{FrameHeader, FrameKind};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

/// Described pieces that are remembered until they come: 4 GiB of images. What lacks of an honest
/// source's windows is far less; what is not remembered is only not offered to other images (I7).
const DESCRIBED: usize = 65_536;

/// Where an image's blocks go.
pub struct Destination {
    /// The disk, for missing blocks.
    pub disk: Arc<Disk>,
    /// The partial file.
    pub file: Arc<dyn ImageFile>,
    /// Exported length in bytes.
    pub len: u64,
    /// What content that arrives is known by.
    pub image: FileRef,
    /// It shows which of its blocks were never written.
    pub sparse: bool,
    /// Where a file that was a replica is written into: noted before it is.
    pub overwritten: Option<IntentFile>,
}

/// The sink of a migration. Frames of a session that is no longer the current one are dropped, and
/// a new session waits until none of them is being written: else an old frame could land on a newer
/// one.
pub struct Sink {
    session: RwLock<u64>,
    places: RwLock<Vec<Destination>>,
    inputs: Sender<Input>,
    /// Zero while receiving; else the epoch in which this host owns the images.
    owner_epoch: AtomicU64,
    finder: Finder,
    reuse: Arc<Reuse>,
    /// For which image content is looked for.
    askers: Vec<Asker>,
    /// Pieces that lacked when they were described, by where they will be: what arrives there has
    /// this hash unless it was written since.
    described: Mutex<HashMap<(ImageIndex, Spot), PieceHash>>,
    /// How many there are.
    lacking: AtomicUsize,
}

impl Sink {
    /// Delivers to `places` what comes from `peer`; what it describes is looked for in `reuse`.
    pub fn new(
        places: Vec<Destination>,
        inputs: Sender<Input>,
        reuse: Arc<Reuse>,
        peer: &str,
    ) -> Arc<Self> {
        let askers = places.iter().map(|place| reuse.asker(peer, &place.image)).collect();
        Arc::new(Self {
            session: RwLock::new(0),
            places: RwLock::new(places),
            inputs,
            owner_epoch: AtomicU64::new(0),
            finder: Finder::default(),
            reuse,
            askers,
            described: Mutex::default(),
            lacking: AtomicUsize::new(0),
        })
    }

    /// Nothing is delivered any more, and nobody's files are kept open for it.
    pub fn let_go(&self) {
        self.close();
        self.finder.end();
        self.places.write().clear();
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
        self.forget_described();
        *self.session.write() = number;
    }

    /// The sink of one session's data streams.
    pub fn of_session(self: &Arc<Self>, number: u64) -> Arc<SessionSink> {
        Arc::new(SessionSink { sink: Arc::clone(self), number })
    }

    fn deliver(&self, number: u64, header: &FrameHeader, payload: Option<&[u8]>) {
        let session = self.session.read();
        if *session != number {
            return;
        }
        let owner = self.owner_epoch.load(Ordering::SeqCst);
        if owner > 0 && header.epoch < Epoch(owner) {
            return;
        }
        let places = self.places.read();
        let arrival = match place(&places, header) {
            Err(why) => failed(&why),
            Ok(place) => match deliver(place, header, payload, owner > 0) {
                Ok(()) => {
                    self.remember(place, header);
                    Arrival::Written
                }
                Err(why) => failed(&why),
            },
        };
        self.report(header, arrival);
    }

    /// Where described content of an image is looked for, and for whom; none outside the images.
    pub(super) fn reuse(&self, image: ImageIndex) -> Option<(&Reuse, &Asker)> {
        Some((&self.reuse, self.askers.get(image.ix())?))
    }

    /// What is on its way to here.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.reuse.wanted
    }

    /// Whether descriptions are understood here.
    pub fn finds(&self) -> bool {
        self.reuse.is_on()
    }

    /// Whether frames of session `number` are still taken.
    pub(super) fn is_current(&self, number: u64) -> bool {
        *self.session.read() == number
    }

    /// A description was looked up: what was found is written, and the rest asked for.
    pub(super) fn found(&self, job: &Job) {
        let session = self.session.read();
        let owner = self.owner_epoch.load(Ordering::SeqCst);
        // What was described before the handover may have been written since.
        if *session != job.session || owner > 0 && job.header.epoch < Epoch(owner) {
            return job.lacks().for_each(|lacks| self.reuse.wanted.settle_lacking(lacks));
        }
        let places = self.places.read();
        let written = place(&places, &job.header).and_then(|place| {
            let parts = job.parts();
            let mut each = parts.iter();
            each.try_for_each(|(range, data)| write_found(place, *range, *data, owner > 0))
        });
        let arrival = match (written, job.lacking()) {
            (Err(why), _) => failed(&why),
            (Ok(()), 0) => Arrival::Written,
            (Ok(()), lacking) => {
                let mut described = self.described.lock();
                let image = job.header.image;
                for lacks in job.lacks() {
                    let place = (image, lacks.place);
                    if described.len() < DESCRIBED || described.contains_key(&place) {
                        described.insert(place, lacks.hash);
                    }
                }
                self.lacking.store(described.len(), Ordering::Release);
                Arrival::Partly { lacking, near: job.near }
            }
        };
        self.report(&job.header, arrival);
    }

    /// Described blocks were looked up: what was found is written unless it is in its place already,
    /// and the rest asked for.
    pub(super) fn blocks_found(&self, job: &BlockJob) {
        let session = self.session.read();
        let owner = self.owner_epoch.load(Ordering::SeqCst);
        if *session != job.session || owner > 0 && job.header.epoch < Epoch(owner) {
            return;
        }
        let places = self.places.read();
        let written = place(&places, &job.header).and_then(|place| {
            let parts = job.parts();
            let mut each = parts.iter();
            each.try_for_each(|(range, data)| write_found(place, *range, *data, owner > 0))
                .map(|()| place)
        });
        let arrival = match (written, job.lacking) {
            (Err(why), _) => failed(&why),
            (Ok(place), [0, 0, 0, 0]) => {
                self.remember(place, &job.header);
                Arrival::Written
            }
            (Ok(place), lacking) => {
                if owner > 0 {
                    self.give_up(place, &job.header);
                }
                Arrival::SomeBlocks { lacking }
            }
        };
        self.report(&job.header, arrival);
    }

    /// Where the image's piece `piece` will be; none outside the images.
    pub(super) fn spot(&self, image: ImageIndex, piece: u64) -> Option<Spot> {
        let places = self.places.read();
        self.reuse.spot(&places.get(image.ix())?.image, piece)
    }

    /// The same if something is there that the image's content may be compared with: what an old
    /// block device holds is no version of it.
    pub(super) fn own_place(&self, image: ImageIndex, piece: u64) -> Option<Spot> {
        let places = self.places.read();
        let place = places.get(image.ix()).filter(|p| p.sparse || p.overwritten.is_some())?;
        let spot = self.reuse.spot(&place.image, piece)?;
        self.reuse.has_data(self.askers.get(image.ix())?, spot).then_some(spot)
    }

    /// What had been described has arrived as data: content that others may have as well.
    fn remember(&self, place: &Destination, header: &FrameHeader) {
        let Some(asker) = self.askers.get(header.image.ix()) else { return };
        self.settle(place, header, |hash, spot| self.reuse.remember(asker, hash, spot));
    }

    /// What had been described comes block by block: nobody shall wait until it is whole.
    fn give_up(&self, place: &Destination, header: &FrameHeader) {
        self.settle(place, header, |_, _| ());
    }

    /// The described pieces in this range are over; what they are was told to `each`.
    fn settle(&self, place: &Destination, header: &FrameHeader, each: impl Fn(&PieceHash, Spot)) {
        if self.lacking.load(Ordering::Acquire) == 0 {
            return;
        }
        let range = header.range;
        let first = range.start.next_multiple_of(PIECE_BLOCKS);
        let mut described = self.described.lock();
        for start in (first..range.end()).step_by(PIECE_BLOCKS as usize) {
            if start + PIECE_BLOCKS > range.end() {
                break;
            }
            let Some(spot) = self.reuse.spot(&place.image, start / PIECE_BLOCKS) else { break };
            if let Some(hash) = described.remove(&(header.image, spot)) {
                each(&hash, spot);
                self.settle_one(header.image, &hash, spot);
            }
        }
        self.lacking.store(described.len(), Ordering::Release);
    }

    /// What was described in an older session is described again, or sent.
    fn forget_described(&self) {
        let mut described = self.described.lock();
        described.drain().for_each(|((image, place), hash)| self.settle_one(image, &hash, place));
        self.lacking.store(0, Ordering::Release);
    }

    fn settle_one(&self, image: ImageIndex, hash: &PieceHash, place: Spot) {
        if let Some(asker) = self.askers.get(image.ix()) {
            self.reuse.wanted.settle(asker, hash, place);
        }
    }

    fn report(&self, header: &FrameHeader, arrival: Arrival) {
        let FrameHeader { tag, image, range, .. } = *header;
        let event = TargetEvent::RunArrived { tag, image, range, arrival };
        // A loop that has ended needs no more blocks.
        let _ = self.inputs.send(Input::Engine(event));
    }
}

fn place<'a>(
    places: &'a [Destination],
    header: &FrameHeader,
) -> dray_image::Result<&'a Destination> {
    let place = places.get(usize::from(header.image.0));
    place.filter(|place| BlockRange::whole(place.len).contains(header.range)).ok_or_else(|| {
        let why = "a frame is outside the image";
        dray_image::Error::new(dray_image::ErrorKind::OutOfRange, "finding its image", why)
    })
}

/// What becomes of a run that is not written.
fn failed(why: &dray_image::Error) -> Arrival {
    Arrival::Failed(fault(why))
}

/// Writes the data and zero parts of a run one after the other.
fn deliver(
    place: &Destination,
    header: &FrameHeader,
    payload: Option<&[u8]>,
    owner: bool,
) -> dray_image::Result<()> {
    if let Some(overwritten) = place.overwritten.as_ref().filter(|_| !owner) {
        note(overwritten, header.range)?;
    }
    let Some(payload) = payload else { return zeros(place, header.range, owner) };
    let mut rest = payload;
    for (range, masked) in parts(header) {
        if masked && header.kind == FrameKind::Part {
            // In its place already.
        } else if masked {
            zeros(place, range, owner)?;
        } else {
            let (data, tail) = rest.split_at(range.byte_len() as usize);
            rest = tail;
            bytes(place, range, data, owner)?;
        }
    }
    Ok(())
}

/// Writes a part of a described run that was found, for an owner where it is missing; no data: zeros.
fn write_found(
    place: &Destination,
    range: BlockRange,
    data: Option<&[u8]>,
    owner: bool,
) -> dray_image::Result<()> {
    if let Some(overwritten) = place.overwritten.as_ref().filter(|_| !owner) {
        note(overwritten, range)?;
    }
    match data {
        Some(data) => bytes(place, range, data, owner),
        None => zeros(place, range, owner),
    }
}

/// From here on the regions of `range` may hold something else than the replica did. One try: the migration's loop waits
/// for who writes here, and nobody relies on what comes before the handover. What is not noted is not written.
fn note(overwritten: &IntentFile, range: BlockRange) -> dray_image::Result<()> {
    let last = range.end().saturating_sub(1) / REGION_BLOCKS;
    let noted = |region| overwritten.try_open_region(region);
    (range.start / REGION_BLOCKS..=last)
        .try_for_each(noted)
        .map_err(|why| dray_image::Error::io("noting which regions are written to", why))
}

/// The run cut where data and what the mask names meet.
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

fn bytes(
    place: &Destination,
    range: BlockRange,
    data: &[u8],
    owner: bool,
) -> dray_image::Result<()> {
    if owner {
        return place.disk.fill(range, Fill::Data(data)).map(drop);
    }
    let len = range.byte_len().min(place.len - range.byte_offset());
    // Two versions of a block are never in flight at once, and no guest runs here yet. What the
    // sync at handover finds left to do is downtime, so little stays in the page cache.
    place.file.write_bulk(&data[..len as usize], range.byte_offset())
}

fn zeros(place: &Destination, range: BlockRange, owner: bool) -> dray_image::Result<()> {
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

    fn described(&self, header: &FrameHeader, hashes: &[u8]) {
        // What is missing has to be filled, even where the file holds it by chance.
        let owner = self.sink.owner_epoch.load(Ordering::SeqCst) > 0;
        let job = || Job::new(self.number, header, hashes, owner);
        let look = || self.sink.finder.look(&self.sink, header.tag, !owner, || job().into());
        if !self.sink.finds() || !look() {
            self.mismatch(header);
        }
    }

    fn described_blocks(&self, header: &FrameHeader, hashes: &[u8]) {
        let owner = self.sink.owner_epoch.load(Ordering::SeqCst) > 0;
        let job = || BlockJob::new(self.number, header, hashes, owner);
        let look = || self.sink.finder.look(&self.sink, header.tag, !owner, || job().into());
        if !self.sink.finds() || !look() {
            self.mismatch(header);
        }
    }

    fn part(&self, header: &FrameHeader, payload: &[u8]) {
        // What lacks of described blocks is fetched as runs after the handover.
        if self.sink.owner_epoch.load(Ordering::SeqCst) > 0 {
            return self.mismatch(header);
        }
        self.sink.deliver(self.number, header, Some(payload));
    }

    fn mismatch(&self, header: &FrameHeader) {
        let session = self.sink.session.read();
        if *session == self.number {
            self.sink.report(header, Arrival::Damaged);
        }
    }

    fn ended(&self, why: Option<NetError>) {
        // The sender sees it, whether it has more to send or not, and begins another session.
        if let Some(why) = why {
            tracing::debug!(%why, "a data stream ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_config::Config;
    use dray_files::StatePath;
    use dray_host::folder::intents::Intents;
    use dray_host::registry::Registry;
    use dray_host::store::Store;
    use dray_image::FileImage;
    use dray_image::FileOptions;
    use dray_provider::reuse::PATIENCE;
    use dray_types::ImageIndex;
    use dray_vm::flat::Pools;
    use dray_wire::Encoding;
    use std::time::{Duration, Instant};

    /// A sink for one image of `pieces` pieces in `dir`, and what it tells.
    fn sink(dir: &std::path::Path, pieces: u64) -> (Arc<Sink>, std::sync::mpsc::Receiver<Input>) {
        let text = format!(
            "[agent]\nname = 'b'\nstate_dir = '{0}'\n[tls]\ndir = '{0}'\n[reuse]\nindex = false\n",
            dir.display()
        );
        let config = Arc::new(Config::parse(&text, std::path::Path::new("dray.toml")).unwrap());
        let registry =
            Registry::load(Store::open(dir).unwrap(), Arc::new(Pools(Arc::clone(&config))))
                .unwrap();
        let reuse = Reuse::new(config, registry);
        let (path, len) = (dir.join("image"), pieces * PIECE_BLOCKS * BLOCK_SIZE);
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        let options = FileOptions { write: true, ..FileOptions::default() };
        let file = Arc::new(FileImage::open(&path, options).unwrap());
        let place = Destination {
            disk: Disk::new(Arc::clone(&file) as _),
            file,
            len,
            image: FileRef::Plain { path },
            sparse: false,
            overwritten: None,
        };
        let (inputs, told) = std::sync::mpsc::channel();
        (Sink::new(vec![place], inputs, reuse, "hosta"), told)
    }

    #[test]
    fn a_source_that_describes_without_end_fills_no_memory() {
        const RUNS: u64 = 6000;
        let dir = tempfile::tempdir().unwrap();
        let (sink, told) = sink(dir.path(), RUNS);
        sink.admit(1);
        let session = sink.of_session(1);
        let began = Instant::now();
        // The same everywhere, and it never comes: each waits for the first.
        for tag in 0..RUNS {
            let header = FrameHeader {
                kind: FrameKind::Described,
                encoding: Encoding::Raw,
                image: ImageIndex(0),
                epoch: Epoch(1),
                tag,
                range: BlockRange::new(tag * PIECE_BLOCKS, PIECE_BLOCKS),
                zero_mask: [0; 4],
                payload_len: 32,
                hash: 0,
            };
            session.described(&header, &[7; 32]);
        }
        // All but what two threads may keep: that is given up later.
        let patience = PATIENCE.saturating_sub(began.elapsed() + Duration::from_millis(500));
        let lacks = |input: &Input| {
            let Input::Engine(TargetEvent::RunArrived { arrival, .. }) = input else {
                return false;
            };
            matches!(arrival, Arrival::Partly { lacking: 1, .. })
        };
        let deadline = Instant::now() + patience;
        let next = || told.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
        let answered = std::iter::from_fn(next).filter(lacks).take(RUNS as usize / 3).count();
        assert_eq!(answered, RUNS as usize / 3, "after {:?}", began.elapsed());
        sink.let_go();
    }

    /// A block of data for the image's first piece.
    fn first_block(tag: u64) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Run,
            encoding: Encoding::Raw,
            image: ImageIndex(0),
            epoch: Epoch(1),
            tag,
            range: BlockRange::new(0, 1),
            zero_mask: [0; 4],
            payload_len: 4096,
            hash: 0,
        }
    }

    /// The list of written regions can be neither written nor removed: what comes is refused, nothing of it is
    /// written, and the loop, which closes the sink, does not wait for that.
    #[test]
    fn what_cannot_be_noted_is_not_written_and_keeps_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let (sink, told) = sink(dir.path(), 1);
        let path = StatePath::real(dir.path().join("written"));
        std::fs::create_dir_all(dir.path().join("written/in-the-way")).unwrap();
        let list = Intents::open(&path, &[PIECE_BLOCKS * BLOCK_SIZE], true);
        sink.places.write()[0].overwritten = Some(IntentFile::new(list, 0));
        sink.admit(1);
        let session = sink.of_session(1);
        let writes = std::thread::spawn(move || session.run(&first_block(1), &[7; 4096]));
        let heard = told.recv_timeout(Duration::from_secs(5)).expect("the frame is answered");
        let Input::Engine(TargetEvent::RunArrived { arrival: Arrival::Failed(fault), .. }) = heard
        else {
            panic!("it was not refused");
        };
        assert!(fault.why.contains("noting which regions"), "{fault:?}");
        writes.join().unwrap();
        sink.close();
        let image = std::fs::read(dir.path().join("image")).unwrap();
        assert!(image.iter().all(|&byte| byte == 0));
    }

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
