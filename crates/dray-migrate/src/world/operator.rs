//! What the operator of two simulated hosts wants, and does.

use super::host::SimAgent;
use super::model::Model;
use super::{World, draw};
use crate::source;
use dray_api::MigrationState;
use dray_engine::SourceEvent;
use dray_wire::request::Base;

/// Steps that a target serves before a host is gone for good.
const SERVED: usize = 2;
/// How often a migration back is tried.
const TRIES: usize = 20;
/// Steps between two tries.
const PAUSE: usize = 5;
/// When a migration is cancelled: from this step on, and within so many.
const CANCELLED: (u64, u64) = (7, 30);

/// What the operator has done so far.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Script {
    /// Nothing; migrations are tried from this step on, so often.
    Begin {
        from: usize,
        tries: usize,
    },
    /// The target is, with copies that begin as this.
    Prepared {
        at: usize,
        bases: Vec<Base>,
    },
    /// The other host is gone for good.
    Claim,
    Over,
}

/// What the operator wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mission {
    /// The images are moved.
    Move,
    /// The target is gone for good while it fetches what is missing: the source's copies are claimed.
    ClaimAtSource,
    /// The source is: the target's are.
    ClaimAtTarget,
    /// The images are moved, and what is left of them at the source is removed.
    Remove,
    /// The images are moved, and back onto what was left of them.
    Return,
    /// The migration is cancelled on its way.
    Cancel,
    /// The images are moved over a link that breaks and comes back.
    Flaky,
    /// The migration is cancelled before it begins. Where that fails, or nobody knows what came of it, the
    /// same migration begins after all.
    CancelThenBegin,
}

impl Mission {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Move,
        Self::Remove,
        Self::ClaimAtSource,
        Self::ClaimAtTarget,
        Self::Return,
        Self::Cancel,
        Self::Flaky,
        Self::CancelThenBegin,
    ];
}

impl World {
    /// The operator does the next thing.
    pub(super) fn operate(&mut self) {
        match self.script.clone() {
            Script::Begin { from, tries } if self.steps >= from => self.prepare(tries),
            Script::Prepared { at, .. } if self.is_to_take_back(at) => self.take_back(),
            Script::Prepared { at, bases } if self.steps >= at + 3 => {
                let intent = self.source_intent(&bases, true);
                self.hosts[self.from].within(|agent| agent.begin_source(intent).is_ok());
                self.script = Script::Over;
            }
            Script::Over if self.is_to_return() => {
                self.from = 1;
                self.script = Script::Begin { from: self.steps, tries: TRIES };
            }
            Script::Over if self.steps == self.cancelled_at => self.cancel(),
            Script::Over if self.served > SERVED && self.gone.is_none() => self.lose_one(),
            Script::Claim => self.claim(),
            _ => {}
        }
    }

    /// When the operator of this mission cancels, if ever.
    pub(super) fn when_cancelled(mission: Mission, random: &mut u64) -> usize {
        let (from, within) = CANCELLED;
        match mission {
            Mission::Cancel => (from + draw(random) % within) as usize,
            _ => 0,
        }
    }

    fn is_to_return(&self) -> bool {
        let arrived = self.mission == Mission::Return && self.from == 0;
        arrived && self.whole().is_some_and(|(at, _)| at == 1)
    }

    fn prepare(&mut self, tries: usize) {
        let (here, ancestors) = (self.target_intent(), self.ancestors());
        let there =
            self.hosts[1 - self.from].within(|agent| agent.prepare_target(here, &ancestors));
        let bases = there.and_then(Result::ok);
        let prepared = bases.filter(|bases| {
            let away = self.source_intent(bases, false);
            self.hosts[self.from].within(|agent| agent.prepare_source(away).is_ok()) == Some(true)
        });
        let at = self.steps;
        self.script = match prepared {
            Some(bases) => {
                self.returned += bases.iter().filter(|b| matches!(b, Base::Replica { .. })).count();
                Script::Prepared { at, bases }
            }
            None if tries > 1 => Script::Begin { from: at + PAUSE, tries: tries - 1 },
            None => Script::Over,
        };
    }

    fn is_to_take_back(&self, prepared_at: usize) -> bool {
        self.mission == Mission::CancelThenBegin && self.steps == prepared_at + 1
    }

    /// What is prepared is not wanted any more.
    fn take_back(&mut self) {
        let cancelled = self.hosts[self.from].within(SimAgent::cancel_prepared);
        if matches!(cancelled, Some(Ok(()))) {
            self.script = Script::Over;
        }
    }

    /// The migration is not wanted any more, as long as that can be said.
    fn cancel(&mut self) {
        let discard = draw(&mut self.random).is_multiple_of(2);
        self.hosts[self.from].within(|agent| {
            let away = agent.away();
            let Some(away) = away.as_ref() else { return };
            if away.slot.board.read().state == MigrationState::Running {
                let cancel = SourceEvent::Cancel { discard };
                away.slot.send(source::Input::Engine(cancel));
            }
        });
    }

    /// One of the hosts burns down.
    fn lose_one(&mut self) {
        let gone = match self.mission {
            Mission::ClaimAtSource => 1,
            Mission::ClaimAtTarget => 0,
            _ => return,
        };
        if gone == 1
            && let Some(disks) = self.handed_over.take()
        {
            self.guest.disks = disks;
            self.guest.at = 0;
        }
        self.hosts[gone].kill();
        (self.gone, self.script) = (Some(gone), Script::Claim);
    }

    /// The operator claims what is not claimed yet, until it succeeds.
    fn claim(&mut self) {
        let at = usize::from(self.mission == Mission::ClaimAtTarget);
        let answers = self.hosts[at].within(|agent| super::NAMES.map(|name| agent.claim(name)));
        let Some(answers) = answers else { return };
        for answer in answers.iter().flatten() {
            if let Err(why) = answer {
                tracing::debug!(?why, "a claim is refused");
            }
        }
        let who = format!("the claim at step {}", self.steps);
        for (disk, answer) in self.guest.disks.iter_mut().zip(&answers) {
            match answer {
                // Who has died before it answered has told nobody.
                Some(Ok(None)) => Model::lost(disk, None, &who),
                Some(Ok(Some(lost))) => lost.iter().for_each(|run| disk.lost(Some(*run), &who)),
                Some(Err(_)) | None => {}
            }
        }
        if answers.iter().all(|answer| matches!(answer, Some(Ok(_)))) {
            self.script = Script::Over;
        }
    }
}
