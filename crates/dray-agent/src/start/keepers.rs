//! The periodic tasks on the images of this host. Each has a thread of its own, which ends with the
//! registry.

use dray_config::Config;
use dray_files::unix_ms;
use dray_heat::DrainPause;
use dray_host::heartbeat::{EVERY, LOOK_EVERY};
use dray_host::lineage::CLOSE_IDLE;
use dray_host::registry::Registry;
use dray_host::retention::{INTERVAL, Retention, sweep};
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, Builder, sleep};
use std::time::{Duration, Instant};

/// Pause between two savings of heat: what a killed agent forgets.
const SAVE: Duration = Duration::from_secs(10);

/// Counts what guests do, and saves it.
///
/// # Errors
/// When no thread can be made.
pub(super) fn heat(registry: &Arc<Registry>) -> io::Result<()> {
    let registry = Arc::downgrade(registry);
    Builder::new().name("dray-heat".to_owned()).spawn(move || keep_heat(&registry)).map(drop)
}

fn keep_heat(registry: &Weak<Registry>) {
    let mut saved = Instant::now();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (mut pause, mut used, mut took) = (DrainPause::new(cores), 0.0, Duration::ZERO);
    loop {
        sleep(pause.after(used, took));
        let Some(registry) = registry.upgrade() else { return };
        let began = Instant::now();
        used = registry.drain_heat(began);
        took = began.elapsed();
        if saved.elapsed() >= SAVE {
            saved = Instant::now();
            registry.save_heat(saved);
        }
    }
}

/// Touches the heartbeats of the files that are open, and looks at these files. Neither waits for the other.
///
/// # Errors
/// When no thread can be made.
pub(super) fn heartbeats(registry: &Arc<Registry>) -> io::Result<()> {
    every(EVERY, "dray-heartbeat", registry, |registry| registry.heartbeats.beat())?;
    every(LOOK_EVERY, "dray-looks", registry, |registry| registry.heartbeats.look())
}

fn every(
    pause: Duration,
    name: &str,
    registry: &Arc<Registry>,
    work: fn(&Registry),
) -> io::Result<()> {
    let registry = Arc::downgrade(registry);
    let work = move || {
        loop {
            sleep(pause);
            let Some(registry) = registry.upgrade() else { return };
            work(&registry);
        }
    };
    Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Closes regions of lines that are not in use.
///
/// # Errors
/// When no thread can be made.
pub(super) fn lines(registry: &Arc<Registry>) -> io::Result<()> {
    every(CLOSE_IDLE, "dray-lines", registry, Registry::close_idle_lines)
}

/// Applies the operator's limits of replicas, if there are any.
///
/// # Errors
/// When no thread can be made.
pub(super) fn replicas(registry: &Arc<Registry>, config: &Arc<Config>) -> io::Result<()> {
    if config.replicas == Retention::default() {
        return Ok(());
    }
    let (registry, config) = (Arc::downgrade(registry), Arc::clone(config));
    let work = move || loop {
        let Some(registry) = registry.upgrade() else { return };
        sweep(&registry, &config.replicas, &config.pools, unix_ms());
        drop(registry);
        sleep(INTERVAL);
    };
    Builder::new().name("dray-replicas".to_owned()).spawn(work).map(drop)
}
