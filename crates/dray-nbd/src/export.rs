//! What is served: the registry a server asks for exports, and who is attached to which.
//!
//! The registry belongs to the agent; this module only counts connections.

use dray_image::Image;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One export as clients see it in a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// The name clients ask for.
    pub name: String,
    /// A line for people; empty for none.
    pub description: String,
    /// Zeroing that may leave holes is always fast here: true for files and block devices that can
    /// punch holes. Clients then zero a whole image before they fill it.
    pub fast_zero: bool,
}

impl ExportInfo {
    /// An export with no description and no promise about zeroing.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), description: String::new(), fast_zero: false }
    }
}

/// Why an export cannot be opened; the text reaches the client.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ExportError {
    /// There is no such export.
    #[error("no export named '{name}'{hint}")]
    Unknown {
        /// What the client asked for.
        name: String,
        /// What it may do about it, starting with a separator; or empty.
        hint: String,
    },
    /// The export exists, but not for this client or not in this state.
    #[error("export refused: {0}")]
    Refused(String),
    /// The export is being taken away.
    #[error("export is shutting down: {0}")]
    ShuttingDown(String),
}

impl ExportError {
    /// No export has that name.
    pub fn unknown(name: &str) -> Self {
        Self::Unknown { name: name.to_owned(), hint: String::new() }
    }
}

/// The exports of a server. Calls come from many threads at once.
pub trait Exports: Send + Sync {
    /// Every export that may be shown to anyone who asks.
    fn list(&self) -> Vec<ExportInfo>;

    /// The image behind `name`. Looking is not attaching: a client may only want its size.
    ///
    /// # Errors
    /// Why the client does not get it.
    fn open(&self, name: &str) -> Result<Arc<dyn Image>, ExportError>;

    /// What `name` is shown as; exports that are not in the list may have it too.
    fn describe(&self, name: &str) -> ExportInfo {
        let found = self.list().into_iter().find(|export| export.name == name);
        found.unwrap_or_else(|| ExportInfo::new(name))
    }

    /// A connection to `name` begins to send requests; `connections` counts it. Calls for
    /// connections that come and go at once may arrive in another order; `Server::connections`
    /// always knows the present number.
    fn attached(&self, _name: &str, _connections: usize) {}

    /// A connection to `name` has ended and none of its requests is under way any more;
    /// `connections` are left.
    fn detached(&self, _name: &str, _connections: usize) {}
}

/// Who is attached, over all listeners of a server.
pub(crate) struct Attachments {
    exports: Arc<dyn Exports>,
    users: Mutex<HashMap<String, Users>>,
    left: Condvar,
}

#[derive(Default)]
struct Users {
    connections: usize,
    /// Connections that are gone while writes of theirs are still under way.
    unfinished: usize,
}

impl Attachments {
    pub(crate) fn new(exports: Arc<dyn Exports>) -> Arc<Self> {
        Arc::new(Self { exports, users: Mutex::default(), left: Condvar::new() })
    }

    pub(crate) fn exports(&self) -> &dyn Exports {
        &*self.exports
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, Users>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, name: &str) -> usize {
        self.users().get(name).map_or(0, |users| users.connections)
    }

    /// Counts a connection to `name` for as long as the result lives. Waits first for writes that
    /// clients now gone have left under way: a client that comes back sends them again and goes
    /// on, and then none of them may land on top of something newer. `None` when that takes
    /// longer than `limit`.
    pub(crate) fn attach(self: &Arc<Self>, name: &str, limit: Duration) -> Option<Attachment> {
        let unfinished = |all: &mut HashMap<String, Users>| {
            all.get(name).is_some_and(|users| users.unfinished > 0)
        };
        let wait = self.left.wait_timeout_while(self.users(), limit, unfinished);
        let (mut all, waited) = wait.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        let users = all.entry(name.to_owned()).or_default();
        users.connections += 1;
        let count = users.connections;
        drop(all);
        self.exports.attached(name, count);
        let unfinished = AtomicBool::new(false);
        Some(Attachment { all: Arc::clone(self), name: name.to_owned(), unfinished })
    }
}

/// One connection's use of an export.
pub(crate) struct Attachment {
    all: Arc<Attachments>,
    name: String,
    unfinished: AtomicBool,
}

impl Attachment {
    /// The client is gone, but writes of its are under way until this is dropped.
    pub(crate) fn is_unfinished(&self) {
        if !self.unfinished.swap(true, Ordering::AcqRel)
            && let Some(users) = self.all.users().get_mut(&self.name)
        {
            users.unfinished += 1;
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let mut all = self.all.users();
        let Some(users) = all.get_mut(&self.name) else { return };
        users.connections -= 1;
        users.unfinished -= usize::from(*self.unfinished.get_mut());
        let left = users.connections;
        if left == 0 {
            all.remove(&self.name);
        }
        drop(all);
        self.all.left.notify_all();
        self.all.exports.detached(&self.name, left);
    }
}
