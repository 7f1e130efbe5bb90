//! Running the source engine's effects: each is done, or well under way, before the next begins. What
//! cannot be done is in [`waiting`](super::waiting).

use super::counts::Mark;
use super::orders::Orders;
use super::waiting::Done;
use super::{Input, SourceLoop, ToTask};
use crate::io_kind;
use crate::lines;
use crate::log::Step;
use crate::messages::ToTargetShell;
use crate::shown::{once_more, shown_phase};
use dray_api::{ErrorKind, MigrationState, Refusal};
use dray_engine::source::SourceNotice;
use dray_engine::{
    MILLISECOND, Phase, Source, SourceEffect, SourceEvent, SourcePlan, SourceRecord,
};
use dray_host::abort;
use dray_host::folder::intent::{Options, SourceIntent};
use dray_host::registry::NotTaken;
use dray_net::{SendJob, SendKind};
use dray_types::{BlockRange, Choice, Epoch, ImageIndex};
use dray_wire::{Envelope, ToTarget};
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl SourceLoop {
    pub(super) fn run_effect(&mut self, effect: &SourceEffect) -> Done {
        let inputs = self.slot.inputs.clone();
        match effect {
            SourceEffect::Send(envelope) => self.send_to_target(envelope),
            SourceEffect::Journal(record) => return self.record(record),
            SourceEffect::StartTracking => return self.images.start_tracking().into(),
            SourceEffect::StopTracking => self.images.stop_tracking(),
            SourceEffect::Scan { image } => return self.images.scan(*image, inputs).into(),
            &SourceEffect::SendRun { tag, image, range, urgent, clear_dirty } => {
                if clear_dirty && let Some(disk) = self.images.disk(image) {
                    disk.clear_dirty(range);
                }
                self.push(tag, image, range, urgent, SendKind::Run);
            }
            &SourceEffect::Describe { tag, image, range } => {
                let keep = self.engine.as_ref().is_some_and(Source::owns);
                if keep && let Some(disk) = self.images.disk(image) {
                    disk.clear_dirty(range);
                }
                self.push(tag, image, range, false, SendKind::Described { keep });
            }
            &SourceEffect::SendKept { tag, of, image, range } => {
                self.push(tag, image, range, false, SendKind::Kept(of));
            }
            &SourceEffect::DescribeBlocks { tag, of, image, range } => {
                let of = self.engine.as_ref().is_some_and(Source::owns).then_some(of);
                self.push(tag, image, range, false, SendKind::DescribedBlocks(of));
            }
            &SourceEffect::SendPart { tag, of, image, range, blocks } => {
                self.push(tag, image, range, false, SendKind::Part { of, blocks });
            }
            &SourceEffect::SendZero { tag, image, range } => {
                self.push(tag, image, range, false, SendKind::Zero);
            }
            &SourceEffect::TakeDirty { image } => {
                let blocks = self.images.take_dirty(image);
                self.report.dirtied(blocks.len());
                self.answers.push_back(SourceEvent::DirtyTaken { image, blocks });
            }
            SourceEffect::PutBack { image, blocks } => {
                if let Some(disk) = self.images.disk(*image) {
                    blocks.runs().for_each(|run| disk.mark_dirty(run));
                }
            }
            SourceEffect::Quiesce => {
                self.report.mark(Mark::Begin);
                self.images.quiesce(self.parts.quiesce_timeout, &inputs);
            }
            SourceEffect::Resume => self.open_again(),
            SourceEffect::SyncImages => self.images.sync(&inputs),
            SourceEffect::Retire => self.retire(),
            SourceEffect::Restore => return self.restore().into(),
            SourceEffect::Throttle { limit } => {
                tracing::debug!(migration = %self.slot.board.migration, ?limit, "throttle");
                self.brakes.set(*limit, self.images.disks().map(|(_, disk)| disk));
            }
            SourceEffect::Notice(notice) => return self.notice(notice).into(),
        }
        Done::Next
    }

    fn send_to_target(&mut self, envelope: &Envelope<ToTarget>) {
        self.report.sending(&envelope.body);
        if matches!(envelope.body, ToTarget::Prepare { .. }) {
            let closed = lines::to_send(self.images.closed_lines(&self.parts.host));
            self.say(&ToTargetShell::Lines { attempt: envelope.attempt, closed });
        }
        if let Some(session) = &self.session
            && session.may_say(&envelope.body)
        {
            // A link that is down reports itself, and the engine then asks again.
            let _ = session.control.send(envelope);
        }
    }

    /// Nothing passes any more, of any image: this side may not own them from here on. Cannot fail.
    pub(super) fn close(&mut self) {
        self.slot.owns.store(false, Ordering::SeqCst);
        self.images.park();
    }

    /// The guest goes on here.
    fn open_again(&mut self) {
        if self.engine.as_ref().is_some_and(Source::owns) {
            if !self.slot.owns.swap(true, Ordering::SeqCst) {
                self.images.unpark();
            }
            self.guards.clear();
        }
    }

    /// The images are owned here again.
    fn restore(&mut self) -> io::Result<()> {
        // What has half of a name is not found under either.
        self.retire_rest()?;
        self.images.restore(self.epoch())?;
        self.slot.owns.store(true, Ordering::SeqCst);
        self.guards.clear();
        Ok(())
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.engine.as_ref().map_or(Epoch(0), Source::epoch)
    }

    fn push(&self, tag: u64, image: ImageIndex, range: BlockRange, urgent: bool, kind: SendKind) {
        if let Some(session) = &self.session {
            let epoch = self.epoch();
            session.queue.push(SendJob { tag, image, range, epoch, urgent, kind });
        }
    }

    /// What a notice asks of the disk; can be repeated.
    fn settle(&mut self, notice: &SourceNotice) -> io::Result<()> {
        match notice {
            SourceNotice::Done => {
                self.retire_rest()?;
                self.images.let_go()
            }
            // Tracking and intents go on: a later try asks what has changed since.
            SourceNotice::Abandoned { .. } => self.images.unbind(),
            _ => Ok(()),
        }
    }

    fn notice(&mut self, notice: &SourceNotice) -> io::Result<()> {
        self.settle(notice)?;
        Step::from(notice).log(&self.slot.board);
        self.report.notice(notice);
        if matches!(notice, SourceNotice::Verified { .. }) && self.images.is_one_gone() {
            self.report.cannot_compare();
        }
        match notice {
            SourceNotice::Ready => self.orders.make_due(),
            SourceNotice::Done => self.resumable = false,
            SourceNotice::TakenBack => {
                self.resumable = false;
                self.report.taken_back();
                self.images.guest_stops(false);
                self.part();
            }
            SourceNotice::Abandoned { why } => {
                let cancelled = why.is_none() && self.failure.is_none();
                let error = match (self.failure.take(), why) {
                    (Some(error), _) => error,
                    (None, None) => Refusal::new(
                        ErrorKind::Cancelled,
                        "migration cancelled",
                        "the operator asked for it; the guest continues at the source",
                    ),
                    (None, Some(why)) => Refusal::new(why.kind, "migration failed", why.in_words())
                        .hint(once_more(self.slot.intent().vm.is_some())),
                };
                self.keep();
                // Who moves the VM may say so after this loop has ended.
                self.images.guest_stops(false);
                // Durable before anybody is told: a cancel that was answered outlives a restart.
                self.part();
                self.report.ended(cancelled, error);
            }
            SourceNotice::Broken { why } => {
                let error =
                    Refusal::new(ErrorKind::DataAtRisk, "the target contradicts itself", why).hint(
                        "this host has changed nothing; check both hosts, then see `dray claim`",
                    );
                self.slot.board.change(|shown| {
                    shown.state = MigrationState::Interrupted;
                    shown.error = Some(error);
                });
            }
            _ => {}
        }
        self.tell(ToTask::Notice(notice.clone()));
        Ok(())
    }

    /// Something outside of the engine failed: so does the whole.
    pub(super) fn fail(&mut self, error: Refusal) {
        self.failure = Some(error);
        let discard = !self.is_resumable();
        self.step(SourceEvent::Cancel { discard });
    }

    /// Whether a later try can use what the target received: what an adopted disk's file becomes
    /// once QEMU has it back is not known to anyone here.
    fn is_resumable(&self) -> bool {
        self.slot.intent().adopted.is_empty()
    }

    /// It was abandoned: what of it can be used again. A try after a discard is another migration: the
    /// target may hear of it before it has thrown away what it had of this one.
    fn keep(&mut self) {
        self.resumable = self.is_resumable() && !self.discarded;
        self.slot.kept.store(self.resumable, Ordering::SeqCst);
    }

    /// `migrate` or `resume` was asked for.
    pub(super) fn begin(&mut self) {
        if self.engine.as_ref().is_some_and(|engine| !engine.is_over()) {
            return;
        }
        if self.session.is_none() {
            self.link_lost = Some(self.clock.now());
        }
        self.report.begin();
        (self.engine, self.observed, self.discarded) = (None, false, false);
        let begun = (|| -> io::Result<()> {
            self.images.reopen(&self.slot.intent())?;
            if !self.history.is_empty() {
                self.log.append(&[SourceRecord::Resumed])?;
                self.history.push(SourceRecord::Resumed);
            }
            Ok(())
        })();
        if let Err(why) = begun {
            return self.not_begun(&why);
        }
        self.revive();
        if self.session.is_some() {
            self.say_settings();
            self.say_reuse();
            self.step(SourceEvent::LinkUp);
        }
    }

    /// It cannot be begun: it is over as it was before, and the guest goes on.
    pub(super) fn not_begun(&mut self, why: &io::Error) {
        let error = Refusal::new(io_kind(why), "migration failed", why)
            .hint(once_more(self.slot.intent().vm.is_some()));
        self.slot.board.change(|shown| shown.error = None);
        self.failure = Some(error);
        // Else a restart begins it. One that finds the disk as full as it is now may.
        let _ = self.log.append(&[SourceRecord::Abandoned]);
        self.run_effects([SourceEffect::Notice(SourceNotice::Abandoned { why: None })].into());
    }

    /// Whether the images are this migration's to send. Their records decide, whatever its journal says (I1).
    fn may_send(&self, intent: &SourceIntent) -> io::Result<()> {
        let registry = &self.parts.registry;
        registry.may_take(intent.migration, intent.epoch, &intent.wanted()).map_err(
            |why| match why {
                NotTaken::Refused { why, .. } => io::Error::other(why),
                NotTaken::Failed(why) => why,
            },
        )?;
        if self.images.are_bound() {
            return Ok(());
        }
        Err(io::Error::other(
            "one of its images is not part of it any more; give `dray migrate` again",
        ))
    }

    /// Makes the engine from the intent and what is durable, and starts it.
    pub(super) fn revive(&mut self) {
        let intent = self.slot.intent();
        let Some(options) = &intent.options else { return };
        if let Some(left) = self.still_to_observe(options) {
            let seconds = left.as_secs_f64();
            self.slot.board.notice(format!("counting the guest's accesses for {seconds:.1} s"));
            self.observing = Some(Instant::now() + left);
            self.measure_if_wanted();
            return;
        }
        let plan = self.source_plan(&intent, options);
        self.brakes.lift();
        self.mirror_if_wanted();
        self.slot.begin_limited();
        let engine = Source::recover(plan, &self.history);
        let owns = engine.owns();
        if owns
            && !engine.is_over()
            && let Err(why) = self.may_send(&intent)
        {
            return self.not_begun(&why);
        }
        if !owns {
            self.report.resumes(shown_phase(engine.phase()));
        }
        self.engine = Some(engine);
        if !owns {
            // Before anybody can reach them.
            self.close();
        }
        // A new engine knows no order.
        self.orders = Orders::default();
        self.images.heats().for_each(|(_, heat)| heat.try_now());
        if self.is_over() && self.tell_end() {
            return;
        }
        self.step(SourceEvent::Start);
        self.tell_orders();
    }

    /// What the engine is made of: what was asked for, and what is measured and expected by now.
    fn source_plan(&mut self, intent: &SourceIntent, options: &Options) -> SourcePlan {
        let tuning = match options.strategy.traits().choice {
            Choice::Planned => self.auto(options),
            Choice::All | Choice::Hot => {
                self.predict(options);
                self.tuning(options)
            }
        };
        let tuning = self.with_reuse(tuning, options);
        self.begin_pacing();
        SourcePlan {
            migration: intent.migration,
            images: intent.images.iter().map(|image| image.offer.clone()).collect(),
            strategy: options.strategy.into(),
            epoch: intent.epoch,
            max_downtime: options.max_downtime_ms * MILLISECOND,
            handover_timeout: self.parts.handover_timeout.as_nanos() as u64,
            suspect: self.images.suspects(self.history.contains(&SourceRecord::Abandoned)),
            tuning,
        }
    }

    /// Tells how a migration has ended that was over before the restart; false when that is left to the engine.
    fn tell_end(&mut self) -> bool {
        if self.is_done() {
            // The restart came between the last record and the last word to the target, and perhaps
            // before all files were replicas: one that is not must not become free.
            self.retire();
            let notices = [SourceNotice::Phase(Phase::Release), SourceNotice::Done];
            self.run_effects(notices.map(SourceEffect::Notice).into());
            return true;
        }
        if self.history.last() != Some(&SourceRecord::Abandoned) {
            return false;
        }
        let (what, why) =
            ("the migration was abandoned", "it had ended before the agent was restarted");
        let why = Some(Refusal::new(ErrorKind::Conflict, what, why));
        let ended = SourceNotice::Abandoned { why };
        self.run_effects([SourceEffect::Notice(ended)].into());
        true
    }
}

