//! Bringing back, after a restart, the migrations that were under way.
//!
//! An intent is read and never written here, and nothing is opened because something failed: the
//! images of a migration that cannot be brought back stay closed (I8), the others are served, and it
//! is tried again until the cause is gone.

use super::Agent;
use crate::migration::intent::{SourceIntent, TargetIntent};
use crate::migration::log::Folder;
use crate::migration::{source, target};
use crate::registry::{CopyState, ImageRecord, Reason};
use crate::store;
use crate::vm::source::wake;
use dray_types::MigrationId;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often is tried again what could not be brought back.
const AGAIN: Duration = Duration::from_secs(2);

/// A migration away that a restart found, and whether there is still something to be moved.
pub struct Revived {
    slot: Arc<source::SourceSlot>,
    moves: bool,
}

/// Which end of a migration this host is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Source,
    Target,
}

/// A migration that could not be brought back yet.
#[derive(Clone, Debug)]
struct Waiting {
    folder: Folder,
    end: End,
    /// Why, as it was last told in the log.
    why: String,
}

/// The migrations that could not be brought back yet.
#[derive(Default)]
pub struct Unrevived(Mutex<Vec<Waiting>>);

impl Unrevived {
    fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Agent {
    /// Brings back every migration of the state directory: disks are parked, exposed or closed as
    /// their journals say, before anyone can reach them.
    pub(super) fn revive(self: &Arc<Self>) -> Vec<Revived> {
        let told = |what: &str, done: io::Result<()>| {
            if let Err(why) = done {
                tracing::error!(%why, "cannot {what}");
            }
        };
        told("remove folders of migrations that are over", Folder::sweep(&self.store));
        self.revive_all(End::Target);
        let undone = crate::replicas::undo_unbegun(&self.registry, &self.store, target::INTENT);
        told("undo migrations that never began", undone);
        crate::seed::revive(&self.store.seeds(), &self.registry, crate::seed::KEEP);
        let revived = self.revive_all(End::Source);
        self.registry.close_voids();
        self.close_strays();
        revived
    }

    fn revive_all(self: &Arc<Self>, end: End) -> Vec<Revived> {
        let intent = match end {
            End::Source => source::INTENT,
            End::Target => target::INTENT,
        };
        let folders = Folder::all(&self.store, intent).unwrap_or_else(|why| {
            tracing::error!(%why, "cannot list the migrations");
            Vec::new()
        });
        let mut revived = Vec::new();
        for folder in folders {
            match self.bring_back(&folder, end) {
                Ok(found) => revived.extend(found),
                Err(why) => {
                    let why = why.to_string();
                    tracing::error!(folder = %folder.path().display(), why,
                        "cannot bring back a migration: its images stay closed");
                    self.stay_closed(&folder, end, &why);
                    self.unrevived.lock().push(Waiting { folder, end, why });
                }
            }
        }
        revived
    }

    fn bring_back(self: &Arc<Self>, folder: &Folder, end: End) -> io::Result<Option<Revived>> {
        match end {
            End::Source => {
                let intent: SourceIntent = read_intent(folder, source::INTENT)?;
                let (slot, moves) = self.launch_source(intent)?;
                Ok(Some(Revived { slot, moves }))
            }
            End::Target => {
                self.launch_target(read_intent(folder, target::INTENT)?)?;
                Ok(None)
            }
        }
    }

    /// Closes the images of a migration that cannot be brought back. An intent that cannot be read
    /// names none: the images' own records do.
    fn stay_closed(&self, folder: &Folder, end: End, why: &str) {
        let named = match end {
            End::Source => read_intent(folder, source::INTENT).map(written_names),
            End::Target => read_intent(folder, target::INTENT).map(|intent: TargetIntent| {
                intent.images.iter().map(|image| image.name_here().to_owned()).collect()
            }),
        };
        let mut names: BTreeSet<String> = named.unwrap_or_default();
        let migration = folder.migration();
        let bound =
            |record: &ImageRecord| record.migration == migration && !record.outlives_migration();
        let records = self.registry.all_records().into_iter().filter(bound);
        names.extend(records.map(|record| record.name));
        for name in names {
            let shown = migration.map_or_else(|| "?".to_owned(), |id| id.to_string());
            let why = format!("its migration {shown} cannot be brought back: {why}");
            self.registry.close(&name, Reason::passing(why, way_out(end, &name)));
        }
    }

    /// An image whose record names a migration of which nothing is left: nobody knows how that ended.
    fn close_strays(&self) {
        for record in self.registry.all_records() {
            let Some(migration) = record.migration else { continue };
            let folder = Folder::of(&self.store, migration);
            let known = folder.is_there() || record.outlives_migration();
            if known || record.state == CopyState::Replica {
                continue;
            }
            let name = record.name;
            tracing::error!(image = name, %migration, "nothing is left of an image's migration");
            let why = format!("nothing is left here of its migration {migration}");
            let hint = format!("`dray claim {name}` if no other host has it");
            self.registry.close(&name, Reason::lasting(why, hint));
        }
    }

    /// Takes up the migrations that were begun before the restart.
    pub(super) fn go_on(self: &Arc<Self>, revived: Vec<Revived>) {
        for Revived { slot, moves } in revived {
            if slot.intent().options.is_none() {
                continue;
            }
            let agent = Arc::clone(self);
            tokio::spawn(async move {
                let vm = slot.intent().vm;
                if let (true, Some(vm)) = (moves, &vm) {
                    let running = vm.facts.as_ref().is_some_and(|facts| facts.running);
                    if let Err(why) = wake(&vm.qmp, running).await {
                        tracing::warn!(%why, "cannot wake the guest of a migration");
                    }
                }
                let intent = slot.intent();
                agent.drive(slot, intent, moves).await;
            });
        }
    }

    /// Tries again, for as long as the agent runs, what could not be opened or brought back.
    pub(super) async fn keep_reviving(self: Arc<Self>) {
        loop {
            tokio::time::sleep(AGAIN).await;
            let agent = Arc::clone(&self);
            let tried = tokio::task::spawn_blocking(move || {
                agent.registry.open_absent();
                let revived = agent.try_again();
                agent.go_on(revived);
                agent.tell_when_decided();
            });
            if let Err(why) = tried.await {
                tracing::error!(%why, "cannot look for what is closed");
            }
        }
    }

    /// Tells whoever started the agent, once every image is served, or closed for a cause that does not
    /// pass by itself.
    pub(super) fn tell_when_decided(&self) {
        if self.registry.all_closed().iter().all(|(_, closed)| !closed.reason.passes) {
            self.readiness.ready();
        }
    }

    fn try_again(self: &Arc<Self>) -> Vec<Revived> {
        let waiting = std::mem::take(&mut *self.unrevived.lock());
        let mut revived = Vec::new();
        for mut one in waiting {
            let intent = match one.end {
                End::Source => source::INTENT,
                End::Target => target::INTENT,
            };
            if !one.folder.file(intent).exists() {
                // An operator has claimed its images.
                continue;
            }
            match self.bring_back(&one.folder, one.end) {
                Ok(found) => {
                    tracing::info!(folder = %one.folder.path().display(), "a migration goes on");
                    revived.extend(found);
                }
                Err(why) => {
                    let why = why.to_string();
                    self.stay_closed(&one.folder, one.end, &why);
                    if why != one.why {
                        tracing::error!(folder = %one.folder.path().display(), why,
                            "still cannot bring back a migration");
                        one.why = why;
                    }
                    self.unrevived.lock().push(one);
                }
            }
        }
        revived
    }
}

/// The images that a migration away moves, and that a guest may write. What was only prepared moves none.
fn written_names(intent: SourceIntent) -> BTreeSet<String> {
    let begun = intent.options.is_some();
    let images = intent.images.into_iter().filter(|image| begun && !image.offer.read_only);
    images.map(|image| image.name).collect()
}

/// What an operator can do about a migration that cannot be brought back.
fn way_out(end: End, name: &str) -> String {
    let other = match end {
        End::Source => format!("`dray claim {name}`"),
        End::Target => format!("`dray cancel` at its source, or `dray claim {name}` here"),
    };
    format!("mend that, and it goes on by itself; if it cannot be mended: {other}")
}

/// An intent belongs to the folder that it lies in, or it is another's.
fn read_intent<T: DeserializeOwned + NamesMigration>(folder: &Folder, name: &str) -> io::Result<T> {
    let path = folder.file(name);
    let intent: T = store::read_settled(&path)?;
    if folder.migration() == Some(intent.migration()) {
        return Ok(intent);
    }
    let why = format!("{}: it is the intent of another migration", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

trait NamesMigration {
    fn migration(&self) -> MigrationId;
}

impl NamesMigration for SourceIntent {
    fn migration(&self) -> MigrationId {
        self.migration
    }
}

impl NamesMigration for TargetIntent {
    fn migration(&self) -> MigrationId {
        self.migration
    }
}
