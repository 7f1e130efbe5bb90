//! Looks at chains whose disks are not flattened yet: what a QEMU that waits at the target reads.
//!
//! While a disk leaves its chain or goes back, nobody else may have the chain's active image open
//! (QEMU's mirror shares its target with no reader), and the file changes its name. Looks wait
//! meanwhile, without a daemon, and go on under the name that it has then.

use super::ChainImage;
use parking_lot::{Mutex, MutexGuard};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// Where the active image of a chain is, when its disk is flattened or about to be.
pub enum Whereabouts {
    /// On the way: not to be opened.
    Turning,
    /// At rest under this name.
    At(PathBuf),
}

/// All looks of this host.
#[derive(Default)]
pub struct Peeks(Mutex<Vec<Weak<dyn ChainImage>>>);

impl Peeks {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn ChainImage>>> {
        self.0.lock()
    }

    /// Adds a look. `frozen` says where the image is when its disk is flattened by now; whoever
    /// changes that afterwards tells the look.
    pub fn add(&self, chain: &Arc<dyn ChainImage>, frozen: impl FnOnce() -> Option<Whereabouts>) {
        let mut all = self.lock();
        match frozen() {
            Some(Whereabouts::Turning) => chain.hold(),
            Some(Whereabouts::At(path)) => chain.moved(&path),
            None => {}
        }
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(chain));
    }

    /// Those at the chain whose active image was at `path` when it was prepared.
    fn of(&self, path: &Path) -> Vec<Arc<dyn ChainImage>> {
        let all = self.lock();
        all.iter().filter_map(Weak::upgrade).filter(|chain| chain.is_of(path)).collect()
    }

    /// Nobody looks at the chain from now on: its daemons have ended when this returns.
    pub fn hold(&self, path: &Path) {
        self.of(path).iter().for_each(|chain| chain.hold());
    }

    /// Its active image rests at `now`.
    pub fn go_on(&self, path: &Path, now: &Path) {
        for chain in self.of(path) {
            chain.moved(now);
            chain.resume();
        }
    }

    /// The agent ends, and with it all looks.
    pub fn close(&self) {
        let all: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|chain| chain.close());
    }
}
