//! `dray backfill`: what a target still misses is fetched, left alone, or fetched at another rate.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, Backfill, BackfillAction, Backfilling, ErrorKind, Phase, Refusal, text};
use dray_engine::{BackfillControl, TargetEvent};
use dray_migrate::messages::ToSourceShell;
use dray_migrate::receiver::{Input, TargetSlot};
use dray_migrate::source::SourceSlot;
use dray_types::MigrationId;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A journal that takes longer than this to write is as good as broken.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const WHAT: &str = "cannot control the backfill";

impl Answers<Backfill> for Arc<Agent> {
    async fn answer(&self, command: Backfill, _: Events) -> ApiResult<Backfilling> {
        let slot = self.pick_target(&command)?;
        await_handover(&slot).await;
        let shown = slot.board.read();
        if shown.progress.phase != Phase::Backfill {
            let why = if shown.progress.phase < Phase::Backfill {
                "the guest does not run at this host yet"
            } else {
                "this host has every block already"
            };
            return Err(Refusal::new(ErrorKind::Conflict, WHAT, why)
                .hint("`dray status` shows how far the migration is"));
        }
        match command.action {
            BackfillAction::Start => control(&slot, BackfillControl::Start).await?,
            BackfillAction::Pause => control(&slot, BackfillControl::Pause).await?,
            BackfillAction::Rate(limit) => {
                if !shown.progress.link_up {
                    let why = "the source, which sends the blocks, cannot be reached at the moment";
                    return Err(Refusal::new(ErrorKind::Peer, WHAT, why)
                        .hint("try again when the link is back"));
                }
                let limit_bytes = limit.map(|limit| limit.bytes_per_second);
                slot.send(Input::Say(ToSourceShell::Bandwidth(limit_bytes)));
                slot.board.change(|shown| shown.progress.bandwidth = limit);
            }
        }
        let progress = slot.board.read().progress;
        Ok(Backfilling {
            migration: slot.board.migration,
            paused: progress.paused,
            bandwidth: progress.bandwidth,
            bytes_missing: progress.total.bytes_missing,
        })
    }
}

impl Agent {
    fn pick_target(&self, command: &Backfill) -> ApiResult<Arc<TargetSlot>> {
        let id = match (&command.qmp, &command.which) {
            (Some(qmp), _) => self.moved_vm(qmp)?,
            (None, Some(which)) => self.named(which)?,
            (None, None) => {
                let slots = self.targets.all();
                // An image may be seen to be this host's a moment before its Backfill is.
                let waits = |slot: &&Arc<TargetSlot>| {
                    matches!(slot.board.read().progress.phase, Phase::Handover | Phase::Backfill)
                };
                let mut waiting = slots.iter().filter(waits).map(|slot| slot.board.migration);
                let away = || self.sources.all().into_iter().find(|slot| lacks_blocks(slot));
                match (waiting.next(), away()) {
                    (None, Some(source)) => source.board.migration,
                    (first, _) => {
                        let all = slots.iter().map(|slot| slot.board.migration);
                        text::pick(None, all, first.into_iter().chain(waiting))?
                    }
                }
            }
        };
        self.targets.get(id).ok_or_else(|| {
            let why = format!("this host is the source of migration {id}, and its target fetches");
            let error = Refusal::new(ErrorKind::Conflict, WHAT, why);
            match self.sources.get(id) {
                Some(slot) => {
                    let peer = slot.board.read().peer;
                    error.hint(format!("give the command on {peer}"))
                }
                None => error,
            }
        })
    }

    fn moved_vm(&self, qmp: &Path) -> ApiResult<MigrationId> {
        let left = |slot: &&Arc<SourceSlot>| {
            lacks_blocks(slot) && slot.intent().vm.is_some_and(|vm| vm.qmp == qmp)
        };
        if let Some(slot) = self.sources.all().iter().find(left) {
            return Ok(slot.board.migration);
        }
        let runs = |slot: &&Arc<TargetSlot>| {
            slot.intent().guest.is_some_and(|guest| guest.qmp == qmp)
                && slot.board.read().progress.phase <= Phase::Backfill
        };
        let found = self.targets.all().iter().find(runs).map(|slot| slot.board.migration);
        found.ok_or_else(|| {
            let why = format!("no vm behind {} is moving to this host", qmp.display());
            Refusal::new(ErrorKind::NotFound, WHAT, why).hint("`dray status` lists the migrations")
        })
    }

    /// The migration of an image of that name, or the one whose id begins like this.
    fn named(&self, which: &str) -> ApiResult<MigrationId> {
        let record = self.registry.get(which).map(|entry| entry.record());
        if let Some(migration) = record.and_then(|record| record.migration) {
            return Ok(migration);
        }
        let targets = self.targets.all().into_iter().map(|slot| slot.board.migration);
        let sources = self.sources.all().into_iter().map(|slot| slot.board.migration);
        text::MigrationRef(which.to_owned()).resolve(targets.chain(sources))
    }
}

/// Whether the target of a migration from here fetches what it lacks.
fn lacks_blocks(slot: &SourceSlot) -> bool {
    slot.board.read().progress.phase == Phase::Backfill
}

/// Lets a handover that is under way come to its end, for a while.
async fn await_handover(slot: &TargetSlot) {
    let mut changes = slot.board.changes();
    let over = async {
        while slot.board.read().progress.phase == Phase::Handover && changes.changed().await.is_ok()
        {
        }
    };
    // Whatever it is then, is said.
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, over).await;
}

/// Tells the engine and waits until it is so, which is once it is durable.
async fn control(slot: &TargetSlot, control: BackfillControl) -> ApiResult<()> {
    let mut changes = slot.board.changes();
    slot.send(Input::Engine(TargetEvent::BackfillControl(control)));
    let wanted = control == BackfillControl::Pause;
    let done = tokio::time::timeout(ANSWER_TIMEOUT, async {
        loop {
            let progress = slot.board.read().progress;
            if progress.paused == wanted || progress.phase != Phase::Backfill {
                return;
            }
            if changes.changed().await.is_err() {
                return;
            }
        }
    });
    done.await.map_err(|_| {
        let why = format!("it has not answered within {} s", ANSWER_TIMEOUT.as_secs());
        Refusal::new(ErrorKind::Internal, WHAT, why)
    })
}
