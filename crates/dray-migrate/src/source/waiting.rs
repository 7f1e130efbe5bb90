//! Steps that the loop could not carry out yet, and repeats until they succeed.
//!
//! A step that waits for a record or for the file system keeps what is left of its effects, and the
//! loop decides nothing else meanwhile. What may be done later (the names of files after the handover,
//! the last words of a migration) is owed, and the loop goes on. Whatever waits is shown with what to
//! do, and goes on by itself when its cause is gone.

use super::{Input, SourceLoop};
use crate::io_kind;
use dray_api::{ErrorKind, Refusal};
use dray_engine::record::Unrecorded;
use dray_engine::{SourceEffect, SourceEvent, SourceRecord, Time};
use dray_host::abort;
use dray_host::folder::intents::Trouble;
use dray_types::Epoch;
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// Pause between tries.
const PAUSE: Duration = Duration::from_secs(1);

/// What is left to do; see the module.
#[derive(Default)]
pub struct Waiting {
    /// What is left of a step, the first of which cannot be done yet.
    effects: VecDeque<SourceEffect>,
    /// What has come in since.
    backlog: VecDeque<Input>,
    /// The epoch in which the files are replicas that do not have all their names yet.
    retire: Option<Epoch>,
    /// The target's part is over, and this side's last things are not done.
    finish: bool,
    /// When something was last tried.
    tried: Option<Time>,
    /// What is shown of it.
    shown: Option<Refusal>,
    /// What was said of the write intents.
    intents: Option<Trouble>,
}

/// What became of an effect.
pub enum Done {
    /// The next may follow.
    Next,
    /// The rest of the step is dropped, and the engine is told why.
    Ends(SourceEvent),
    /// It is tried again.
    Waits(io::Error),
}

impl From<io::Result<()>> for Done {
    fn from(result: io::Result<()>) -> Self {
        result.map_or_else(Self::Waits, |()| Self::Next)
    }
}

impl SourceLoop {
    /// Steps the engine and runs what it wants, until it wants nothing more or has to wait.
    pub(super) fn step(&mut self, event: SourceEvent) {
        if let SourceEvent::Cancel { discard } = event {
            self.discarded |= discard;
            self.end_observation();
        }
        self.answers.push_back(event);
        self.work();
    }

    fn work(&mut self) {
        while self.waiting.effects.is_empty()
            && let Some(event) = self.answers.pop_front()
        {
            let Some(engine) = &mut self.engine else { return self.answers.clear() };
            let mut effects = Vec::new();
            engine.step(self.clock.now(), event, &mut effects);
            self.run_effects(effects.into());
        }
    }

    pub(super) fn run_effects(&mut self, mut effects: VecDeque<SourceEffect>) {
        while let Some(effect) = effects.pop_front() {
            abort::before(|| super::effects::names(&effect));
            match self.run_effect(&effect) {
                Done::Next => {}
                Done::Ends(event) => {
                    effects.clear();
                    // Before any other event.
                    self.answers.push_front(event);
                }
                Done::Waits(why) => {
                    self.show_waiting("the migration waits at the source", &why);
                    effects.push_front(effect);
                    self.waiting.effects = effects;
                    return;
                }
            }
        }
    }

    /// Whether a step waits: then nothing else is decided.
    pub(super) fn is_stuck(&self) -> bool {
        !self.waiting.effects.is_empty()
    }

    /// Keeps an input for later, if a step waits.
    pub(super) fn hold_back(&mut self, input: Input) -> Option<Input> {
        if !self.is_stuck() {
            return Some(input);
        }
        self.waiting.backlog.push_back(input);
        None
    }

    /// Makes a record durable, or says what becomes of its step.
    pub(super) fn record(&mut self, record: &SourceRecord) -> Done {
        if matches!(record, SourceRecord::HandedOver(_)) {
            // Whatever becomes of the record, nothing passes until that is certain (I5).
            self.close();
        }
        let Err(why) = self.log.append(std::slice::from_ref(record)) else { return Done::Next };
        match record.unrecorded() {
            Unrecorded::GoesOn => {
                let migration = self.slot.board.migration;
                tracing::warn!(%migration, %why, "cannot write a record; the migration continues");
                tracing::debug!(%migration, ?record, "not written");
                Done::Next
            }
            Unrecorded::Ends if !self.log.is_unsure() => {
                let (record, kind, why) = (record.clone(), io_kind(&why), why.to_string());
                Done::Ends(SourceEvent::NotRecorded { record, kind, why })
            }
            Unrecorded::Ends | Unrecorded::Waits => Done::Waits(why),
        }
    }

