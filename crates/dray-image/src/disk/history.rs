//! The blocks that were changed in the image's open generation.

use super::{Disk, IntentLog};
use crate::Result;
use crate::gate::Quiesced;
use dray_types::BlockSet;
use std::sync::Arc;

impl Disk {
    /// From now on every change is remembered for the image's open generation, in which `changed`
    /// was changed before; a disk that does so already goes on with what it has. Migrations do not
    /// touch this set: it is there for those that come later. Writes that are in flight count.
    pub fn start_history(&self, intent: Arc<dyn IntentLog>, changed: &BlockSet) {
        if !self.history.is_on() {
            self.history.start(Some(intent));
            changed.runs().for_each(|run| self.history.mark(run));
        }
    }

    /// Ends [`start_history`](Self::start_history) and forgets what was changed.
    pub fn stop_history(&self) {
        self.history.stop();
    }

    /// True while changes are remembered for the open generation.
    pub fn keeps_history(&self) -> bool {
        self.history.is_on()
    }

    /// The blocks changed in the open generation; exact while the disk is quiesced.
    pub fn history(&self) -> BlockSet {
        self.history.snapshot()
    }

    /// Closes the regions that nobody has changed since the last call; see
    /// [`Tracker::close_idle`](crate::tracker::Tracker::close_idle).
    pub fn close_idle_history(&self) -> Vec<u64> {
        self.history.close_idle()
    }

    /// Ends the open generation at this quiet moment and returns what was changed in it: from now on
    /// changes are remembered for the next one. Regions that are open stay so. None when nothing was
    /// remembered: it is from now on.
    ///
    /// # Errors
    /// `Invalid` when it is another disk that is quiet.
    pub fn turn_history(
        &self,
        quiesced: &Quiesced,
        intent: Arc<dyn IntentLog>,
    ) -> Result<Option<BlockSet>> {
        self.is_quiet(quiesced, "closing a generation")?;
        if !self.history.is_on() {
            self.history.start(Some(intent));
            return Ok(None);
        }
        let mut changed = BlockSet::new();
        self.history.take(0, u64::MAX).accept().into_iter().for_each(|run| changed.insert(run));
        Ok(Some(changed))
    }

    /// Takes `changed` back into the open generation: the one before it was not closed after all.
    pub fn add_history(&self, changed: &BlockSet) {
        changed.runs().for_each(|run| self.history.mark(run));
    }
}
