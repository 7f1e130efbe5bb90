//! Copy and Sync: what is sent before handover, and what is known to have arrived.
//!
//! Where each block stands is kept in `blocks`; here is what is sent when, and what ends a phase.

use super::blocks::Found;
use super::rounds::Verdict;
use super::{ImageState, InFlight, Kind, Link, Source, SourceEffect, SourceNotice, Stage};
use crate::{Phase, SECOND};
use dray_types::{
    Attempt, BLOCK_SIZE, BlockRange, BlockSet, Choice, ErrorKind, ImageIndex, Refusal,
};
use dray_wire::frame::PIECE_BLOCKS;
use dray_wire::{TargetImage, TargetState};

/// Frames in flight at most, so that small runs and zeros are bounded too.
const MAX_IN_FLIGHT: usize = 4096;
/// Times a run is sent again because it arrived damaged, before the migration fails (I3).
const MAX_TRIES: u32 = 3;

/// What it costs to go on at another place of a disk, in seconds (Scheduling paper, section 7.1).
const JUMP: f64 = 0.010;

/// A rest this small is always affordable, in bytes; covers copies too short to measure a rate.
const SMALL_REST: f64 = 2097152.0;

impl Source {
    pub(super) fn shared(&mut self, image: ImageIndex, blocks: BlockSet) {
        if let Some(state) = self.images.get_mut(image.ix()).filter(|_| !self.opened) {
            state.blocks.share(blocks);
        }
    }

    pub(super) fn scanned(
        &mut self,
        image: ImageIndex,
        data: BlockSet,
        out: &mut Vec<SourceEffect>,
    ) {
        if let Some(state) = self.images.get_mut(image.ix()) {
            state.data = Some(data);
        }
        self.advance(out);
    }

    pub(super) fn target_opened(
        &mut self,
        state: TargetState,
        images: Vec<TargetImage>,
        attempt: Attempt,
        out: &mut Vec<SourceEffect>,
    ) {
        if self.link != Link::Opening {
            // One answer a session: what it says about blocks in flight holds at its start only.
            return;
        }
        self.link = Link::Up;
        if self.handed_over().is_some() || matches!(self.stage, Stage::Done) {
            return self.opened_after_handover(state, attempt, out);
        }
        if self.is_over() {
            return;
        }
        match state {
            // A promise is void as long as this side has not handed over; `Open` has said so.
            TargetState::Receiving | TargetState::Prepared { .. } => {}
            TargetState::Owner | TargetState::Complete | TargetState::Fenced => {
                let why = "it says it was given images that were never handed over";
                return self.target_failed(target_is_wrong(why), out);
            }
        }
        if images.len() != self.images.len() {
            return self.target_failed(target_is_wrong("it has another number of images"), out);
        }
        if self.opened {
            for (state, target) in self.images.iter_mut().zip(&images) {
                state.blocks.reopen(&target.have);
            }
        } else {
            self.first = Some(images);
        }
        self.advance(out);
    }

    /// Merges what the target has with what the source holds, once both are known.
    fn merge_first_answer(&mut self) -> bool {
        if self.opened {
            return true;
        }
        if self.images.iter().any(|image| image.data.is_none()) {
            return false;
        }
        let Some(answer) = self.first.take() else { return false };
        for (ix, (state, target)) in self.images.iter_mut().zip(answer).enumerate() {
            let whole = BlockRange::whole(self.plan.images[ix].len);
            let (data, suspect) = (state.data.take(), self.plan.suspect.get(ix));
            let data = data.unwrap_or_default();
            state.blocks.begin(Found { whole, data, target, suspect });
            let chosen = self
                .plan
                .tuning
                .copy_only
                .as_ref()
                .filter(|_| self.plan.strategy.chooses() && self.scheme.copies);
            if let Some(chosen) = chosen {
                // An image that nobody chose from is left as a whole.
                let chosen = chosen.get(ix).cloned().unwrap_or_default();
                state.blocks.choose(&chosen, self.scheme.names_zeros);
            }
            state.blocks.begin_round();
        }
        self.begin_progress();
        self.opened = true;
        self.begin_sample();
        true
    }

    /// A newer choice of `auto`, as long as there is something to choose about: Copy under way.
    pub(super) fn choose(
        &mut self,
        image: ImageIndex,
        copy_only: BlockSet,
        out: &mut Vec<SourceEffect>,
    ) {
        let counts = self.plan.strategy.choice == Choice::Planned && self.stage == Stage::Copy;
        let known = self.plan.tuning.copy_only.as_mut().and_then(|sets| sets.get_mut(image.ix()));
        let Some(chosen) = known.filter(|_| counts) else { return };
        chosen.clone_from(&copy_only);
        if self.opened {
            self.images[image.ix()].blocks.choose_again(copy_only);
            self.advance(out);
        }
    }

