//! `dray migrate` of several, and `dray batch`: what is asked of batches.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    ApiResult, Batch, BatchCancel, BatchLimit, BatchRef, BatchStatus, BatchWatch, Batches,
    ErrorKind, Event, MAX_MOVES, Migrate, Refusal, Subject,
};
use dray_files::unix_ms;
use dray_host::batches::{BatchRecord, MoveRecord};
use dray_host::refusals::io_error;
use dray_host::refusals::random_id;
use dray_types::BatchId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// A watcher hears at least this often.
const HEARTBEAT: Duration = Duration::from_secs(1);

const WHAT: &str = "cannot begin the batch";

impl Answers<Batch> for Arc<Agent> {
    async fn answer(&self, command: Batch, events: Events) -> ApiResult<BatchStatus> {
        let detach = command.detach;
        self.check_batch(&command)?;
        for one in &command.moves {
            // Its own migration tells of what fails.
            if let Ok(Some(notice)) = self.seed_migration(one, &events).await {
                let _ = events.send(notice).await;
            }
        }
        let begun = block_in_place(|| self.begin_batch(command))?;
        if detach {
            return Ok(begun);
        }
        let watch = BatchWatch { batch: Some(BatchRef(begun.batch.to_string())) };
        self.answer(watch, events).await
    }
}

impl Agent {
    /// What can be said of it without looking at anything.
    fn check_batch(&self, command: &Batch) -> ApiResult<()> {
        let invalid = |why: String| {
            Refusal::new(ErrorKind::Invalid, WHAT, why).hint("see `dray migrate --help`")
        };
        if command.moves.is_empty() || command.moves.len() > MAX_MOVES {
            let why = format!("it has {} migrations, not 1 to {MAX_MOVES}", command.moves.len());
            return Err(invalid(why));
        }
        if command.jobs == 0 {
            return Err(invalid(
                "the number of migrations that run at the same time is zero".to_owned(),
            ));
        }
        if let Some(twice) = twice(&command.moves) {
            return Err(invalid(format!("the batch contains {twice} twice")));
        }
        for one in &command.moves {
            self.session_settings(&one.to)?;
            self.check(one)?;
        }
        Ok(())
    }

    /// One that is to begin later, by the name of its VM if it was prepared.
    fn move_of(&self, command: Migrate) -> MoveRecord {
        let prepared = self.prepared(&command).ok().flatten();
        let name = prepared.and_then(|slot| slot.intent().vm?.name);
        MoveRecord::new(command, name)
    }

    fn begin_batch(self: &Arc<Self>, command: Batch) -> ApiResult<BatchStatus> {
        let record = BatchRecord {
            batch: BatchId(random_id()?),
            started_unix_ms: unix_ms(),
            ended_unix_ms: None,
            jobs: command.jobs.min(MAX_MOVES),
            budget: command.budget,
            ordered: command.in_order,
            cancelled: false,
            moves: command.moves.into_iter().map(|one| self.move_of(one)).collect(),
        };
        let run = self.batches.add(&self.store.batches(), record);
        let run = run.map_err(|why| io_error(WHAT, why))?;
        run.spawn(self);
        Ok(run.status(self))
    }
}

impl Answers<Batches> for Arc<Agent> {
    async fn answer(&self, command: Batches, _: Events) -> ApiResult<Vec<BatchStatus>> {
        let runs = match &command.batch {
            Some(named) => vec![self.batches.pick(Some(named))?],
            None => self.batches.all(),
        };
        Ok(runs.iter().map(|run| run.status(self)).collect())
    }
}

impl Answers<BatchWatch> for Arc<Agent> {
    async fn answer(&self, command: BatchWatch, events: Events) -> ApiResult<BatchStatus> {
        let run = self.batches.pick(command.batch.as_ref())?;
        let mut changes = run.changes();
        loop {
            let status = run.status(self);
            if status.over {
                return Ok(status);
            }
            if events.send(Event::Batch(Box::new(status))).await.is_err() {
                let why = "the client has disconnected";
                return Err(Refusal::new(ErrorKind::Internal, "watch ended", why));
            }
            tokio::select! {
                _ = changes.changed() => {}
                () = tokio::time::sleep(HEARTBEAT) => {}
            }
        }
    }
}

impl Answers<BatchCancel> for Arc<Agent> {
    async fn answer(&self, command: BatchCancel, _: Events) -> ApiResult<BatchStatus> {
        let run = self.batches.pick(command.batch.as_ref())?;
        if run.status(self).over {
            let why = "it is over";
            return Err(Refusal::new(ErrorKind::Conflict, "cannot cancel the batch", why));
        }
        let cancelled = run.cancel(self).await;
        cancelled.map_err(|why| io_error("cannot cancel the batch", why))?;
        Ok(run.status(self))
    }
}

impl Answers<BatchLimit> for Arc<Agent> {
    async fn answer(&self, command: BatchLimit, _: Events) -> ApiResult<BatchStatus> {
        let run = self.batches.pick(command.batch.as_ref())?;
        let changed = run.set_budget(command.budget);
        changed.map_err(|why| io_error("cannot change the budget", why))?;
        Ok(run.status(self))
    }
}

/// What stands in a batch twice: the second would find the first under way.
fn twice(moves: &[Migrate]) -> Option<String> {
    let mut seen = BTreeSet::new();
    let names = moves.iter().flat_map(|one| match &one.subject {
        Subject::Vm { qmp } => vec![format!("the vm behind {}", qmp.display())],
        Subject::Images { names } => names.iter().map(|name| format!("image '{name}'")).collect(),
    });
    names.into_iter().find(|name| !seen.insert(name.clone()))
}
