//! The target's side: it owns the images once the source has handed over, and not before.
//!
//! ```text
//! Receiving ──▶ Preparing ──▶ Prepared ──▶ Owner ──▶ Complete
//!     ▲             └── void ──────┤         │ guest cannot be reached
//!     └────────────────────────────┘         └──▶ Fenced
//! ```
//! A target that is only prepared never guesses: it waits until the source says what became of the
//! attempt (I1).

mod backfill;
mod fetching;
mod focus;
mod hash_questions;
mod held;
mod interface;
mod receiving;
mod watching;

pub(crate) use fetching::BACKFILL_RUN;
pub use held::Held;
pub use interface::{
    Arrival, BackfillControl, DiskFault, TargetEffect, TargetEvent, TargetNotice, TargetPlan,
    TargetStatus,
};

use crate::record::TargetRecord;
use crate::window::{BACKFILL_WINDOW, Window};
use crate::{Phase, Time};
use dray_types::{Attempt, BlockRange, BlockSet, Epoch, ErrorKind, ImageIndex, Refusal, Why};
use dray_wire::{
    Envelope, HandedOver, ImageHandover, ImageOffer, MapHash, Open, TargetState, ToSource, ToTarget,
};
use fetching::Backfill;
use receiving::parts;

/// Highest epoch with which an image may come: nobody hands one over a trillion times. A higher one would leave the next
/// owners no number to go on with. The epoch of a handover may be twice as high, so that none is refused that was begun.
const MOST_HANDOVERS: u64 = 1 << 40;

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    Receiving,
    /// A data sync with this number covers everything received; then the promise is written.
    Preparing {
        /// None while an older sync is under way.
        sync: Option<u64>,
        attempt: Attempt,
        map_hash: MapHash,
        images: Vec<ImageHandover>,
    },
    Prepared {
        attempt: Attempt,
        map_hash: MapHash,
        images: Vec<ImageHandover>,
    },
    Owner(Guest),
    Complete,
    Fenced,
    Over,
}

/// What is known of the guest at an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    Reaching,
    Starting,
    Running,
}

/// The target's state machine.
pub struct Target {
    plan: TargetPlan,
    stage: Stage,
    link_up: bool,
    /// The source has said in this session how far it is.
    opened: bool,
    /// It is recorded that frames may have arrived.
    touched: bool,
    epoch: Epoch,
    attempt: Attempt,
    /// Blocks received in this life or recorded as durable in an earlier one.
    have: Vec<BlockSet>,
    /// Those of them that no durable record names yet.
    unsaved: Vec<BlockSet>,
    /// The data sync under way for a checkpoint, and what it covers.
    saving: Option<(u64, Vec<BlockSet>)>,
    saved_at: Time,
    next_sync: u64,
    acknowledged: Vec<u64>,
    /// Blocks missing as of the agreed map, for a restart that must expose them again.
    agreed: Vec<ImageHandover>,
    /// Per image: its file holds what nobody knows, and the source may take it for what it was: Backfill alone mends
    /// that.
    spoiled: Vec<bool>,
    /// Per image: a sync of its file has failed. What the file shows may not be on the disk.
    lossy: Vec<bool>,
    /// The handover that is being prepared shall leave Backfill to the operator.
    deferred: bool,
    /// Parts of all maps that were promised: the journal keeps them, also of attempts that came to nothing.
    promised_parts: u64,
    backfill: Backfill,
    now: Time,
}

impl Target {
    /// A target that was just prepared and has nothing.
    pub fn new(plan: TargetPlan) -> Self {
        let none = vec![BlockSet::new(); plan.images.len()];
        Self {
            stage: Stage::Receiving,
            link_up: false,
            opened: false,
            touched: false,
            epoch: Epoch(0),
            attempt: Attempt(0),
            have: none.clone(),
            unsaved: none,
            saving: None,
            saved_at: Time(0),
            next_sync: 1,
            acknowledged: Vec::new(),
            agreed: Vec::new(),
            spoiled: vec![false; plan.images.len()],
            lossy: vec![false; plan.images.len()],
            deferred: false,
            promised_parts: 0,
            backfill: Backfill::new(plan.images.len(), Window::new(BACKFILL_WINDOW)),
            now: Time(0),
            plan,
        }
    }