    pub(super) fn forget_in_flight(&mut self) {
        self.forget_mirrored();
        self.mirror_bytes = 0;
        self.mirror_flying = 0;
        self.lacking.clear();
        self.reuse.forget();
        for flight in std::mem::take(&mut self.in_flight).into_values() {
            if flight.kind.takes_room() {
                self.window.lost(flight.bytes());
            }
            let zeros = flight.kind == Kind::Zero;
            self.images[flight.image.ix()].blocks.lose_link(flight.range, zeros);
        }
    }

    /// Does whatever can be done now: sends, ends a round, becomes ready.
    pub(super) fn advance(&mut self, out: &mut Vec<SourceEffect>) {
        let sends =
            matches!(self.stage, Stage::Copy | Stage::Sync | Stage::Ready | Stage::Handover(_));
        if !sends || self.link != Link::Up || !self.merge_first_answer() {
            return;
        }
        match self.stage {
            // What was written meanwhile stays for Backfill, or for the next tick.
            Stage::Ready if !self.keeps_up() => return self.tell_ready(out),
            Stage::Handover(_) if !self.scheme.equal => return self.drained(out),
            _ => self.pump(out),
        }
        let ends = self.is_stuck() || self.all_sent();
        if !ends || self.awaiting_dirty > 0 {
            return;
        }
        self.catching_up = false;
        match self.stage {
            Stage::Copy => self.end_copy(out),
            Stage::Sync => self.take_all_dirty(out),
            Stage::Handover(_) => self.drained(out),
            _ => {}
        }
    }

    fn end_copy(&mut self, out: &mut Vec<SourceEffect>) {
        out.push(SourceEffect::Notice(SourceNotice::Phase(Phase::Sync)));
        if self.scheme.syncs {
            self.stage = Stage::Sync;
            self.take_all_dirty(out);
        } else {
            self.stage = Stage::Ready;
            self.tell_ready(out);
        }
    }

    /// Whether the rest is being sent while the guest's memory moves.
    fn keeps_up(&self) -> bool {
        self.scheme.equal || self.catching_up
    }

    /// While the guest's memory moves, Sync keeps the rest small: what pre-copy sends while the
    /// guest stands still, or what hot-set hands over in the map.
    pub(super) fn keep_up(&mut self, out: &mut Vec<SourceEffect>) {
        self.advance(out);
        let idle = if self.keeps_up() {
            self.is_stuck() || self.all_sent()
        } else {
            self.in_flight.is_empty()
        };
        if self.link == Link::Up && self.opened && idle && self.awaiting_dirty == 0 {
            self.take_all_dirty(out);
        }
    }

    fn tell_ready(&mut self, out: &mut Vec<SourceEffect>) {
        if !self.ready_told {
            self.ready_told = true;
            out.push(SourceEffect::Notice(SourceNotice::Ready));
        }
    }

    pub(super) fn take_all_dirty(&mut self, out: &mut Vec<SourceEffect>) {
        self.round_bytes = 0;
        for (ix, offer) in self.plan.images.iter().enumerate() {
            if !offer.read_only {
                self.awaiting_dirty += 1;
                out.push(SourceEffect::TakeDirty { image: ImageIndex(ix as u16) });
            }
        }
        if self.awaiting_dirty == 0 {
            self.round_taken(out);
        }
    }

    pub(super) fn dirty_taken(
        &mut self,
        image: ImageIndex,
        blocks: BlockSet,
        out: &mut Vec<SourceEffect>,
    ) {
        self.awaiting_dirty = self.awaiting_dirty.saturating_sub(1);
        if self.stage == Stage::Over {
            // Nobody will send them now, and a later try must know of them (I4).
            return out.push(SourceEffect::PutBack { image, blocks });
        }
        self.not_mirrored(image, &blocks);
        self.round_bytes += self.images[image.ix()].blocks.collect(blocks) * BLOCK_SIZE;
        if self.awaiting_dirty == 0 {
            self.round_taken(out);
        }
    }

