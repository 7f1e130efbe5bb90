//! Starting the owner loops: new ones, and those that a restart finds in the state directory.

use super::Agent;
use crate::api::{ApiResult, MigrationState, Progress, Role};
use crate::migration::abort;
use crate::migration::intent::{SourceIntent, TargetIntent};
use crate::migration::log::Folder;
use crate::migration::messages::ToSourceShell;
use crate::migration::slots::{Board, Shown};
use crate::migration::source::{
    self, Input, SourceLoop, SourceParts, SourceSlot, Told, keep, shown_strategy, unix_ms,
};
use crate::migration::target::{self, TargetLoop, TargetParts, TargetSlot};
use crate::store;
use crate::vm::source::{Outcome, SourceVmTask, wake};
use crate::vm::target::TargetVmTask;
use dray_engine::SourceEvent;
use dray_engine::source::SourceNotice;
use dray_types::MigrationId;
use dray_wire::request::Request;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How long guest writes may take to drain before a handover.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between handovers of images that no VM is waiting for.
const HANDOVER_PAUSE: Duration = Duration::from_millis(500);

/// How often a target is asked to clean up; with the pause, for ten minutes.
const FORGET_TRIES: u32 = 120;
/// Pause between these.
const FORGET_PAUSE: Duration = Duration::from_secs(5);

/// What the loops of migrations away tell, until somebody listens.
#[derive(Default)]
pub struct Tasks(Mutex<BTreeMap<MigrationId, UnboundedReceiver<Told>>>);

impl Tasks {
    /// The messages of a migration; whoever takes them drives it.
    pub fn take(&self, migration: MigrationId) -> Option<UnboundedReceiver<Told>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&migration)
    }

    fn put(&self, migration: MigrationId, told: UnboundedReceiver<Told>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(migration, told);
    }
}

/// A migration away that a restart found, and whether there is still something to be moved.
pub struct Revived {
    slot: Arc<SourceSlot>,
    moves: bool,
}

impl Agent {
    fn board(&self, intent: &SourceIntent, state: MigrationState) -> Arc<Board> {
        let strategy =
            intent.options.as_ref().map_or(dray_engine::Strategy::Hybrid, |o| o.strategy);
        let shown = Shown {
            role: Role::Source,
            peer: intent.peer.clone(),
            vm: intent.vm.as_ref().and_then(|vm| vm.name.clone()),
            state,
            started_unix_ms: intent.started_unix_ms,
            progress: Progress::new(intent.migration, shown_strategy(strategy)),
            summary: None,
            error: None,
        };
        Board::new(intent.migration, shown)
    }

    /// Starts the loop of a migration away. It keeps a session with the target from now on.
    ///
    /// # Errors
    /// When its journal or images cannot be opened, or its peer is not configured.
    pub fn launch_source(
        self: &Arc<Self>,
        intent: SourceIntent,
    ) -> ApiResult<Result<(Arc<SourceSlot>, bool), io::Error>> {
        let settings = self.session_settings(&intent.peer)?;
        let opened = (|| {
            let folder = Folder::create(&self.store, intent.migration)?;
            write_intent(&folder, source::INTENT, &intent)?;
            let state = if intent.options.is_some() {
                MigrationState::Running
            } else {
                MigrationState::Prepared
            };
            let board = self.board(&intent, state);
            let (inputs, queue) = channel();
            let (tell, told) = unbounded_channel();
            let parts = SourceParts {
                folder: folder.clone(),
                registry: Arc::clone(&self.registry),
                quiesce_timeout: QUIESCE_TIMEOUT,
                handover_timeout: self.config.limits.handover_timeout,
                link_timeout: self.config.limits.link_timeout,
                host: self.config.name.clone(),
                links: self.store.links(),
                digests: Arc::clone(&self.digests),
                reuse: Arc::clone(&self.reuse),
                told: tell,
            };
            let (slot, owner) = SourceLoop::open(intent, parts, board, inputs)?;
            let moves = owner.moves();
            let session =
                tokio::spawn(keep(settings, Arc::clone(&slot), owner.content(), unix_ms() * 1000))
                    .abort_handle();
            std::thread::Builder::new().name("dray-source".to_owned()).spawn(move || {
                owner.run(&queue);
                session.abort();
            })?;
            self.tasks.put(slot.board.migration, told);
            self.sources.insert(slot.board.migration, Arc::clone(&slot));
            Ok((slot, moves))
        })();
        Ok(opened)
    }

