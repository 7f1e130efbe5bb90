//! How an agent starts and ends.
//!
//! First everything durable is brought back (parked disks stay parked, partial images stay closed), then
//! guests are let in, then operators and peers. Only what concerns every image ends the start: no usable
//! configuration, no run directory, a state directory that is not there, cannot be read, or is another
//! agent's. Everything else is a [trouble](crate::troubles) of one thing, and the rest goes on without it.
//!
//! * [`listeners`]: sockets. [`signals`]: being told to end. [`reload`]: reading the configuration again.
//! * [`keepers`]: what is done to images now and then. [`looks`]: what is looked at now and then, and its
//!   troubles; [`records`]: small ones that are damaged.

mod keepers;
mod listeners;
mod looks;
mod records;
mod reload;
mod signals;

use crate::agent::revive::Revived;
use crate::agent::room::Questions;
use crate::agent::{Agent, Tasks};
use crate::backup::thaw;
use crate::batches::Batches;
use crate::readiness::Readiness;
use crate::troubles::Troubles;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_config::start::Start;
use dray_config::{BackupStore, Config};
use dray_host::migration::fate::Preparing;
use dray_host::migration::waiting::Unrevived;
use dray_host::registry::Registry;
use dray_host::store::Store;
use dray_migrate::slots::Slots;
use dray_net::tls::Identity;
use dray_provider::bases::Digests;
use dray_provider::offer::{Offer, StoreRules};
use dray_provider::reuse::Reuse;
use dray_provider::seed::Seeds;
use dray_serve::{Attachments, FrontEnds};
use dray_vm::exports::ImageExports;
use dray_vm::flat::Pools;
use dray_vm::frozen::FrozenGuests;
use dray_vm::leaving::{Leaving, left_stopped};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signals::Signals;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Time that guests' requests get to end when the agent is told to.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

/// With what the keys of troubles begin that are about the configuration.
const CONFIGURATION: &str = "configuration";

/// Mode of the run directory.
const RUN_DIR_MODE: u32 = 0o755;
/// The bits of a mode by which others than its owner write to a directory.
const OTHERS_WRITE: u32 = 0o022;

/// Runs an agent until a signal ends it.
///
/// # Errors
/// What is wrong with the configuration or the host.
pub fn run(path: &Path) -> ApiResult<()> {
    // Hints name it, wherever they are read.
    let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let what = format!("cannot start the agent with {}", path.display());
    let start = Start::load(path).map_err(|why| {
        Refusal::new(ErrorKind::Invalid, what.clone(), why)
            .hint("`dray check-config` shows all problems")
    })?;
    let failed = |why: io::Error| Refusal::new(ErrorKind::Io, what.clone(), why);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(failed)?;
    let outcome = runtime.block_on(serve(start, &what));
    runtime.shutdown_background();
    outcome
}

async fn serve(start: Start, what: &str) -> ApiResult<()> {
    // What is for others is opened to them expressly.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    may_open_many_files();
    let mut signals = Signals::catch();
    let readiness = Arc::new(Readiness::default());
    readiness.in_any_case();
    let (agent, lock) = open(&start, readiness, what)?;
    agent.end_restores();
    agent.release_all_of_ended();
    let revived = agent.revive();
    agent.tell_when_decided();
    let stopped = left_stopped(&agent.registry);
    let hang_ups = signals.hang_ups();
    signals.serves();
    agent.let_guests_in();
    tokio::select! {
        () = Arc::clone(&agent).work(&start, hang_ups, (revived, stopped)) => {}
        () = signals.told() => {}
    }
    agent.readiness.stopping();
    agent.end();
    drop(lock);
    Ok(())
}

/// Allows this process as many open files as its system lets it have: each image takes some.
fn may_open_many_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(why) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!(%why, "the limit on open files stays as it is");
    }
}