/// What crash tests call an effect.
pub(super) fn names(effect: &SourceEffect) -> Vec<String> {
    vec![match effect {
        SourceEffect::Send(envelope) => format!("Send-{}", abort::variant(&envelope.body)),
        SourceEffect::Journal(record) => format!("Journal-{}", abort::variant(record)),
        SourceEffect::Notice(notice) => format!("Notice-{}", abort::variant(notice)),
        other => abort::variant(other),
    }]
}

/// Ending the loop from inside.
impl SourceLoop {
    /// Whether the migration needs no session any more.
    pub(super) fn is_over(&self) -> bool {
        self.engine.as_ref().is_some_and(Source::is_over)
    }

    /// Whether the target has everything.
    pub(super) fn is_done(&self) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.is_over() && !engine.owns())
    }

    /// The target's part is over, verification too: the replica goes if the operator wants that.
    pub(super) fn finish(&self) -> io::Result<()> {
        let wanted = self.slot.intent().options.is_some_and(|options| options.remove_replica);
        match wanted && !self.report.differs() {
            true => self.images.remove_replicas(self.epoch()),
            false => Ok(()),
        }
    }

    /// Its target may be away: what is left tells it.
    fn cancelled(&self) {
        if let Err(why) = self.slot.set_cancelled() {
            // It stays as one that was given up.
            tracing::warn!(migration = %self.slot.board.migration, %why, "cannot note that it is over");
        }
    }

    /// Everything was said: the session ends in order, the loop ends, and unless the migration can
    /// be taken up again its folder goes, or what its target has to hear is left of it. While the guest
    /// of a VM may have to be seen to here, that is left to who does it.
    pub(super) fn part(&mut self) {
        if let Some(session) = &mut self.session {
            session.orderly = true;
        }
        let stays = !self.is_done() && self.slot.intent().vm.is_some();
        if !self.resumable && self.is_done() {
            self.slot.forget();
        } else if !self.resumable && !stays {
            self.cancelled();
        }
        self.slot.send(Input::Stop);
    }
}
