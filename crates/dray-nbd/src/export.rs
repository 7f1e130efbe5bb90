//! What is served: the registry a server asks for exports, and who is attached to which.
//!
//! The registry belongs to the agent; this module only counts connections.

use dray_image::Image;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

    /// A connection to `name` begins to send requests; `connections` counts it.
    fn attached(&self, _name: &str, _connections: usize) {}

    /// A connection to `name` has ended and none of its requests is under way any more;
    /// `connections` are left.
    fn detached(&self, _name: &str, _connections: usize) {}
}

/// Who is attached, over all listeners of a server.
pub(crate) struct Attachments {
    exports: Arc<dyn Exports>,
    counts: Mutex<HashMap<String, usize>>,
}

impl Attachments {
    pub(crate) fn new(exports: Arc<dyn Exports>) -> Arc<Self> {
        Arc::new(Self { exports, counts: Mutex::new(HashMap::new()) })
    }

    pub(crate) fn exports(&self) -> &dyn Exports {
        &*self.exports
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, name: &str) -> usize {
        self.counts().get(name).copied().unwrap_or(0)
    }

    /// Counts a connection to `name` for as long as the result lives.
    pub(crate) fn attach(self: &Arc<Self>, name: &str) -> Attachment {
        let count = {
            let mut counts = self.counts();
            let count = counts.entry(name.to_owned()).or_insert(0);
            *count += 1;
            *count
        };
        self.exports.attached(name, count);
        Attachment { all: Arc::clone(self), name: name.to_owned() }
    }
}

/// One connection's use of an export.
pub(crate) struct Attachment {
    all: Arc<Attachments>,
    name: String,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let left = {
            let mut counts = self.all.counts();
            let left = counts.get(&self.name).map_or(0, |count| count.saturating_sub(1));
            if left == 0 {
                counts.remove(&self.name);
            } else {
                counts.insert(self.name.clone(), left);
            }
            left
        };
        self.all.exports.detached(&self.name, left);
    }
}