/// Makes the run directory, through which everybody may go. Whoever may write to it may put sockets in place of
/// the agent's, which nobody else may.
fn own_run_dir(run_dir: &Path) -> io::Result<()> {
    if !run_dir.exists() {
        std::fs::create_dir_all(run_dir)?;
        std::fs::set_permissions(run_dir, Permissions::from_mode(RUN_DIR_MODE))?;
    }
    let mode = std::fs::metadata(run_dir)?.permissions().mode();
    if mode & OTHERS_WRITE == 0 {
        return Ok(());
    }
    tracing::warn!(dir = %run_dir.display(), "others could write to the run directory: not any more");
    std::fs::set_permissions(run_dir, Permissions::from_mode(mode & !OTHERS_WRITE))
}

/// An agent with everything that is durable, and the lock on it.
fn open(start: &Start, readiness: Arc<Readiness>, what: &str) -> ApiResult<(Arc<Agent>, File)> {
    let io = |why: io::Error| Refusal::new(ErrorKind::Io, what, why);
    let config = Arc::new(start.config.clone());
    let troubles = Arc::new(Troubles::default());
    note_configuration(start, &troubles);
    own_run_dir(&config.run_dir).map_err(io)?;
    // Two agents on one state directory would both believe that they own its images.
    let lock = lock_state(&config.state_dir).map_err(|why| {
        let (kind, hint) = match why.kind() {
            io::ErrorKind::AddrInUse => (
                ErrorKind::Conflict,
                "end that agent, or give this one a state_dir and a run_dir of its own",
            ),
            _ => (
                ErrorKind::Io,
                "mount the state directory; on a new host, create it with install -d -m 0700",
            ),
        };
        Refusal::new(kind, what, format!("{}: {why}", config.state_dir.display())).hint(hint)
    })?;
    let store = Store::open(&config.state_dir).map_err(io)?;
    dray_vm::flat::end_leftovers(&config.run_dir);
    let around = Arc::new(Pools(Arc::clone(&config)));
    let registry = Registry::load(store.clone(), around).map_err(io)?;
    if let Err(why) = keepers::heartbeats(&registry) {
        tracing::warn!(%why, "no thread for heartbeats: after a kill the next agent treats all images as changed");
    }
    let frozen = FrozenGuests::open(store.frozen());
    let agent = Arc::new(Agent {
        front_ends: FrontEnds::default(),
        attachments: Attachments::new(Arc::new(ImageExports(Arc::clone(&registry)))),
        offer: config.backup_store.as_ref().map(offer),
        reuse: Reuse::new(Arc::clone(&config), Arc::clone(&registry)),
        digests: Digests::open(store.digests()),
        identity: Arc::new(Identity::of_host(&config.tls_dir, &config.name).0),
        config,
        store,
        registry,
        sources: Slots::default(),
        targets: Slots::default(),
        seeds: Seeds::default(),
        batches: Batches::default(),
        tasks: Tasks::default(),
        preparing: Preparing::default(),
        memory: dray_net::Memory::default(),
        questions: Questions::default(),
        making_room: tokio::sync::Mutex::default(),
        backups: Arc::default(),
        frozen,
        troubles,
        readiness,
        unrevived: Unrevived::default(),
        hypervisor: Arc::new(dray_vm::qemu::Qemu),
    });
    agent.look_at_certificates();
    agent.look_at_records();
    Ok((agent, lock))
}

/// The store for peers.
fn offer(store: &BackupStore) -> Arc<Offer> {
    let BackupStore { path, append_only, keep_deleted, quota, max_objects } = store;
    let rules = StoreRules {
        append_only: *append_only,
        keep_deleted: *keep_deleted,
        max_bytes: quota.map(|quota| quota.0),
        max_objects: *max_objects,
    };
    Arc::new(Offer::new(path, rules))
}

/// What is not as the operator has written it.
fn note_configuration(start: &Start, troubles: &Troubles) {
    let path = start.config.path.display();
    if let Some(instead) = &start.instead {
        let what = format!("the agent runs with {instead}");
        let hint = format!(
            "`dray check-config --config {path}` shows the problem; correct it and restart the \
             agent"
        );
        troubles.note(CONFIGURATION, what, &instead.because, hint);
    }
    for problem in &start.problems {
        let what = format!("the agent leaves out a part of {path}");
        let key = format!("{CONFIGURATION}.{}.{}", problem.field, problem.line.unwrap_or_default());
        troubles.note(key, what, problem, "correct it and restart the agent");
    }
    note_backups(&start.config, troubles);
}

