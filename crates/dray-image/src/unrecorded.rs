//! Blocks that are in an image while nothing durable says so yet, and what a flush does about them.
//!
//! A flush first makes the data durable, then records, then answers (I2). Until then a note makes
//! the next process of this boot take such a block for present. A sync that fails ends both: the
//! kernel reports lost pages once and then calls them clean, so nobody knows any more what is in the
//! image. The notes are taken back, and this process brings, changes and records nothing more.

use crate::blockmap::AtomicBlockMap;
use crate::needs::PresentLog;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::unpoisoned::lock;
use crate::{Error, ErrorKind, Result, WriteBackError};
use dray_types::{BlockRange, BlockSet};

/// The blocks that are present and not recorded.
pub(crate) struct Unrecorded {
    map: AtomicBlockMap,
    /// Held from the snapshot of what is unrecorded until it is recorded.
    recording: Mutex<()>,
    /// Held while something is noted, and while notes are taken back: what was written before a
    /// sync that failed is not noted after that.
    noting: Mutex<Notes>,
    sync_failed: AtomicBool,
}

/// What the next process of this boot believes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notes {
    /// What was noted, rightly.
    Believed,
    /// A sync failed, and the notes are still there.
    Doubtful,
    /// A sync failed, and the notes were taken back.
    Forgotten,
}

impl Unrecorded {
    /// None, of an image of `blocks` blocks.
    pub(crate) fn new(blocks: u64) -> Self {
        Self {
            map: AtomicBlockMap::new(blocks),
            recording: Mutex::new(()),
            noting: Mutex::new(Notes::Believed),
            sync_failed: AtomicBool::new(false),
        }
    }

    /// True when a flush has nothing to record.
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Blocks of `noted` came to an earlier process, whose notes say so. One whose sync failed, with this
    /// `loss`, may have ended before it took them back: then they are not believed. True when there was no
    /// such note, so that those of this process are right.
    #[must_use = "the next process doubts the notes of this one until the image knows"]
    pub(crate) fn inherit(&self, noted: &BlockSet, loss: Option<WriteBackError>) -> bool {
        let in_doubt = loss.is_some_and(|loss| loss.notes_in_doubt);
        if in_doubt && !noted.is_empty() {
            *lock(&self.noting) = Notes::Doubtful;
            self.sync_failed.store(true, Ordering::SeqCst);
        }
        noted.runs().for_each(|run| {
            self.map.set(run);
        });
        in_doubt && noted.is_empty()
    }

    /// Whether blocks may be changed; not after a failed sync, because no flush could ever answer
    /// for it. One load.
    ///
    /// # Errors
    /// After a failed sync: an error that asks for a restart of the agent.
    pub(crate) fn check_usable(&self, what: &str) -> Result<()> {
        if self.sync_failed.load(Ordering::SeqCst) { Err(unusable(what)) } else { Ok(()) }
    }

    /// Whether what was just read of `range` is what is in the image. After a failed sync that is not known
    /// of what is not recorded: the kernel may have dropped it.
    ///
    /// # Errors
    /// After a failed sync, for blocks of `range` that are not recorded: an error that asks for a restart.
    pub(crate) fn check_read(&self, range: BlockRange) -> Result<()> {
        let lost = self.sync_failed.load(Ordering::SeqCst) && self.map.intersects(range);
        if lost { Err(unusable("reading blocks that came lately")) } else { Ok(()) }
    }

    /// Blocks of `run` are in the image now, though nobody may take them for present before this
    /// returns. They are noted: a process that is killed must not put old data over a write that was
    /// acknowledged.
    ///
    /// # Errors
    /// When that cannot be noted; they are not present then.
    pub(crate) fn add(&self, log: Option<&dyn PresentLog>, run: BlockRange) -> Result<()> {
        let noting = lock(&self.noting);
        if *noting != Notes::Believed {
            return Err(unusable("noting blocks as present"));
        }
        log.map_or(Ok(()), |log| log.note(run))?;
        self.map.set(run);
        Ok(())
    }

    /// Makes the image durable by `sync`, then the record of every block that was added before. `sync` is told whether
    /// there is one: then the time at which the file was changed has to be durable as well.
    ///
    /// # Errors
    /// What either reports; after a failed sync always. An [earlier loss](Error::is_earlier_loss) is no
    /// failed sync.
    pub(crate) fn record(
        &self,
        what: &str,
        log: Option<&dyn PresentLog>,
        sync: impl FnOnce(bool) -> Result<()>,
    ) -> Result<()> {
        let _one = lock(&self.recording);
        if self.sync_failed.load(Ordering::SeqCst) {
            self.forget(log)?;
            return Err(unusable(what));
        }
        let arrived = self.map.snapshot();
        let records = !arrived.is_empty();
        if records {
            log.iter().for_each(|log| log.before_sync());
        }
        let told = match sync(records) {
            Err(why) if !why.is_earlier_loss() => {
                self.sync_failed.store(true, Ordering::SeqCst);
                return Err(self.forget(log).err().unwrap_or(why));
            }
            told => told,
        };
        self.write_down(what, log, &arrived)?;
        told
    }

    fn write_down(
        &self,
        what: &str,
        log: Option<&dyn PresentLog>,
        arrived: &BlockSet,
    ) -> Result<()> {
        if arrived.is_empty() {
            return Ok(());
        }
        let none = || Error::new(ErrorKind::Invalid, what, "there is no log of present blocks");
        log.ok_or_else(none)?.record(arrived)?;
        arrived.runs().for_each(|run| {
            self.map.clear(run);
        });
        Ok(())
    }

    /// Takes the notes back, unless that is done. Until it is, the next process would believe them:
    /// each flush tries again.
    fn forget(&self, log: Option<&dyn PresentLog>) -> Result<()> {
        let mut noting = lock(&self.noting);
        if *noting == Notes::Forgotten {
            return Ok(());
        }
        *noting = Notes::Doubtful;
        log.map_or(Ok(()), PresentLog::forget_notes).map_err(|why| {
            tracing::error!(%why, "a sync failed, and the earlier notes of present blocks cannot \
                                   be removed");
            let context = "removing the notes of present blocks after a failed sync (restart the \
                           agent only when this has succeeded: each flush tries it again)";
            Error { kind: ErrorKind::Io, context: context.to_owned(), source: Box::new(why) }
        })?;
        *noting = Notes::Forgotten;
        Ok(())
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.map.memory_bytes()
    }
}

fn unusable(what: &str) -> Error {
    let why = "an earlier flush failed, so it is unknown which blocks are lost; restart the agent";
    Error::new(ErrorKind::Io, what, why)
}
