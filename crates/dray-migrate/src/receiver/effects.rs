//! Running the target engine's effects: each is done, or well under way, before the next begins.

use super::alone::BACK;
use super::owed::Owed;
use super::{TargetLoop, ToTask};
use crate::log::Step;
use crate::messages::ToSourceShell;
use dray_api::{ErrorKind, MigrationState, Phase, Refusal};
use dray_engine::receiver::TargetNotice;
use dray_engine::{TargetEffect, TargetEvent};
use dray_host::abort;
use dray_host::folder::intent::written_by_guest;
use dray_wire::{Envelope, ToSource};
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;

/// What the board says while something fails that is tried again.
const FAILED: &str = "migration failed";

impl TargetLoop {
    /// Carries one effect out.
    ///
    /// # Errors
    /// When it has to be tried again: it may have been done in part.
    pub(super) fn try_effect(&mut self, effect: &TargetEffect) -> io::Result<()> {
        match effect {
            TargetEffect::Send(envelope) => self.send(envelope),
            TargetEffect::Journal(records) => self.journal(records)?,
            TargetEffect::SyncImages { id } => self.images.sync(*id),
            TargetEffect::BeginAnew { image } => self.images.begin_anew(*image)?,
            TargetEffect::Expose { images } => {
                self.images.expose(&self.slot, images, self.engine.attempt())?;
                self.slot.exposed.store(true, Ordering::SeqCst);
                self.slot.sink.fill(self.engine.epoch());
                // Before anybody can see that this host owns them.
                self.refresh();
                self.write_records();
            }
            TargetEffect::LetChange => self.images.let_change(),
            TargetEffect::Withdraw => {
                self.slot.exposed.store(false, Ordering::SeqCst);
                self.vm_goes_back();
                self.images.begin_incoming(&self.slot);
                // What waits for ownership waits for nothing.
                self.images.fail_stalled();
                self.write_records();
            }
            TargetEffect::ReachGuest => {
                self.ask_guest(ToTask::Reach, TargetEvent::GuestReachable(Ok(())));
            }
            TargetEffect::StartGuest => {
                self.ask_guest(ToTask::Start, TargetEvent::GuestStarted(Ok(())));
            }
            TargetEffect::AskMissing { image, range, max } => {
                let run = self.images.next_missing(*image, *range, *max);
                self.answers.push_back(TargetEvent::NextMissing { image: *image, run });
            }
            TargetEffect::Checkpoint { id } => self.images.checkpoint(*id),
            TargetEffect::Finish => self.images.finish()?,
            TargetEffect::Discard => {
                self.slot.sink.close();
                self.vm_does_not_come();
                self.images.discard()?;
            }
            TargetEffect::Notice(notice) => self.notice(notice.clone()),
        }
        Ok(())
    }

    /// The images go back without the QEMU that has the guest's memory. It may go on when they are claimed here.
    fn vm_goes_back(&self) {
        let intent = self.slot.intent();
        let Some(qemu) = &intent.qemu else { return };
        let names = written_by_guest(&intent.images);
        self.parts.registry.vm_leaves(intent.migration, &names, qemu);
    }

    /// The QEMU that waits has nothing to do with the images any more. It may have the guest's memory.
    fn vm_does_not_come(&self) {
        if let Some(qemu) = &self.slot.intent().qemu {
            self.parts.registry.vm_does_not_come(qemu);
        }
    }

    /// Whoever looks after the VM answers; without a VM that is said at once.
    fn ask_guest(&mut self, told: ToTask, answer: TargetEvent) {
        match self.slot.intent().guest {
            Some(_) => self.tell(told),
            None => self.answers.push_back(answer),
        }
    }

    fn send(&self, envelope: &Envelope<ToSource>) {
        if matches!(envelope.body, ToSource::Opened { .. }) {
            self.taken_up();
        }
        if let Some(session) = &self.session
            && session.may_say(&envelope.body)
        {
            // A link that is down reports itself, and the source then opens anew.
            let _ = session.control.send(envelope);
        }
    }

    fn notice(&mut self, notice: TargetNotice) {
        // Without a VM there is no guest that could have been started.
        if self.slot.intent().guest.is_some() || notice != TargetNotice::GuestRunning {
            Step::from(&notice).log(&self.slot.board);
        }
        match &notice {
            TargetNotice::GuestRunning => self.say(&ToSourceShell::GuestRunning),
            TargetNotice::GuestFailed { why } => {
                self.say(&ToSourceShell::GuestFailed(why.clone()));
                self.fail(ErrorKind::Hypervisor, "cannot start the guest at the target", why);
            }
            TargetNotice::HandedBack { why } => {
                let back = Refusal::new(ErrorKind::Hypervisor, BACK, why);
                let back = back.hint(self.until_taken());
                self.slot.board.change(|shown| shown.error = Some(back));
            }
            TargetNotice::Failed { why } => self.fail(ErrorKind::Io, FAILED, why),
            TargetNotice::Unreadable { why, .. } | TargetNotice::Refused { why } => {
                self.slot.board.notice(why.clone());
            }
            TargetNotice::Abandoned { discarded } => self.abandoned(*discarded),
            TargetNotice::Complete => {
                // What failed on the way was tried again, and has not failed after all.
                self.slot.board.change(|shown| {
                    shown.error.take_if(|error| error.what == FAILED);
                });
                self.complete();
            }
            TargetNotice::Phase(_) => self.refresh(),
            TargetNotice::Serving => {}
        }
        self.tell(ToTask::Notice(notice));
    }

