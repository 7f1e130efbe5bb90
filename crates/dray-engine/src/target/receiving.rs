//! Receiving, and the promise: what arrived, what of it is durable, and `Prepared`.

use super::{Arrival, Stage, Target, TargetEffect, TargetNotice};
use crate::SECOND;
use crate::record::TargetRecord;
use dray_types::{Attempt, BlockRange, BlockSet, ImageIndex};
use dray_wire::control::MAX_TAGS;
use dray_wire::{ImageHandover, MapHash, TargetImage, ToSource};

/// Progress is made durable this often, in nanoseconds: what a crash of the target costs at most.
pub(super) const SAVE_INTERVAL: u64 = 2 * SECOND;
/// Acknowledgements held together at most.
const ACK_BATCH: usize = 64;
const _: () = assert!(ACK_BATCH <= MAX_TAGS);

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
            Stage::Receiving => self.received(tag, image, range, arrival, out),
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
            Arrival::Damaged => self.send(ToSource::Mismatch { tag }, out),
            Arrival::Failed(why) => self.fail(why, out),
        }
    }

    pub(super) fn acknowledge(&mut self, out: &mut Vec<TargetEffect>) {
        if !self.acknowledged.is_empty() {
            let tags = std::mem::take(&mut self.acknowledged);
            self.send(ToSource::Received { tags }, out);
        }
    }

    fn fail(&mut self, why: String, out: &mut Vec<TargetEffect>) {
        let why = format!("writing at the target failed: {why}; check the target's pool");
        self.send(ToSource::Failed { why: why.clone() }, out);
        out.push(TargetEffect::Notice(TargetNotice::Failed { why }));
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
        let due = self.now.since(self.saved_at) >= SAVE_INTERVAL;
        if !due || self.saving.is_some() || self.unsaved.iter().all(BlockSet::is_empty) {
            return;
        }
        self.saved_at = self.now;
        let id = self.start_sync(out);
        let none = vec![BlockSet::new(); self.unsaved.len()];
        self.saving = Some((id, std::mem::replace(&mut self.unsaved, none)));
    }

    fn start_sync(&mut self, out: &mut Vec<TargetEffect>) -> u64 {
        let id = self.next_sync;
        self.next_sync += 1;
        out.push(TargetEffect::SyncImages { id });
        id
    }

    pub(super) fn images_synced(
        &mut self,
        id: u64,
        result: Result<(), String>,
        out: &mut Vec<TargetEffect>,
    ) {
        if let Err(why) = result {
            if !self.owns() {
                self.forget_unsaved();
                self.fail(why, out);
            }
            return;
        }
        if self.saving.as_ref().is_some_and(|(saving, _)| *saving == id)
            && let Some((_, blocks)) = self.saving.take()
        {
            // Written after the sync that covers it: a record is never durable before its data.
            out.push(TargetEffect::Journal(received_records(blocks)));
        }
        if let Stage::Preparing { sync, .. } = &self.stage
            && *sync == id
        {
            self.promise(out);
        }
    }

    /// After a failed sync nothing that was not recorded can be trusted to be on the disk.
    fn forget_unsaved(&mut self) {
        let saving = self.saving.take().map(|(_, blocks)| blocks).unwrap_or_default();
        let unsaved = self.unsaved.iter_mut().map(std::mem::take).collect::<Vec<_>>();
        for lost in [saving, unsaved] {
            for (have, lost) in self.have.iter_mut().zip(&lost) {
                have.subtract(lost);
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
        self.attempt = attempt;
        let sync = self.start_sync(out);
        self.stage = Stage::Preparing { sync, attempt, map_hash, images };
    }

    /// Data is durable: write the promise, then say it.
    fn promise(&mut self, out: &mut Vec<TargetEffect>) {
        let stage = std::mem::replace(&mut self.stage, Stage::Receiving);
        let Stage::Preparing { attempt, map_hash, images, .. } = stage else { return };
        let unsaved = self.unsaved.iter_mut().map(std::mem::take).collect();
        let mut records = received_records(unsaved);
        records.push(TargetRecord::Prepared { attempt, map_hash, images: images.clone() });
        out.push(TargetEffect::Journal(records));
        self.stage = Stage::Prepared { attempt, map_hash, images };
        self.send(ToSource::Prepared { map_hash }, out);
    }

    /// The attempt came to nothing; receiving goes on.
    pub(super) fn void(&mut self, out: &mut Vec<TargetEffect>) {
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

fn received_records(blocks: Vec<BlockSet>) -> Vec<TargetRecord> {
    let name = |(ix, blocks)| TargetRecord::Received { image: ImageIndex(ix as u16), blocks };
    let some = blocks.into_iter().enumerate().filter(|(_, blocks)| !blocks.is_empty());
    some.map(name).collect()
}