    /// A target after a restart, from the records that were durable.
    pub fn recover(plan: TargetPlan, records: &[TargetRecord]) -> Self {
        let mut target = Self::new(plan);
        for record in records {
            target.replay(record);
        }
        target
    }

    fn replay(&mut self, record: &TargetRecord) {
        match record {
            TargetRecord::Touched => {
                self.touched = true;
                self.plan.zeroed.fill(false);
            }
            TargetRecord::Lost { image, blocks } => {
                if let Some(have) = self.have.get_mut(image.ix()) {
                    have.subtract(blocks);
                }
                self.doubt(*image);
            }
            TargetRecord::Received { image, blocks } => {
                if let Some(have) = self.have.get_mut(image.ix()) {
                    have.union_with(blocks);
                    // Nothing is recorded as received between a loss and the new beginning.
                    self.lossy[image.ix()] = false;
                }
            }
            TargetRecord::Distrusted { image } => self.distrust(*image),
            TargetRecord::Prepared { attempt, map_hash, images, epoch } => {
                self.attempt = *attempt;
                self.epoch = *epoch;
                self.promised_parts += parts(images);
                self.stage = Stage::Prepared {
                    attempt: *attempt,
                    map_hash: *map_hash,
                    images: images.clone(),
                };
            }
            TargetRecord::Void { .. } => {
                self.stage = Stage::Receiving;
                self.backfill.paused = false;
            }
            TargetRecord::BackfillPaused { paused } => self.backfill.paused = *paused,
            TargetRecord::Committed(handed_over) => {
                if let Stage::Prepared { images, .. } = &self.stage {
                    self.agreed = images.clone();
                    self.backfill.begin(images);
                }
                self.epoch = handed_over.epoch;
                self.attempt = handed_over.attempt;
                self.stage = Stage::Owner(Guest::Reaching);
            }
            TargetRecord::GuestStarting => self.stage = Stage::Owner(Guest::Starting),
            TargetRecord::GuestStarted => self.stage = Stage::Owner(Guest::Running),
            TargetRecord::Fenced => self.stage = Stage::Fenced,
            TargetRecord::Complete => self.stage = Stage::Complete,
            TargetRecord::Discarded => self.stage = Stage::Over,
        }
    }

    /// Nothing of an image is here. A promise stays what was agreed, by its hash: all that this adds is that this side
    /// fetches the whole image. Without a promise the shell has made the file zeros, as it was when the source first
    /// heard of it.
    fn distrust(&mut self, image: ImageIndex) {
        let promised = matches!(self.stage, Stage::Prepared { .. });
        if let Some(have) = self.have.get_mut(image.ix()) {
            *have = BlockSet::new();
            self.plan.zeroed[image.ix()] = false;
            self.spoiled[image.ix()] = promised;
        }
        if let Stage::Prepared { images, .. } = &mut self.stage
            && let Some(image) = images.get_mut(image.ix())
        {
            image.missing = [BlockRange::whole(image.len)].into_iter().collect();
        }
    }

    /// Takes one event and appends what must be done.
    pub fn step(&mut self, now: Time, event: TargetEvent, out: &mut Vec<TargetEffect>) {
        self.now = now;
        match event {
            TargetEvent::Start => self.start(out),
            TargetEvent::LinkUp => {
                self.link_down();
                self.link_up = true;
                self.backfill.new_route();
            }
            TargetEvent::LinkDown => self.link_down(),
            TargetEvent::Message(message) => self.message(message, out),
            TargetEvent::RunArrived { tag, image, range, arrival } => {
                self.run_arrived(tag, image, range, arrival, out);
            }
            TargetEvent::Demand { image, runs } => self.demand(image, &runs, out),
            TargetEvent::NextMissing { image, run } => self.next_missing(image, run, out),
            TargetEvent::ImagesSynced { id, result } => self.images_synced(id, result, out),
            TargetEvent::Checkpointed { id, result } => self.checkpointed(id, result, out),
            TargetEvent::ChangeWaits => self.change_waits(out),
            TargetEvent::GuestReachable(result) => self.guest_reachable(result, out),
            TargetEvent::GuestStarted(result) => self.guest_started(result, out),
            TargetEvent::Tick => self.tick(out),
            TargetEvent::Idle => self.acknowledge(out),
            TargetEvent::BackfillControl(control) => self.control(control, out),
            TargetEvent::Schedule { image, backfill } => self.order(image, &backfill),
        }
    }

