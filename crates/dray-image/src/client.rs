//! Whose request a thread does, and whether anybody still waits for its answer.
//!
//! A request may wait at a closed gate for as long as a migration takes. When its client has gone meanwhile a
//! change must never be done: the guest has written elsewhere since, and was told that this is durable.

use std::cell::RefCell;
use std::sync::Arc;

/// Tells whether a client is still there.
pub type IsThere = Arc<dyn Fn() -> bool + Send + Sync>;

thread_local! {
    static CLIENT: RefCell<Option<IsThere>> = const { RefCell::new(None) };
}

/// Puts back what was there before, also when the work panics.
struct Before(Option<IsThere>);

impl Drop for Before {
    fn drop(&mut self) {
        CLIENT.with(|client| *client.borrow_mut() = self.0.take());
    }
}

/// Does `work` on this thread for a client: what waits in it for the disk to be opened fails when the client
/// has gone, and does nothing.
pub fn working_for<T>(is_there: &IsThere, work: impl FnOnce() -> T) -> T {
    let before = CLIENT.with(|client| client.replace(Some(Arc::clone(is_there))));
    let _before = Before(before);
    work()
}

/// Whether the client that this thread works for is still there; true when it works for none.
pub(crate) fn is_there() -> bool {
    CLIENT.with(|client| client.borrow().as_ref().is_none_or(|is_there| is_there()))
}
