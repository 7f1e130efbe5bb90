//! The source's side: it owns the images until its handed-over record is durable.
//!
//! ```text
//! Copy ──▶ Sync ──▶ Ready ──▶ Handover ──▶ HandedOver ──▶ Backfill ──▶ Done
//!   └────────┴────────┴──────────┤ void        │ fenced
//!                 Over ◀─────────┘             └──▶ TakenBack
//! ```
//! Until the record in `handover` named the point of no return, every failure leads back to a
//! guest that runs here (I4); after it, only the target may serve (I5).

mod blocks;
mod copying;
mod describing;
mod handover;
mod image;
mod interface;
mod mirror;
mod rounds;
mod serving;
mod slowing;

pub use interface::{SourceEffect, SourceEvent, SourceNotice, SourcePlan, SourceStatus};
pub use rounds::MAX_ROUNDS;
pub(crate) use rounds::{Rounds, Verdict};

use crate::record::SourceRecord;
use crate::reuse::Reuse;
use crate::strategy::Scheme;
use crate::throttle::WriteLimit;
use crate::window::{COPY_WINDOW, Window};
use crate::{Phase, SECOND, Time};
use dray_types::{
    Attempt, BLOCK_SIZE, BlockRange, BlockSet, Epoch, ImageIndex, Refusal, Schedule, Why,
};
use dray_wire::frame::mask_len;
use dray_wire::{Envelope, HandedOver, ImageOffer, Open, TargetImage, ToSource, ToTarget};
use handover::Step;
use image::ImageState;
use mirror::Progress;
use std::collections::{BTreeMap, VecDeque};

/// Where the source is.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Copy,
    Sync,
    Ready,
    Handover(Step),
    HandedOver(HandedOver),
    Backfill(HandedOver),
    TakenBack,
    Done,
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Down,
    /// `Open` was sent, its answer has not come.
    Opening,
    Up,
}

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Copied,
    /// Takes room in the window of mirrored writes.
    Mirrored,
    Zero,
    /// Hashes instead of content.
    Described,
    /// Hashes of the blocks of pieces that lack.
    DescribedBlocks,
    /// Described, not found, and not sent yet.
    Lacking,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    image: ImageIndex,
    range: BlockRange,
    kind: Kind,
    sent_at: Time,
    tries: u32,
    /// The blocks that the frame carries, a bit each, when it is not all of them: the target has
    /// the others in their place.
    part: Option<[u64; 4]>,
}

impl InFlight {
    /// Bytes that the frame carries at most.
    fn bytes(&self) -> u64 {
        self.part.map_or(self.range.len, |part| mask_len(&part)) * BLOCK_SIZE
    }
}

fn first_stage(scheme: Scheme) -> Stage {
    if scheme.copies { Stage::Copy } else { Stage::Ready }
}

/// The source's state machine.
pub struct Source {
    plan: SourcePlan,
    scheme: Scheme,
    stage: Stage,
    link: Link,
    epoch: Epoch,
    /// The epoch in which it owned the images before it handed them over.
    owned_in: Epoch,
    attempt: Attempt,
    images: Vec<ImageState>,
    /// Whether the target's first answer was merged with the scan.
    opened: bool,
    in_flight: BTreeMap<u64, InFlight>,
    next_tag: u64,
    window: Window,
    reuse: Reuse,
    /// Tags of what the target lacks, in the order in which it will be sent, and of the description
    /// each was a part of.
    lacking: VecDeque<(u64, u64)>,
    /// Images whose dirty blocks were asked for and have not come.
    awaiting_dirty: usize,
    /// `Quiesce` effects that are not answered: only the last answer tells how the gate stands.
    awaiting_quiet: u32,
    /// `SyncImages` effects that are not answered: only the last one covers everything.
    awaiting_sync: u32,
    /// It is recorded that the migration began.
    begun: bool,
    /// This life may still record that what was written before tracking began is durable. A later
    /// life may not: the target may have records of blocks that a power cut has undone here.
    may_settle: bool,
    rounds: Rounds,
    round_bytes: u64,
    /// The target's first answer, until the scans are in.
    first: Option<Vec<TargetImage>>,
    /// Ready, and more is dirty than may be: it is being sent.
    catching_up: bool,
    /// Bytes of mirrored writes that wait or are under way.
    mirror_bytes: u64,
    /// Those of them that are under way.
    mirror_flying: u64,
    /// The fewest blocks that waited in this round, and the bytes that were acknowledged since
    /// there were as few, and when.
    progress: Progress,
    blocks_mirrored: u64,
    /// What the gate holds the guest's writes to.
    limit: Option<WriteLimit>,
    ready_told: bool,
    /// What a jump costs here, in nanoseconds; none when nobody has measured.
    jumps: Option<u64>,
    now: Time,
}

