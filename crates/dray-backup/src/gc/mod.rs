//! The collector: removes packs that no backup names, and empties those that are mostly dead.
//!
//! # Protocol
//! The store offers creation of new names, reading, listing and removal; no lock, no exchange. Every
//! name is used for one thing only and never again: packs, manifests and sessions carry a session's
//! random id, rounds their own. Clocks decide only how patient everybody is.
//!
//! **A writer** S
//! * W1 creates its session object;
//! * W2 reads all marks: what they condemn it *avoids*, it stores that content again;
//! * W3 reads manifests (also its parent, again), and relies on packs that they name and that it
//!   does not avoid; then writes packs of its own;
//! * W4 creates its outcome object, the manifest, whose name the session object told. If a tombstone
//!   is there, the backup has failed;
//! * W5 removes its session object. A writer that gives up before W4 does only this.
//!
//! **A collector** runs rounds:
//! * C1 lists packs, then sessions, then reads all manifests; what no manifest names and no session
//!   in the list has written it condemns: it creates the round's *mark*;
//! * C2 lists the sessions and notes them in the round's *waits* (the first note counts);
//! * C3 waits until each of them is over: its session object is gone or its outcome exists; and until
//!   the mark is as old as the grace period, which is for the readers of pruned backups. A session
//!   without a sign of life for too long is *fenced*: a tombstone is put where its outcome would be;
//! * C4 reads all manifests, anew, and then looks whether the mark is still there, else it stops;
//! * C5 removes the condemned packs that no manifest named in C4, then waits, then mark.
//!
//! C1 and C2 to C5 may be done by different collectors, by several at once, and be repeated.
//! **A pruner** removes manifests. **Emptying** a pack: a session writes each manifest that names it
//! anew, avoiding it, as the next revision of the same backup; then the older revisions go.
//!
//! # Why nothing is lost
//! *Lemma: what is condemned in a round and named by no manifest in C4 is never named again.* Who
//! could name pack P in a manifest that is created after C4 began? Either P's own writer, or one who
//! relies on P since W3. If its session object was created before C2 listed them, it is in `waits`
//! and was over before C4 (W1 comes before everything; a round's waits are listed after its mark).
//! If it was created later, its W2 came after the mark was created: it saw the mark and avoids P, or
//! the mark was gone already, after C4, and then its W3 found no manifest that names P, by
//! induction. P's own writer created its session before P, and P was there before the mark. A
//! manifest that names P and goes while C4 reads only makes P more dead. So it does not matter how
//! long a collector sleeps between C4 and C5, nor who else collects: no step relies on time. Removing
//! a mark is safe at any time, for a collector that comes to C4 later stops.
//!
//! # What happens when …
//! | … | then |
//! |---|---|
//! | a writer dies before W4 | its session is fenced after the expiry; its packs are condemned in the next round |
//! | … between W4 and W5 | the backup exists; a collector removes the session object |
//! | a writer sleeps for long, is fenced and wakes up | W4 finds the tombstone: `Fenced`, no backup |
//! | the answer to W4 is lost | it tries the tombstone: whatever is there then is the answer |
//! | a request of W4 arrives after the writer has given up | the tombstone is there, the request changes nothing |
//! | a collector dies after C1 | the mark is there: another lists the waits and goes on; until then writers avoid the packs |
//! | … in C5 | the next repeats it; packs that are gone are gone |
//! | … while it empties a pack | as a writer; old and new revision may both exist, the next collector removes the old one |
//! | two collectors empty the same pack | two revisions, both whole; all agree which one stays: the greatest (revision, name) |
//! | a backup is pruned while it is written anew | the new revision appears after the pruning: prune again |
//! | a parent is pruned while a backup is built on it, and what both share was condemned before the backup began | its content may be gone when the backup is finished: `NotFound`, no backup; make a full one |
//! | a mark cannot be decoded | writers refuse to begin; the next collector removes the round |
//! | a manifest, or a segment of one, cannot be read | the collector stops with an error: it cannot know what is needed. Removing that backup helps |
//! | clocks differ by more than the expiry | writers are fenced too early, and fail; nothing is lost |
//!
//! Tombstones stay for ever, a hundred bytes for each backup that failed without a word: only that
//! makes it certain that a sleeping writer does not come back. A store must keep the four promises of
//! [`crate::store`]; and a request that was answered with an error must not be carried out after
//! days: a manifest that appears *after* it was pruned can name packs that are gone (it is then
//! reported as damaged and nobody relies on it, because writers look which packs there are).
//!
//! # What is left over
//! When everything is quiet and the grace is over, two runs leave no pack that is dead as a whole, and
//! in every other pack at least [`GcOptions::keep_percent`] of the bytes are alive.

mod live;
mod revise;
mod rounds;

#[cfg(test)]
mod tests;

pub(crate) use live::{Walk, walk};

use crate::error::Result;
use crate::repository::{Core, Repository};
use crate::session;
use std::time::Duration;

/// How a collector works.
#[derive(Clone, Copy, Debug)]
pub struct GcOptions {
    /// How long a condemned pack stays for readers of backups that were pruned.
    pub grace: Duration,
    /// A writer without a sign of life for so long is given up. Writers give one every 5 minutes
    /// while pieces are given to them.
    pub session_expiry: Duration,
    /// A pack with less than this share of live bytes is emptied; 0 never.
    pub keep_percent: u8,
    /// Threads that write what is moved.
    pub threads: usize,
}

impl Default for GcOptions {
    fn default() -> Self {
        let hours = |n: u64| Duration::from_secs(n * 3600);
        Self { grace: hours(24), session_expiry: hours(6), keep_percent: 50, threads: 4 }
    }
}

/// What a collector did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GcReport {
    /// Packs that were removed.
    pub removed_packs: u64,
    /// Bytes in them.
    pub removed_bytes: u64,
    /// Packs that are newly condemned; a later run removes them.
    pub condemned_packs: u64,
    /// Bytes in them.
    pub condemned_bytes: u64,
    /// Backups whose manifests were written anew, to empty packs.
    pub revised_backups: u64,
    /// Writers that were given up.
    pub fenced_sessions: u64,
    /// Rounds that have to wait for writers or for the grace period.
    pub waiting_rounds: u64,
}

impl Repository {
    /// Removes what no backup needs, as far as that can be known to be safe now; what is condemned
    /// now goes in a run after the grace period. Never waits. Any number of hosts may run it.
    ///
    /// # Errors
    /// `Damaged` when a manifest cannot be read, and what it needs cannot be known; `Unavailable`.
    /// What was done until then stays done.
    pub fn gc(&self, options: GcOptions) -> Result<GcReport> {
        let mut report = GcReport::default();
        end_sessions(&self.core, options.session_expiry, &mut report)?;
        rounds::advance(&self.core, options.grace, &mut report)?;
        revise::empty_packs(self, options, &mut report)?;
        if rounds::condemn(&self.core, &mut report)? {
            report.waiting_rounds = 0;
            rounds::advance(&self.core, options.grace, &mut report)?;
        }
        Ok(report)
    }
}

/// Fences silent sessions, and removes what announces those that are over.
fn end_sessions(core: &Core, expiry: Duration, report: &mut GcReport) -> Result<()> {
    let (sessions, lost) = session::list(core)?;
    for listed in sessions {
        let decided = core.store.exists(&listed.seen.outcome())?;
        if !decided {
            if listed.silent < expiry {
                continue;
            }
            listed.seen.fence(core)?;
            report.fenced_sessions += 1;
        }
        listed.remove(core)?;
    }
    lost.iter().try_for_each(|name| core.store.delete(name))
}
