//! Who is attached to which export, over all front ends; and that no write of a client
//! that has gone lands on top of what the next one has written.
//!
//! A client that comes back sends again what was not answered, and goes on. Requests that it left
//! with its last connection must not be done after that. Such a connection is in the way of new ones
//! from the moment at which its client could know that it is over until nothing that changes the
//! image can come of it any more.

use crate::client::{Client, Process};
use crate::export::Exports;
use crate::limits::CONNECTIONS_OF_EXPORT;
use crate::share::{Share, Shares};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A connection: who it is with, and whether it is over.
#[derive(Clone)]
pub struct ClientLink {
    /// Who it is with.
    pub client: Client,
    /// Set when the front end ends it.
    pub closing: Arc<AtomicBool>,
    /// Tells whether the client has gone.
    pub has_gone: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Breaks it: what waits in it for an image to be opened is not done any more.
    pub cut: Arc<dyn Fn() + Send + Sync>,
}

impl ClientLink {
    /// Whether the front end ends it.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether its client can know that it is over.
    fn is_over(&self) -> bool {
        self.is_closing() || (self.has_gone)()
    }
}

/// Who is attached.
pub struct Attachments {
    exports: Arc<dyn Exports>,
    users: Mutex<Users>,
    changed: Condvar,
    shares: Shares,
}

#[derive(Default)]
struct Users {
    next: u64,
    by_export: HashMap<String, HashMap<u64, User>>,
}

struct User {
    line: ClientLink,
    stage: Stage,
}

/// What can come of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Any request.
    Live,
    /// Writes that are under way, nothing new.
    Unfinished,
    /// Nothing that changes the image.
    Harmless,
}

impl User {
    fn is_in_the_way(&self) -> bool {
        match self.stage {
            Stage::Live => self.line.is_over(),
            Stage::Unfinished => true,
            Stage::Harmless => false,
        }
    }
}

impl Users {
    fn of(&self, export: &str) -> usize {
        self.by_export.get(export).map_or(0, HashMap::len)
    }

    fn any_in_the_way(&self, export: &str) -> bool {
        self.by_export.get(export).is_some_and(|all| all.values().any(User::is_in_the_way))
    }
}

impl Attachments {
    /// Nobody yet, to none of `exports`.
    pub fn new(exports: Arc<dyn Exports>) -> Arc<Self> {
        let (users, changed, shares) = Default::default();
        Arc::new(Self { exports, users, changed, shares })
    }

    /// What there is to be attached to.
    pub fn exports(&self) -> &dyn Exports {
        &*self.exports
    }

    /// What the connections of the export `name` have together.
    pub fn share(&self, name: &str) -> Arc<Share> {
        self.shares.of(name)
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock()
    }

    /// Connections that now use the export `name`. One counts until the last of its requests has ended,
    /// even when the client is gone.
    pub fn count(&self, name: &str) -> usize {
        self.users().of(name)
    }

    /// Wakes everyone who waits here: connections have been told to close.
    pub fn wake(&self) {
        // Whoever has looked at its flag and not yet gone to sleep holds the lock.
        drop(self.users());
        self.changed.notify_all();
    }

    /// Breaks the connections of a process. It may come again, and gets what is there for it then.
    pub fn cut(&self, process: Process) {
        let users = self.users();
        let lines = users.by_export.values().flat_map(HashMap::values).map(|user| &user.line);
        for line in lines.filter(|line| line.client.process == Some(process)) {
            line.closing.store(true, Ordering::Release);
            (line.cut)();
        }
        drop(users);
        self.changed.notify_all();
    }

    /// Waits for `time`; false when the connection ends meanwhile.
    pub fn pause(&self, time: Duration, line: &ClientLink) -> bool {
        self.changed.wait_while_for(&mut self.users(), |_| !line.is_closing(), time);
        !line.is_over()
    }

    /// Counts a connection to `name` for as long as the result lives. Waits first for connections
    /// that are in the way; `None` when that takes longer than `limit`, or `line` ends meanwhile.
    pub fn attach(
        self: &Arc<Self>,
        name: &str,
        line: &ClientLink,
        limit: Duration,
    ) -> Option<Attachment> {
        let deadline = Instant::now() + limit;
        let mut users = self.users();
        while users.any_in_the_way(name) && !line.is_closing() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(export = name, "writes of an earlier client are unfinished");
                return None;
            }
            self.changed.wait_for(&mut users, left);
        }
        if line.is_closing() {
            return None;
        }
        if users.of(name) >= CONNECTIONS_OF_EXPORT {
            tracing::warn!(export = name, "a client is refused: too many connections");
            return None;
        }
        let id = users.next;
        users.next += 1;
        let user = User { line: line.clone(), stage: Stage::Live };
        users.by_export.entry(name.to_owned()).or_default().insert(id, user);
        let count = users.of(name);
        drop(users);
        self.exports.attached(name, &line.client, count);
        let all = Arc::clone(self);
        Some(Attachment { all, name: name.to_owned(), id, client: line.client })
    }
}

/// One connection's use of an export.
pub struct Attachment {
    all: Arc<Attachments>,
    name: String,
    id: u64,
    client: Client,
}

impl Attachment {
    /// No request begins any more; with `changing`, writes are under way until this is dropped.
    pub fn ends(&self, changing: bool) {
        let mut users = self.all.users();
        let user = users.by_export.get_mut(&self.name).and_then(|all| all.get_mut(&self.id));
        if let Some(user) = user
            && user.stage == Stage::Live
        {
            user.stage = if changing { Stage::Unfinished } else { Stage::Harmless };
        }
        drop(users);
        self.all.changed.notify_all();
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let mut users = self.all.users();
        if let Some(all) = users.by_export.get_mut(&self.name) {
            all.remove(&self.id);
        }
        let left = users.of(&self.name);
        if left == 0 {
            users.by_export.remove(&self.name);
        }
        drop(users);
        self.all.changed.notify_all();
        self.all.exports.detached(&self.name, &self.client, left);
    }
}