impl Source {
    /// A source at the start of a migration.
    pub fn new(plan: SourcePlan) -> Self {
        let images = plan.images.iter().map(|_| ImageState::default()).collect();
        let scheme = Scheme::of(plan.strategy, &plan.tuning);
        Self {
            scheme,
            stage: first_stage(scheme),
            link: Link::Down,
            epoch: plan.epoch,
            owned_in: plan.epoch,
            attempt: Attempt(0),
            images,
            opened: false,
            in_flight: BTreeMap::new(),
            next_tag: 1,
            window: Window::new(COPY_WINDOW),
            reuse: Reuse::new(plan.tuning.link_rate),
            lacking: VecDeque::new(),
            awaiting_dirty: 0,
            awaiting_quiet: 0,
            awaiting_sync: 0,
            begun: false,
            may_settle: true,
            rounds: Rounds::default(),
            round_bytes: 0,
            first: None,
            catching_up: false,
            mirror_bytes: 0,
            mirror_flying: 0,
            progress: Progress::default(),
            blocks_mirrored: 0,
            limit: None,
            ready_told: false,
            jumps: None,
            now: Time(0),
            plan,
        }
    }

    /// A source after a restart, from the records that were durable. Effects that the crash may
    /// have cut off (they are all idempotent) come with the first `Start`.
    pub fn recover(plan: SourcePlan, records: &[SourceRecord]) -> Self {
        let mut source = Self::new(plan);
        source.begun = !records.is_empty();
        source.may_settle = records.is_empty();
        let mut settled = false;
        for record in records {
            match record {
                SourceRecord::Attempt { attempt } | SourceRecord::Void { attempt } => {
                    source.attempt = *attempt;
                }
                SourceRecord::HandedOver(handed_over) => {
                    source.attempt = handed_over.attempt;
                    source.epoch = handed_over.epoch;
                    source.stage = Stage::HandedOver(*handed_over);
                }
                SourceRecord::TakenBack { epoch } => {
                    source.epoch = *epoch;
                    source.stage = Stage::TakenBack;
                }
                SourceRecord::Done => source.stage = Stage::Done,
                SourceRecord::Abandoned => source.stage = Stage::Over,
                SourceRecord::Resumed | SourceRecord::Begun => {
                    source.stage = first_stage(source.scheme);
                }
                SourceRecord::Settled => settled = true,
            }
        }
        if source.begun && !settled {
            source.suspect_everything();
        }
        source
    }

    /// A power cut may have undone writes that are older than the tracking and were already copied.
    fn suspect_everything(&mut self) {
        let suspect = |offer: &ImageOffer| {
            if offer.read_only {
                return BlockSet::new();
            }
            [BlockRange::whole(offer.len)].into_iter().collect()
        };
        self.plan.suspect = self.plan.images.iter().map(suspect).collect();
    }

