//! The guest's memory and devices move: each side's steps, in the order of a safe switchover.
//!
//! At pre-switchover the guest is stopped, but QEMU has *not* finished with its disks: a qcow2 with
//! persistent bitmaps or lazy refcounts writes them after `migrate-continue`. So:
//!
//! | source                             | target                          |
//! |------------------------------------|---------------------------------|
//! |                                    | [`Incoming::prepare`]           |
//! |                                    | [`Incoming::listen`]            |
//! | [`Outgoing::start`]                |                                 |
//! | [`Outgoing::wait_pre_switchover`]  |                                 |
//! | [`Outgoing::complete`]             |                                 |
//! |                                    | [`Incoming::wait_loaded`]       |
//! | *the disks' handover*: before it [`Outgoing::abandon`] resumes the guest here ||
//! |                                    | [`Incoming::resume`]            |
//!
//! After the handover the source's export parks what comes. A source QEMU that is then told to quit
//! closes its images, and reads a qcow2's bitmaps once more although it is inactive: it waits for
//! ever, unless the parked requests are failed first. It writes nothing.
//!
//! The target QEMU activates its disks only in the last step (`late-block-activate`, kept stopped);
//! before it, it has read a raw image's first 512 bytes and a qcow2's tables.

use dray_types::text::harmless;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::activate::activate;
use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph;
use crate::plan::LayerPlan;
use crate::qmp::{Events, Qmp};
use crate::status::{check_disks, cont, status, stop};

/// How often the progress is asked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// After `migrate-continue` only the devices' state and the last dirty pages move.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(120);
/// The STOP event is at most this many events behind the state that follows from it.
const STOP_EVENTS: usize = 32;
/// A cancelled migration closes its stream and resumes the guest.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits of the memory's migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes per second; 0 without limit.
    pub max_bandwidth: u64,
    /// QEMU goes to pre-switchover when the rest takes at most this time.
    pub downtime_limit: Duration,
}

/// How far the memory's migration is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// QEMU's word: `setup`, `active`, `pre-switchover`, `device`, `completed`, `failed` …
    pub status: String,
    /// Bytes sent.
    pub transferred: u64,
    /// Bytes of memory still to be sent.
    pub remaining: u64,
    /// Bytes of memory.
    pub total: u64,
    /// Bytes the guest dirties per second.
    pub dirty_rate: u64,
    /// What QEMU counts as downtime, once known.
    pub downtime: Option<Duration>,
    /// Why it failed.
    pub error: Option<String>,
}

/// How far the VM's migration is.
pub async fn progress(qmp: &Qmp) -> Result<Progress> {
    let info = qmp.execute("query-migrate", Value::Null).await?;
    let number = |v: &Value| v.as_u64().unwrap_or(0);
    let ram = &info["ram"];
    let pages = number(&ram["dirty-pages-rate"]);
    Ok(Progress {
        status: harmless(info["status"].as_str().unwrap_or("none")),
        transferred: number(&ram["transferred"]),
        remaining: number(&ram["remaining"]),
        total: number(&ram["total"]),
        dirty_rate: pages.saturating_mul(number(&ram["page-size"]).max(4096)),
        downtime: info["downtime"].as_u64().map(Duration::from_millis),
        error: info["error-desc"].as_str().map(harmless),
    })
}

/// The source's side.
pub struct Outgoing {
    qmp: Qmp,
    events: Events,
    was_running: bool,
    stopped_at: Option<Duration>,
}

impl Outgoing {
    /// Starts sending to a unix socket. The guest goes on as before; on failure nothing has started, unless
    /// [QEMU has not said](ErrorKind::is_unknown): then it may have, and is to be [abandoned](Self::abandon).
    pub async fn start(qmp: &Qmp, socket: &Path, limits: &Limits) -> Result<Self> {
        let events = qmp.events();
        let was_running = status(qmp).await?.goes_on();
        if !was_running {
            // It may have arrived stopped, with an agent that did not do this.
            activate(qmp).await.map_err(|e| e.during("could not start the vm's migration"))?;
        }
        let capabilities = [("events", true), ("pause-before-switchover", true)];
        set_capabilities(qmp, &capabilities).await?;
        set_limits(qmp, limits).await?;
        let uri = format!("unix:{}", socket.display());
        let mut this = Self { qmp: qmp.clone(), events, was_running, stopped_at: None };
        let error = match qmp.execute("migrate", json!({ "uri": uri })).await {
            Ok(_) => return Ok(this),
            Err(error) if error.kind().is_unknown() => this.give_up(error).await,
            // The one that may be on its way is somebody else's.
            Err(error) => error,
        };
        Err(error.during("could not start the vm's migration"))
    }

