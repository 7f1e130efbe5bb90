//! Receiving, and the promise: what arrived, what of it is durable, and `Prepared`.

use super::{Arrival, DiskFault, Stage, Target, TargetEffect, TargetNotice};
use crate::SECOND;
use crate::record::TargetRecord;
use dray_types::{Attempt, BlockRange, BlockSet, ErrorKind, ImageIndex, Refusal};
use dray_wire::control::MAX_TAGS;
use dray_wire::frame::{PIECE_BLOCKS, mask_bit};
use dray_wire::{ImageHandover, ImageOffer, MapHash, TargetImage, ToSource};

/// Progress is made durable this often, in nanoseconds: what a crash of the target costs at most.
pub(super) const SAVE_INTERVAL: u64 = 2 * SECOND;
/// Acknowledgements held together at most.
const ACK_BATCH: usize = 64;
const _: () = assert!(ACK_BATCH <= MAX_TAGS);

/// Most parts of all maps that one migration is promised for, beyond its first attempt: 256 MiB in the journal.
const MAX_PROMISED_PARTS: u64 = 1 << 16;

impl Target {
    pub(super) fn run_arrived(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        arrival: Arrival,
        out: &mut Vec<TargetEffect>,
    ) {
        match self.stage {
            // A frame may overtake the message that voids the attempt; nothing else comes then.
            Stage::Receiving | Stage::Preparing { .. } | Stage::Prepared { .. } => {
                self.received(tag, image, range, arrival, out);
            }
            Stage::Owner(_) => self.filled(tag, arrival, out),
            _ => {}
        }
    }

    fn received(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        arrival: Arrival,
        out: &mut Vec<TargetEffect>,
    ) {
        match arrival {
            Arrival::Written => {
                let Some(have) = self.have.get_mut(image.ix()) else { return };
                have.insert(range);
                self.unsaved[image.ix()].insert(range);
                self.acknowledged.push(tag);
                if self.acknowledged.len() >= ACK_BATCH {
                    self.acknowledge(out);
                }
            }
            Arrival::Partly { lacking, near } => {
                self.found(image, &pieces(range, !lacking));
                let answer = match near {
                    0 => ToSource::Lack { tag, pieces: lacking },
                    near => ToSource::Near { tag, pieces: lacking, near },
                };
                self.send(answer, out);
            }
            Arrival::SomeBlocks { lacking } => {
                self.found(image, &found_blocks(range, &lacking));
                self.send(ToSource::LackBlocks { tag, blocks: lacking }, out);
            }
            Arrival::Damaged => self.send(ToSource::Mismatch { tag }, out),
            Arrival::Failed(fault) => {
                // Part of it may have been written.
                if let Some(zeroed) = self.plan.zeroed.get_mut(image.ix()) {
                    *zeroed = false;
                }
                self.fail(fault, out);
            }
        }
    }

    /// These blocks of a described run are here.
    fn found(&mut self, image: ImageIndex, blocks: &BlockSet) {
        if let Some(have) = self.have.get_mut(image.ix()) {
            have.union_with(blocks);
            self.unsaved[image.ix()].union_with(blocks);
        }
    }

    pub(super) fn acknowledge(&mut self, out: &mut Vec<TargetEffect>) {
        if !self.acknowledged.is_empty() {
            let tags = std::mem::take(&mut self.acknowledged);
            self.send(ToSource::Received { tags }, out);
        }
    }

    fn fail(&mut self, fault: DiskFault, out: &mut Vec<TargetEffect>) {
        let why = Refusal::new(fault.kind, "writing at the target failed", fault.why)
            .hint("check the target's pool");
        out.push(TargetEffect::Notice(TargetNotice::Failed { why: why.in_words() }));
        self.send(ToSource::Failed(why), out);
    }

    pub(super) fn offer(&self) -> Vec<TargetImage> {
        self.have
            .iter()
            .zip(&self.plan.zeroed)
            .map(|(have, &zeroed)| TargetImage { have: have.clone(), zeroed })
            .collect()
    }

    /// Starts a checkpoint of what was received, now and then.
    pub(super) fn save_progress(&mut self, out: &mut Vec<TargetEffect>) {
        let due = self.now.since(self.saved_at) >= SAVE_INTERVAL && !self.is_lossy();
        if !due || self.saving.is_some() || self.unsaved.iter().all(BlockSet::is_empty) {
            return;
        }
        self.start_sync(out);
    }

    /// A sync covers what was received before it and nothing that comes while it runs.
    fn start_sync(&mut self, out: &mut Vec<TargetEffect>) -> u64 {
        let id = self.next_sync;
        self.next_sync += 1;
        self.saved_at = self.now;
        let none = vec![BlockSet::new(); self.unsaved.len()];
        self.saving = Some((id, std::mem::replace(&mut self.unsaved, none)));
        out.push(TargetEffect::SyncImages { id });
        id
    }

