//! Several migrations that one command has begun: a batch, its queue and its budget.
//!
//! The queue lives here and not in the command, and is durable: whoever began a batch may go, the
//! agent may die, and every migration of it still has its turn. [`record`] is what is durable,
//! [`queue`] begins the migrations and sees them through. A migration of a batch is one like any
//! other: `dray status`, `cancel` and `limit` know it by its id.

mod queue;
pub mod record;

use crate::agent::Agent;
use dray_api::{ApiResult, BatchRef, BatchStatus, ErrorKind, MoveState, MoveStatus, Refusal};
use dray_files::StatePath;
use dray_files::unix_ms;
use dray_net::budget::Budget;
use dray_types::{BatchId, BitRate};
use parking_lot::{Mutex, MutexGuard};
use record::{BatchRecord, MoveRecord};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use tokio::sync::watch;

/// The batches that this agent knows.
#[derive(Default)]
pub struct Batches(Mutex<BTreeMap<BatchId, Arc<Run>>>);

/// A batch as this process has it.
pub struct Run {
    path: StatePath,
    record: Mutex<BatchRecord>,
    /// Those that have been begun and are not over.
    running: Mutex<BTreeSet<usize>>,
    budget: Arc<Budget>,
    changed: watch::Sender<u64>,
}

impl Batches {
    fn map(&self) -> MutexGuard<'_, BTreeMap<BatchId, Arc<Run>>> {
        self.0.lock()
    }

    /// All of them, the newest first.
    pub fn all(&self) -> Vec<Arc<Run>> {
        let mut all: Vec<_> = self.map().values().cloned().collect();
        all.sort_by_key(|run| std::cmp::Reverse(run.record().started_unix_ms));
        all
    }

    /// The one that is meant: the only one that is not over, when none is named.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Invalid` when it is not clear which one is meant.
    pub fn pick(&self, named: Option<&BatchRef>) -> ApiResult<Arc<Run>> {
        let meant = |run: &Arc<Run>| match named {
            Some(BatchRef(text)) => {
                let id = run.record().batch.to_string();
                !text.is_empty() && id.starts_with(&text.to_ascii_lowercase())
            }
            None => run.record().ended_unix_ms.is_none(),
        };
        let mut found = self.all().into_iter().filter(meant);
        let what = match named {
            Some(named) => format!("cannot find batch {named}"),
            None => "cannot tell which batch is meant".to_owned(),
        };
        let hint = "`dray batch` lists them";
        let Some(first) = found.next() else {
            let why = if named.is_some() { "no batch has this id" } else { "none is running" };
            return Err(Refusal::new(ErrorKind::NotFound, what, why).hint(hint));
        };
        if found.next().is_some() {
            let why = "several are running, or several ids begin like this";
            return Err(Refusal::new(ErrorKind::Invalid, what, why).hint(hint));
        }
        Ok(first)
    }

    /// Makes a batch durable.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn add(&self, folder: &StatePath, record: BatchRecord) -> io::Result<Arc<Run>> {
        let run = Run::new(folder, record);
        run.change(|_| ())?;
        self.map().insert(run.record().batch, Arc::clone(&run));
        Ok(run)
    }

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
    fn new(folder: &StatePath, record: BatchRecord) -> Arc<Self> {
        Arc::new(Self {
            path: folder.join(format!("{}.json", record.batch)),
            budget: Budget::new(record.budget),
            record: Mutex::new(record),
            running: Mutex::default(),
            changed: watch::Sender::new(0),
        })
    }

    fn record(&self) -> MutexGuard<'_, BatchRecord> {
        self.record.lock()
    }

    fn running(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.running.lock()
    }

    fn one(&self, nth: usize) -> MoveRecord {
        self.record().moves[nth].clone()
    }

    /// Changes what is durable, and wakes who watches.
    fn change<T>(&self, change: impl FnOnce(&mut BatchRecord) -> T) -> io::Result<T> {
        let mut record = self.record();
        let mut new = record.clone();
        let result = change(&mut new);
        self.path.put(&new)?;
        *record = new;
        drop(record);
        self.changed.send_modify(|count| *count += 1);
        Ok(result)
    }

    /// The same where a disk that fails must not keep the others waiting: a restart then knows less.
    fn note(&self, change: impl FnOnce(&mut BatchRecord)) {
        if let Err(why) = self.change(change) {
            tracing::error!(%why, "cannot write down how a batch goes");
        }
    }

    /// Wakes at every change of what is durable.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Changes the budget.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn set_budget(&self, limit: Option<BitRate>) -> io::Result<()> {
        self.change(|record| record.budget = limit)?;
        self.budget.set_limit(limit);
        Ok(())
    }

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