    /// Takes over a migration that another process started, for [`Outgoing::abandon`].
    pub fn attach(qmp: &Qmp, was_running: bool) -> Self {
        Self { qmp: qmp.clone(), events: qmp.events(), was_running, stopped_at: None }
    }

    /// Whether the guest ran when the migration stopped it, as far as that is known.
    pub fn was_running(&self) -> bool {
        self.was_running
    }

    /// When the guest stopped for the switchover, by the source's clock.
    pub fn stopped_at(&self) -> Option<Duration> {
        self.stopped_at
    }

    /// Waits until the memory's rest fits the downtime limit. On success the guest is stopped and
    /// QEMU still owns the disks; on failure it runs, unless
    /// [QEMU has not said](ErrorKind::is_unknown). May be dropped and called again.
    pub async fn wait_pre_switchover(
        &mut self,
        mut report: impl FnMut(&Progress),
    ) -> Result<Progress> {
        let now = match self.sent_most(&mut report).await {
            Ok(now) => now,
            Err(error) => return Err(self.give_up(error).await),
        };
        if now.status == "completed" {
            let why = "the vm's migration completed without a pause: somebody else continued it";
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        self.note_stop().await;
        Ok(now)
    }

    /// Until QEMU waits for the switchover, or has completed without.
    async fn sent_most(&mut self, report: &mut impl FnMut(&Progress)) -> Result<Progress> {
        loop {
            let now = progress(&self.qmp).await?;
            report(&now);
            match now.status.as_str() {
                "pre-switchover" | "completed" => return Ok(now),
                "failed" | "cancelled" | "none" => return Err(failed(&now)),
                _ => {
                    self.next_change().await?;
                    self.note_pause().await?;
                }
            }
        }
    }

    /// A guest that somebody pauses on the way is not QEMU's to resume, nor the target's to start.
    async fn note_pause(&mut self) -> Result<()> {
        if self.was_running && self.stopped_at.is_some() {
            let now = status(&self.qmp).await?;
            self.was_running = now.state != "paused";
        }
        Ok(())
    }

    /// Returns at the next migration event, or when it is time to ask again; whether there was one.
    async fn next_change(&mut self) -> Result<bool> {
        let event = match timeout(PROGRESS_INTERVAL, self.events.next()).await {
            Ok(event) => event?,
            Err(_) => return Ok(false),
        };
        match event.name.as_str() {
            "STOP" => self.stopped_at = Some(event.at),
            "RESUME" => (self.was_running, self.stopped_at) = (true, None),
            _ => {}
        }
        Ok(true)
    }

    /// Reads the STOP event that precedes pre-switchover, if it is not read yet. The guest is stopped: one
    /// that does not come is not waited for.
    async fn note_stop(&mut self) {
        let known = |this: &Self| !this.was_running || this.stopped_at.is_some();
        for _ in 0..STOP_EVENTS {
            if known(self) || !matches!(self.next_change().await, Ok(true)) {
                return;
            }
        }
    }

    /// Lets QEMU finish: on success everything is sent, all writes to the disks are done and the
    /// source's QEMU has let go of them (inactive); only [`Outgoing::abandon`] may wake it. On
    /// failure the guest runs at the source, unless [QEMU has not said](ErrorKind::is_unknown).
    pub async fn complete(&mut self) -> Result<Progress> {
        match self.send_rest().await {
            Ok(now) => Ok(now),
            Err(error) => Err(self.give_up(error).await),
        }
    }

    async fn send_rest(&mut self) -> Result<Progress> {
        self.qmp.execute("migrate-continue", json!({ "state": "pre-switchover" })).await?;
        let finished = timeout(COMPLETE_TIMEOUT, async {
            loop {
                let now = progress(&self.qmp).await?;
                match now.status.as_str() {
                    "completed" => return Ok(now),
                    "failed" | "cancelled" => return Err(failed(&now)),
                    _ => self.next_change().await?,
                };
            }
        });
        finished.await.unwrap_or_else(|_| {
            let why = format!("the vm's migration did not complete in {COMPLETE_TIMEOUT:?}");
            Err(Error::new(ErrorKind::Timeout, why))
        })
    }

    /// After [`Outgoing::complete`]: checks that the guest has not run since. Somebody may have let it go on, and
    /// its disks are active again then. Once it has run QEMU never says again that it is sent.
    ///
    /// # Errors
    /// That it has run, or what QEMU reports.
    pub async fn check_sent(&self) -> Result<()> {
        let now = status(&self.qmp).await?;
        // QEMU says that all is sent a moment before it leaves the first of these, in which it refuses `cont`.
        if matches!(now.state.as_str(), "finish-migrate" | "postmigrate") {
            return Ok(());
        }
        let why = format!(
            "somebody has let the guest go on at the source after its memory was sent (it is {})",
            now.state
        );
        Err(Error::new(ErrorKind::Mismatch, why))
    }

    /// Changes the limits on the way.
    pub async fn set_limits(&self, limits: &Limits) -> Result<()> {
        set_limits(&self.qmp, limits).await
    }

    /// Gives up, before the disks' handover, whatever has happened so far: the migration ends and
    /// the guest runs at the source if it did before; if not, QEMU has its disks again. The target's
    /// QEMU must be dead or killed.
    pub async fn abandon(&mut self) -> Result<()> {
        let what = "could not take the vm's migration back";
        let now = progress(&self.qmp).await.map_err(|e| e.during(what))?;
        let over = ["none", "completed", "failed", "cancelled"];
        if !over.contains(&now.status.as_str()) {
            let cancel = self.qmp.execute("migrate_cancel", Value::Null).await;
            cancel.map_err(|e| e.during(what))?;
            self.wait_over(&over).await.map_err(|e| e.during(what))?;
        }
        self.ensure_running().await.map_err(|e| e.during(what))?;
        if !self.was_running {
            activate(&self.qmp).await.map_err(|e| e.during(what))?;
        }
        Ok(())
    }

    /// What failed with `error` leaves the guest here as it was; returns what to report.
    async fn give_up(&mut self, error: Error) -> Error {
        match self.abandon().await {
            Ok(()) => error,
            Err(undo) => not_undone(error, "the guest could not be brought back", undo),
        }
    }

    /// Until a cancelled migration has ended.
    async fn wait_over(&mut self, over: &[&str]) -> Result<()> {
        let ended = timeout(CANCEL_TIMEOUT, async {
            loop {
                let now = progress(&self.qmp).await?.status;
                if over.contains(&now.as_str()) {
                    return Ok(());
                }
                if !self.next_change().await? && now == "cancelling" {
                    self.wake_cancelled().await?;
                }
            }
        });
        ended.await.unwrap_or_else(|_| {
            let why = format!("the migration did not end within {CANCEL_TIMEOUT:?}");
            Err(Error::new(ErrorKind::NotUndone, why))
        })
    }

    /// A migration that is cancelled just when QEMU goes to pre-switchover (seen with 7.2) waits there for a
    /// `migrate-continue` that never comes, with the guest stopped. It ends when it is told to go on. Where it
    /// does not wait that is forgotten at its next pause.
    async fn wake_cancelled(&self) -> Result<()> {
        match self.qmp.execute("migrate-continue", json!({ "state": "cancelling" })).await {
            // It has ended meanwhile.
            Err(error) if error.kind() == ErrorKind::Command => Ok(()),
            told => told.map(drop),
        }
    }

    /// A failed or cancelled migration resumes the guest by itself, a little after it says that it
    /// is over; until then QEMU refuses `cont`. A completed one does not.
    async fn ensure_running(&mut self) -> Result<()> {
        let resumed = timeout(CANCEL_TIMEOUT, async {
            while self.was_running {
                let now = status(&self.qmp).await?;
                match now.state.as_str() {
                    _ if now.running => break,
                    "finish-migrate" => self.next_change().await?,
                    _ => return cont(&self.qmp).await,
                };
            }
            Ok(())
        });
        resumed.await.unwrap_or_else(|_| {
            let why = format!("the guest did not resume within {CANCEL_TIMEOUT:?}");
            Err(Error::new(ErrorKind::NotUndone, why))
        })
    }
}

fn failed(now: &Progress) -> Error {
    let why = now.error.clone().unwrap_or_else(|| format!("qemu says {}", now.status));
    Error::new(ErrorKind::Failed, format!("the vm's migration failed: {why}"))
}

/// The target's side.
pub struct Incoming {
    qmp: Qmp,
    events: Events,
}

/// What is said of a VM that cannot take a guest.
const NOT_READY: &str = "the target vm is not ready";

impl Incoming {
    /// Checks that the VM waits for a migration and has the source's disks. Nothing is changed.
    pub async fn check(qmp: &Qmp, expected: &[LayerPlan]) -> Result<()> {
        let what = NOT_READY;
        let now = status(qmp).await.map_err(|e| e.during(what))?;
        if now.state != "inmigrate" {
            let why = format!(
                "{what}: its state is {}, not inmigrate: start it with -incoming defer",
                now.state
            );
            return Err(Error::new(ErrorKind::Refused, why));
        }
        check_disks(&graph::disks(qmp).await?, expected).map_err(|e| e.during(what))
    }

