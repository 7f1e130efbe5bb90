//! Starting the owner loops, and seeing a migration away through to its end. Which of them a restart
//! finds is in [`revive`](super::revive).

use super::Agent;
use dray_api::{ErrorKind, ImageProgress, MigrationState, Progress, Refusal, Role};
use dray_host::abort;
use dray_host::folder::intent::{SourceIntent, TargetIntent};
use dray_host::folder::log::{End, Folder};
use dray_host::registry::Process;
use dray_migrate::guest::behind::Behind;
use dray_migrate::guest::receiver::TargetVmTask;
use dray_migrate::guest::source::{Outcome, SourceVmTask};
use dray_migrate::receiver::{TargetLoop, TargetParts};
use dray_migrate::slots::{Board, Shown};
use dray_migrate::source::{Reach, SourceLoop, SourceParts, SourceSlot, ToTask, keep};
use dray_migrate::{Clock, Threads};
use dray_types::MigrationId;
use dray_wire::request::Request;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::AbortHandle;

/// How long guest writes may take to drain before a handover.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a target is asked to clean up; with the pause, for ten minutes.
const FORGET_TRIES: u32 = 120;
/// Pause between these.
const FORGET_PAUSE: Duration = Duration::from_secs(5);

/// So many cancelled migrations are remembered over a restart until their targets have heard: one that is gone
/// for good never does. Older ones are known by their images only.
const REMEMBERED: usize = 256;

/// What the loops of migrations away tell, until somebody listens.
#[derive(Default)]
pub struct Tasks(Mutex<BTreeMap<MigrationId, UnboundedReceiver<ToTask>>>);

impl Tasks {
    /// The messages of a migration; whoever takes them drives it.
    pub fn take(&self, migration: MigrationId) -> Option<UnboundedReceiver<ToTask>> {
        self.0.lock().remove(&migration)
    }

    fn put(&self, migration: MigrationId, told: UnboundedReceiver<ToTask>) {
        self.0.lock().insert(migration, told);
    }
}