    pub(super) fn images_synced(
        &mut self,
        id: u64,
        result: Result<(), DiskFault>,
        out: &mut Vec<TargetEffect>,
    ) {
        if let Err(fault) = result {
            if !self.owns() {
                self.forget_unsaved(out);
                if matches!(self.stage, Stage::Preparing { .. }) {
                    self.stage = Stage::Receiving;
                }
                self.fail(fault, out);
            }
            return;
        }
        let Some((_, blocks)) = self.saving.take_if(|(saving, _)| *saving == id) else { return };
        // Written after the sync that covers it: a record is never durable before its data.
        let records = received_records(blocks);
        match self.stage {
            Stage::Preparing { sync, .. } if sync == Some(id) => self.promise(records, out),
            Stage::Preparing { .. } => {
                out.push(TargetEffect::Journal(records));
                let next = self.start_sync(out);
                if let Stage::Preparing { sync, .. } = &mut self.stage {
                    *sync = Some(next);
                }
            }
            _ => out.push(TargetEffect::Journal(records)),
        }
    }

    /// After a failed sync nothing that was not recorded can be trusted to be on the disk.
    fn forget_unsaved(&mut self, out: &mut Vec<TargetEffect>) {
        let saving = self.saving.take().map(|(_, blocks)| blocks).unwrap_or_default();
        let unsaved = self.unsaved.iter_mut().map(std::mem::take).collect::<Vec<_>>();
        let mut records = Vec::new();
        for lost in [saving, unsaved] {
            for (ix, blocks) in lost.into_iter().enumerate() {
                self.have[ix].subtract(&blocks);
                self.plan.zeroed[ix] &= blocks.is_empty();
                if !blocks.is_empty() {
                    self.lossy[ix] = true;
                    records.push(TargetRecord::Lost { image: ImageIndex(ix as u16), blocks });
                }
            }
        }
        if !records.is_empty() {
            out.push(TargetEffect::Journal(records));
        }
    }

    /// Writes to the image's file were lost: the system shows them still, takes them for written down, and never
    /// writes them down. Before anything else is received into it the file is begun anew.
    pub fn doubt(&mut self, image: ImageIndex) {
        if let Some(lossy) = self.lossy.get_mut(image.ix()) {
            *lossy = true;
        }
    }

    fn is_lossy(&self) -> bool {
        self.lossy.contains(&true)
    }

    /// Whether writes to a copy were lost that an image began with: the source does not send what was in it.
    pub(super) fn has_lost_what_it_began_with(&self) -> bool {
        let based = |(ix, _): (usize, &bool)| self.plan.based.get(ix) == Some(&true);
        self.stage == Stage::Receiving
            && self.lossy.iter().enumerate().filter(|(_, lossy)| **lossy).any(based)
    }

    /// A session begins: files that have lost writes become empty ones before the source hears what is here.
    pub(super) fn begin_anew(&mut self, out: &mut Vec<TargetEffect>) {
        if self.stage != Stage::Receiving || !self.is_lossy() {
            return;
        }
        // What is being synced is of the file as it was.
        self.saving = None;
        for ix in 0..self.lossy.len() {
            if std::mem::take(&mut self.lossy[ix]) {
                let image = ImageIndex(ix as u16);
                self.distrust(image);
                self.unsaved[ix] = BlockSet::new();
                out.push(TargetEffect::Journal(vec![TargetRecord::Distrusted { image }]));
                out.push(TargetEffect::BeginAnew { image });
            }
        }
    }

    pub(super) fn prepare(
        &mut self,
        attempt: Attempt,
        images: Vec<ImageHandover>,
        map_hash: MapHash,
        out: &mut Vec<TargetEffect>,
    ) {
        if !matches!(self.stage, Stage::Receiving) || images.len() != self.plan.images.len() {
            return;
        }
        let lossy = || self.is_lossy().then(|| "writes of what was received were lost".to_owned());
        let fits = self.too_long(&images).or_else(|| self.outside(&images)).or_else(lossy);
        if let Some(why) = fits.or_else(|| self.too_often(&images)) {
            return self.send(ToSource::Failed(not_promised(why)), out);
        }
        self.attempt = attempt;
        // One sync at a time, so that a failed one can never hide behind a later success.
        let sync = if self.saving.is_none() { Some(self.start_sync(out)) } else { None };
        self.stage = Stage::Preparing { sync, attempt, map_hash, images };
    }

