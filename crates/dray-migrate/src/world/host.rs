//! A host whose disk is simulated, and the agent that runs on it until it dies.

use crate::receiver::{self, TargetLoop, TargetParts, TargetSlot};
use crate::slots::{Board, Shown};
use crate::source::{self, SourceLoop, SourceParts, SourceSlot};
use crate::{Clock, Threads};
use dray_api::{MigrationState, Progress, Role, Strategy};
use dray_config::Config;
use dray_engine::SourceEvent;
use dray_engine::source::SourceNotice;
use dray_files::StatePath;
use dray_files::files::Files;
use dray_files::files::sim::{Died, SimDisk};
use dray_host::folder::intent::{SourceIntent, TargetIntent};
use dray_host::folder::log::{End, Folder};
use dray_host::migration::claim::{ClaimError, Claims, Loops};
use dray_host::migration::revive::{Launch, Revival};
use dray_host::migration::waiting::Unrevived;
use dray_host::record::CopyState;
use dray_host::registry::Registry;
use dray_host::store::Store;
use dray_image::{Disk, StateImages};
use dray_provider::bases::Digests;
use dray_provider::reuse::Reuse;
use dray_serve::{Client, Exports, Process};
use dray_types::{BlockRange, Epoch, MigrationId};
use dray_vm::exports::ImageExports;
use dray_vm::flat::Pools;
use dray_wire::request::Fate;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// The guest's QEMU, which was there before every restart of the agent.
pub const QEMU: Client = Client { process: Some(Process { pid: 77, started: 1 }), user: Some(0) };

/// A migration away, with its loop as long as that runs.
pub struct Away {
    pub slot: Arc<SourceSlot>,
    pub owner: Option<SourceLoop>,
    pub content: Arc<source::content::Content>,
    queue: Receiver<source::Input>,
    told: UnboundedReceiver<source::ToTask>,
}

/// A migration to here, with its loop as long as that runs.
pub struct IncomingMigration {
    pub slot: Arc<TargetSlot>,
    pub owner: Option<TargetLoop>,
    queue: Receiver<receiver::Input>,
    told: UnboundedReceiver<receiver::ToTask>,
}

/// The agent of one life.
pub struct SimAgent {
    pub store: Store,
    pub registry: Arc<Registry>,
    config: Arc<Config>,
    digests: Arc<Digests>,
    reuse: Arc<Reuse>,
    pub unrevived: Unrevived,
    clock: Clock,
    /// Its target is to hear of what was cancelled here.
    pub tells_cancelled: AtomicBool,
    away: Mutex<Option<Away>>,
    here: Mutex<Option<IncomingMigration>>,
}

/// A host.
pub struct Host {
    pub disk: Arc<SimDisk>,
    pub agent: Option<SimAgent>,
    root: PathBuf,
    clock: Clock,
    /// Set while the agent runs: its death ends what it does.
    runs: Arc<AtomicBool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Host {
    /// A host without an agent, with an empty disk.
    pub fn new(root: PathBuf, seed: u64, nanos: &Arc<AtomicU64>) -> Self {
        let folders = [root.clone(), root.join("state"), root.join("pool")];
        let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
        let disk = SimDisk::new(seed, &folders);
        Self {
            disk,
            agent: None,
            root,
            clock: Clock::given(Arc::clone(nanos)),
            runs: Arc::default(),
        }
    }

    /// The folder of all images.
    pub fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    /// Where an image of this name lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.pool().join(name)
    }

    /// Starts the agent. False when it died of it.
    pub fn start(&mut self) -> bool {
        let files = Arc::new(self.disk.files().unwinding(&self.runs)) as Arc<dyn Files>;
        let (root, clock) = (self.root.clone(), self.clock.clone());
        let started = self.guarded(|| SimAgent::start(&files, &root, clock));
        // One that cannot read its directory ends, and is started again.
        self.agent = started.and_then(Result::ok);
        self.agent.is_some()
    }

    /// Has the agent do something; none when it is dead, or has died of it.
    pub fn within<T>(&mut self, work: impl FnOnce(&SimAgent) -> T) -> Option<T> {
        let agent = self.agent.take()?;
        let done = self.guarded(|| work(&agent));
        if done.is_some() {
            self.agent = Some(agent);
        }
        done
    }

    fn guarded<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        self.runs.store(true, Ordering::SeqCst);
        let done = catch_unwind(AssertUnwindSafe(work));
        self.runs.store(false, Ordering::SeqCst);
        match done {
            Ok(done) => Some(done),
            Err(why) if why.is::<Died>() => None,
            Err(why) => resume_unwind(why),
        }
    }

    /// The agent is killed.
    pub fn kill(&mut self) {
        self.disk.kill();
        self.agent = None;
    }

    /// The host loses power.
    pub fn cut(&mut self) {
        self.disk.cut();
        self.agent = None;
    }

    /// The disks that the guest's QEMU is let in to, whatever they do with its requests.
    pub fn disks(&self, names: &[&str]) -> Vec<Option<Arc<Disk>>> {
        let Some(agent) = &self.agent else { return vec![None; names.len()] };
        let exports = ImageExports(Arc::clone(&agent.registry));
        let disk = |name: &&str| {
            exports.open(name, &QEMU).ok()?;
            exports.attached(name, &QEMU, 1);
            agent.registry.get(name).map(|entry| Arc::clone(&entry.disk))
        };
        names.iter().map(disk).collect()
    }
}