    /// The same, and makes sure that neither the guest starts nor the disks are activated before
    /// [`Incoming::resume`].
    pub async fn prepare(qmp: &Qmp, expected: &[LayerPlan]) -> Result<Self> {
        let (what, events) = (NOT_READY, qmp.events());
        Self::check(qmp, expected).await?;
        // While incoming this only says that the guest is not to start by itself, like -S.
        stop(qmp).await.map_err(|e| e.during(what))?;
        let capabilities = [("events", true), ("late-block-activate", true)];
        set_capabilities(qmp, &capabilities).await.map_err(|e| e.during(what))?;
        Ok(Self { qmp: qmp.clone(), events })
    }

    /// The connection to the VM.
    pub fn monitor(&self) -> &Qmp {
        &self.qmp
    }

    /// Whether it listens on this unix socket already, and nobody has connected yet. QEMU listens
    /// once: asked again, it refuses and goes on.
    pub async fn listens(&self, socket: &Path) -> Result<bool> {
        let info = self.qmp.execute("query-migrate", Value::Null).await?;
        let here = |address: &Value| {
            address["type"] == "unix"
                && address["path"].as_str().is_some_and(|p| socket == Path::new(p))
        };
        let mut listening = info["socket-address"].as_array().into_iter().flatten();
        Ok(info["status"].is_null() && listening.any(here))
    }

