//! Finds the migration that a command names.

use crate::agent::Agent;
use dray_api::{
    ApiResult, ErrorKind, MigrationState, MigrationStatus, Progress, Refusal, Role, Strategy, text,
};
use dray_host::folder::log::End;
use dray_host::migration::waiting::ShownWaiting;
use dray_migrate::slots::Board;
use dray_migrate::source::SourceSlot;
use dray_types::MigrationId;
use std::sync::Arc;

pub(super) fn is_running(state: MigrationState) -> bool {
    matches!(state, MigrationState::Running | MigrationState::Interrupted)
}

impl Agent {
    pub(super) fn boards(&self) -> Vec<Arc<Board>> {
        let sources = self.sources.all().into_iter().map(|slot| Arc::clone(&slot.board));
        let targets = self.targets.all().into_iter().map(|slot| Arc::clone(&slot.board));
        sources.chain(targets).collect()
    }

    pub(super) fn pick(&self, named: Option<&text::MigrationRef>) -> ApiResult<Arc<Board>> {
        let boards = self.boards();
        let waiting = self.waiting();
        let ids = boards.iter().map(|board| board.migration);
        let known: Vec<_> = ids.chain(waiting.iter().map(|one| one.migration)).collect();
        let running: Vec<MigrationId> = boards
            .iter()
            .filter(|board| is_running(board.read().state))
            .map(|board| board.migration)
            .collect();
        let id = text::pick(named, known, running)?;
        if let Some(error) =
            waiting.into_iter().find(|one| one.migration == id).and_then(|one| one.error)
        {
            return Err(error);
        }
        boards.into_iter().find(|board| board.migration == id).ok_or_else(|| {
            Refusal::new(ErrorKind::NotFound, "cannot find the migration", "it has just ended")
        })
    }

    pub(super) fn pick_source(
        &self,
        named: Option<&text::MigrationRef>,
    ) -> ApiResult<Arc<SourceSlot>> {
        let board = self.pick(named)?;
        self.sources.get(board.migration).ok_or_else(|| {
            let why = "this host is its target; the command belongs to its source";
            let peer = board.read().peer;
            Refusal::new(ErrorKind::Conflict, "cannot control the migration at this host", why)
                .hint(format!("run it on {peer}"))
        })
    }

    /// The migrations that could not be brought back yet.
    pub(super) fn waiting(&self) -> Vec<MigrationStatus> {
        self.unrevived.shown(&self.registry).into_iter().map(shown_waiting).collect()
    }
}

/// A migration that could not be brought back yet.
fn shown_waiting(waits: ShownWaiting) -> MigrationStatus {
    let error = Refusal::new(ErrorKind::Io, "the migration cannot be brought back yet", waits.why);
    MigrationStatus {
        migration: waits.migration,
        role: match waits.end {
            End::Source => Role::Source,
            End::Target => Role::Target,
        },
        peer: waits.peer.unwrap_or_else(|| "?".to_owned()),
        vm: waits.vm,
        state: MigrationState::Waiting,
        started_unix_ms: waits.started_unix_ms.unwrap_or(0),
        progress: Progress::new(waits.migration, Strategy::default()),
        summary: None,
        error: Some(error.hint(waits.hint)),
        waiting_seconds: None,
        subject: None,
    }
}