    /// An image cannot be longer than there is room for: once it was handed over, nobody could ever serve
    /// it (I7).
    fn too_long(&self, images: &[ImageHandover]) -> Option<String> {
        let mut all = self.plan.images.iter().zip(images);
        let (offer, image) = all.find(|(offer, image)| image.len > offer.len)?;
        Some(format!(
            "the source's image '{}' has {} bytes, and was prepared with {}; prepare again",
            offer.name, image.len, offer.len
        ))
    }

    /// Each attempt is noted with its map for as long as the migration lasts, and read when the agent starts.
    fn too_often(&self, images: &[ImageHandover]) -> Option<String> {
        let before = self.promised_parts;
        (before > 0 && before + parts(images) > MAX_PROMISED_PARTS).then(|| {
            format!(
                "attempt {} and those before it have maps of missing blocks with {before} parts, and all may have \
                 {MAX_PROMISED_PARTS}; prepare again",
                self.attempt.0
            )
        })
    }

    /// A map that names blocks past an image's end is no map of it: whoever followed it would ask
    /// for them for ever (I7).
    fn outside(&self, images: &[ImageHandover]) -> Option<String> {
        let past = |(offer, image): (&ImageOffer, &ImageHandover)| {
            let whole = BlockRange::whole(offer.len);
            let behind = BlockRange::new(whole.len, u64::MAX - whole.len);
            image.missing.intersects(behind).then(|| offer.name.clone())
        };
        let name = self.plan.images.iter().zip(images).find_map(past)?;
        Some(format!("the source's map of missing blocks goes past the end of image '{name}'"))
    }

    /// Data is durable: write the promise, then say it.
    fn promise(&mut self, mut records: Vec<TargetRecord>, out: &mut Vec<TargetEffect>) {
        let stage = std::mem::replace(&mut self.stage, Stage::Receiving);
        let Stage::Preparing { attempt, map_hash, images, .. } = stage else { return };
        if self.deferred {
            // Part of the promise: no restart may begin a Backfill that nobody has asked for.
            self.backfill.paused = true;
            records.push(TargetRecord::BackfillPaused { paused: true });
        }
        let promised = images.clone();
        self.promised_parts += parts(&promised);
        let epoch = self.epoch;
        records.push(TargetRecord::Prepared { attempt, map_hash, images: promised, epoch });
        out.push(TargetEffect::Journal(records));
        self.stage = Stage::Prepared { attempt, map_hash, images };
        self.send(ToSource::Prepared { map_hash }, out);
    }

    /// One attempt came to nothing; if another one is being prepared, it is not meant.
    pub(super) fn void_attempt(&mut self, void: Attempt, out: &mut Vec<TargetEffect>) {
        match self.stage {
            Stage::Preparing { attempt, .. } | Stage::Prepared { attempt, .. }
                if attempt == void =>
            {
                self.void(out);
            }
            _ => {}
        }
    }

    /// Whatever was promised came to nothing; receiving goes on.
    pub(super) fn void(&mut self, out: &mut Vec<TargetEffect>) {
        self.deferred = false;
        self.backfill.paused = false;
        match self.stage {
            Stage::Prepared { attempt, .. } => {
                out.push(TargetEffect::Journal(vec![TargetRecord::Void { attempt }]));
                self.stage = Stage::Receiving;
            }
            Stage::Preparing { .. } => self.stage = Stage::Receiving,
            _ => {}
        }
    }
}

/// What maps of missing blocks cost: up to 4 KiB for each of these.
pub(super) fn parts(images: &[ImageHandover]) -> u64 {
    images.iter().map(|image| image.missing.parts()).sum()
}

/// The pieces of a described run whose bits are set.
pub(super) fn pieces(range: BlockRange, bits: u16) -> BlockSet {
    let piece = |nth| BlockRange::new(range.start + nth * PIECE_BLOCKS, PIECE_BLOCKS);
    let nths = 0..range.len / PIECE_BLOCKS;
    nths.filter(|nth| bits >> nth & 1 == 1).map(piece).collect()
}

/// The blocks of a described run that do not lack.
pub(super) fn found_blocks(range: BlockRange, lacking: &[u64; 4]) -> BlockSet {
    let nths = (0..range.len).filter(|&nth| !mask_bit(lacking, nth));
    nths.map(|nth| BlockRange::new(range.start + nth, 1)).collect()
}

fn received_records(blocks: Vec<BlockSet>) -> Vec<TargetRecord> {
    let name = |(ix, blocks)| TargetRecord::Received { image: ImageIndex(ix as u16), blocks };
    let some = blocks.into_iter().enumerate().filter(|(_, blocks)| !blocks.is_empty());
    some.map(name).collect()
}

fn not_promised(why: impl std::fmt::Display) -> Refusal {
    Refusal::new(ErrorKind::Conflict, "the target cannot promise to serve the images", why)
}
