//! `dray status`, `watch`, `cancel`, `limit`: migrations that are under way.

use crate::agent::Agent;
use crate::api::{
    ApiError, ApiResult, Cancel, Cancelled, ErrorKind, Event, Events, Limit, Limited,
    MigrationState, MigrationStatus, Role, Status, Subject, Summary, Watch, text,
};
use crate::migration::intent::SourceIntent;
use crate::migration::slots::Board;
use crate::migration::source::{Input, SourceSlot};
use dray_engine::SourceEvent;
use dray_types::MigrationId;
use std::sync::Arc;
use std::time::Duration;

/// A watcher hears at least this often.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a cancel may take before the answer says so.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

fn is_running(state: MigrationState) -> bool {
    matches!(state, MigrationState::Running | MigrationState::Interrupted)
}

impl Agent {
    fn boards(&self) -> Vec<Arc<Board>> {
        let sources = self.sources.all().into_iter().map(|slot| Arc::clone(&slot.board));
        let targets = self.targets.all().into_iter().map(|slot| Arc::clone(&slot.board));
        sources.chain(targets).collect()
    }

    fn pick(&self, named: Option<&text::MigrationRef>) -> ApiResult<Arc<Board>> {
        let boards = self.boards();
        let known: Vec<MigrationId> = boards.iter().map(|board| board.migration).collect();
        let running: Vec<MigrationId> = boards
            .iter()
            .filter(|board| is_running(board.read().state))
            .map(|board| board.migration)
            .collect();
        let id = text::pick(named, known, running)?;
        boards.into_iter().find(|board| board.migration == id).ok_or_else(|| {
            ApiError::new(ErrorKind::NotFound, "cannot find the migration", "it has just ended")
        })
    }

    fn pick_source(&self, named: Option<&text::MigrationRef>) -> ApiResult<Arc<SourceSlot>> {
        let board = self.pick(named)?;
        self.sources.get(board.migration).ok_or_else(|| {
            let why = "this host is its target; the command belongs to its source";
            let peer = board.read().peer;
            ApiError::new(ErrorKind::Conflict, "cannot steer the migration here", why)
                .hint(format!("run it on {peer}"))
        })
    }

    pub(super) fn status(&self, command: &Status) -> ApiResult<Vec<MigrationStatus>> {
        if command.migration.is_some() {
            return Ok(vec![self.pick(command.migration.as_ref())?.status()]);
        }
        let mut all: Vec<_> = self.boards().iter().map(|board| board.status()).collect();
        for shown in &mut all {
            shown.subject = self.sources.get(shown.migration).map(|slot| subject(&slot.intent()));
        }
        all.sort_by_key(|status| std::cmp::Reverse(status.started_unix_ms));
        Ok(all)
    }

    pub(super) async fn watch(&self, command: &Watch, events: &Events) -> ApiResult<Summary> {
        let board = self.pick(command.migration.as_ref())?;
        let mut notices = board.events();
        let mut changes = board.changes();
        let mut last = None;
        let mut told_at = tokio::time::Instant::now() - HEARTBEAT;
        loop {
            let shown = board.read();
            let phase = (shown.progress.phase, shown.progress.step);
            if last != Some(phase) || told_at.elapsed() >= HEARTBEAT {
                last = Some(phase);
                told_at = tokio::time::Instant::now();
                let gone = events.send(Event::Progress(shown.progress.clone())).await.is_err();
                if gone {
                    let why = "the client hung up";
                    return Err(ApiError::new(ErrorKind::Internal, "watch ended", why));
                }
            }
            if let Some(outcome) = outcome(&board) {
                return outcome;
            }
            tokio::select! {
                Ok(notice) = notices.recv() => { let _ = events.send(notice).await; }
                _ = changes.changed() => {}
                () = tokio::time::sleep(HEARTBEAT) => {}
            }
        }
    }

