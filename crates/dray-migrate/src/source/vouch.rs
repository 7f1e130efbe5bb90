//! Saying that the images may be used: after a restart they are closed until this loop knows who owns
//! them (I8).

use super::SourceLoop;

impl SourceLoop {
    /// Opens the exports as soon as this loop has done what its journal asks for: without a handover
    /// it is this host that owns the images, whatever became of its peer (I4), and after one their
    /// disks are parked and stay so.
    pub(super) fn vouch(&mut self) {
        if self.vouched || self.is_stuck() {
            return;
        }
        self.vouched = true;
        self.images.vouch();
    }
}
