//! The queue of a batch: each migration is begun when a place is free, and seen through.

use crate::agent::Agent;
use crate::batches::Run;
use crate::ops::Together;
use dray_api::{
    ApiResult, Cancel, ErrorKind, MigrationState, MoveState, Plan, Planned, Refusal, Strategy,
    Summary,
};
use dray_files::unix_ms;
use dray_host::record::CopyState;
use dray_migrate::slots::Board;
use dray_migrate::source::SourceSlot;
use dray_types::BitRate;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

/// How long a prediction may take: measuring how a guest writes its memory takes a second or two.
const PREDICTION: Duration = Duration::from_secs(10);

/// How often is looked whether a migration has been brought back: until then it does not know the batch's budget.
const REVIVAL: Duration = Duration::from_millis(100);

/// What became of a migration that a restart finds begun.
enum Found {
    /// It goes on, or its end is known.
    Here(Arc<SourceSlot>),
    /// It has its turn before it.
    NotBegun,
    /// It cannot be brought back yet, as when its pool is not mounted.
    Waits,
    /// It is over, and nobody has seen how.
    Forgotten,
}

impl Run {
    /// Begins every migration in its turn and returns when all are over.
    pub(super) async fn go(self: Arc<Self>, agent: Arc<Agent>) {
        if !self.record().ordered {
            self.order(&agent).await;
        }
        let (count, jobs) = {
            let record = self.record();
            (record.moves.len(), record.jobs)
        };
        let places = Arc::new(Semaphore::new(jobs));
        let mut tasks = JoinSet::new();
        // What an earlier process has begun goes on, place or no place.
        let (begun, waiting): (Vec<_>, Vec<_>) =
            (0..count).partition(|&nth| self.one(nth).migration.is_some());
        for nth in begun.into_iter().filter(|&nth| self.one(nth).end().is_none()) {
            let place = Arc::clone(&places).try_acquire_owned().ok();
            tasks.spawn(Arc::clone(&self).see_through(Arc::clone(&agent), nth, place));
        }
        for nth in waiting {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
            if self.one(nth).end().is_none() {
                tasks.spawn(Arc::clone(&self).see_through(Arc::clone(&agent), nth, Some(place)));
            }
        }
        while tasks.join_next().await.is_some() {}
        self.note(|record| record.ended_unix_ms = Some(unix_ms()));
        let status = self.status(&agent);
        let (moved, all) = (status.count(MoveState::Completed), status.moves.len());
        tracing::info!(batch = %status.batch, moved, all, "a batch is over");
    }

    /// What one migration may reckon with when as many run as may.
    fn share(&self) -> Option<BitRate> {
        let record = self.record();
        let jobs = record.jobs.min(record.moves.len()).max(1) as u64;
        record.budget.map(|all| BitRate { bytes_per_second: all.bytes_per_second / jobs })
    }

    /// Predicts each and puts the shortest first.
    async fn order(&self, agent: &Arc<Agent>) {
        let (share, moves) = (self.share(), self.record().moves.clone());
        let mut tasks = JoinSet::new();
        for (nth, one) in moves.iter().enumerate() {
            let limits = [one.command.bandwidth, share].into_iter().flatten();
            let plan = Plan {
                subject: one.command.subject.clone(),
                to: one.command.to.clone(),
                chain: one.command.chain.unwrap_or_default(),
                bandwidth: limits.min_by_key(|limit| limit.bytes_per_second),
                max_downtime_ms: one.command.max_downtime_ms,
                deadline_ms: one.command.deadline_ms,
                max_added_latency_ms: one.command.tuning.max_added_latency_ms,
                pool: one.command.pool.clone(),
                names: one.command.names.clone(),
                // What a target was to be given before is there by now.
                no_backups: true,
            };
            let (agent, strategy) = (Arc::clone(agent), one.command.strategy);
            tasks.spawn(async move {
                let planned = tokio::time::timeout(PREDICTION, agent.predict(plan)).await;
                let planned = planned.ok().and_then(|planned| {
                    planned.inspect_err(|why| tracing::debug!(%why, "cannot predict")).ok()
                });
                (nth, planned.and_then(|planned| seconds(&planned, strategy)))
            });
        }
        let mut predicted = tasks.join_all().await;
        predicted.sort_by_key(|&(nth, _)| nth);
        self.note(|record| {
            for (nth, seconds) in predicted {
                record.moves[nth].predicted_seconds = seconds;
            }
            record.sort();
        });
    }

    /// One migration, from its beginning or from where it is to its end.
    async fn see_through(
        self: Arc<Self>,
        agent: Arc<Agent>,
        nth: usize,
        mut place: Option<OwnedSemaphorePermit>,
    ) {
        self.running().insert(nth);
        self.changed.send_modify(|count| *count += 1);
        let outcome = match self.find_revived(&agent, nth).await {
            Found::Here(slot) => {
                self.join(&slot);
                // The agent may have died while it cancelled the batch.
                if self.record().cancelled {
                    self.cancel_one(&agent, nth).await;
                }
                follow(&slot.board, &mut place).await
            }
            Found::NotBegun => match self.begin(&agent, nth).await {
                Ok(slot) => follow(&slot.board, &mut place).await,
                Err(why) => Err(why),
            },
            Found::Forgotten | Found::Waits => Err(self.forgotten(&agent, nth)),
        };
        self.running().remove(&nth);
        self.note(|record| {
            let one = &mut record.moves[nth];
            match outcome {
                Ok(summary) => one.summary = Some(summary),
                Err(error) => one.error = Some(error),
            }
        });
    }

