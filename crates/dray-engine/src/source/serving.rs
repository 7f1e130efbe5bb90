//! After handover: the source is a server of blocks, nothing more (I5).

use super::handover::missing;
use super::{Link, Source, SourceEffect, SourceNotice, Stage};
use crate::Phase;
use crate::order::clip;
use crate::record::SourceRecord;
use dray_types::{Attempt, BlockRange, ImageIndex};
use dray_wire::control::MAX_ORDER;
use dray_wire::{TargetState, ToTarget};

impl Source {
    /// A session was made while the source no longer owns the images.
    pub(super) fn opened_after_handover(
        &mut self,
        state: TargetState,
        attempt: Attempt,
        out: &mut Vec<SourceEffect>,
    ) {
        let Some(handed_over) = self.handed_over() else { return };
        match state {
            TargetState::Prepared { attempt: prepared, map_hash }
                if prepared == handed_over.attempt && map_hash == handed_over.map_hash =>
            {
                self.send(ToTarget::Commit(handed_over), out);
            }
            TargetState::Owner => {
                self.note_serving(out);
                self.tell_orders(out);
            }
            TargetState::Complete => {
                self.note_serving(out);
                self.target_complete(out);
            }
            TargetState::Fenced => self.hand_back(out),
            TargetState::Receiving | TargetState::Prepared { .. } => {
                let why = format!(
                    "the target does not know of attempt {} that it promised to serve (it names \
                     {}); its state was lost or replaced; nothing here was changed; see dray claim",
                    handed_over.attempt.0, attempt.0
                );
                out.push(SourceEffect::Notice(SourceNotice::Broken { why }));
            }
        }
    }

    /// The orders are made and told once the target serves: the guest stands still before, and would
    /// wait for them.
    fn tell_orders(&mut self, out: &mut Vec<SourceEffect>) {
        for ix in 0..self.images.len() {
            self.tell_order(ImageIndex(ix as u16), out);
        }
    }

    /// Tells the target in which order to fetch an image, once it may: after the handover.
    pub(super) fn tell_order(&mut self, image: ImageIndex, out: &mut Vec<SourceEffect>) {
        let state = &self.images[image.ix()];
        let Some(backfill) = state.backfill.as_ref().filter(|_| self.link == Link::Up) else {
            return;
        };
        let missing = missing(state);
        // A restarted source does not know what is missing; the target does.
        let known = self.opened;
        let whole = BlockRange::whole(self.plan.images[image.ix()].len);
        let wanted = |range: &BlockRange| !known || missing.intersects(*range);
        let ranges = backfill.ranges().iter().map(|&range| clip(range, whole));
        let ranges = ranges.filter(wanted).take(MAX_ORDER).collect();
        self.send(ToTarget::Order { image, ranges }, out);
    }

    pub(super) fn target_serving(&mut self, out: &mut Vec<SourceEffect>) {
        if matches!(self.stage, Stage::HandedOver(_)) {
            self.note_serving(out);
            self.tell_orders(out);
        }
    }

    fn note_serving(&mut self, out: &mut Vec<SourceEffect>) {
        if let Stage::HandedOver(handed_over) = self.stage {
            self.stage = Stage::Backfill(handed_over);
            out.push(SourceEffect::Notice(SourceNotice::TargetServing));
            out.push(SourceEffect::Notice(SourceNotice::Phase(Phase::Backfill)));
        }
    }

    pub(super) fn fetch(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        urgent: bool,
        out: &mut Vec<SourceEffect>,
    ) {
        // Before handover nobody but the source reads its blocks (a peek is not a fetch).
        if self.handed_over().is_none() {
            return;
        }
        let whole = self.plan.images.get(image.ix()).map(|offer| BlockRange::whole(offer.len));
        if !whole.is_some_and(|whole| whole.contains(range)) {
            let why = "the fetch lies outside the image".to_owned();
            return self.send(ToTarget::Unreadable { tag, why }, out);
        }
        let state = &mut self.images[image.ix()];
        state.count(range);
        state.sent.insert(range);
        out.push(SourceEffect::SendRun { tag, image, range, urgent, clear_dirty: false });
    }

    pub(super) fn target_complete(&mut self, out: &mut Vec<SourceEffect>) {
        if !matches!(self.stage, Stage::Backfill(_) | Stage::HandedOver(_)) {
            return;
        }
        out.push(SourceEffect::Journal(SourceRecord::Done));
        out.push(SourceEffect::StopTracking);
        self.stage = Stage::Done;
        out.push(SourceEffect::Notice(SourceNotice::Phase(Phase::Release)));
        out.push(SourceEffect::Notice(SourceNotice::Done));
    }

    /// The target never served and never will: the images come back under a new epoch (I5).
    pub(super) fn hand_back(&mut self, out: &mut Vec<SourceEffect>) {
        let Some(handed_over) = self.handed_over() else { return };
        self.epoch = handed_over.epoch.next();
        out.push(SourceEffect::Journal(SourceRecord::TakenBack { epoch: self.epoch }));
        out.push(SourceEffect::Restore);
        self.stage = Stage::TakenBack;
        out.push(SourceEffect::Notice(SourceNotice::TakenBack));
    }
}