    fn fail(&self, kind: ErrorKind, what: &str, why: &str) {
        let error = Refusal::new(kind, what, why);
        self.slot.board.change(|shown| shown.error = Some(error));
    }

    fn abandoned(&mut self, discarded: bool) {
        let state = if discarded { MigrationState::Cancelled } else { MigrationState::Interrupted };
        self.slot.board.change(|shown| {
            shown.state = state;
            shown.waiting_since = None;
        });
        if discarded {
            self.slot.board.change(|shown| shown.progress.phase = Phase::Ended);
            self.owed = Owed::default();
            self.remove_folder();
            self.slot.send(super::Input::Stop);
        }
    }

    /// The source has come back to what it had abandoned.
    fn taken_up(&self) {
        let waits = [MigrationState::Interrupted, MigrationState::Prepared];
        if waits.contains(&self.slot.board.read().state) {
            self.slot.board.change(|shown| {
                shown.state = MigrationState::Running;
                shown.waiting_since = None;
            });
        }
    }

    fn complete(&mut self) {
        self.owed.last_words = false;
        if !self.images.any_bound() {
            // All was done before, and the images may take part in something else by now.
            self.slot.send(super::Input::Finished { given: BTreeSet::new() });
        } else if self.slot.intent().settings.verify {
            self.start_verification();
        } else {
            self.say_progress();
            self.release();
        }
    }

    /// QEMU takes its disks back now, if it is to. Each image stays locked until it is its turn.
    pub(super) fn release(&mut self) {
        self.releasing = true;
        self.tell(ToTask::Release);
    }

    /// After a new session of a complete migration: its last words may have been lost.
    pub(super) fn opened_again(&mut self) {
        // Not before the record that says so is durable, and the files have their names.
        self.owed.last_words = !self.held.is_empty();
        if self.engine.is_complete() && self.held.is_empty() && !self.verifying() {
            self.complete();
        }
    }

    /// The target's part is over. True when the loop may end.
    pub(super) fn finished(&mut self) -> bool {
        self.say_progress();
        let complete = self.engine.is_complete();
        if complete {
            self.let_go();
            if self.held.is_empty() && self.owed.is_nothing() {
                self.mended();
            }
            self.show_completed();
        }
        self.slot.board.change(|shown| shown.progress.phase = Phase::Ended);
        // Last: who hears of the end at the source finds it so here.
        self.say(&ToSourceShell::Finished);
        // A source that missed the last words asks again; the loop stays to answer it.
        !complete
    }

    pub(super) fn show_completed(&self) {
        self.slot.board.change(|shown| {
            shown.progress.complete();
            shown.state = MigrationState::Completed;
        });
    }

    /// The source needs nothing more: the migration's folder goes.
    pub(super) fn part(&mut self) {
        if self.engine.is_complete() && self.remove_folder() {
            self.slot.send(super::Input::Stop);
        }
    }

    /// Forgets a migration whose source says that it is not wanted (it never began, or it failed, or
    /// its images were taken back), or which nobody can want. True when the loop may end.
    pub(super) fn forget(&mut self) -> bool {
        if self.engine.owns() {
            return false;
        }
        let records = [dray_engine::TargetRecord::Discarded];
        if let Err(why) = self.log.append(&records) {
            // Whoever asked asks again.
            self.cannot("forget the migration", &why);
            return false;
        }
        self.held.clear();
        self.held.push(TargetEffect::Discard);
        let gone = TargetNotice::Abandoned { discarded: true };
        self.held.push(TargetEffect::Notice(gone));
        self.run_effects();
        // What cannot be removed yet is tried again.
        self.held.is_empty()
    }
}

/// What crash tests call an effect; records that are written together are one.
pub(super) fn names(effect: &TargetEffect) -> Vec<String> {
    match effect {
        TargetEffect::Send(envelope) => vec![format!("Send-{}", abort::variant(&envelope.body))],
        TargetEffect::Journal(records) => {
            records.iter().map(|record| format!("Journal-{}", abort::variant(record))).collect()
        }
        TargetEffect::Notice(notice) => vec![format!("Notice-{}", abort::variant(notice))],
        other => vec![abort::variant(other)],
    }
}
