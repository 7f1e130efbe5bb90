//! The configuration is read again: who may come, and what each may do, changes at once.

use super::{CONFIGURATION, note_backups};
use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, Held, MigrationState, Refusal, Reloaded};
use dray_net::Opened;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::block_in_place;

/// Reloads at each notice, for as long as the agent lives.
pub(super) async fn when_told(agent: Arc<Agent>, told: Arc<Notify>) {
    loop {
        told.notified().await;
        if let Err(why) = block_in_place(|| agent.reload()) {
            tracing::error!("{why}");
        }
    }
}

impl Agent {
    /// Takes from the file and the certificates what can change while the agent runs. Whoever may do less now is cut
    /// off, and let in again as far as it may be.
    ///
    /// # Errors
    /// What is wrong with the file; nothing has changed then.
    pub(crate) fn reload(&self) -> ApiResult<Reloaded> {
        let read = self.config.reload().map_err(|why| {
            Refusal::new(ErrorKind::Invalid, "cannot take the configuration", why)
                .hint("correct the file; the agent goes on with what it had")
        })?;
        // Connections of peers are made of what the file said before: what comes from now on is judged anew.
        let lost = |peer: &String| read.may_less.contains(peer);
        let ended = self.identity.cut(|other| other.opened == Opened::There && lost(&other.peer));
        // It also ends connections of those whose certificates were revoked, and of clients of NBD.
        self.look_at_certificates();
        if read.needs_restart.is_empty() {
            self.troubles.clear_all(CONFIGURATION);
            note_backups(&self.config, &self.troubles);
        }
        let held = self.held();
        for change in &read.changes {
            tracing::info!("configuration: {change}");
        }
        for part in &read.needs_restart {
            tracing::warn!("configuration: {part} has changed, which needs a restart of the agent");
        }
        for Held { migration, peer } in &held {
            tracing::warn!("migration {migration} does not go on: {peer} is no peer any more");
        }
        if let Some(why) = &read.not_kept {
            tracing::warn!(%why, "cannot keep a copy of the configuration as the last good one");
        }
        Ok(Reloaded {
            changes: read.changes,
            needs_restart: read.needs_restart.into_iter().map(str::to_owned).collect(),
            ended: ended as u64,
            held,
            not_kept: read.not_kept,
        })
    }

    /// Migrations under way whose other end is not in the configuration.
    fn held(&self) -> Vec<Held> {
        let sources = self
            .sources
            .all()
            .into_iter()
            .map(|slot| (slot.intent().peer, Arc::clone(&slot.board)));
        let targets = self
            .targets
            .all()
            .into_iter()
            .map(|slot| (slot.intent().peer, Arc::clone(&slot.board)));
        let running = sources.chain(targets).filter(|(peer, board)| {
            board.read().state == MigrationState::Running && self.config.peer(peer).is_none()
        });
        running.map(|(peer, board)| Held { migration: board.migration, peer }).collect()
    }
}