    /// Takes one event and appends what must be done.
    pub fn step(&mut self, now: Time, event: SourceEvent, out: &mut Vec<SourceEffect>) {
        self.now = now;
        match event {
            SourceEvent::Start => self.start(out),
            SourceEvent::LinkUp => self.link_up(out),
            SourceEvent::LinkDown => self.link_down(out),
            SourceEvent::Message(message) => self.message(message, out),
            SourceEvent::Shared { image, blocks } => self.shared(image, blocks),
            SourceEvent::Scanned { image, data } => self.scanned(image, data, out),
            SourceEvent::RunFailed { tag, why } => self.run_failed(tag, why, out),
            SourceEvent::DirtyTaken { image, blocks } => self.dirty_taken(image, blocks, out),
            SourceEvent::Quiesced { lens } => self.quiesced(lens, out),
            SourceEvent::QuiesceFailed { why } => self.quiesce_failed(why, out),
            SourceEvent::ImagesSynced(result) => self.images_synced(result, out),
            SourceEvent::NotRecorded { record, kind, why } => {
                self.not_recorded(&record, (kind, why), out);
            }
            SourceEvent::BeginHandover => self.begin_handover(out),
            SourceEvent::AbortHandover { why } => self.void_attempt(why, out),
            SourceEvent::Cancel { discard } => self.cancel(discard, out),
            SourceEvent::Tick => self.tick(out),
            SourceEvent::Schedule { image, copy, backfill } => {
                self.schedule(image, &copy, backfill, out);
            }
            SourceEvent::Jumps { nanos } => self.jumps = Some(nanos),
            SourceEvent::Choose { image, copy_only } => self.choose(image, copy_only, out),
            SourceEvent::Reuse { known, together } => self.reuse_changed(known, together, out),
            SourceEvent::Written { image, range } => self.written(image, range, out),
        }
        // Whatever happened: the guest is slowed exactly as long as Sync goes on (I4, I6).
        self.slow_or_release(out);
    }

    /// The shell knows better by now in which order the blocks should move.
    fn schedule(
        &mut self,
        image: ImageIndex,
        copy: &Schedule,
        backfill: Option<Schedule>,
        out: &mut Vec<SourceEffect>,
    ) {
        let Some(offer) = self.plan.images.get(image.ix()) else { return };
        let state = &mut self.images[image.ix()];
        state.blocks.renew_order(copy, BlockRange::whole(offer.len));
        state.backfill = backfill.or(state.backfill.take());
        if matches!(self.stage, Stage::Backfill(_)) {
            self.tell_order(image, out);
        }
    }

    fn start(&mut self, out: &mut Vec<SourceEffect>) {
        match &self.stage {
            Stage::HandedOver(_) | Stage::Backfill(_) => out.push(SourceEffect::Retire),
            // The files may have been retired by the crash's predecessor of the record that took
            // them back, and the guest that is paused here may go on.
            Stage::TakenBack => {
                out.push(SourceEffect::Restore);
                out.push(SourceEffect::Notice(SourceNotice::TakenBack));
            }
            Stage::Done | Stage::Over => {}
            _ => {
                if self.attempt > Attempt(0) {
                    // An attempt without an outcome never reached the point of no return.
                    out.push(SourceEffect::Journal(SourceRecord::Void { attempt: self.attempt }));
                }
                if !std::mem::replace(&mut self.begun, true) {
                    out.push(SourceEffect::Journal(SourceRecord::Begun));
                }
                out.push(SourceEffect::StartTracking);
                if self.may_settle {
                    // Under way while the copy begins; until it is done a restart trusts nothing.
                    self.sync_images(out);
                }
                out.push(SourceEffect::Notice(SourceNotice::Phase(Phase::Copy)));
                for ix in 0..self.images.len() {
                    out.push(SourceEffect::Scan { image: ImageIndex(ix as u16) });
                }
            }
        }
    }

    fn link_up(&mut self, out: &mut Vec<SourceEffect>) {
        if self.is_over() {
            return;
        }
        if self.link != Link::Down {
            // A new session replaces one whose end nobody has told of.
            self.link_down(out);
        }
        self.link = Link::Opening;
        self.window.new_route();
        let handed_over = self.handed_over();
        self.send(
            ToTarget::Open(Open {
                migration: self.plan.migration,
                images: self.plan.images.clone(),
                handed_over,
            }),
            out,
        );
    }

    fn link_down(&mut self, out: &mut Vec<SourceEffect>) {
        self.link = Link::Down;
        self.forget_in_flight();
        self.rounds.interrupted();
        if matches!(self.stage, Stage::Handover(_)) {
            self.void_attempt("the link to the target was lost".into(), out);
        }
    }

