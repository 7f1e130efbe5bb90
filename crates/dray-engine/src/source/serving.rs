//! After handover: the source is a server of blocks, nothing more (I5).

use super::{Link, Source, SourceEffect, SourceNotice, Stage};
use crate::Phase;
use crate::order::clip;
use crate::record::SourceRecord;
use dray_types::{Attempt, BlockRange, ImageIndex};
use dray_wire::control::MAX_ORDER;
use dray_wire::{HandedOver, TargetState, ToTarget};

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
                self.send_commit(handed_over, out);
            }
            TargetState::Owner => {
                self.note_serving(out);
                self.offer_hashes(out);
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
        if let Some(nanos) = self.jumps {
            self.send(ToTarget::Jumps { nanos }, out);
        }
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
        let missing = state.blocks.missing();
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

    /// The target shall serve. Whether it may ask for hashes comes first: it begins to fetch at once.
    pub(super) fn send_commit(&mut self, handed_over: HandedOver, out: &mut Vec<SourceEffect>) {
        self.offer_hashes(out);
        self.send(ToTarget::Commit(handed_over), out);
    }

    /// Says that Backfill may ask for hashes, if the operator wants that.
    pub(super) fn offer_hashes(&mut self, out: &mut Vec<SourceEffect>) {
        if self.reuse.known {
            let (together, link_rate) = (self.reuse.together, self.plan.tuning.link_rate);
            let images = (0..).map(ImageIndex).zip(&self.images);
            let some = images.filter(|(_, state)| !state.blocks.in_place().is_empty());
            let in_place = some.map(|(image, _)| image).collect();
            self.send(ToTarget::Describes { together, link_rate, in_place }, out);
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
        if !self.may_fetch(tag, image, range, out) {
            return;
        }
        let state = &mut self.images[image.ix()];
        state.count(range);
        state.blocks.fetched(range);
        out.push(SourceEffect::SendRun { tag, image, range, urgent, clear_dirty: false });
    }

    /// Backfill asks for hashes of blocks that are missing. They stay true: nobody writes here any
    /// more. Who has not offered any sends the blocks, which is an answer as well.
    pub(super) fn describe_missing(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        blocks: bool,
        out: &mut Vec<SourceEffect>,
    ) {
        if !self.reuse.known {
            return self.fetch(tag, image, range, false, out);
        }
        if self.may_fetch(tag, image, range, out) {
            out.push(match blocks {
                false => SourceEffect::Describe { tag, image, range },
                true => SourceEffect::DescribeBlocks { tag, of: tag, image, range },
            });
        }
    }

    fn may_fetch(
        &self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        out: &mut Vec<SourceEffect>,
    ) -> bool {
        // Before handover nobody but the source reads its blocks (a peek is not a fetch).
        if self.handed_over().is_none() {
            return false;
        }
        let whole = self.plan.images.get(image.ix()).map(|offer| BlockRange::whole(offer.len));
        let inside = whole.is_some_and(|whole| whole.contains(range));
        if !inside {
            let why = "the fetch lies outside the image".to_owned();
            self.send(ToTarget::Unreadable { tag, why }, out);
        }
        inside
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