impl SimAgent {
    fn start(files: &Arc<dyn Files>, root: &Path, clock: Clock) -> io::Result<Self> {
        let state = StatePath::new(Arc::clone(files), root.join("state"));
        let store = Store::among(state, Arc::new(StateImages(Arc::clone(files))))?;
        let text = format!(
            "[agent]\nname = 'host'\nstate_dir = '{0}'\n[tls]\ndir = '{0}'\n[reuse]\nenabled = false\n\
             [limits]\nlink_timeout_seconds = 5\n",
            root.display()
        );
        let parsed = Config::parse(&text, Path::new("dray.toml"));
        let config = Arc::new(parsed.map_err(|why| io::Error::other(why.to_string()))?);
        let registry = Registry::load(store.clone(), Arc::new(Pools(Arc::clone(&config))))?;
        let agent = Self {
            digests: Digests::open(store.digests()),
            reuse: Reuse::new(Arc::clone(&config), Arc::clone(&registry)),
            store,
            registry,
            config,
            unrevived: Unrevived::default(),
            clock,
            tells_cancelled: AtomicBool::new(true),
            away: Mutex::default(),
            here: Mutex::default(),
        };
        agent.revival().begin();
        Ok(agent)
    }

    fn revival(&self) -> Revival<'_, Self> {
        let (store, registry, unrevived) = (&self.store, &self.registry, &self.unrevived);
        Revival { store, registry, unrevived, launch: self }
    }

    pub fn away(&self) -> MutexGuard<'_, Option<Away>> {
        lock(&self.away)
    }

    pub fn here(&self) -> MutexGuard<'_, Option<IncomingMigration>> {
        lock(&self.here)
    }

    /// The source of a migration to here that waits says this of it; whether it is given up.
    pub fn hear_of_waiting(&self, migration: MigrationId, told: Fate) -> io::Result<bool> {
        let waits = self.unrevived.unowned(&self.registry, migration)?;
        if !waits.is_some_and(|waits| waits.is_unwanted(told) && !waits.served) {
            return Ok(false);
        }
        self.unrevived.give_up(&self.registry, migration, Some(told))
    }

    /// What an agent does every two seconds.
    pub fn look_again(&self) {
        self.registry.open_absent();
        self.revival().try_again();
    }

    /// The loops take what has come.
    pub fn pump(&self) {
        // Taken out: who dies in it leaves none.
        let away = self.away().take();
        if let Some(mut away) = away {
            away.owner = away.owner.take().and_then(|owner| owner.pump(&away.queue));
            away.drive();
            *self.away() = Some(away);
        }
        let here = self.here().take();
        if let Some(mut here) = here {
            here.owner = here.owner.take().and_then(|owner| owner.pump(&here.queue));
            here.drive();
            *self.here() = Some(here);
        }
    }

    /// Time has passed.
    pub fn tick(&self) {
        let away = self.away().take();
        if let Some(mut away) = away {
            if let Some(owner) = &mut away.owner {
                owner.tick_now();
            }
            *self.away() = Some(away);
        }
        let here = self.here().take();
        if let Some(mut here) = here {
            here.owner = here.owner.take().and_then(TargetLoop::tick_now);
            *self.here() = Some(here);
        }
    }

    /// Whether a loop here has something to do with images.
    pub fn is_busy(&self) -> bool {
        let records = self.registry.all_records();
        let runs = |board: &Board| {
            let holds = records.iter().any(|record| record.migration == Some(board.migration));
            holds && board.read().state == MigrationState::Running
        };
        let away = self.away().as_ref().is_some_and(|a| a.owner.is_some() && runs(&a.slot.board));
        away || self.here().as_ref().is_some_and(|h| h.owner.is_some() && runs(&h.slot.board))
    }

    /// Makes a migration away durable, as `prepare` does.
    pub fn prepare_source(&self, intent: SourceIntent) -> io::Result<()> {
        Folder::begin(&self.store, intent.migration, End::Source, &intent)?;
        self.source(intent)
    }

    /// Cancels what is only prepared, as `cancel` does while the target is away.
    pub fn cancel_prepared(&self) -> io::Result<()> {
        let away = self.away();
        let Some(away) = away.as_ref() else { return Err(io::ErrorKind::NotFound.into()) };
        away.slot.set_cancelled()?;
        away.slot.send(source::Input::Cancelled);
        self.tells_cancelled.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Begins it, as `migrate` does.
    pub fn begin_source(&self, intent: SourceIntent) -> io::Result<()> {
        let away = self.away();
        let Some(away) = away.as_ref() else { return Err(io::ErrorKind::NotFound.into()) };
        let begun = away.slot.begin("a test's migration", &self.registry, intent, || Ok(()));
        begun.map_err(|why| io::Error::other(why.why))
    }

    /// Claims an image that is not this host's beyond doubt. None when it is not there; tells the blocks
    /// that are lost, or nothing when it was claimed before.
    pub fn claim(
        &self,
        name: &str,
    ) -> Option<Result<Option<Vec<BlockRange>>, ClaimError<io::Error>>> {
        let entry = self.registry.get(name)?;
        let record = entry.record();
        if record.state == CopyState::Owner && record.migration.is_none() {
            return Some(Ok(None));
        }
        let claims = Claims { store: &self.store, registry: &self.registry, loops: self };
        Some(claims.claim(&entry, true).map(|claimed| Some(claimed.lost.first)))
    }
}