    fn round_taken(&mut self, out: &mut Vec<SourceEffect>) {
        let jump = self.jump_blocks();
        self.images.iter_mut().for_each(|image| image.blocks.begin_scattered_round(jump));
        self.begin_progress();
        match self.stage {
            Stage::Handover(_) => self.collected(out),
            Stage::Sync => self.judge_round(out),
            Stage::Ready if self.scheme.equal => self.pump(out),
            Stage::Ready if self.scheme.syncs => {
                let todo = |image: &ImageState| image.blocks.todo().blocks().len();
                let waits: u64 = self.images.iter().map(todo).sum();
                self.catching_up |= waits * BLOCK_SIZE > self.affordable();
                self.advance(out);
            }
            // An attempt that took them is void: they stay for Backfill.
            _ => {}
        }
    }

    /// Blocks that the link carries in the time of a jump; zero before it has carried anything.
    fn jump_blocks(&self) -> u64 {
        (self.window.capacity() * JUMP / BLOCK_SIZE as f64) as u64
    }

    /// Bytes that may be dirty when the guest stops.
    fn affordable(&self) -> u64 {
        let downtime = self.window.capacity() * self.plan.max_downtime as f64 / SECOND as f64;
        // Half of the downtime is left to the guest's memory and the handover itself.
        self.scheme.handover_size.unwrap_or((downtime / 2.0).max(SMALL_REST) as u64)
    }

    fn get_ready(&mut self, out: &mut Vec<SourceEffect>) {
        self.stage = Stage::Ready;
        self.tell_ready(out);
        if self.scheme.equal {
            self.pump(out);
        }
    }

    /// Ready when the rest is affordable, or when it never will be and may be left.
    fn judge_round(&mut self, out: &mut Vec<SourceEffect>) {
        let affordable = self.affordable();
        // A mirror's rounds are what its window could not take, and say nothing of the next ones.
        let foretells = self.scheme.equal && !self.plan.strategy.mirrors;
        match self.rounds.judge(self.now, self.round_bytes, affordable) {
            Verdict::Fits => self.get_ready(out),
            Verdict::Hopeless if foretells => self.give_up(out),
            Verdict::Enough if self.scheme.equal => self.give_up(out),
            Verdict::Another | Verdict::Hopeless => self.pump(out),
            Verdict::Enough if self.plan.tuning.endless => self.pump(out),
            // A map takes what the rounds cannot.
            Verdict::Enough => self.get_ready(out),
        }
    }

    fn give_up(&mut self, out: &mut Vec<SourceEffect>) {
        let what = format!("{} does not converge", self.plan.strategy.name);
        let why = format!(
            "after {} rounds {} MiB are still written per round while the link carries {:.0} MiB/s",
            self.rounds.count,
            self.round_bytes >> 20,
            self.window.capacity() / f64::from(1 << 20),
        );
        let why = Refusal::new(ErrorKind::Conflict, what, why)
            .hint("use --strategy hybrid, or raise --max-downtime");
        self.send(dray_wire::ToTarget::Abandon { discard: false }, out);
        self.abandon(Some(why), out);
    }

    fn all_sent(&self) -> bool {
        self.in_flight.is_empty() && self.images.iter().all(|image| image.blocks.all_sent())
    }

    /// Sends until the window is full or nothing waits.
    pub(super) fn pump(&mut self, out: &mut Vec<SourceEffect>) {
        if self.link != Link::Up {
            return;
        }
        while self.has_room() && self.mirror_has_room() && self.send_mirrored(out) {}
        while self.has_room() && self.send_zero(out) {}
        while self.window.open() && self.send_lacking(out) {}
        if !self.send_sample(out) {
            while self.send_next(out) {}
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.window.open() && self.has_frames()
    }

    pub(super) fn has_frames(&self) -> bool {
        self.in_flight.len() < MAX_IN_FLIGHT
    }

    fn send_zero(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let Some(ix) = self.images.iter().position(|image| image.blocks.has_zeros()) else {
            return false;
        };
        let Some(range) = self.images[ix].blocks.launch_zeros() else { return false };
        let image = ImageIndex(ix as u16);
        let tag = self.frame(image, range, Kind::Zero, 0);
        out.push(SourceEffect::SendZero { tag, image, range });
        true
    }

    pub(super) fn send_run(
        &mut self,
        image: ImageIndex,
        range: BlockRange,
        mirrored: bool,
        out: &mut Vec<SourceEffect>,
    ) {
        self.images[image.ix()].count(range);
        let kind = if mirrored { Kind::Mirrored } else { Kind::Copied };
        let tag = self.frame(image, range, kind, 0);
        out.push(SourceEffect::SendRun { tag, image, range, urgent: false, clear_dirty: true });
    }

    /// A frame with blocks that are in flight by now; returns its tag.
    pub(super) fn frame(
        &mut self,
        image: ImageIndex,
        range: BlockRange,
        kind: Kind,
        tries: u32,
    ) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        // A frame of zeros or hashes takes no room on the link.
        if kind.takes_room() {
            self.window.sent(range.byte_len());
        }
        let flight = InFlight { image, range, kind, sent_at: self.now, tries, part: None };
        self.in_flight.insert(tag, flight);
        tag
    }

