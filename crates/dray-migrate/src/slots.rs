//! The migrations this agent knows: handles for the API, the listener and the VM's tasks.

use dray_api::{
    Event, MigrationState, MigrationStatus, Progress, Refusal, Role, Summary, what_moves,
};
use dray_files::unix_ms;
use dray_types::MigrationId;
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{broadcast, watch};

/// Events a slow watcher may be behind before it misses some; each is one line on a screen.
const EVENTS: usize = 256;

thread_local! {
    /// This thread is changing a board.
    static CHANGING: Cell<bool> = const { Cell::new(false) };
}

/// Who changes a board takes no lock meanwhile: somebody may hold that one and wait for the board.
pub(super) fn assert_no_board_is_changing() {
    debug_assert!(!CHANGING.get(), "a lock is taken while a board is changed");
}

/// What is shown of a migration.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Which end this agent is.
    pub role: Role,
    /// The host at the other end.
    pub peer: String,
    /// Name of the VM.
    pub vm: Option<String>,
    /// What it is doing.
    pub state: MigrationState,
    /// Milliseconds since 1970 at the start.
    pub started_unix_ms: u64,
    /// Since when a target waits for its source, to begin or to come back; likewise.
    pub waiting_since: Option<u64>,
    /// The last progress.
    pub progress: Progress,
    /// The summary, once the migration has ended.
    pub summary: Option<Summary>,
    /// Why it failed, or what it waits for.
    pub error: Option<Refusal>,
}

/// The public face of one migration; its loop writes, everyone may read.
pub struct Board {
    /// Id of the migration.
    pub migration: MigrationId,
    shown: Mutex<Shown>,
    changed: watch::Sender<u64>,
    events: broadcast::Sender<Event>,
}

impl Board {
    /// A board that shows `shown`.
    pub fn new(migration: MigrationId, shown: Shown) -> Arc<Self> {
        Arc::new(Self {
            migration,
            shown: Mutex::new(shown),
            changed: watch::Sender::new(0),
            events: broadcast::Sender::new(EVENTS),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock()
    }

    /// A copy of what is shown.
    pub fn read(&self) -> Shown {
        self.lock().clone()
    }

    /// Changes what is shown and wakes who watches. `change` takes no lock: who calls this may hold any.
    pub fn change(&self, change: impl FnOnce(&mut Shown)) {
        let mut shown = self.lock();
        CHANGING.set(true);
        change(&mut shown);
        CHANGING.set(false);
        drop(shown);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Makes a prepared migration into something else; nothing when somebody was faster.
    pub fn take(&self, state: MigrationState) -> Option<()> {
        let mut taken = None;
        self.change(|shown| {
            taken = (shown.state == MigrationState::Prepared).then(|| shown.state = state);
        });
        taken
    }

    /// Tells watchers one line.
    pub fn notice(&self, text: impl Into<String>) {
        // Nobody may be watching.
        let _ = self.events.send(Event::Notice { text: text.into() });
    }

    /// Shows `now`, why the migration waits, in the place of what was `shown` for that before. Watchers are told when it
    /// changes. An error of anybody else's stays.
    pub fn show_wait(&self, shown: &mut Option<Refusal>, now: Option<Refusal>) {
        if now == *shown {
            return;
        }
        if let Some(now) = &now {
            self.notice(now.to_string());
        }
        let before = std::mem::replace(shown, now.clone());
        self.change(|board| {
            if before.is_some() && board.error == before {
                board.error = None;
            }
            if now.is_some() {
                board.error = now;
            }
        });
    }

    /// Wakes at every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Notices from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// What is moved, and where: `vm1 → hostb`, at its target `vm1 ← hosta`.
    pub fn title(&self) -> String {
        let shown = self.lock();
        let arrow = match shown.role {
            Role::Source => '→',
            Role::Target => '←',
        };
        let moves = what_moves(shown.vm.as_deref(), &shown.progress.images);
        format!("{moves} {arrow} {}", shown.peer)
    }

    /// As the API shows it.
    pub fn status(&self) -> MigrationStatus {
        let shown = self.read();
        MigrationStatus {
            migration: self.migration,
            role: shown.role,
            peer: shown.peer,
            vm: shown.vm,
            state: shown.state,
            started_unix_ms: shown.started_unix_ms,
            progress: shown.progress,
            summary: shown.summary,
            error: shown.error,
            waiting_seconds: shown.waiting_since.map(|at| unix_ms().saturating_sub(at) / 1000),
            subject: None,
        }
    }
}

/// A map of migrations of one role.
pub struct Slots<T> {
    slots: Mutex<BTreeMap<MigrationId, Arc<T>>>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Mutex::new(BTreeMap::new()) }
    }
}

impl<T> Slots<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<MigrationId, Arc<T>>> {
        self.slots.lock()
    }

    /// Adds or replaces a migration.
    pub fn insert(&self, migration: MigrationId, slot: Arc<T>) {
        self.lock().insert(migration, slot);
    }

    /// One migration.
    pub fn get(&self, migration: MigrationId) -> Option<Arc<T>> {
        self.lock().get(&migration).cloned()
    }

    /// Forgets a migration.
    pub fn remove(&self, migration: MigrationId) {
        self.lock().remove(&migration);
    }

    /// All slots.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.lock().values().cloned().collect()
    }
}
