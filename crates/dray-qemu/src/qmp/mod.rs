//! A QMP monitor: commands to one QEMU, answered in order, and its events to whoever subscribed.
//!
//! What carries them is a [`Channel`]. The first is a connection to the monitor's own socket
//! ([`Qmp::connect`]). A manager that stands between dray and QEMU and passes commands through would
//! be another. A channel that is lost fails what is in flight and everything after it: whether to
//! connect again is the caller's decision.

mod line;
mod socket;

use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;
use tokio::time::timeout;

use crate::error::{Error, ErrorKind, Result};

/// A monitor greets at once; one that does not within this time is no monitor, or serves somebody
/// else (QEMU serves one client per socket).
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Most commands take milliseconds. `stop` waits for I/O in flight, so a slow disk needs seconds.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// Events a slow subscriber may leave unread before the oldest are dropped.
pub const EVENT_QUEUE: usize = 1024;

/// A version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u64, pub u64, pub u64);

/// The oldest QEMU that does everything this crate asks for.
pub const OLDEST: Version = Version(7, 2, 0);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Something QEMU said unasked.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name, `STOP`.
    pub name: String,
    /// Its data; null when it has none.
    pub data: Value,
    /// When it happened by the host's clock, since the epoch.
    pub at: Duration,
}

/// The events of a connection from the moment of subscribing.
pub struct Events {
    receiver: Option<broadcast::Receiver<Event>>,
    socket: PathBuf,
}

/// What has come already.
enum Come {
    Event(Event),
    /// Some were dropped: nobody knows which.
    Dropped,
    No,
}

impl Events {
    /// The next event; an error when the connection is gone.
    pub async fn next(&mut self) -> Result<Event> {
        let closed = || closed(&self.socket);
        let receiver = self.receiver.as_mut().ok_or_else(closed)?;
        loop {
            match receiver.recv().await {
                Ok(event) => return Ok(event),
                Err(broadcast::error::RecvError::Closed) => return Err(closed()),
                Err(broadcast::error::RecvError::Lagged(lost)) => {
                    tracing::warn!(lost, "events were dropped: their reader is too slow");
                }
            }
        }
    }

    /// Whether one of these events is among those that have come and were not asked for yet. Also when some were
    /// dropped.
    pub(crate) fn has_come(&mut self, names: &[&str]) -> bool {
        loop {
            match self.come() {
                Come::Event(event) if names.contains(&event.name.as_str()) => return true,
                Come::Event(_) => {}
                Come::Dropped => return true,
                Come::No => return false,
            }
        }
    }

    /// The last of these events among those that have come and were not asked for yet.
    pub(crate) fn last_come(&mut self, names: &[&str]) -> Option<Event> {
        let mut last = None;
        loop {
            match self.come() {
                Come::Event(event) if names.contains(&event.name.as_str()) => last = Some(event),
                Come::Event(_) | Come::Dropped => {}
                Come::No => return last,
            }
        }
    }

    /// The next event that has come already.
    fn come(&mut self) -> Come {
        use broadcast::error::TryRecvError;
        let Some(receiver) = &mut self.receiver else { return Come::No };
        match receiver.try_recv() {
            Ok(event) => Come::Event(event),
            Err(TryRecvError::Lagged(_)) => Come::Dropped,
            Err(TryRecvError::Empty | TryRecvError::Closed) => Come::No,
        }
    }

    /// The next event that `wanted` accepts.
    pub async fn wait_for(
        &mut self,
        within: Duration,
        what: &str,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Event> {
        let found = async {
            loop {
                let event = self.next().await?;
                if wanted(&event) {
                    return Ok(event);
                }
            }
        };
        timeout(within, found).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Timeout, format!("{what}: nothing heard in {within:?}")))
        })
    }
}

/// An answer that takes its time.
pub type Answer<'a> = Pin<Box<dyn Future<Output = Result<Value>> + Send + 'a>>;