    pub(crate) async fn cancel(&self, command: &Cancel) -> ApiResult<Cancelled> {
        let slot = self.pick_source(command.migration.as_ref())?;
        let migration = slot.board.migration;
        let what = || format!("cannot cancel migration {migration}");
        let shown = slot.board.read();
        if shown.state == MigrationState::Prepared {
            return self.forget_prepared(&slot).await;
        }
        let kept = shown.progress.total.bytes_done;
        if shown.progress.phase >= crate::api::Phase::Backfill {
            let why = "the images are already handed over and only the target can go on from here";
            return Err(ApiError::new(ErrorKind::Conflict, what(), why)
                .hint("see it through with `dray watch`, then migrate back from the target"));
        }
        let mut changes = slot.board.changes();
        let discard = command.discard || !slot.intent().adopted.is_empty();
        slot.send(Input::Engine(SourceEvent::Cancel { discard }));
        let ended = tokio::time::timeout(CANCEL_TIMEOUT, async {
            while is_running(slot.board.read().state) {
                if changes.changed().await.is_err() {
                    break;
                }
            }
        });
        if ended.await.is_err() {
            let seconds = CANCEL_TIMEOUT.as_secs();
            let Some(error) = slot.board.read().error else {
                let why = format!("it has not ended in {seconds} s");
                return Err(ApiError::new(ErrorKind::Conflict, what(), why));
            };
            let why = format!("it has not ended in {seconds} s, and will: {error}");
            let late = ApiError::new(ErrorKind::Conflict, what(), why);
            return Err(match error.hint {
                Some(hint) => late.hint(hint),
                None => late,
            });
        }
        if slot.board.read().state == MigrationState::Completed {
            let why = "it had completed before the cancel";
            return Err(ApiError::new(ErrorKind::Conflict, what(), why));
        }
        Ok(Cancelled { migration, bytes_kept: if discard { 0 } else { kept } })
    }

    pub(super) fn limit(&self, command: &Limit) -> ApiResult<Limited> {
        let slot = self.pick_source(command.migration.as_ref())?;
        slot.pacer.set_limit(command.bandwidth);
        slot.board.change(|shown| shown.progress.bandwidth = command.bandwidth);
        Ok(Limited { migration: slot.board.migration, bandwidth: command.bandwidth })
    }
}

impl Agent {
    /// A prepared migration leaves nothing at either side.
    async fn forget_prepared(&self, slot: &Arc<SourceSlot>) -> ApiResult<Cancelled> {
        let migration = slot.board.migration;
        let peer = slot.intent().peer;
        let request = dray_wire::request::Request::Forget { migration };
        let what = format!("cannot cancel migration {migration}");
        // From here on nobody can begin it: the target may drop even a promise.
        slot.board.take(MigrationState::Cancelled).ok_or_else(|| {
            ApiError::new(ErrorKind::Conflict, &what, "it has just begun")
                .hint("try again: a migration that has begun is cancelled in another way")
        })?;
        if let Err(why) = self.ask(&peer, &request).await {
            slot.board.change(|shown| shown.state = MigrationState::Prepared);
            return Err(super::asking::net_error(&what, &why));
        }
        slot.send(Input::Forget);
        self.tasks.take(migration);
        self.sources.remove(migration);
        Ok(Cancelled { migration, bytes_kept: 0 })
    }
}

/// What a migration moves, in the words in which it is asked for.
fn subject(intent: &SourceIntent) -> Subject {
    match &intent.vm {
        Some(vm) => Subject::Vm { qmp: vm.qmp.clone() },
        None => Subject::Images {
            names: intent.images.iter().map(|image| image.name.clone()).collect(),
        },
    }
}

/// How a migration ended, if it has.
pub(crate) fn outcome(board: &Board) -> Option<ApiResult<Summary>> {
    let shown = board.read();
    let failed = || {
        shown.error.clone().unwrap_or_else(|| {
            ApiError::new(ErrorKind::Internal, "migration failed", "no reason was given")
        })
    };
    match shown.state {
        MigrationState::Completed => match (shown.summary, shown.role) {
            (Some(summary), _) => Some(Ok(summary)),
            (None, Role::Target) => Some(Err(ApiError::new(
                ErrorKind::NotFound,
                "the migration has completed",
                "its summary is at its source",
            )
            .hint(format!("ask on {}", shown.peer)))),
            (None, Role::Source) => None,
        },
        MigrationState::Cancelled | MigrationState::Failed => Some(Err(failed())),
        MigrationState::Prepared | MigrationState::Running | MigrationState::Interrupted => None,
    }
}