    /// The same as soon as it is known.
    async fn find_revived(&self, agent: &Agent, nth: usize) -> Found {
        loop {
            match self.find(agent, nth) {
                Found::Waits => tokio::time::sleep(REVIVAL).await,
                known => return known,
            }
        }
    }

    fn find(&self, agent: &Agent, nth: usize) -> Found {
        let Some(id) = self.one(nth).migration else { return Found::NotBegun };
        // Looked at first: it is known before it waits no longer.
        let waits = agent.unrevived.away().contains(&id);
        match agent.sources.get(id) {
            Some(slot) if slot.board.read().state == MigrationState::Prepared => Found::NotBegun,
            Some(slot) => Found::Here(slot),
            None if waits => Found::Waits,
            // It is forgotten last of all, when nothing is left to be done.
            None => Found::Forgotten,
        }
    }

    fn join(&self, slot: &SourceSlot) {
        let number = slot.board.migration.0 as u64;
        slot.pacer.join(&self.budget, number);
    }

    async fn begin(&self, agent: &Arc<Agent>, nth: usize) -> ApiResult<Arc<SourceSlot>> {
        let one = self.one(nth);
        let mut command = one.command;
        // Prepared by an earlier process, for this.
        command.prepared = one.migration.map(Into::into).or(command.prepared);
        let note = |slot: &SourceSlot| {
            self.join(slot);
            let intent = slot.intent();
            let images = intent.images.iter().map(|image| image.name.clone()).collect();
            let written = self.change(|record| {
                let one = &mut record.moves[nth];
                one.migration = Some(intent.migration);
                one.images = images;
                if let Some(name) = intent.vm.and_then(|vm| vm.name) {
                    one.name = name;
                }
            });
            written.map_err(|why| Refusal::new(ErrorKind::Io, "cannot begin a migration", why))
        };
        let together = Together { share: self.share(), note: &note };
        let started = agent.migrate(command, Some(together)).await?;
        let gone = || Refusal::new(ErrorKind::Internal, "migration failed", "it has gone");
        let slot = agent.sources.get(started.migration).ok_or_else(gone)?;
        if self.record().cancelled {
            self.cancel_one(agent, nth).await;
        }
        Ok(slot)
    }

    /// It ended while the agent was away, and its folder is gone: only the images tell how.
    fn forgotten(&self, agent: &Agent, nth: usize) -> Refusal {
        let one = self.one(nth);
        let left = |name: &String| match agent.registry.get(name) {
            Some(entry) => entry.record().state == CopyState::Replica,
            None => one.command.remove_replica,
        };
        let what = "the end of the migration is unknown";
        if one.images.iter().all(left) {
            let why = "the images have left this host, and the agent was restarted at the end of \
                       the migration";
            return Refusal::new(ErrorKind::Internal, what, why)
                .hint(format!("`dray images` on {} shows them", one.command.to));
        }
        let why = "the agent was restarted at the end of the migration; the images are still on \
                   this host";
        Refusal::new(ErrorKind::Internal, what, why).hint("migrate it again")
    }

    /// Begins nothing more, and cancels what is before its handover.
    ///
    /// # Errors
    /// What the file system reports: then nothing is cancelled.
    pub async fn cancel(&self, agent: &Arc<Agent>) -> std::io::Result<()> {
        let running = self.running().clone();
        self.change(|record| {
            record.cancelled = true;
            let waiting = record.moves.iter_mut().enumerate();
            for (_, one) in
                waiting.filter(|(nth, one)| !running.contains(nth) && one.end().is_none())
            {
                let why = "the migration had not begun";
                one.error =
                    Some(Refusal::new(ErrorKind::Cancelled, "the batch was cancelled", why));
            }
        })?;
        for nth in running {
            self.cancel_one(agent, nth).await;
        }
        Ok(())
    }

    async fn cancel_one(&self, agent: &Arc<Agent>, nth: usize) {
        let Some(id) = self.one(nth).migration else { return };
        let begun = agent.sources.get(id).is_some_and(|slot| slot.intent().options.is_some());
        if !begun {
            // It looks whether it is still wanted as soon as it has begun.
            return;
        }
        let command = Cancel { migration: Some(id.into()), discard: false };
        if let Err(why) = agent.cancel(&command).await {
            tracing::info!(migration = %id, %why, "a migration of a cancelled batch continues");
        }
    }
}

/// What a strategy is predicted to take; those of which nothing can be said are like the ones that
/// move the same blocks.
fn seconds(planned: &Planned, strategy: Strategy) -> Option<f64> {
    let like = strategy.traits().resembles.unwrap_or(strategy);
    let found = planned.strategies.iter().find(|one| one.strategy == like)?;
    found.predicted.converges.then_some(found.predicted.total_seconds)
}

/// Waits for the end of a migration. One whose Backfill waits for the operator keeps no place.
async fn follow(board: &Board, place: &mut Option<OwnedSemaphorePermit>) -> ApiResult<Summary> {
    let mut changes = board.changes();
    loop {
        if let Some(outcome) = crate::ops::outcome(board) {
            return outcome;
        }
        if board.read().progress.paused {
            *place = None;
        }
        if changes.changed().await.is_err() {
            let why = "the agent does not know the migration any more";
            return Err(Refusal::new(ErrorKind::Internal, "migration failed", why));
        }
    }
}
