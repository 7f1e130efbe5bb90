//! A part of the configuration that may change while the agent runs.

use parking_lot::RwLock;
use std::fmt;
use std::sync::Arc;

/// The part as it is now. Clones are the same one.
#[derive(Clone, Default)]
pub struct Live<T>(Arc<RwLock<Arc<T>>>);

impl<T> Live<T> {
    /// It begins like this.
    pub fn new(value: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(value))))
    }

    /// As it is now; what is got stays as it was when it changes.
    pub fn now(&self) -> Arc<T> {
        Arc::clone(&self.0.read())
    }

    /// From now on it is what `other` is now.
    pub(crate) fn take(&self, other: &Self) {
        let value = other.now();
        *self.0.write() = value;
    }
}

impl<T: fmt::Debug> fmt::Debug for Live<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

impl<T: PartialEq> PartialEq for Live<T> {
    fn eq(&self, other: &Self) -> bool {
        *self.now() == *other.now()
    }
}

impl<T: Eq> Eq for Live<T> {}