    /// Starts the loop of a migration to here.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    pub fn launch_target(self: &Arc<Self>, intent: TargetIntent) -> io::Result<Arc<TargetSlot>> {
        let folder = Folder::create(&self.store, intent.migration)?;
        write_intent(&folder, target::INTENT, &intent)?;
        let shown = Shown {
            role: Role::Target,
            peer: intent.peer.clone(),
            vm: None,
            state: MigrationState::Running,
            started_unix_ms: intent.started_unix_ms,
            progress: Progress::new(intent.migration, crate::api::Strategy::default()),
            summary: None,
            error: None,
        };
        let board = Board::new(intent.migration, shown);
        let (inputs, queue) = channel();
        let (tell, told) = unbounded_channel();
        let parts = TargetParts {
            folder,
            registry: Arc::clone(&self.registry),
            stall: self.config.limits.stall,
            reuse: Arc::clone(&self.reuse),
            told: tell,
        };
        let (slot, owner) = TargetLoop::open(intent, parts, board, inputs)?;
        self.targets.insert(slot.board.migration, Arc::clone(&slot));
        let task = TargetVmTask {
            slot: Arc::clone(&slot),
            released: false,
            made: BTreeMap::new(),
            told,
            config: Arc::clone(&self.config),
            registry: Arc::clone(&self.registry),
        };
        tokio::spawn(task.run());
        std::thread::Builder::new()
            .name("dray-target".to_owned())
            .spawn(move || owner.run(&queue))?;
        Ok(slot)
    }

    /// Brings back every migration of the state directory: disks are parked, exposed or closed as
    /// their journals say, before anyone can reach them.
    pub(super) fn revive(self: &Arc<Self>) -> io::Result<Vec<Revived>> {
        Folder::sweep(&self.store)?;
        for folder in Folder::all(&self.store, target::INTENT)? {
            let intent: TargetIntent = store::read_json(&folder.file(target::INTENT))?;
            let migration = intent.migration;
            if let Err(why) = self.launch_target(intent) {
                tracing::error!(%migration, %why, "cannot bring back a migration to this host");
            }
        }
        crate::replicas::undo_unbegun(&self.registry, &self.store, target::INTENT)?;
        crate::seed::revive(&self.store.seeds(), &self.registry, crate::seed::KEEP);
        let mut revived = Vec::new();
        for folder in Folder::all(&self.store, source::INTENT)? {
            let intent: SourceIntent = store::read_json(&folder.file(source::INTENT))?;
            let migration = intent.migration;
            match self.launch_source(intent) {
                Ok(Ok((slot, moves))) => revived.push(Revived { slot, moves }),
                Ok(Err(why)) => {
                    tracing::error!(%migration, %why, "cannot bring back a migration of this host");
                }
                Err(why) => {
                    tracing::error!(%migration, %why, "cannot bring back a migration of this host");
                }
            }
        }
        Ok(revived)
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

    /// Drives a migration that has begun to its end. The intent is given because the loop may not
    /// have taken it over yet; `moves` when the VM is still to be moved.
    pub async fn drive(self: Arc<Self>, slot: Arc<SourceSlot>, intent: SourceIntent, moves: bool) {
        let Some(told) = self.tasks.take(slot.board.migration) else { return };
        let Some(vm) = intent.vm else { return drive_images(&slot, told).await };
        let Ok(settings) = self.session_settings(&intent.peer) else { return };
        let config = Arc::clone(&self.config);
        let task = SourceVmTask { slot: Arc::clone(&slot), told, config, settings, ready: false };
        let outcome = match (moves, vm.facts) {
            (true, Some(facts)) => task.run(facts).await,
            _ => task.await_outcome().await,
        };
        if outcome == Outcome::Stayed {
            self.see_to_it(&slot).await;
        }
    }

    /// The guest stays here and goes on: its disks go back to it, and nothing is left at the target.
    /// The folder goes last, so that a restart in between does all this again.
    async fn see_to_it(&self, slot: &Arc<SourceSlot>) {
        if !slot.is_home() {
            abort::before(|| vec!["Unadopt".to_owned()]);
            self.unadopt(slot).await;
            // A later try under the same number has a guest of its own to look after.
            let current = self.sources.get(slot.board.migration);
            if current.is_none_or(|current| Arc::ptr_eq(&current, slot))
                && let Err(why) = slot.set_home()
            {
                tracing::warn!(%why, "a restart will look after the guest again");
            }
        }
        if !slot.is_kept() {
            abort::before(|| vec!["ForgetThere".to_owned()]);
            self.forget_there(slot).await;
            slot.forget();
        }
    }

    /// What the target received of disks that went back to QEMU is of no use to anyone, and a
    /// target that gave the images back waits to hear that they were taken. It may be away just now.
    async fn forget_there(&self, slot: &SourceSlot) {
        let intent = slot.intent();
        let request = Request::Forget { migration: intent.migration };
        for _ in 0..FORGET_TRIES {
            match self.ask(&intent.peer, &request).await {
                Ok(_) => return,
                Err(why) => {
                    tracing::debug!(peer = intent.peer, %why, "cannot clean up at the target");
                    tokio::time::sleep(FORGET_PAUSE).await;
                }
            }
        }
        let (peer, migration) = (&intent.peer, intent.migration);
        tracing::warn!(peer, %migration, "what the target received may still be there");
    }
}

/// Makes an intent durable; a folder that cannot hold even that goes.
fn write_intent(folder: &Folder, name: &str, intent: &impl Serialize) -> io::Result<()> {
    let path = folder.file(name);
    let written = store::replace_json(&path, intent);
    if written.is_err() && !path.exists() {
        // The failure that is told is the first one.
        let _ = folder.remove();
    }
    written
}

/// Images without a VM are handed over as soon as they are ready, and again if that fails.
async fn drive_images(slot: &Arc<SourceSlot>, mut told: UnboundedReceiver<Told>) {
    while let Some(message) = told.recv().await {
        match message {
            Told::Notice(SourceNotice::Ready) => {
                slot.send(Input::Engine(SourceEvent::BeginHandover));
            }
            Told::Notice(SourceNotice::HandoverFailed { .. } | SourceNotice::Refused { .. }) => {
                tokio::time::sleep(HANDOVER_PAUSE).await;
                slot.send(Input::Engine(SourceEvent::BeginHandover));
            }
            Told::Notice(SourceNotice::Abandoned { .. }) | Told::Shell(ToSourceShell::Finished) => {
                return;
            }
            _ => {}
        }
    }
}
