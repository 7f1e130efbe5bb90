//! Migrations that a restart has found and could not bring back yet, and what becomes of those to here that
//! nobody wants any more, and of those away that an operator lets go.

use super::fate;
use super::revive::{has_served, image_of, named_away, read_intent, way_out};
use crate::abort;
use crate::folder::intent::{SourceIntent, TargetIntent};
use crate::folder::log::{
    End, Folder, Log, SOURCE_INTENT, SOURCE_JOURNAL, TARGET_INTENT, TARGET_JOURNAL,
};
use crate::folder::standing::{self, Unserved};
use crate::registry::Registry;
use crate::registry::left::Left;
use dray_engine::TargetRecord;
use dray_types::{ImageId, MigrationId};
use dray_wire::request::Fate;
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::time::Duration;

/// How long the files of other migrations may be looked for before none can be ended.
const TRIES: Duration = Duration::from_secs(5);

/// A migration that could not be brought back yet.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub folder: Folder,
    pub end: End,
    /// Why, as it was last told in the log.
    pub why: String,
}

impl Waiting {
    fn is(&self, end: End, migration: MigrationId) -> bool {
        self.end == end && self.folder.is_of(migration)
    }

    fn is_same(&self, other: &Self) -> bool {
        self.end == other.end && self.folder.path() == other.folder.path()
    }
}

/// The migrations that could not be brought back yet.
#[derive(Default)]
pub struct Unrevived {
    waiting: Mutex<Vec<Waiting>>,
    /// Held while they are tried again, or while one is ended: its loop is not started meanwhile.
    trying: Mutex<()>,
}

/// What came of letting go of a migration away that waits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LetGo {
    /// It is over for this host, and what it has left here stays.
    Gone,
    /// It has not handed over: its images are this host's.
    Kept {
        /// Why it cannot be brought back.
        why: String,
        /// What to do instead.
        hint: String,
    },
}

/// A migration that waits, as an operator sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShownWaiting {
    /// Id of the migration.
    pub migration: MigrationId,
    /// Which end this host is.
    pub end: End,
    /// The other one, as far as an intent tells.
    pub peer: Option<String>,
    /// Name of the VM; likewise.
    pub vm: Option<String>,
    /// Milliseconds since 1970 at the start; likewise.
    pub started_unix_ms: Option<u64>,
    /// Why it cannot be brought back.
    pub why: String,
    /// What an operator can do.
    pub hint: String,
}

impl ShownWaiting {
    fn of(registry: &Registry, one: Waiting) -> Option<Self> {
        let Waiting { folder, end, why } = one;
        let migration = folder.migration()?;
        let hint = way_out(registry, &folder, end, &image_of(registry, &folder));
        let why = match why_closed(registry, migration) {
            Some(closed) => format!("{why}: {closed}"),
            None => why,
        };
        let (peer, vm, started_unix_ms) = match end {
            End::Source => {
                let intent = read_intent::<SourceIntent>(&folder, SOURCE_INTENT).ok();
                intent.map(|it| (it.peer, it.vm.and_then(|vm| vm.name), it.started_unix_ms))
            }
            End::Target => {
                let intent = read_intent::<TargetIntent>(&folder, TARGET_INTENT).ok();
                intent.map(|it| (it.peer, None, it.started_unix_ms))
            }
        }
        .map_or((None, None, None), |(peer, vm, at)| (Some(peer), vm, Some(at)));
        Some(Self { migration, end, peer, vm, started_unix_ms, why, hint })
    }
}

/// Why an image of a migration is not open here, if its file is what is waited for.
fn why_closed(registry: &Registry, migration: MigrationId) -> Option<String> {
    registry.all_closed().into_iter().find_map(|(_, known)| {
        let its = known.absent.is_some_and(|absent| absent.record.migration == Some(migration));
        its.then_some(known.reason.why)
    })
}