/// What carries commands to one QEMU's monitor and events back.
pub trait Channel: Send + Sync {
    /// Runs a command; `arguments` are an object or null. What QEMU returned. An answer that is
    /// dropped was given up: the command may still run.
    ///
    /// # Errors
    /// `Command` with QEMU's own words, or `Closed` when the channel is gone.
    fn execute<'a>(&'a self, command: &'a str, arguments: Value) -> Answer<'a>;

    /// The events from now on; none when the channel is gone.
    fn events(&self) -> Option<broadcast::Receiver<Event>>;

    /// Whether it is still there.
    fn is_open(&self) -> bool;
}

/// Whose monitor a channel leads to.
#[derive(Clone, Debug)]
pub struct Monitored {
    /// The path that names the VM: its monitor's socket, where it has one of its own.
    pub socket: PathBuf,
    /// Its process, where that is known.
    pub pid: Option<i32>,
    /// The user who made the socket, where that is known.
    pub user: Option<u32>,
    /// Its version.
    pub version: Version,
}

struct Shared {
    monitored: Monitored,
    patience: Duration,
    channel: Box<dyn Channel>,
}

/// A monitor; clones share its channel, which is closed when the last clone is dropped.
#[derive(Clone)]
pub struct Qmp(Arc<Shared>);

/// A channel that is gone.
pub(crate) fn closed(socket: &Path) -> Error {
    Error::new(ErrorKind::Closed, format!("{}: qemu closed the connection", socket.display()))
}

impl Qmp {
    /// Connects, checks that the peer is a QEMU new enough, and leaves negotiation mode.
    ///
    /// # Errors
    /// When nobody listens, or who listens is not that.
    pub async fn connect(socket: &Path) -> Result<Self> {
        Self::connect_within(socket, GREETING_TIMEOUT).await
    }

    /// [`Qmp::connect`] with another time limit for the greeting.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub async fn connect_within(socket: &Path, limit: Duration) -> Result<Self> {
        Self::connect_with(socket, limit, COMMAND_TIMEOUT).await
    }

    /// [`Qmp::connect_within`], and a monitor that does not answer a command, or whose job tells nothing, for
    /// `patience` counts as one that does not answer.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub async fn connect_with(socket: &Path, limit: Duration, patience: Duration) -> Result<Self> {
        let (connection, monitored) = socket::Connection::open(socket, limit).await?;
        let qmp = Self::over(Box::new(connection), monitored, patience);
        qmp.execute_within("qmp_capabilities", Value::Null, limit).await?;
        Ok(qmp)
    }

    /// A monitor that is reached by `channel`. One that does not answer a command for `patience` counts as
    /// one that does not answer.
    pub fn over(channel: Box<dyn Channel>, monitored: Monitored, patience: Duration) -> Self {
        Self(Arc::new(Shared { monitored, patience, channel }))
    }

    /// The socket that names the VM.
    pub fn socket(&self) -> &Path {
        &self.0.monitored.socket
    }

    /// The process of the VM.
    pub fn pid(&self) -> Option<i32> {
        self.0.monitored.pid
    }

    /// The user who made its socket.
    pub fn user(&self) -> Option<u32> {
        self.0.monitored.user
    }

    /// How long an answer may take, or an event of a job.
    pub(crate) fn patience(&self) -> Duration {
        self.0.patience
    }

    /// The QEMU's version.
    pub fn version(&self) -> Version {
        self.0.monitored.version
    }

    /// Whether the channel is still there.
    pub fn is_open(&self) -> bool {
        self.0.channel.is_open()
    }

    /// The events from now on.
    pub fn events(&self) -> Events {
        Events { receiver: self.0.channel.events(), socket: self.socket().to_owned() }
    }

    /// Runs a command and returns what it returned.
    ///
    /// # Errors
    /// What QEMU refuses, or that it does not answer.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_within(command, arguments, self.0.patience).await
    }

    /// [`Qmp::execute`] with another time limit. After a timeout the command may still run.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value> {
        let answer = timeout(limit, self.0.channel.execute(command, arguments)).await;
        answer.unwrap_or_else(|_| {
            let why = format!("{command}: qemu did not answer within {limit:?}");
            Err(Error::new(ErrorKind::Timeout, why))
        })
    }
}