impl Loops for SimAgent {
    type Error = io::Error;

    fn is_exposed(&self, migration: MigrationId) -> bool {
        let here = self.here();
        here.as_ref().is_some_and(|h| h.slot.board.migration == migration && h.slot.is_exposed())
    }

    fn end(&self, _migration: MigrationId) -> io::Result<Option<Epoch>> {
        let (answer, answered) = channel();
        if let Some(away) = self.away().as_ref().filter(|away| away.owner.is_some()) {
            away.slot.send(source::Input::Void(answer));
        } else if let Some(here) = self.here().as_ref().filter(|here| here.owner.is_some()) {
            here.slot.send(receiver::Input::Void(answer));
        }
        self.pump();
        match answered.try_recv() {
            Ok(Ok(epoch)) => Ok(Some(epoch)),
            Ok(Err(why)) => Err(why),
            Err(_) => Ok(None),
        }
    }

    fn cut_off(&self, _process: dray_host::registry::Process) {}
}

impl Away {
    /// What whoever drives a migration of images does.
    fn drive(&mut self) {
        while let Ok(told) = self.told.try_recv() {
            let notice = match told {
                source::ToTask::Notice(notice) => notice,
                _ => continue,
            };
            let again = matches!(
                notice,
                SourceNotice::Ready
                    | SourceNotice::HandoverFailed { .. }
                    | SourceNotice::Refused { .. }
            );
            if again {
                self.slot.send(source::Input::Engine(SourceEvent::BeginHandover));
            }
        }
    }
}

impl IncomingMigration {
    /// What whoever looks after a guest does where there is none.
    fn drive(&mut self) {
        while let Ok(told) = self.told.try_recv() {
            if matches!(told, receiver::ToTask::Release) {
                self.slot.send(receiver::Input::Finished { given: BTreeSet::new() });
            }
        }
    }
}

fn board(migration: MigrationId, role: Role, peer: &str, state: MigrationState) -> Arc<Board> {
    let shown = Shown {
        role,
        peer: peer.to_owned(),
        vm: None,
        state,
        started_unix_ms: 0,
        waiting_since: None,
        progress: Progress::new(migration, Strategy::default()),
        summary: None,
        error: None,
    };
    Board::new(migration, shown)
}

impl Launch for SimAgent {
    type Source = ();

    fn seeds(&self) {
        dray_provider::seed::revive(&self.store.seeds(), &self.registry, dray_provider::seed::KEEP);
    }

    fn source(&self, intent: SourceIntent) -> io::Result<()> {
        let state = match intent.options {
            Some(_) => MigrationState::Running,
            None => MigrationState::Prepared,
        };
        let board = board(intent.migration, Role::Source, &intent.peer, state);
        let (inputs, queue) = channel();
        let (tell, told) = unbounded_channel();
        let parts = SourceParts {
            folder: Folder::of(&self.store, intent.migration),
            registry: Arc::clone(&self.registry),
            quiesce_timeout: Duration::ZERO,
            handover_timeout: self.config.limits.handover_timeout,
            link_timeout: self.config.limits.link_timeout,
            host: self.config.name.clone(),
            links: self.store.links(),
            digests: Arc::clone(&self.digests),
            reuse: Arc::clone(&self.reuse),
            told: tell,
            clock: self.clock.clone(),
            threads: Threads::None,
        };
        let (slot, owner) = SourceLoop::open(intent, parts, board, inputs)?;
        let content = owner.content();
        *self.away() = Some(Away { slot, owner: Some(owner), content, queue, told });
        Ok(())
    }

    fn target(&self, intent: TargetIntent) -> io::Result<()> {
        let board = board(intent.migration, Role::Target, &intent.peer, MigrationState::Running);
        let (inputs, queue) = channel();
        let (tell, told) = unbounded_channel();
        let parts = TargetParts {
            folder: Folder::of(&self.store, intent.migration),
            registry: Arc::clone(&self.registry),
            stall: self.config.limits.stall,
            reuse: Arc::clone(&self.reuse),
            told: tell,
            clock: self.clock.clone(),
            threads: Threads::None,
        };
        let (slot, owner) = TargetLoop::open(intent, parts, board, inputs)?;
        *self.here() = Some(IncomingMigration { slot, owner: Some(owner), queue, told });
        Ok(())
    }
}
