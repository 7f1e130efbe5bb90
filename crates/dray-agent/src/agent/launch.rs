//! Starting the owner loops, and seeing a migration away through to its end. Which of them a restart
//! finds is in [`revive`](super::revive).

use super::Agent;
use crate::api::{ApiError, ErrorKind, MigrationState, Progress, Role};
use crate::migration::abort;
use crate::migration::intent::{SourceIntent, TargetIntent};
use crate::migration::log::Folder;
use crate::migration::messages::ToSourceShell;
use crate::migration::slots::{Board, Shown};
use crate::migration::source::{
    self, Input, Reach, SourceLoop, SourceParts, SourceSlot, Told, keep, shown_strategy,
};
use crate::migration::target::{self, TargetLoop, TargetParts};
use crate::store;
use crate::vm::source::{Outcome, SourceVmTask};
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

    /// How to reach a peer, found out whenever it is needed.
    fn reach(self: &Arc<Self>, peer: &str) -> Reach {
        let (agent, peer) = (Arc::downgrade(self), peer.to_owned());
        Arc::new(move || match agent.upgrade() {
            Some(agent) => agent.session_settings(&peer),
            None => Err(ApiError::new(ErrorKind::Internal, "cannot dial", "the agent ends")),
        })
    }

    /// Begins a migration away: makes its intent durable and starts its loop.
    ///
    /// # Errors
    /// When the intent cannot be written, or as [`launch_source`](Self::launch_source).
    pub fn begin_source(self: &Arc<Self>, intent: SourceIntent) -> io::Result<Arc<SourceSlot>> {
        let folder = Folder::create(&self.store, intent.migration)?;
        write_intent(&folder, source::INTENT, &intent)?;
        self.launch_source(intent).map(|(slot, _)| slot)
    }

    /// Starts the loop of a migration away whose intent is durable. It keeps a session with the target
    /// from now on. The flag tells whether something is still to be moved.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    pub(super) fn launch_source(
        self: &Arc<Self>,
        intent: SourceIntent,
    ) -> io::Result<(Arc<SourceSlot>, bool)> {
        let state = match intent.options {
            Some(_) => MigrationState::Running,
            None => MigrationState::Prepared,
        };
        let reach = self.reach(&intent.peer);
        let board = self.board(&intent, state);
        let (inputs, queue) = channel();
        let (tell, told) = unbounded_channel();
        let parts = SourceParts {
            folder: Folder::of(&self.store, intent.migration),
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
        let session = tokio::spawn(keep(reach, Arc::clone(&slot), owner.content())).abort_handle();
        std::thread::Builder::new().name("dray-source".to_owned()).spawn(move || {
            owner.run(&queue);
            session.abort();
        })?;
        self.tasks.put(slot.board.migration, told);
        self.sources.insert(slot.board.migration, Arc::clone(&slot));
        Ok((slot, moves))
    }

    /// Begins a migration to here: makes its intent durable and starts its loop.
    ///
    /// # Errors
    /// When the intent cannot be written, or as [`launch_target`](Self::launch_target).
    pub(super) fn begin_target(self: &Arc<Self>, intent: TargetIntent) -> io::Result<()> {
        let folder = Folder::create(&self.store, intent.migration)?;
        write_intent(&folder, target::INTENT, &intent)?;
        self.launch_target(intent)
    }

    /// Starts the loop of a migration to here whose intent is durable.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    pub(super) fn launch_target(self: &Arc<Self>, intent: TargetIntent) -> io::Result<()> {
        let folder = Folder::of(&self.store, intent.migration);
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
        std::thread::Builder::new()
            .name("dray-target".to_owned())
            .spawn(move || owner.run(&queue))?;
        self.targets.insert(slot.board.migration, Arc::clone(&slot));
        let task = TargetVmTask {
            slot,
            released: false,
            made: BTreeMap::new(),
            told,
            config: Arc::clone(&self.config),
            registry: Arc::clone(&self.registry),
        };
        tokio::spawn(task.run());
        Ok(())
    }

    /// Drives a migration that has begun to its end. The intent is given because the loop may not
    /// have taken it over yet; `moves` when the VM is still to be moved.
    pub async fn drive(self: Arc<Self>, slot: Arc<SourceSlot>, intent: SourceIntent, moves: bool) {
        let Some(told) = self.tasks.take(slot.board.migration) else { return };
        let Some(vm) = intent.vm else { return drive_images(&slot, told).await };
        let (config, reach) = (Arc::clone(&self.config), self.reach(&intent.peer));
        let task = SourceVmTask { slot: Arc::clone(&slot), told, config, reach, ready: false };
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
