//! What is served: the registry that front ends ask for exports. It belongs to the agent.

use crate::client::Client;
use dray_image::Image;
use std::sync::Arc;

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
    /// The export exists, but not for this client or not in this state. It is told so at once.
    #[error("export refused: {0}")]
    Refused(String),
    /// The export cannot be had now, for a cause that may pass by itself. The client is held and the
    /// registry asked again until it has passed, or until
    /// [`OPEN_PATIENCE`](crate::limits::OPEN_PATIENCE) is over and the client is told.
    #[error("export is not ready: {0}")]
    NotYet(String),
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

/// The exports of a host. Calls come from many threads at once.
pub trait Exports: Send + Sync {
    /// Every export that is shown in a list, to those it [is for](Self::is_for).
    fn list(&self) -> Vec<ExportInfo>;

    /// The image behind `name`, for `client`. Looking is not attaching: a client may only want its
    /// size.
    ///
    /// # Errors
    /// Why the client does not get it.
    fn open(&self, name: &str, client: &Client) -> Result<Arc<dyn Image>, ExportError>;

    /// Whether `client` may learn that there is an export called `name`.
    fn is_for(&self, _name: &str, _client: &Client) -> bool {
        true
    }

    /// What `name` is shown as; exports that are not in the list may have it too.
    fn describe(&self, name: &str) -> ExportInfo {
        let found = self.list().into_iter().find(|export| export.name == name);
        found.unwrap_or_else(|| ExportInfo::new(name))
    }

    /// A connection of `client` to `name` begins to send requests; `connections` counts it. Calls
    /// for connections that come and go at once may arrive in another order;
    /// `Attachments::count` always knows the present number.
    fn attached(&self, _name: &str, _client: &Client, _connections: usize) {}

    /// A connection of `client` to `name` has ended and none of its requests is under way any more;
    /// `connections` are left.
    fn detached(&self, _name: &str, _client: &Client, _connections: usize) {}
}
