//! What an agent process is made of, and the order in which it starts: first everything durable is
//! brought back (parked disks stay parked, partial images stay closed), then guests, operators and
//! peers are let in.

mod devices;
mod found;
mod launch;
mod made;
mod peers;
mod requests;
mod revive;

pub use launch::Tasks;

use crate::api::{ApiError, ApiResult, ErrorKind, MigrationState, Server, SocketAccess};
use crate::backup::jobs::Jobs;
use crate::bases::Digests;
use crate::batch::Batches;
use crate::config::Config;
use crate::migration::slots::Slots;
use crate::migration::source::{SessionSettings, SourceSlot};
use crate::migration::target::TargetSlot;
use crate::net::{ControlSettings, ListenSettings, Listener};
use crate::ops::Operator;
use crate::registry::Registry;
use crate::reuse::Reuse;
use crate::seed::Seeds;
use crate::store::Store;
use crate::tls::Identity;
use revive::Unrevived;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Time that guests' requests get to end when the agent is told to.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

/// Everything an agent has.
pub struct Agent {
    /// Its configuration.
    pub config: Arc<Config>,
    /// Its certificate.
    pub identity: Arc<Identity>,
    /// What is durable.
    pub store: Store,
    /// Its images.
    pub registry: Arc<Registry>,
    /// Content of its images by hash.
    pub reuse: Arc<Reuse>,
    /// The digests of base images.
    pub digests: Arc<Digests>,
    /// Who is attached to them.
    pub nbd: dray_nbd::Server,
    /// Migrations away from here.
    pub sources: Slots<SourceSlot>,
    /// Migrations to here.
    pub targets: Slots<TargetSlot>,
    /// Images that are being read from backups.
    pub seeds: Seeds,
    /// Several migrations away that one command has begun.
    pub batches: Batches,
    /// Tasks of migrations away that were prepared and not begun.
    pub tasks: Tasks,
    /// Backups under way.
    pub backups: Arc<Jobs>,
    /// Migrations that a restart found and could not bring back yet.
    unrevived: Unrevived,
}

impl Agent {
    /// The NBD socket of this host.
    pub fn nbd_socket(&self) -> PathBuf {
        self.config.run_dir.join("nbd.sock")
    }

    /// How to reach a peer.
    ///
    /// # Errors
    /// When no peer of that name is configured.
    pub fn session_settings(&self, peer: &str) -> ApiResult<SessionSettings> {
        let known = self.config.peer(peer).ok_or_else(|| {
            let names: Vec<_> = self.config.peers.iter().map(|peer| peer.name.as_str()).collect();
            let why = format!("no peer of that name is configured (known: {})", names.join(", "));
            ApiError::new(ErrorKind::NotFound, format!("cannot reach host '{peer}'"), why)
                .hint(format!("add a [[peer]] to {}", self.config.path.display()))
        })?;
        Ok(SessionSettings {
            identity: Arc::clone(&self.identity),
            peer: known.name.clone(),
            address: known.address.clone(),
            streams: self.config.limits.data_streams as u16,
            control: self.control_settings(),
        })
    }

    /// Whether anything migrates, from here or to here.
    fn moves(&self) -> bool {
        let boards = self.sources.all().into_iter().map(|slot| Arc::clone(&slot.board));
        let targets = self.targets.all();
        let mut boards = boards.chain(targets.iter().map(|slot| Arc::clone(&slot.board)));
        boards.any(|board| board.read().state == MigrationState::Running)
    }

    /// Timeouts of control streams.
    pub fn control_settings(&self) -> ControlSettings {
        ControlSettings { dead: self.config.limits.link_dead, ..ControlSettings::default() }
    }
}

/// Runs an agent until a signal ends it.
///
/// # Errors
/// What is wrong with the configuration or the host.
pub fn run(path: &Path) -> ApiResult<()> {
    let what = format!("cannot start the agent with {}", path.display());
    let config =
        Config::load(path).map_err(|why| ApiError::new(ErrorKind::Invalid, what.clone(), why))?;
    let failed = |why: std::io::Error| ApiError::new(ErrorKind::Io, what.clone(), why);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
    let outcome = runtime.block_on(serve(config, &what));
    runtime.shutdown_background();
    outcome
}