    /// The files become replicas, now or as soon as that is possible.
    pub(super) fn retire(&mut self) {
        self.close();
        self.guards.clear();
        self.waiting.retire = Some(self.epoch());
        self.do_what_is_owed();
    }

    /// Gives the files the names that they lack.
    ///
    /// # Errors
    /// What the file system or the store reports; it is tried again.
    pub(super) fn retire_rest(&mut self) -> io::Result<()> {
        if let Some(epoch) = self.waiting.retire {
            self.images.retire(epoch, self.slot.left_by().as_ref())?;
            self.waiting.retire = None;
        }
        Ok(())
    }

    /// The target has done its last; this side does, and says good-bye.
    pub(super) fn begin_finish(&mut self) {
        self.waiting.finish = true;
        self.note_link();
        self.go_on_finishing();
    }

    fn go_on_finishing(&mut self) {
        match self.finish() {
            Ok(()) => {
                self.waiting.finish = false;
                self.say_bye();
            }
            Err(why) => self.show_waiting("the copy at the source cannot be removed", &why),
        }
    }

    /// Whether the last things of a migration that is done are not done.
    pub(super) fn is_unfinished(&self) -> bool {
        self.waiting.finish
    }

    /// Tries again what waits, now and then.
    pub(super) fn try_again(&mut self) {
        self.tell_of_intents();
        let due = self.waiting.tried.is_some_and(|at| self.clock.since(at) >= PAUSE);
        if !due {
            return;
        }
        self.waiting.tried = None;
        let effects = std::mem::take(&mut self.waiting.effects);
        self.run_effects(effects);
        self.work();
        while !self.is_stuck()
            && let Some(input) = self.waiting.backlog.pop_front()
        {
            self.take(input);
        }
        if !self.is_stuck() {
            self.do_what_is_owed();
        }
        let held = matches!(self.waiting.intents, Some(Trouble::Held(_)));
        if self.waiting.tried.is_none() && !held {
            self.show_nothing();
        }
    }

    fn do_what_is_owed(&mut self) {
        if let Err(why) = self.retire_rest() {
            self.show_waiting(
                "the migration continues, and a disk at the source still has its old name",
                &why,
            );
        }
        if self.waiting.finish {
            self.go_on_finishing();
        }
    }

    fn show_waiting(&mut self, what: &str, why: &io::Error) {
        let text = why.to_string();
        let hint = if text.contains("exists already") {
            "move that file away; the agent then continues by itself"
        } else {
            "check the state directory and the pool, and whether they have room; the agent \
             continues by itself when the cause is gone"
        };
        let error = Refusal::new(ErrorKind::Io, what, text).hint(hint);
        self.waiting.tried = Some(self.clock.now());
        if self.waiting.shown.as_ref() != Some(&error) {
            tracing::warn!(migration = %self.slot.board.migration, %why, what);
            self.show_nothing();
            self.waiting.shown = Some(error.clone());
        }
        self.slot.board.change(|shown| shown.error = Some(error));
    }

    fn show_nothing(&mut self) {
        let Some(error) = self.waiting.shown.take() else { return };
        self.slot.board.change(|shown| {
            if shown.error.as_ref() == Some(&error) {
                shown.error = None;
            }
        });
    }

    /// A guest's write that waits is shown; that a restart compares everything is said once.
    fn tell_of_intents(&mut self) {
        let trouble = self.images.trouble();
        if trouble == self.waiting.intents {
            return;
        }
        match &trouble {
            Some(Trouble::Held(why)) => {
                let why = io::Error::other(why.clone());
                self.show_waiting("a write of the guest waits at the source", &why);
            }
            Some(Trouble::Gone(why)) => self.slot.board.notice(format!(
                "the agent cannot keep write intents ({why}): if the agent or the host fails \
                 before the migration ends, everything is compared again"
            )),
            None => {}
        }
        if self.waiting.shown.is_some() {
            // Looked at again: it may have been about this.
            self.waiting.tried.get_or_insert(self.clock.now());
        }
        self.waiting.intents = trouble;
    }
}