    /// Whether the shell should demand the blocks around those that a guest waits for as well: where
    /// blocks move in an order of their own, not in address order as such, and while few demands are
    /// under way.
    pub fn widens(&self) -> bool {
        self.backfill.has_room_around()
    }

    fn start(&mut self, out: &mut Vec<TargetEffect>) {
        match self.stage {
            Stage::Owner(guest) => {
                out.push(TargetEffect::Expose { images: self.agreed.clone() });
                if guest != Guest::Reaching {
                    out.push(TargetEffect::LetChange);
                }
                match guest {
                    Guest::Reaching => out.push(TargetEffect::ReachGuest),
                    Guest::Starting => out.push(TargetEffect::StartGuest),
                    Guest::Running => {}
                }
            }
            Stage::Complete => out.push(TargetEffect::Finish),
            // Done again: the records may be all that there was time for.
            Stage::Fenced => out.push(TargetEffect::Withdraw),
            Stage::Over => {
                out.push(TargetEffect::Discard);
                out.push(TargetEffect::Notice(TargetNotice::Abandoned { discarded: true }));
            }
            _ => {}
        }
    }

    fn message(&mut self, message: Envelope<ToTarget>, out: &mut Vec<TargetEffect>) {
        // A lower epoch is a voice from before the last handover (I1).
        if message.epoch < self.epoch {
            return;
        }
        match message.body {
            ToTarget::Open(open) => self.open(message.epoch, open, out),
            ToTarget::Prepare { images, map_hash } => {
                self.prepare(message.attempt, images, map_hash, out);
            }
            ToTarget::Commit(handed_over) => self.commit(handed_over, out),
            ToTarget::Void => self.void_attempt(message.attempt, out),
            ToTarget::Abandon { discard } => self.abandoned(discard, out),
            ToTarget::Unreadable { tag, why } => self.unreadable(tag, why, out),
            ToTarget::Order { image, ranges } => self.order(image, &ranges.into_iter().collect()),
            ToTarget::Describes { together, link_rate, in_place } => {
                self.describes(together, link_rate, &in_place, out);
            }
            ToTarget::Jumps { nanos } => self.backfill.follow.jump_takes(nanos),
            ToTarget::Defer => self.deferred |= self.stage == Stage::Receiving,
            // The shell answers these; they do not change the state of the migration.
            ToTarget::Peeked { .. }
            | ToTarget::Hashed { .. }
            | ToTarget::Vm(_)
            | ToTarget::Ping => {}
        }
    }

    fn open(&mut self, epoch: Epoch, open: Open, out: &mut Vec<TargetEffect>) {
        if let Some(why) = self.mismatch_with(&open) {
            return self.refuse(epoch, why, out);
        }
        if epoch.0 > MOST_HANDOVERS {
            let why = "its epoch is higher than any image's can be; `dray images remove` and `dray images add` at its \
                       source make it another image";
            return self.refuse(epoch, why.to_owned(), out);
        }
        if self.stage == Stage::Over {
            let why = "what was prepared at the target was removed; prepare again".to_owned();
            return self.refuse(epoch, why, out);
        }
        self.opened = true;
        if !std::mem::replace(&mut self.touched, true) {
            out.push(TargetEffect::Journal(vec![TargetRecord::Touched]));
        }
        if open.handed_over.is_none() && !self.owns() && self.stage != Stage::Fenced {
            // The source's word: nothing that was promised here was taken up.
            self.epoch = epoch;
            self.void(out);
        }
        if self.spoiled.contains(&true) && self.stage == Stage::Receiving {
            let why = "another program has changed what the target had received; prepare again"
                .to_owned();
            return self.refuse(epoch, why, out);
        }
        if self.has_lost_what_it_began_with() {
            let why = "writes to the copy that the image began with were lost at the target; give \
                       `dray cancel --discard` at the target, then migrate again";
            return self.refuse(epoch, why.to_owned(), out);
        }
        self.begin_anew(out);
        let state = match &self.stage {
            Stage::Receiving | Stage::Preparing { .. } | Stage::Over => TargetState::Receiving,
            Stage::Prepared { attempt, map_hash, .. } => {
                TargetState::Prepared { attempt: *attempt, map_hash: *map_hash }
            }
            Stage::Owner(_) => TargetState::Owner,
            Stage::Complete => TargetState::Complete,
            Stage::Fenced => TargetState::Fenced,
        };
        let images = if state == TargetState::Receiving { self.offer() } else { Vec::new() };
        self.send(ToSource::Opened { state, images }, out);
        self.refetch(out);
    }

