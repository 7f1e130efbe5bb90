//! Several migrations that one command has begun: a batch.
//!
//! The queue lives here and not in the command, and is durable: whoever began a batch may go, the
//! agent may die, and every migration of it still has its turn. [`batches`](crate::batches) is what is durable,
//! [`queue`] begins the migrations and sees them through. A migration of a batch is one like any
//! other: `dray status`, `cancel` and `limit` know it by its id.

mod queue;

use crate::agent::Agent;
use crate::batches::{Batches, Run};
use dray_api::{BatchStatus, MoveState, MoveStatus};
use dray_files::unix_ms;
use dray_host::batches::BatchRecord;
use std::sync::Arc;

impl Batches {
    /// Takes up the batches of an earlier process.
    pub fn revive(agent: &Arc<Agent>) {
        let folder = agent.store.batches();
        for record in BatchRecord::all(&folder) {
            let run = Run::new(&folder, record);
            agent.batches.map().insert(run.record().batch, Arc::clone(&run));
            if run.record().ended_unix_ms.is_none() {
                run.spawn(agent);
            }
        }
    }
}

impl Run {
    /// Goes on with it in the background.
    pub fn spawn(self: &Arc<Self>, agent: &Arc<Agent>) {
        tokio::spawn(Arc::clone(self).go(Arc::clone(agent)));
    }

    /// As the API shows it.
    pub fn status(&self, agent: &Agent) -> BatchStatus {
        let record = self.record().clone();
        let running = self.running().clone();
        let moves = record.moves.into_iter().enumerate().map(|(nth, one)| {
            let slot = one.migration.and_then(|id| agent.sources.get(id));
            let state = match one.end() {
                Some(end) => end,
                None if running.contains(&nth) => MoveState::Running,
                None => MoveState::Waiting,
            };
            let runs = state == MoveState::Running;
            let progress = slot.filter(|_| runs).map(|slot| slot.board.read().progress);
            MoveStatus {
                name: one.name,
                subject: one.command.subject,
                to: one.command.to,
                state,
                migration: one.migration,
                predicted_seconds: one.predicted_seconds,
                progress,
                summary: one.summary,
                error: one.error,
            }
        });
        let until = record.ended_unix_ms.unwrap_or_else(unix_ms);
        BatchStatus {
            batch: record.batch,
            from: agent.config.name.clone(),
            started_unix_ms: record.started_unix_ms,
            elapsed_seconds: until.saturating_sub(record.started_unix_ms) as f64 / 1e3,
            over: record.ended_unix_ms.is_some(),
            jobs: record.jobs,
            budget: record.budget,
            rate: if record.ended_unix_ms.is_some() { 0 } else { self.budget.rate() },
            moves: moves.collect(),
        }
    }
}