    fn message(&mut self, message: Envelope<ToSource>, out: &mut Vec<SourceEffect>) {
        // A lower epoch is a voice from before the last handover (I1).
        if message.epoch < self.epoch && !matches!(message.body, ToSource::Opened { .. }) {
            return;
        }
        match message.body {
            ToSource::Opened { state, images } => {
                self.target_opened(state, images, message.attempt, out)
            }
            ToSource::Failed(why) => self.target_failed(why, out),
            ToSource::Received { tags } => self.received(&tags, out),
            ToSource::Lack { tag, pieces } => self.lack(tag, pieces, 0, out),
            ToSource::Near { tag, pieces, near } => self.lack(tag, pieces, near, out),
            ToSource::LackBlocks { tag, blocks } => self.lack_blocks(tag, blocks, out),
            ToSource::Mismatch { tag } => self.mismatch(tag, out),
            ToSource::Prepared { map_hash } => self.prepared(message.attempt, map_hash, out),
            ToSource::Serving => self.target_serving(out),
            ToSource::Fetch { tag, image, range, urgent } => {
                self.fetch(tag, image, range, urgent, out)
            }
            ToSource::Describe { tag, image, range, blocks } => {
                self.describe_missing(tag, image, range, blocks, out);
            }
            ToSource::Complete => self.target_complete(out),
            ToSource::Verified { blocks, different } => {
                out.push(SourceEffect::Notice(SourceNotice::Verified { blocks, different }));
            }
            ToSource::HandBack => self.hand_back(out),
            // The shell answers these; they do not change the state of the migration.
            ToSource::Peek { .. }
            | ToSource::Hash { .. }
            | ToSource::Hurry { .. }
            | ToSource::Vm(_)
            | ToSource::Ping => {}
        }
    }

    fn cancel(&mut self, discard: bool, out: &mut Vec<SourceEffect>) {
        match self.stage {
            Stage::HandedOver(_) | Stage::Backfill(_) => self.refuse(
                "the images are already handed over; only the target can go on from here",
                out,
            ),
            Stage::Done | Stage::Over | Stage::TakenBack => {
                self.refuse("the migration is already over", out);
            }
            _ => {
                if matches!(self.stage, Stage::Handover(_)) {
                    self.void_attempt("the migration was cancelled".into(), out);
                }
                self.send(ToTarget::Abandon { discard }, out);
                self.abandon(None, out);
            }
        }
    }

    fn target_failed(&mut self, why: Refusal, out: &mut Vec<SourceEffect>) {
        if self.owns() {
            if matches!(self.stage, Stage::Handover(_)) {
                self.void_attempt(why.in_words(), out);
            }
            self.abandon(Some(why), out);
        } else {
            out.push(SourceEffect::Notice(SourceNotice::Broken { why: why.in_words() }));
        }
    }

    /// Ends the migration before handover. What was taken from the tracker goes back into it, so
    /// that a later try can trust it (I4).
    fn abandon(&mut self, why: Option<Refusal>, out: &mut Vec<SourceEffect>) {
        self.forget_in_flight();
        out.push(SourceEffect::Journal(SourceRecord::Abandoned));
        for (ix, state) in self.images.iter_mut().enumerate() {
            let mut blocks = state.blocks.put_back();
            if !self.opened
                && let Some(suspect) = self.plan.suspect.get(ix)
            {
                blocks.union_with(suspect);
            }
            if !blocks.is_empty() {
                out.push(SourceEffect::PutBack { image: ImageIndex(ix as u16), blocks });
            }
        }
        self.stage = Stage::Over;
        out.push(SourceEffect::Notice(SourceNotice::Abandoned { why }));
    }

    fn tick(&mut self, out: &mut Vec<SourceEffect>) {
        match &self.stage {
            Stage::Handover(step) if self.now.since(step.began()) > self.plan.handover_timeout => {
                let seconds = self.plan.handover_timeout / SECOND;
                self.void_attempt(format!("no answer from the target in {seconds} s"), out);
            }
            Stage::Ready if self.scheme.syncs => self.keep_up(out),
            Stage::Copy | Stage::Sync | Stage::Ready => self.advance(out),
            _ => {}
        }
    }