    /// Says no in the epoch of the one who asked: nothing of it is taken over here.
    fn refuse(&self, epoch: Epoch, why: String, out: &mut Vec<TargetEffect>) {
        if self.link_up {
            let what = "the target refuses the migration";
            let body = ToSource::Failed(Refusal::new(ErrorKind::Conflict, what, why));
            out.push(TargetEffect::Send(Envelope { epoch, attempt: self.attempt, body }));
        }
    }

    fn mismatch_with(&self, open: &Open) -> Option<String> {
        if open.migration != self.plan.migration || open.images.len() != self.plan.images.len() {
            return Some("the migration was prepared with other images".into());
        }
        let differs = |(ours, theirs): &(&ImageOffer, &ImageOffer)| {
            ours.id != theirs.id || ours.len != theirs.len || ours.read_only != theirs.read_only
        };
        let (ours, theirs) = self.plan.images.iter().zip(&open.images).find(differs)?;
        Some(format!(
            "image '{}' was prepared with {} bytes and is now offered with {}; prepare again",
            ours.name, ours.len, theirs.len
        ))
    }

    fn commit(&mut self, handed_over: HandedOver, out: &mut Vec<TargetEffect>) {
        if handed_over.epoch.0 > 2 * MOST_HANDOVERS {
            return;
        }
        match &self.stage {
            Stage::Prepared { attempt, map_hash, images }
                if *attempt == handed_over.attempt && *map_hash == handed_over.map_hash =>
            {
                self.agreed = images.clone();
                self.backfill.begin(images);
            }
            Stage::Owner(_) | Stage::Complete => return self.send(ToSource::Serving, out),
            _ => return,
        }
        self.epoch = handed_over.epoch;
        self.attempt = handed_over.attempt;
        self.stage = Stage::Owner(Guest::Reaching);
        out.push(TargetEffect::Journal(vec![TargetRecord::Committed(handed_over)]));
        out.push(TargetEffect::Expose { images: self.agreed.clone() });
        self.send(ToSource::Serving, out);
        out.push(TargetEffect::Notice(TargetNotice::Serving));
        out.push(TargetEffect::ReachGuest);
    }

    /// From here on the images do not go back (I5): durable before the first change.
    fn begin_start(&mut self, out: &mut Vec<TargetEffect>) {
        self.stage = Stage::Owner(Guest::Starting);
        out.push(TargetEffect::Journal(vec![TargetRecord::GuestStarting]));
        out.push(TargetEffect::LetChange);
    }

    fn change_waits(&mut self, out: &mut Vec<TargetEffect>) {
        if self.stage == Stage::Owner(Guest::Reaching) {
            self.begin_start(out);
        }
    }

    fn guest_reachable(&mut self, result: Result<(), Why>, out: &mut Vec<TargetEffect>) {
        match (&self.stage, result) {
            (Stage::Owner(Guest::Reaching), Ok(())) => {
                self.begin_start(out);
                out.push(TargetEffect::StartGuest);
            }
            // Something has changed the images here meanwhile.
            (Stage::Owner(Guest::Starting), Ok(())) => out.push(TargetEffect::StartGuest),
            (Stage::Owner(Guest::Starting), Err(why)) => self.guest_started(Err(why), out),
            (Stage::Owner(Guest::Reaching), Err(why)) => {
                // Nothing was changed here, so the images may go back (I5): durable first, then said.
                self.stage = Stage::Fenced;
                out.push(TargetEffect::Journal(vec![TargetRecord::Fenced]));
                out.push(TargetEffect::Withdraw);
                self.send(ToSource::HandBack, out);
                let why = why.to_string();
                out.push(TargetEffect::Notice(TargetNotice::HandedBack { why }));
            }
            _ => {}
        }
    }

