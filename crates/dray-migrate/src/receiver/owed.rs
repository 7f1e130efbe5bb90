//! Failed writes of records, which the loop repeats every second until they succeed: the machine's
//! effects in their order ([`Held`](dray_engine::receiver::Held)), and beside them what no order
//! needs, such as the records of images, which follow the journal while the migration is open.

use super::TargetLoop;
use dray_api::{ErrorKind, Refusal};
use dray_engine::{TargetRecord, Time};
use dray_host::abort;
use dray_host::folder::log::End;
use std::io;
use std::time::Duration;

/// Time between two tries.
const RETRY: Duration = Duration::from_secs(1);

/// What waits to be written.
#[derive(Default)]
pub struct Owed {
    /// The settings of the intent.
    settings: bool,
    /// What the images' records say of who owns them.
    records: bool,
    /// The migration is over for its images.
    let_go: bool,
    /// What was said when all blocks had come, which the source may have missed: not before what is held is done.
    pub(super) last_words: bool,
    /// The source needs nothing more: the folder goes when nothing else is owed.
    parting: bool,
    tried: Option<Time>,
    /// What the board shows because of it.
    shown: Option<Refusal>,
}

impl Owed {
    pub(super) fn is_nothing(&self) -> bool {
        !(self.settings || self.records || self.let_go)
    }
}

impl TargetLoop {
    /// Carries out what the machine wants, in order, as far as that goes.
    pub(super) fn run_effects(&mut self) {
        while let Some(effect) = self.held.take() {
            abort::before(|| super::effects::names(&effect));
            if let Err(why) = self.try_effect(&effect) {
                self.held.put_back(effect);
                self.owed.tried = Some(self.clock.now());
                self.cannot("continue at the target", &why);
            }
        }
    }

    /// Writes records. Where there is no room, those go that cost nothing but sending again.
    pub(super) fn journal(&mut self, records: &[TargetRecord]) -> io::Result<()> {
        let Err(why) = self.log.append(records) else { return Ok(()) };
        let needed: Vec<_> =
            records.iter().filter(|record| !record.may_be_left_out()).cloned().collect();
        if needed.len() == records.len() {
            return Err(why);
        }
        tracing::debug!(migration = %self.slot.board.migration, %why, "cannot record progress");
        self.log.append(&needed)
    }

    /// The records of the images say what the machine knows, now or later: the journal is the truth.
    pub(super) fn write_records(&mut self) {
        let owner = self.engine.owns().then(|| self.engine.epoch());
        let written = self.images.write_records(owner);
        self.owed.records = written.is_err();
        self.owe("write the records of its images", written);
    }

    /// The intent's settings are durable, now or later.
    pub(super) fn write_settings(&mut self) {
        let written = self.slot.keep_intent();
        self.owed.settings = written.is_err();
        self.owe("record the settings of the migration", written);
    }

    /// The images belong to no migration any more, now or later.
    pub(super) fn let_go(&mut self) {
        let vm = self.slot.intent().qemu;
        let done = self.images.let_go(self.released, &self.given, vm.as_ref());
        self.owed.let_go = done.is_err();
        self.owe("release its images from the migration", done);
    }

    /// The migration's folder goes, now or later. True when it is gone.
    pub(super) fn remove_folder(&mut self) -> bool {
        self.owed.parting = true;
        if !self.owed.is_nothing() {
            return false;
        }
        if let Err(why) = self.parts.folder.remove(End::Target) {
            tracing::warn!(%why, "cannot remove a migration's folder");
        }
        true
    }

    fn owe(&mut self, what: &str, result: io::Result<()>) {
        if let Err(why) = result {
            self.owed.tried.get_or_insert(self.clock.now());
            self.cannot(what, &why);
        }
    }

    /// Tells that something waits, once.
    pub(super) fn cannot(&mut self, what: &str, why: &io::Error) {
        let full = matches!(why.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let kind = if full { ErrorKind::NoSpace } else { ErrorKind::Io };
        let hint = "make room in the agent's state directory and in the pool, or remove the fault \
                    there: the agent tries again every second, and the guest continues meanwhile";
        let error = Refusal::new(kind, format!("cannot {what} yet"), why).hint(hint);
        if self.owed.shown.is_none() {
            tracing::warn!(migration = %self.slot.board.migration, what, %why, "waits at the target");
        }
        self.owed.shown = Some(error.clone());
        self.slot.board.change(|shown| shown.error = Some(error));
    }

    /// Tries again what could not be done. False when the loop may end.
    pub(super) fn try_again(&mut self) -> bool {
        let waits = self.held.is_stuck() || !self.owed.is_nothing();
        if !waits {
            self.owed.tried = None;
            self.mended();
            return !(self.owed.parting && self.remove_folder());
        }
        if self.owed.tried.is_some_and(|tried| self.clock.since(tried) < RETRY) {
            return true;
        }
        self.owed.tried = Some(self.clock.now());
        if self.held.is_stuck() {
            self.held.retry();
            self.settle();
            if self.owed.last_words && self.held.is_empty() {
                self.opened_again();
            }
        }
        if self.owed.settings {
            self.write_settings();
        }
        if self.owed.records {
            self.write_records();
        }
        if self.owed.let_go {
            self.let_go();
        }
        true
    }

    /// All is written: what was shown of it goes.
    pub(super) fn mended(&mut self) {
        let Some(error) = self.owed.shown.take() else { return };
        tracing::info!(migration = %self.slot.board.migration, "continues at the target");
        self.slot.board.change(|shown| {
            if shown.error.as_ref() == Some(&error) {
                shown.error = None;
            }
        });
    }
}