    fn refuse(&self, why: &str, out: &mut Vec<SourceEffect>) {
        out.push(SourceEffect::Notice(SourceNotice::Refused { why: why.to_owned() }));
    }

    fn send(&self, body: ToTarget, out: &mut Vec<SourceEffect>) {
        self.send_about(self.attempt, body, out);
    }

    /// Sends a message about an attempt that need not be the current one.
    fn send_about(&self, attempt: Attempt, body: ToTarget, out: &mut Vec<SourceEffect>) {
        if self.link != Link::Down {
            let envelope = Envelope { epoch: self.epoch, attempt, body };
            out.push(SourceEffect::Send(envelope));
        }
    }

    fn handed_over(&self) -> Option<HandedOver> {
        match self.stage {
            Stage::HandedOver(handed_over) | Stage::Backfill(handed_over) => Some(handed_over),
            _ => None,
        }
    }

    /// Whether guest writes may be accepted here (I1).
    pub fn owns(&self) -> bool {
        !matches!(self.stage, Stage::HandedOver(_) | Stage::Backfill(_) | Stage::Done)
    }

    /// Whether blocks of the range wait to be sent before the handover, or in this round of Sync.
    pub fn waits(&self, image: ImageIndex, range: BlockRange) -> bool {
        self.images
            .get(image.ix())
            .is_some_and(|state| state.blocks.todo().blocks().intersects(range))
    }

    /// For tests and simulators: whether each block stands in one place, and has a frame if it is in
    /// flight. Looks at every run of every set.
    ///
    /// # Errors
    /// What does not hold, in words.
    pub fn partition(&self) -> Result<(), Why> {
        if !self.opened || self.is_over() {
            return Ok(());
        }
        let mut flying = vec![0; self.images.len()];
        for flight in self.in_flight.values() {
            flying[flight.image.ix()] += flight.range.len;
        }
        for (image, flying) in self.images.iter().zip(flying) {
            image.blocks.partition()?;
            if image.blocks.flying() != flying {
                let why = format!("{} blocks fly in frames of {flying}", image.blocks.flying());
                return Err(why.into());
            }
        }
        Ok(())
    }

    /// For simulators: whether a block that is not dirty may differ at the target, by what this side
    /// knows. Without a session it knows nothing.
    pub fn may_differ(&self, image: ImageIndex, block: u64) -> bool {
        let knows = self.opened && self.link == Link::Up && !self.is_over();
        !knows || self.images[image.ix()].blocks.may_differ(block)
    }

    /// The epoch this side knows of.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// True when nothing is left to do here.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Done | Stage::Over | Stage::TakenBack)
    }

    /// True when the migration waits for `BeginHandover`.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Ready && self.opened && self.ready_told
    }

    /// The phase to show.
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Copy => Phase::Copy,
            Stage::Sync | Stage::Ready => Phase::Sync,
            Stage::Handover(_) | Stage::HandedOver(_) => Phase::Handover,
            Stage::Backfill(_) => Phase::Backfill,
            Stage::TakenBack | Stage::Done | Stage::Over => Phase::Release,
        }
    }

    /// Progress to show.
    pub fn status(&self) -> SourceStatus {
        SourceStatus {
            waiting: self.images.iter().map(|image| image.blocks.waiting()).collect(),
            sent: self.images.iter().map(|image| image.blocks.sent()).collect(),
            shared: self.images.iter().map(|image| image.blocks.shared()).collect(),
            left: self.images.iter().map(|image| image.blocks.left()).collect(),
            image_blocks_sent: self.images.iter().map(|image| image.blocks_sent).collect(),
            image_blocks_resent: self.images.iter().map(|image| image.blocks_resent).collect(),
            image_blocks_found: self.images.iter().map(|image| image.blocks_found).collect(),
            blocks_sent: self.images.iter().map(|image| image.blocks_sent).sum(),
            blocks_resent: self.images.iter().map(|image| image.blocks_resent).sum(),
            blocks_mirrored: self.blocks_mirrored,
            rounds: self.rounds.count,
            rate: self.window.rate(),
            link_up: self.link == Link::Up,
        }
    }
}