    /// Starts listening on a unix socket.
    pub async fn listen(&self, socket: &Path) -> Result<()> {
        let uri = format!("unix:{}", socket.display());
        let listening = self.qmp.execute("migrate-incoming", json!({ "uri": uri })).await;
        listening.map(|_| ()).map_err(|e| {
            e.during("the target vm cannot listen (it must be started with -incoming defer)")
        })
    }

    /// Waits until memory and devices are loaded. The guest is stopped and its disks inactive, unless somebody
    /// has let it go on; a failed target QEMU ends by itself.
    pub async fn wait_loaded(&mut self, within: Duration) -> Result<Progress> {
        let loaded = timeout(within, async {
            loop {
                let now = progress(&self.qmp).await?;
                match now.status.as_str() {
                    "completed" => return Ok(now),
                    "failed" | "cancelled" => {
                        let why = now.error.unwrap_or(now.status);
                        let why = format!("the target vm could not load: {why}");
                        return Err(Error::new(ErrorKind::Failed, why));
                    }
                    _ => {}
                }
                if let Ok(event) = timeout(PROGRESS_INTERVAL, self.events.next()).await {
                    event?;
                }
            }
        });
        loaded.await.unwrap_or_else(|_| {
            let why = format!("the target vm has not loaded within {within:?}");
            Err(Error::new(ErrorKind::Timeout, why))
        })
    }

    /// After the disks' commit: activates the disks and lets the guest run. Returns when it did, by
    /// the target's clock. For a guest that was stopped at the source it is [`activate`] instead.
    pub async fn resume(&mut self) -> Result<Duration> {
        let mut events = self.qmp.events();
        let resumed = cont(&self.qmp).await;
        resumed.map_err(|e| e.during("the target's guest could not be started"))?;
        let event = events.wait_for(self.qmp.patience(), "cont", |e| e.name == "RESUME").await?;
        Ok(event.at)
    }
}

async fn set_capabilities(qmp: &Qmp, wanted: &[(&str, bool)]) -> Result<()> {
    let list: Vec<Value> =
        wanted.iter().map(|(name, on)| json!({ "capability": name, "state": on })).collect();
    let set = qmp.execute("migrate-set-capabilities", json!({ "capabilities": list })).await;
    set.map(|_| ())
}

async fn set_limits(qmp: &Qmp, limits: &Limits) -> Result<()> {
    let downtime = u64::try_from(limits.downtime_limit.as_millis()).unwrap_or(u64::MAX);
    // QEMU wants a number below 2^63 for "no limit".
    let bandwidth = if limits.max_bandwidth == 0 { i64::MAX as u64 } else { limits.max_bandwidth };
    let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": downtime });
    qmp.execute("migrate-set-parameters", parameters).await.map(|_| ())
}