/// A migration to here that waits, and owns nothing yet: its source says whether it is still wanted.
#[derive(Clone, Debug)]
pub struct Unowned {
    /// Id of the migration.
    pub migration: MigrationId,
    /// Its source.
    pub peer: String,
    /// The images that a guest may write.
    pub images: Vec<ImageId>,
    /// Its source has said how far it is; it was only prepared until then.
    begun: bool,
    /// What this host has done with them. Only its source says that a promise is void, and that what was handed back
    /// is of no use.
    pub done: Unserved,
    /// A file in which an image was to come is lost.
    lost: bool,
    /// An image of it was served here by its record, and the journal that said so is lost. What its guest has written
    /// since is in nothing else.
    pub served: bool,
}

impl Unowned {
    /// Whether nobody wants it any more, by what its source says. What was kept for another try, or could still be
    /// claimed here, is of no use once a part of it is lost: who has claimed the images there has all of them.
    pub fn is_unwanted(&self, told: Fate) -> bool {
        if self.served {
            // Whoever claims there accepts that.
            return told == Fate::Claimed;
        }
        let ended = matches!(told, Fate::Abandoned | Fate::Claimed);
        fate::is_unwanted(told, self.begun) || self.lost && ended
    }
}

impl Unrevived {
    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock()
    }

    /// They are tried again until the answer is dropped.
    pub(super) fn begin_tries(&self) -> MutexGuard<'_, ()> {
        self.trying.lock()
    }

    /// None of them is tried until the answer is dropped.
    fn hold_tries(&self) -> io::Result<MutexGuard<'_, ()>> {
        self.trying.try_lock_for(TRIES).ok_or_else(|| {
            let why = "a migration is being brought back, and the file system does not answer";
            io::Error::new(io::ErrorKind::TimedOut, why)
        })
    }

    /// It waits no longer.
    pub(super) fn remove(&self, gone: &Waiting) {
        self.lock().retain(|one| !one.is_same(gone));
    }

    /// It waits for another cause than before.
    pub(super) fn tell(&self, waits: &Waiting, why: String) {
        let mut waiting = self.lock();
        if let Some(one) = waiting.iter_mut().find(|one| one.is_same(waits)) {
            one.why = why;
        }
    }

    /// All of them, with what an operator can do.
    pub fn shown(&self, registry: &Registry) -> Vec<ShownWaiting> {
        let waiting = self.lock().clone();
        waiting.into_iter().filter_map(|one| ShownWaiting::of(registry, one)).collect()
    }

    /// The migrations to here that wait.
    pub fn here(&self) -> Vec<MigrationId> {
        self.at(End::Target)
    }

    /// The migrations away that wait.
    pub fn away(&self) -> Vec<MigrationId> {
        self.at(End::Source)
    }

    fn at(&self, end: End) -> Vec<MigrationId> {
        let waiting = self.lock();
        let ours = waiting.iter().filter(|one| one.end == end);
        ours.filter_map(|one| one.folder.migration()).collect()
    }

    /// A migration to here that waits, if it owns nothing.
    ///
    /// # Errors
    /// When its intent or its journal cannot be read.
    pub fn unowned(
        &self,
        registry: &Registry,
        migration: MigrationId,
    ) -> io::Result<Option<Unowned>> {
        match self.find(End::Target, migration) {
            Some(one) => look(registry, &one.folder),
            None => Ok(None),
        }
    }

    fn find(&self, end: End, migration: MigrationId) -> Option<Waiting> {
        self.lock().iter().find(|one| one.is(end, migration)).cloned()
    }

    /// A migration to here that waits, and owns nothing, is given up, durably: when it is brought back, it ends. One
    /// that has promised, or handed its images back, is only if its source `says` that it is void. Whether it is.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn give_up(
        &self,
        registry: &Registry,
        migration: MigrationId,
        says: Option<Fate>,
    ) -> io::Result<bool> {
        let _held = self.hold_tries()?;
        // Who opens a file of it may write to its journal.
        let _opening = registry.hold_files()?;
        let Some(one) = self.find(End::Target, migration) else { return Ok(false) };
        let waits = look(registry, &one.folder)?;
        let may = |it: &Unowned| {
            it.done == Unserved::Received && !it.served
                || says.is_some_and(|fate| it.is_unwanted(fate))
        };
        if !waits.as_ref().is_some_and(may) {
            return Ok(false);
        }
        let (mut log, _) = Log::open(&one.folder.file(TARGET_JOURNAL))?;
        log.append(&[TargetRecord::Discarded]).map(|()| true)
    }

    /// A migration away that waits, and that has handed over, is over for this host, as if its loop had let it go
    /// at `unix_ms`, milliseconds since 1970: what lies here stays, as copies of no migration. None when there is
    /// no such migration.
    ///
    /// The copies are copies by their records before anything else is done. Then the intent goes, durably: no
    /// restart brings the migration back, and one before the rest is done finds that it lacks its intent, and that
    /// it has handed over by its journal: it waits, and can be let go again. Its target hears that it was handed
    /// over until nothing of it is left, and that nobody here knows it after that: no promise is void for that.
    ///
    /// # Errors
    /// What the file system reports: it can be repeated.
    pub fn let_go(
        &self,
        registry: &Registry,
        migration: MigrationId,
        unix_ms: u64,
    ) -> io::Result<Option<LetGo>> {
        let _held = self.hold_tries()?;
        let Some(one) = self.find(End::Source, migration) else { return Ok(None) };
        let _opening = registry.hold_files()?;
        // An operator may have claimed an image of it just now.
        let _taking = registry.taking.lock();
        let folder = &one.folder;
        if folder.is_void()? {
            return Ok(None);
        }
        let records = standing::read(&folder.file(SOURCE_JOURNAL))?;
        let Some(epoch) = standing::handed_over_in(&records) else {
            let hint = way_out(registry, folder, End::Source, &image_of(registry, folder));
            return Ok(Some(LetGo::Kept { why: one.why, hint }));
        };
        let names = named_away(folder, &records).unwrap_or_default();
        // It may have had no time for that.
        let intent: Option<SourceIntent> = read_intent(folder, SOURCE_INTENT).ok();
        if let Some(qemu) = intent.and_then(|intent| intent.vm?.qemu) {
            let names: Vec<_> = names.keys().cloned().collect();
            registry.vm_leaves(migration, &names, &qemu);
        }
        let left = Left { migration, names, epoch, unix_ms };
        registry.retire_left(&left)?;
        abort::step("LetGo-Intent");
        folder.remove_intents(End::Source)?;
        abort::step("LetGo-Images");
        registry.let_go_left(&left)?;
        abort::step("LetGo-Forget");
        folder.remove(End::Source)?;
        self.remove(&one);
        tracing::info!(%migration, "a migration that could not be brought back was ended by the \
                                    operator or its source");
        Ok(Some(LetGo::Gone))
    }
}

/// What is to be asked about the migration to here in this folder; nothing once it owns its images, or is over.
fn look(registry: &Registry, folder: &Folder) -> io::Result<Option<Unowned>> {
    if folder.lacks_intent()? {
        return Ok(None);
    }
    let intent: TargetIntent = read_intent(folder, TARGET_INTENT)?;
    let records = standing::read(&folder.file(TARGET_JOURNAL))?;
    let Some(done) = standing::unserved(&records) else { return Ok(None) };
    let images = intent.images.iter().filter(|image| !image.offer.read_only);
    let images = images.map(|image| image.offer.id).collect();
    let ours = registry.all_records().into_iter();
    let mut ours = ours.filter(|record| record.migration == Some(intent.migration));
    Ok(Some(Unowned {
        migration: intent.migration,
        peer: intent.peer,
        images,
        begun: done != Unserved::Received || records.contains(&TargetRecord::Touched),
        done,
        lost: ours.any(|record| registry.has_lost_arriving(&record)),
        served: has_served(registry, intent.migration),
    }))
}

#[cfg(test)]
mod tests;