/// Repositories that cannot be used.
fn note_backups(config: &Config, troubles: &Troubles) {
    for problem in config.check_backups() {
        let key = format!("{CONFIGURATION}.{}", problem.field);
        let hint = problem.hint.clone().unwrap_or_default();
        troubles.note(key, "a backup repository cannot be used", problem.what, hint);
    }
}

impl Agent {
    /// Takes up what an earlier agent has begun, and answers operators and peers, for ever.
    async fn work(
        self: Arc<Self>,
        start: &Start,
        hang_ups: Arc<Notify>,
        (revived, stopped): (Vec<Revived>, Vec<Leaving>),
    ) {
        self.keep_threads();
        // Guests that an earlier agent has stopped go on before anything else is done with them.
        self.end_exchanges(stopped).await;
        tokio::spawn(Arc::clone(&self).keep_flat());
        tokio::spawn(Arc::clone(&self).keep_releasing());
        tokio::spawn(Arc::clone(&self).keep_settling());
        self.go_on(revived);
        tokio::spawn(reload::when_told(Arc::clone(&self), hang_ups));
        tokio::spawn(Arc::clone(&self).keep_reviving());
        self.tell_cancelled();
        tokio::spawn(Arc::clone(&self).keep_asking());
        tokio::spawn(crate::ops::prepared::forget_old(Arc::downgrade(&self)));
        Batches::revive(&self);
        self.keep_looking();
        if let Some(address) = self.config.nbd_tcp {
            self.let_remote_guests_in(address);
        }
        if let Err(why) = start.has_worked() {
            tracing::warn!(%why, "cannot keep a copy of the configuration as the last good one");
        }
        tracing::info!(host = self.config.name, listen = %self.config.listen, "ready");
        tokio::join!(
            Arc::clone(&self).serve_operators(),
            Arc::clone(&self).serve_readers(),
            Arc::clone(&self).serve_peers(),
        );
    }

    /// Starts what goes on in the background. Without one of these guests are served all the same.
    fn keep_threads(self: &Arc<Self>) {
        let watched = Arc::downgrade(self);
        let moves = move || watched.upgrade().is_some_and(|agent| agent.moves());
        for (key, what, kept) in [
            (
                "heat",
                "the agent does not count the guests' accesses",
                keepers::heat(&self.registry),
            ),
            (
                "lines",
                "after a kill, more regions than necessary have to be compared",
                keepers::lines(&self.registry),
            ),
            (
                "retention",
                "the agent does not remove replicas by itself",
                keepers::replicas(&self.registry, &self.config),
            ),
            (
                "index",
                "the agent does not index content",
                self.reuse.keep(self.store.content().path(), moves),
            ),
            (
                "schedule",
                "the agent makes no scheduled backups",
                crate::backup::schedule::keep(self),
            ),
            ("thaw", "a guest that was frozen for a backup may stay frozen", thaw::keep(self)),
        ] {
            let found = kept.err().map(|why| format!("cannot start a thread: {why}"));
            self.troubles.settle(&format!("thread.{key}"), what, found, "restart the agent");
        }
    }

    /// Ends in order: guests' connections first.
    fn end(&self) {
        self.frozen.thaw_all();
        // Parked requests would hold this up for their whole stall: they are cut, and come again.
        self.front_ends.end(SHUTDOWN_GRACE);
        self.registry.save_heat(Instant::now());
        self.registry.stop_lines(SHUTDOWN_GRACE);
        // They would serve nobody until the next agent ends them. Last: one that is being started is waited for.
        self.registry
            .all()
            .iter()
            .filter_map(|entry| entry.flat.as_ref())
            .for_each(|f| f.chain.close());
        self.registry.peeks.close();
    }
}

/// Locks the directory itself: that needs no room in it, and is free again when the process is gone.
fn lock_state(dir: &Path) -> io::Result<File> {
    let file = File::open(dir)?;
    if !file.metadata()?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another agent uses it"))
        }
        Err(why) => Err(why.into()),
    }
}
