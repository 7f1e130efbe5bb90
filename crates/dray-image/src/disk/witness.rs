//! Telling of changes that are complete, for what is sent on at once.

use dray_types::BlockRange;
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Is told of a guest's changes.
pub trait WriteWitness: Send + Sync {
    /// A change of `range` is in the image, and its blocks are dirty if the disk is tracked. Told
    /// by the thread that serves the guest: must not wait for anything.
    fn written(&self, range: BlockRange);
}

/// Who is told.
#[derive(Default)]
pub(super) struct Witness {
    on: AtomicBool,
    who: RwLock<Option<Arc<dyn WriteWitness>>>,
}

impl Witness {
    /// From now on this one is told, or nobody.
    pub(super) fn set(&self, who: Option<Arc<dyn WriteWitness>>) {
        let mut held = self.who.write();
        self.on.store(who.is_some(), Ordering::Release);
        *held = who;
    }

    /// One load when nobody wants to know.
    pub(super) fn tell(&self, range: BlockRange) {
        if !self.on.load(Ordering::Acquire) {
            return;
        }
        let who = self.who.read().clone();
        if let Some(who) = who {
            who.written(range);
        }
    }
}