    fn guest_started(&mut self, result: Result<(), Why>, out: &mut Vec<TargetEffect>) {
        if self.stage != Stage::Owner(Guest::Starting) {
            return;
        }
        self.stage = Stage::Owner(Guest::Running);
        match result {
            Ok(()) => {
                out.push(TargetEffect::Journal(vec![TargetRecord::GuestStarted]));
                out.push(TargetEffect::Notice(TargetNotice::GuestRunning));
            }
            Err(why) => {
                let why = why.to_string();
                out.push(TargetEffect::Notice(TargetNotice::GuestFailed { why }));
            }
        }
        out.push(TargetEffect::Notice(TargetNotice::Phase(Phase::Backfill)));
        self.close_when_done(out);
        self.fill_window(out);
    }

    fn abandoned(&mut self, discard: bool, out: &mut Vec<TargetEffect>) {
        if self.owns() || self.stage == Stage::Fenced {
            return;
        }
        self.void(out);
        if discard {
            self.stage = Stage::Over;
            out.push(TargetEffect::Journal(vec![TargetRecord::Discarded]));
            out.push(TargetEffect::Discard);
        }
        out.push(TargetEffect::Notice(TargetNotice::Abandoned { discarded: discard }));
    }

    fn link_down(&mut self) {
        self.link_up = false;
        self.opened = false;
        self.acknowledged.clear();
        self.backfill.forget_asking();
    }

    fn tick(&mut self, out: &mut Vec<TargetEffect>) {
        match self.stage {
            Stage::Receiving => self.save_progress(out),
            Stage::Owner(_) => self.tick_backfill(out),
            _ => {}
        }
    }

    fn send(&self, body: ToSource, out: &mut Vec<TargetEffect>) {
        if self.link_up {
            let envelope = Envelope { epoch: self.epoch, attempt: self.attempt, body };
            out.push(TargetEffect::Send(envelope));
        }
    }

    /// Whether guest writes may be accepted here (I1).
    pub fn owns(&self) -> bool {
        matches!(self.stage, Stage::Owner(_) | Stage::Complete)
    }

    /// True when every block is here.
    pub fn is_complete(&self) -> bool {
        self.stage == Stage::Complete
    }

    /// Whether its source has ever said how far it is; it is only prepared until then.
    pub fn has_begun(&self) -> bool {
        self.touched
    }

    /// Whether the images were handed back: nothing was changed here, and the source may not know it yet.
    pub fn has_handed_back(&self) -> bool {
        self.stage == Stage::Fenced
    }

    /// True when nothing is left to do here.
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Complete | Stage::Over | Stage::Fenced)
    }

    /// Whether the guest was (about to be) started here.
    pub fn guest_started_here(&self) -> bool {
        matches!(self.stage, Stage::Owner(Guest::Starting | Guest::Running) | Stage::Complete)
    }

    /// The attempt this side knows of; at an owner the one that succeeded.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// The epoch this side knows of.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The phase to show.
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Receiving => Phase::Copy,
            Stage::Preparing { .. } | Stage::Prepared { .. } => Phase::Handover,
            Stage::Owner(_) => Phase::Backfill,
            Stage::Complete | Stage::Fenced | Stage::Over => Phase::Release,
        }
    }

    /// Progress to show.
    pub fn status(&self) -> TargetStatus {
        TargetStatus {
            received: self.have.iter().map(BlockSet::len).collect(),
            fetching: self.backfill.in_flight(),
            rate: self.backfill.rate(),
            demands: self.backfill.demands(),
            paused: self.backfill.paused,
            blocks_fetched: self.backfill.blocks_fetched,
            blocks_refetched: self.backfill.blocks_refetched,
            blocks_found: self.backfill.asking.found.clone(),
            link_up: self.link_up,
        }
    }
}
