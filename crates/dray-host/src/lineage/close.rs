//! Closes a generation for a backup, while the owner keeps serving the image.
//!
//! The generation ends at a quiet moment, in memory only, so that the guest waits for no disk. It is
//! written down after that. Until then the journal knows of the old generation, with every region
//! that was written into before or since; a crash then makes the old one go on, with too much in its
//! set and never too little. Only what is written down may be told to anybody. Regions that were
//! open stay open, so that no guest's write waits for a record because of a backup; the next look
//! for idle ones closes them.

use super::{ImageLineage, random_generation};
use dray_engine::lineage::{Lineage, LineageRecord};
use dray_image::{Disk, Quiesced};
use dray_types::{Ancestor, BlockSet, GenerationId};
use parking_lot::MutexGuard;
use std::io;
use std::sync::Arc;

/// Nobody else writes the line down; to be had before the disk is made quiet.
pub struct Turning<'a> {
    line: &'a Arc<ImageLineage>,
    next: GenerationId,
    held: Vec<GenerationId>,
    _rewriting: MutexGuard<'a, ()>,
}

/// A generation that has ended and is not written down yet. Dropping it makes it go on.
#[must_use = "dropping it lets the old generation continue"]
pub struct Turn<'a> {
    turning: Turning<'a>,
    disk: Arc<Disk>,
    /// What was written in the generation that has ended; none where nothing was remembered.
    changed: Option<BlockSet>,
    before: Ancestor,
    after: Lineage,
    durable: bool,
}

impl ImageLineage {
    /// Makes ready for a generation's end. Of the generations that are `held` none is merged into a
    /// later one.
    ///
    /// # Errors
    /// When the system has no randomness to give.
    pub fn turning(self: &Arc<Self>, held: Vec<GenerationId>) -> io::Result<Turning<'_>> {
        Ok(Turning { next: random_generation()?, held, _rewriting: self.rewriting(), line: self })
    }

    /// The closed generations' ids and numbers, oldest first.
    pub fn ancestors(&self) -> Vec<Ancestor> {
        self.inner().lineage.ancestors()
    }
}

impl<'a> Turning<'a> {
    /// The open generation ends at this quiet moment of `disk`, and the next one begins: changes are
    /// remembered from the first one on. It is `unix_ms`, milliseconds since 1970.
    ///
    /// # Errors
    /// When it is another disk that is quiet.
    pub fn turn(
        self,
        disk: &Arc<Disk>,
        quiesced: &Quiesced,
        host: &str,
        unix_ms: u64,
    ) -> io::Result<Turn<'a>> {
        let mut inner = self.line.inner();
        let had_past = inner.lineage.has_past();
        if !had_past {
            // What a line that has ended left on knows of no record of its regions.
            disk.stop_history();
        }
        let intent = Arc::clone(self.line) as _;
        let changed = disk.turn_history(quiesced, intent).map_err(io::Error::other)?;
        let known = changed.clone().filter(|_| !inner.suspect);
        let written = known.unwrap_or_else(|| super::whole(disk));
        let before = inner.lineage.open();
        let after = inner.lineage.turned(written, host, unix_ms, self.next, &self.held);
        let after = after.ok_or_else(|| io::Error::other("no further generation can be numbered"));
        inner.turning = after.is_ok();
        drop(inner);
        match after {
            Ok(after) => {
                let disk = Arc::clone(disk);
                Ok(Turn { turning: self, disk, changed, before, after, durable: false })
            }
            Err(why) => {
                go_on(disk, changed.as_ref());
                Err(why)
            }
        }
    }
}

/// The old generation goes on.
fn go_on(disk: &Disk, changed: Option<&BlockSet>) {
    match changed {
        Some(changed) => disk.add_history(changed),
        None => disk.stop_history(),
    }
}

impl Turn<'_> {
    /// The generation that has ended.
    pub fn closed(&self) -> Ancestor {
        self.before
    }

    /// The blocks that were changed after the generation `base` and until the end of this one; none
    /// when the line does not know `base`.
    pub fn changed_since(&self, base: GenerationId) -> Option<BlockSet> {
        self.after.changed_since(base, &BlockSet::new())
    }

    /// Writes the end down; durable on return. Others may hear of the generation from then on.
    ///
    /// # Errors
    /// When that fails, or the line has ended meanwhile; the old generation then goes on.
    pub fn commit(mut self) -> io::Result<Ancestor> {
        let mut inner = self.turning.line.inner();
        if inner.lineage.open() != self.before {
            return Err(io::Error::other("the image's line of generations has ended"));
        }
        // What is written by now is in regions that are open.
        let whole = LineageRecord::Whole { lineage: self.after.clone(), changed: BlockSet::new() };
        inner.rewrite_open(&whole)?;
        inner.lineage = self.after.clone();
        inner.turning = false;
        drop(inner);
        self.durable = true;
        Ok(self.before)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.durable {
            return;
        }
        let mut inner = self.turning.line.inner();
        inner.turning = false;
        go_on(&self.disk, self.changed.as_ref());
    }
}