    pub(super) fn received(&mut self, tags: &[u64], out: &mut Vec<SourceEffect>) {
        for tag in tags {
            let Some(flight) = self.in_flight.remove(tag) else { continue };
            match flight.kind {
                // It waits to be sent: nobody can have it.
                Kind::Lacking => {
                    self.in_flight.insert(*tag, flight);
                    continue;
                }
                Kind::Described => self.found(flight),
                Kind::DescribedBlocks => self.blocks_found(flight, flight.range.len),
                Kind::Copied | Kind::Mirrored => {
                    self.window.arrived(self.now, flight.sent_at, flight.bytes());
                    self.reuse.carried(flight.bytes());
                    self.reuse.measured(self.window.rate());
                }
                Kind::Zero => {}
            }
            if flight.kind != Kind::Zero {
                self.delivered(flight.bytes());
            }
            self.leaves_mirror(flight);
            self.images[flight.image.ix()].blocks.arrived(flight.range);
        }
        self.advance(out);
    }

    fn leaves_mirror(&mut self, flight: InFlight) {
        if flight.kind == Kind::Mirrored {
            let bytes = flight.range.byte_len();
            self.mirror_bytes = self.mirror_bytes.saturating_sub(bytes);
            self.mirror_flying = self.mirror_flying.saturating_sub(bytes);
        }
    }

    pub(super) fn mismatch(&mut self, tag: u64, out: &mut Vec<SourceEffect>) {
        let Some(flight) = self.in_flight.get(&tag).copied() else { return };
        let InFlight { image, range, mut kind, tries, .. } = flight;
        if kind == Kind::Lacking {
            return;
        }
        self.in_flight.remove(&tag);
        if kind.takes_room() {
            self.window.lost(flight.bytes());
        }
        if matches!(kind, Kind::Described | Kind::DescribedBlocks) {
            // A description that came damaged is not worth another one.
            self.reuse.no_answer(self.now, range.len / PIECE_BLOCKS);
            self.images[image.ix()].count(range);
            kind = Kind::Copied;
        }
        if tries + 1 > MAX_TRIES {
            self.images[image.ix()].blocks.failed(range);
            let (first, last) = (range.start, range.end() - 1);
            let why =
                format!("blocks {first} to {last} arrived damaged {} times in a row", tries + 1);
            let hint = "check the memory and network of both hosts";
            return self.target_failed(target_is_wrong(why).hint(hint), out);
        }
        let tag = self.frame(image, range, kind, tries + 1);
        out.push(if kind == Kind::Zero {
            SourceEffect::SendZero { tag, image, range }
        } else {
            SourceEffect::SendRun { tag, image, range, urgent: false, clear_dirty: true }
        });
    }

    pub(super) fn run_failed(&mut self, tag: u64, why: String, out: &mut Vec<SourceEffect>) {
        if !self.owns() {
            // A fetch: the target keeps asking, and its guest waits (I5).
            return self.send(dray_wire::ToTarget::Unreadable { tag, why }, out);
        }
        let Some(flight) = self.in_flight.remove(&tag) else { return };
        if flight.kind.takes_room() {
            self.window.lost(flight.bytes());
        }
        self.leaves_mirror(flight);
        self.images[flight.image.ix()].blocks.failed(flight.range);
        let name = &self.plan.images[flight.image.ix()].name;
        let what = format!("reading image '{name}' at the source failed");
        let why = Refusal::new(ErrorKind::Io, what, why).hint("check the source's disk");
        if matches!(self.stage, Stage::Handover(_)) {
            self.void_attempt(why.in_words(), out);
        }
        self.send(dray_wire::ToTarget::Abandon { discard: false }, out);
        self.abandon(Some(why), out);
    }
}

/// What the target does cannot be.
fn target_is_wrong(why: impl std::fmt::Display) -> Refusal {
    Refusal::new(ErrorKind::Conflict, "the target cannot be gone on with", why)
}
