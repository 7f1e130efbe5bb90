//! A part of the configuration that is read again while the agent runs.

use parking_lot::RwLock;
use std::fmt;
use std::sync::Arc;

/// What such a part says now. Clones are the same one, so that everybody who has a configuration sees what it
/// says today.
pub struct Live<T>(Arc<RwLock<Arc<T>>>);

impl<T> Live<T> {
    /// It says this.
    pub fn new(now: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(now))))
    }

    /// What it says now.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.read())
    }
}

impl<T> Clone for Live<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: fmt::Debug> fmt::Debug for Live<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: PartialEq> PartialEq for Live<T> {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl<T: Eq> Eq for Live<T> {}