async fn serve(config: Config, what: &str) -> ApiResult<()> {
    let io = |why: std::io::Error| ApiError::new(ErrorKind::Io, what, why);
    let problems = config.check();
    if let Some(first) = problems.first() {
        return Err(ApiError::new(ErrorKind::Invalid, what, first)
            .hint("`dray check-config` shows everything that is wrong"));
    }
    for problem in config.check_backups() {
        tracing::warn!(%problem, "a backup repository cannot be used as it is configured");
    }
    std::fs::create_dir_all(&config.run_dir).map_err(io)?;
    let identity = Identity::load(&config.tls_dir)
        .map_err(|why| ApiError::new(ErrorKind::Denied, what, why))?;
    let store = Store::open(&config.state_dir).map_err(io)?;
    // Two agents on one state directory would both believe that they own its images.
    let lock = lock_state(&config.state_dir).map_err(io)?;
    crate::flat::end_leftovers(&config.run_dir);
    let config = Arc::new(config);
    let registry = Registry::load(store.clone(), Arc::clone(&config)).map_err(io)?;
    let agent = Arc::new(Agent {
        nbd: dray_nbd::Server::new(Arc::clone(&registry) as _),
        reuse: Reuse::open(Arc::clone(&config), Arc::clone(&registry), &store.content()),
        digests: Digests::open(store.digests()),
        config,
        identity: Arc::new(identity),
        store,
        registry,
        sources: Slots::default(),
        targets: Slots::default(),
        seeds: Seeds::default(),
        batches: Batches::default(),
        tasks: Tasks::default(),
        backups: Arc::default(),
        unrevived: Unrevived::default(),
    });
    let access =
        agent.config.group.as_deref().map_or_else(SocketAccess::default, SocketAccess::for_group);
    agent.undo_restores().map_err(io)?;
    let revived = agent.revive();
    let exports = agent.nbd.bind_unix(&agent.nbd_socket(), 0o660, access.group).map_err(io)?;
    // Over TCP a client proves by a certificate of the same authority that it may have the images.
    let tls = dray_nbd::Tls::Required(Arc::clone(&agent.identity.server));
    let over_tcp = agent.config.nbd_tcp.map(|address| agent.nbd.bind_tcp(address, tls));
    let over_tcp = over_tcp.transpose().map_err(io)?;
    let api = Server::bind(&agent.config.run_dir.join("api.sock"), access).map_err(io)?;
    let settings = ListenSettings::default();
    let listener = Listener::bind(agent.config.listen, settings)
        .await
        .map_err(|why| ApiError::new(ErrorKind::Io, what, why))?;
    crate::heat::keep(&agent.registry).map_err(io)?;
    crate::lineage::keep(&agent.registry).map_err(io)?;
    crate::retention::keep(&agent.registry, &agent.config).map_err(io)?;
    let watched = Arc::downgrade(&agent);
    let moves = move || watched.upgrade().is_some_and(|agent| agent.moves());
    agent.reuse.keep(moves).map_err(io)?;
    // Guests that an earlier agent has stopped go on before anything else is done with them.
    agent.recover_turns().await;
    agent.registry.recover_swaps().await;
    tokio::spawn(Arc::clone(&agent).keep_flat());
    agent.go_on(revived);
    tokio::spawn(Arc::clone(&agent).keep_reviving());
    crate::backup::schedule::keep(&agent).map_err(io)?;
    Batches::revive(&agent).map_err(io)?;
    let peers = tokio::spawn(Arc::clone(&agent).listen(listener));
    tracing::info!(host = agent.config.name, listen = %agent.config.listen, "ready");
    let ended = tokio::select! {
        served = api.serve(Arc::new(Operator(Arc::clone(&agent)))) => served.map_err(io),
        () = signalled() => Ok(()),
    };
    // First, while everything that guests' requests may need still works. Parked ones would hold this
    // up for their whole stall: they are cut, and come again.
    for exports in [Some(exports), over_tcp].into_iter().flatten() {
        exports.shutdown_within(SHUTDOWN_GRACE);
    }
    peers.abort();
    // They would serve nobody until the next agent ends them.
    agent
        .registry
        .all()
        .iter()
        .filter_map(|entry| entry.flat.as_ref())
        .for_each(|f| f.chain.close());
    agent.registry.peeks.close();
    agent.registry.save_heat();
    agent.registry.stop_lines(SHUTDOWN_GRACE);
    drop(lock);
    ended
}

fn lock_state(dir: &Path) -> std::io::Result<std::fs::File> {
    let file = std::fs::File::create(dir.join("lock"))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
        |_| {
            let why = format!("another agent uses the state directory {}", dir.display());
            std::io::Error::new(std::io::ErrorKind::AddrInUse, why)
        },
    )?;
    Ok(file)
}

async fn signalled() {
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
