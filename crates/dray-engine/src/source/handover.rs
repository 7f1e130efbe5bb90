//! Handover: how ownership passes, step by step (I1).
//!
//! | step | waits for | then |
//! |---|---|---|
//! | `Quiescing` | no guest write in flight | the attempt's number is already durable |
//! | `Collecting` | all dirty blocks, images durable | missing map, or the last runs of pre-copy |
//! | `Asking` | the target's durable promise | **the handed-over record: point of no return** |
//!
//! Whatever goes wrong before that record makes the attempt void and lets the guest go on here.

use super::{Source, SourceEffect, SourceNotice, Stage};
use crate::record::SourceRecord;
use crate::{Phase, Time};
use dray_types::{Attempt, ErrorKind, Refusal, Why};
use dray_wire::{HandedOver, ImageHandover, MapHash, ToTarget};

/// How far a handover is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Quiescing { began: Time },
    Collecting { began: Time, lens: Vec<u64>, synced: bool, collected: bool, drained: bool },
    Asking { began: Time, map_hash: MapHash },
}

impl Step {
    pub(super) fn began(&self) -> Time {
        match self {
            Self::Quiescing { began }
            | Self::Collecting { began, .. }
            | Self::Asking { began, .. } => *began,
        }
    }
}

impl Source {
    pub(super) fn begin_handover(&mut self, out: &mut Vec<SourceEffect>) {
        if !self.is_ready() {
            return self.refuse("the images are not ready for handover", out);
        }
        if self.link != super::Link::Up {
            let why = "there is no link to the target".to_owned();
            return out.push(SourceEffect::Notice(SourceNotice::HandoverFailed { why }));
        }
        self.attempt = self.attempt.next();
        self.stage = Stage::Handover(Step::Quiescing { began: self.now });
        out.push(SourceEffect::Notice(SourceNotice::Phase(Phase::Handover)));
        out.push(SourceEffect::Journal(SourceRecord::Attempt { attempt: self.attempt }));
        self.awaiting_quiet += 1;
        out.push(SourceEffect::Quiesce);
    }

    /// The guest's writes did not drain. If this answers an older try, voiding the current one too
    /// is safe, and going on would not be.
    pub(super) fn quiesce_failed(&mut self, why: String, out: &mut Vec<SourceEffect>) {
        self.awaiting_quiet = self.awaiting_quiet.saturating_sub(1);
        if matches!(self.stage, Stage::Handover(Step::Quiescing { .. })) {
            self.void_attempt(why, out);
        }
    }

    pub(super) fn quiesced(&mut self, lens: Vec<u64>, out: &mut Vec<SourceEffect>) {
        self.awaiting_quiet = self.awaiting_quiet.saturating_sub(1);
        if self.awaiting_quiet > 0 {
            // An answer to an attempt that is void; the gate may have been opened since.
            return;
        }
        let Stage::Handover(Step::Quiescing { began }) = self.stage else {
            // The attempt became void while the guest's writes drained.
            return out.push(SourceEffect::Resume);
        };
        self.stage = Stage::Handover(Step::Collecting {
            began,
            lens,
            synced: false,
            collected: false,
            drained: false,
        });
        self.sync_images(out);
        // Dirty blocks asked for before the guest was quiet may be incomplete: ask again, and count
        // the outstanding answers with the new ones.
        self.take_all_dirty(out);
    }

    /// All dirty blocks are in `todo` or `rest`.
    pub(super) fn collected(&mut self, out: &mut Vec<SourceEffect>) {
        if let Stage::Handover(Step::Collecting { collected, .. }) = &mut self.stage {
            *collected = true;
        }
        if self.scheme.equal {
            self.advance(out);
        } else {
            self.drained(out);
        }
    }

    /// Nothing that was sent is unacknowledged; for pre-copy, nothing is left to send.
    pub(super) fn drained(&mut self, out: &mut Vec<SourceEffect>) {
        let quiet = self.in_flight.is_empty();
        if let Stage::Handover(Step::Collecting { drained, collected, .. }) = &mut self.stage {
            *drained = *collected && quiet;
        }
        self.ask(out);
    }

    pub(super) fn sync_images(&mut self, out: &mut Vec<SourceEffect>) {
        self.awaiting_sync += 1;
        out.push(SourceEffect::SyncImages);
    }

