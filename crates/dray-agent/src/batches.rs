//! The batches that an agent knows: what is durable of them ([`BatchRecord`]), and their budget. What is done with them is in
//! [`batch`](crate::batch).

use dray_api::{ApiResult, BatchRef, ErrorKind, Refusal};
use dray_files::StatePath;
use dray_host::batches::{BatchRecord, MoveRecord};
use dray_net::budget::Budget;
use dray_types::{BatchId, BitRate};
use parking_lot::{Mutex, MutexGuard};
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
    pub(crate) budget: Arc<Budget>,
    pub(crate) changed: watch::Sender<u64>,
}

impl Batches {
    pub(crate) fn map(&self) -> MutexGuard<'_, BTreeMap<BatchId, Arc<Run>>> {
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
}

impl Run {
    pub(crate) fn new(folder: &StatePath, record: BatchRecord) -> Arc<Self> {
        Arc::new(Self {
            path: folder.join(format!("{}.json", record.batch)),
            budget: Budget::new(record.budget),
            record: Mutex::new(record),
            running: Mutex::default(),
            changed: watch::Sender::new(0),
        })
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, BatchRecord> {
        self.record.lock()
    }

    pub(crate) fn running(&self) -> MutexGuard<'_, BTreeSet<usize>> {
        self.running.lock()
    }

    pub(crate) fn one(&self, nth: usize) -> MoveRecord {
        self.record().moves[nth].clone()
    }

    /// Changes what is durable, and wakes who watches.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut BatchRecord) -> T) -> io::Result<T> {
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
    pub(crate) fn note(&self, change: impl FnOnce(&mut BatchRecord)) {
        if let Err(why) = self.change(change) {
            tracing::error!(%why, "cannot record the progress of a batch");
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
}
