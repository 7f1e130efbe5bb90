//! `dray watch`: follows a migration to its end.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, Event, MigrationState, Refusal, Role, Summary, Watch};
use dray_migrate::slots::Board;
use std::sync::Arc;
use std::time::Duration;

/// A watcher hears at least this often.
const HEARTBEAT: Duration = Duration::from_secs(1);

impl Answers<Watch> for Arc<Agent> {
    async fn answer(&self, command: Watch, events: Events) -> ApiResult<Summary> {
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
                    let why = "the client has disconnected";
                    return Err(Refusal::new(ErrorKind::Internal, "watch ended", why));
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
}

/// How a migration ended, if it has.
pub(crate) fn outcome(board: &Board) -> Option<ApiResult<Summary>> {
    let shown = board.read();
    let failed = || {
        shown.error.clone().unwrap_or_else(|| {
            Refusal::new(ErrorKind::Internal, "migration failed", "no reason was given")
        })
    };
    match shown.state {
        MigrationState::Completed => match (shown.summary, shown.role) {
            (Some(summary), _) => Some(Ok(summary)),
            (None, Role::Target) => Some(Err(Refusal::new(
                ErrorKind::NotFound,
                "the migration has completed",
                "its summary is at its source",
            )
            .hint(format!("ask on {}", shown.peer)))),
            (None, Role::Source) => None,
        },
        MigrationState::Cancelled | MigrationState::Failed => Some(Err(failed())),
        MigrationState::Prepared
        | MigrationState::Running
        | MigrationState::Interrupted
        | MigrationState::Waiting => None,
    }
}