impl Agent {
    fn board(&self, intent: &SourceIntent, state: MigrationState) -> Arc<Board> {
        let strategy = intent.options.as_ref().map_or(dray_types::Strategy::Hybrid, |o| o.strategy);
        let mut progress = Progress::new(intent.migration, strategy);
        progress.bandwidth = intent.options.as_ref().and_then(|options| options.bandwidth);
        progress.images =
            intent.images.iter().map(|image| ImageProgress::new(&image.name)).collect();
        let shown = Shown {
            role: Role::Source,
            peer: intent.peer.clone(),
            vm: intent.vm.as_ref().and_then(|vm| vm.name.clone()),
            state,
            started_unix_ms: intent.started_unix_ms,
            waiting_since: None,
            progress,
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
            None => Err(Refusal::new(ErrorKind::Internal, "cannot dial", "the agent ends")),
        })
    }

    /// Begins a migration away: makes its intent durable and starts its loop.
    ///
    /// # Errors
    /// When the intent cannot be written, or as [`launch_source`](Self::launch_source).
    pub fn begin_source(self: &Arc<Self>, intent: SourceIntent) -> io::Result<Arc<SourceSlot>> {
        Folder::begin(&self.store, intent.migration, End::Source, &intent)?;
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
            clock: Clock::start(),
            threads: Threads::Own,
        };
        let owners = thread("dray-source", move |(owner, session): (SourceLoop, AbortHandle)| {
            owner.run(&queue);
            session.abort();
        })?;
        let (slot, owner) = SourceLoop::open(intent, parts, board, inputs)?;
        let moves = owner.moves();
        let session = tokio::spawn(keep(reach, Arc::clone(&slot), owner.content())).abort_handle();
        // The thread is there, and waits for it.
        let _ = owners.send((owner, session));
        self.tasks.put(slot.board.migration, told);
        self.sources.insert(slot.board.migration, Arc::clone(&slot));
        Ok((slot, moves))
    }

    /// Begins a migration to here: makes its intent durable and starts its loop.
    ///
    /// # Errors
    /// When the intent cannot be written, or as [`launch_target`](Self::launch_target).
    pub(super) fn begin_target(self: &Arc<Self>, intent: TargetIntent) -> io::Result<()> {
        Folder::begin(&self.store, intent.migration, End::Target, &intent)?;
        self.launch_target(intent)
    }

    /// Starts the loop of a migration to here whose intent is durable.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    pub(super) fn launch_target(self: &Arc<Self>, intent: TargetIntent) -> io::Result<()> {
        let folder = Folder::of(&self.store, intent.migration);
        let mut progress = Progress::new(intent.migration, dray_types::Strategy::default());
        let images = intent.images.iter().map(|image| ImageProgress::new(image.name_here()));
        progress.images = images.collect();
        let shown = Shown {
            role: Role::Target,
            peer: intent.peer.clone(),
            vm: intent.guest.as_ref().and_then(|guest| guest.name.clone()),
            state: MigrationState::Running,
            started_unix_ms: intent.started_unix_ms,
            waiting_since: None,
            progress,
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
            clock: Clock::start(),
            threads: Threads::Own,
        };
        let owners = thread("dray-target", move |owner: TargetLoop| owner.run(&queue))?;
        let checked = intent.qemu.clone();
        let (slot, owner) = TargetLoop::open(intent, parts, board, inputs)?;
        // The thread is there, and waits for it.
        let _ = owners.send(owner);
        self.targets.insert(slot.board.migration, Arc::clone(&slot));
        let attachments = Arc::clone(&self.attachments);
        let task = TargetVmTask {
            slot,
            released: false,
            given: BTreeSet::new(),
            made: BTreeMap::new(),
            unsure: BTreeMap::new(),
            told,
            config: Arc::clone(&self.config),
            hypervisor: Arc::clone(&self.hypervisor),
            registry: Arc::clone(&self.registry),
            behind: Behind::default(),
            cut_off: Arc::new(move |Process { pid, started }| {
                attachments.cut(dray_serve::Process { pid, started });
            }),
            checked,
            reached: None,
        };
        tokio::spawn(task.run());
        Ok(())
    }

    /// Drives a migration that has begun to its end. The intent is given because the loop may not
    /// have taken it over yet; `moves` when the VM is still to be moved.
    pub async fn drive(self: Arc<Self>, slot: Arc<SourceSlot>, intent: SourceIntent, moves: bool) {
        let Some(told) = self.tasks.take(slot.board.migration) else { return };
        let Some(vm) = intent.vm else {
            // It may have been away, and would keep the names.
            let gone = self.drive_images(&slot, told).await && !slot.is_kept();
            if gone && self.forget_there(&intent.peer, intent.migration).await {
                slot.forget();
            }
            return;
        };
        let (config, reach) = (Arc::clone(&self.config), self.reach(&intent.peer));
        let hypervisor = Arc::clone(&self.hypervisor);
        let slot_of_task = Arc::clone(&slot);
        let task =
            SourceVmTask { slot: slot_of_task, told, config, hypervisor, reach, ready: false };
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
            self.unadopt(slot, None).await;
            // A later try under the same number has a guest of its own to look after.
            let current = self.sources.get(slot.board.migration);
            if current.is_none_or(|current| Arc::ptr_eq(&current, slot))
                && let Err(why) = slot.set_home()
            {
                tracing::warn!(%why, "cannot record that the guest is back; the next agent checks \
                                      it again");
            }
        }
        if !slot.is_kept() {
            abort::before(|| vec!["ForgetThere".to_owned()]);
            // Else a restart has to look after the guest, and does this once more.
            if slot.is_home()
                && let Err(why) = slot.set_cancelled()
            {
                tracing::warn!(%why, "cannot record that the guest is back; the next agent checks \
                                      it again");
            }
            let intent = slot.intent();
            if self.forget_there(&intent.peer, intent.migration).await {
                slot.forget();
            }
        }
    }

    /// What the target received of disks that went back to QEMU is of no use to anyone, and a
    /// target that gave the images back waits to hear that they were taken. It may be away just now:
    /// whether it was told. One that comes back later asks.
    async fn forget_there(&self, peer: &str, migration: MigrationId) -> bool {
        let request = Request::Forget { migration };
        for _ in 0..FORGET_TRIES {
            match self.ask(peer, &request).await {
                Ok(_) => return true,
                Err(why) => {
                    tracing::debug!(peer, %why, "cannot clean up at the target");
                    tokio::time::sleep(FORGET_PAUSE).await;
                }
            }
        }
        tracing::info!(peer, %migration, "the target cannot be reached; it learns that the \
                                          migration is over when it asks");
        false
    }

    /// Tells the targets of migrations that never begin, or never again, what they have not heard yet.
    pub(crate) fn tell_cancelled(self: &Arc<Self>) {
        let folders = Folder::all_cancelled(&self.store).unwrap_or_else(|why| {
            tracing::error!(%why, "cannot list the migrations that were cancelled");
            Vec::new()
        });
        let mut known: Vec<SourceIntent> = Vec::new();
        for folder in folders {
            match folder.cancelled() {
                Ok(intent) => known.extend(intent),
                Err(why) => {
                    let folder = folder.path().display();
                    tracing::warn!(%folder, %why,
                        "cannot read which target is to be told of a cancel");
                }
            }
        }
        known.sort_by_key(|intent| std::cmp::Reverse(intent.started_unix_ms));
        for intent in known.split_off(known.len().min(REMEMBERED)) {
            let migration = intent.migration;
            tracing::warn!(%migration, peer = intent.peer,
                "too many cancels are waiting: the oldest is forgotten, and its target is not \
                 told");
            if let Err(why) = Folder::of(&self.store, migration).remove(End::Source) {
                tracing::warn!(%migration, %why, "cannot remove its folder");
            }
        }
        known.into_iter().for_each(|intent| self.tell_later(intent.peer, intent.migration));
    }

    /// Tells a target that a migration is over, as soon as it can be reached, and forgets it then.
    pub(crate) fn tell_later(self: &Arc<Self>, peer: String, migration: MigrationId) {
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            if agent.forget_there(&peer, migration).await
                && let Err(why) = Folder::of(&agent.store, migration).remove(End::Source)
            {
                tracing::warn!(%migration, %why, "cannot remove its folder");
            }
        });
    }
}

/// A thread that runs the loop it is given, or ends when it is given none. It is there before the loop opens
/// an export: one without a thread would be vouched for by nobody (I8).
fn thread<T: Send + 'static>(
    name: &str,
    run: impl FnOnce(T) + Send + 'static,
) -> io::Result<Sender<T>> {
    let (owners, given) = channel();
    let work = move || {
        if let Ok(owner) = given.recv() {
            run(owner);
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(work)?;
    Ok(owners)
}