    pub(super) fn images_synced(&mut self, result: Result<(), Why>, out: &mut Vec<SourceEffect>) {
        self.awaiting_sync = self.awaiting_sync.saturating_sub(1);
        if let Err(why) = result {
            let why = format!("making the source's images durable failed: {why}");
            return self.void_attempt(why, out);
        }
        if std::mem::take(&mut self.may_settle) && !self.is_over() {
            out.push(SourceEffect::Journal(SourceRecord::Settled));
        }
        if self.awaiting_sync > 0 {
            // It began before the guest was quiet.
            return;
        }
        if let Stage::Handover(Step::Collecting { synced, .. }) = &mut self.stage {
            *synced = true;
        }
        self.ask(out);
    }

    fn ask(&mut self, out: &mut Vec<SourceEffect>) {
        let Stage::Handover(Step::Collecting { began, lens, synced, collected, drained }) =
            &self.stage
        else {
            return;
        };
        if !(*synced && *collected && *drained) {
            return;
        }
        let began = *began;
        let images: Vec<_> = self
            .images
            .iter()
            .zip(lens)
            .map(|(image, &len)| ImageHandover { len, missing: image.blocks.missing() })
            .collect();
        let map_hash = MapHash::of(&images);
        self.stage = Stage::Handover(Step::Asking { began, map_hash });
        if self.plan.strategy.defers {
            self.send(ToTarget::Defer, out);
        }
        self.send(ToTarget::Prepare { images, map_hash }, out);
    }

    pub(super) fn prepared(
        &mut self,
        attempt: Attempt,
        map_hash: MapHash,
        out: &mut Vec<SourceEffect>,
    ) {
        let current = match &self.stage {
            Stage::Handover(Step::Asking { map_hash: asked, .. }) => {
                attempt == self.attempt && map_hash == *asked
            }
            _ => false,
        };
        if !current {
            // A promise for an attempt that is not the current one is void (I1).
            return self.send_about(attempt, ToTarget::Void, out);
        }
        self.owned_in = self.epoch;
        self.epoch = self.epoch.next();
        let handed_over = HandedOver { epoch: self.epoch, attempt, map_hash };
        // The point of no return: once this record is durable only the target may serve.
        out.push(SourceEffect::Journal(SourceRecord::HandedOver(handed_over)));
        self.stage = Stage::HandedOver(handed_over);
        out.push(SourceEffect::Retire);
        self.send_commit(handed_over, out);
        out.push(SourceEffect::Notice(SourceNotice::HandedOver));
    }

    /// The attempt came to nothing: its number is spent, the guest may go on here (I4).
    pub(super) fn void_attempt(&mut self, why: String, out: &mut Vec<SourceEffect>) {
        if !matches!(self.stage, Stage::Handover(_)) {
            return;
        }
        self.voided(why, out);
    }

    fn voided(&mut self, why: String, out: &mut Vec<SourceEffect>) {
        out.push(SourceEffect::Journal(SourceRecord::Void { attempt: self.attempt }));
        self.send(ToTarget::Void, out);
        out.push(SourceEffect::Resume);
        self.stage = Stage::Ready;
        out.push(SourceEffect::Notice(SourceNotice::HandoverFailed { why }));
    }

    /// A step has ended because its record is certainly not durable: nobody was told anything on
    /// the strength of it, and this side owns the images as before (I4).
    pub(super) fn not_recorded(
        &mut self,
        record: &SourceRecord,
        (kind, why): (ErrorKind, String),
        out: &mut Vec<SourceEffect>,
    ) {
        let what = "writing the migration's journal at the source failed";
        let why = Refusal::new(kind, what, why);
        match (record, &self.stage) {
            (SourceRecord::HandedOver(lost), Stage::HandedOver(handed_over))
                if lost == handed_over =>
            {
                self.epoch = self.owned_in;
                self.voided(why.to_string(), out);
            }
            (SourceRecord::Attempt { attempt }, Stage::Handover(_)) if *attempt == self.attempt => {
                // The guest was not asked to be quiet yet.
                self.awaiting_quiet = self.awaiting_quiet.saturating_sub(1);
                self.voided(why.to_string(), out);
            }
            (SourceRecord::Begun, _) if !self.is_over() => {
                // Of the rest of the step only the sync would have been answered.
                self.awaiting_sync = 0;
                self.abandon(Some(why), out);
            }
            _ => {}
        }
        // The step may have ended with another limit, and that was not carried out.
        out.push(SourceEffect::Throttle { limit: self.limit });
    }
}
