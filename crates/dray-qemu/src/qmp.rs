//! A QMP client: one connection to one QEMU's monitor socket.
//!
//! Commands are answered in order by id; events go to whoever subscribed, known or not. A lost
//! connection fails what is in flight and everything after it: whether to connect again is the
//! caller's decision.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot};
use tokio::time::timeout;

use crate::error::{Error, ErrorKind, Result};

/// A monitor greets at once; one that does not within this time is no monitor, or serves somebody
/// else (QEMU serves one client per socket).
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Most commands take milliseconds. `stop` waits for I/O in flight, so a slow disk needs seconds.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest message taken. A VM with hundreds of nodes answers in a few MiB.
const MAX_MESSAGE: u64 = 64 << 20;
/// Events a slow subscriber may leave unread before the oldest are dropped.
const EVENT_QUEUE: usize = 1024;

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

    /// Whether an event of this name is among those that have come and were not asked for yet. Also when some were
    /// dropped.
    pub(crate) fn has_come(&mut self, name: &str) -> bool {
        use broadcast::error::TryRecvError;
        let Some(receiver) = &mut self.receiver else { return false };
        loop {
            match receiver.try_recv() {
                Ok(event) if event.name == name => return true,
                Ok(_) => {}
                Err(TryRecvError::Lagged(_)) => return true,
                Err(TryRecvError::Empty | TryRecvError::Closed) => return false,
            }
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

type Reply = std::result::Result<Value, Value>;

struct Shared {
    socket: PathBuf,
    pid: Option<i32>,
    version: Version,
    next_id: AtomicU64,
    pending: Mutex<Option<HashMap<u64, oneshot::Sender<Reply>>>>,
    events: Mutex<Option<broadcast::Sender<Event>>>,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    reader: Mutex<Option<tokio::task::AbortHandle>>,
    patience: Duration,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(reader) = lock(&self.reader).take() {
            reader.abort();
        }
    }
}

/// A connection to a monitor; clones share it. It is closed when the last clone is dropped.
#[derive(Clone)]
pub struct Qmp(Arc<Shared>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

fn closed(socket: &Path) -> Error {
    Error::new(ErrorKind::Closed, format!("{}: qemu closed the connection", socket.display()))
}

impl Qmp {
    /// Connects, checks that the peer is a QEMU new enough, and leaves negotiation mode.
    pub async fn connect(socket: &Path) -> Result<Self> {
        Self::connect_within(socket, GREETING_TIMEOUT).await
    }

    /// [`Qmp::connect`] with another time limit for the greeting.
    pub async fn connect_within(socket: &Path, limit: Duration) -> Result<Self> {
        Self::connect_with(socket, limit, COMMAND_TIMEOUT).await
    }

    /// [`Qmp::connect_within`], and a monitor that does not answer a command, or whose job tells nothing, for
    /// `patience` counts as one that does not answer.
    pub async fn connect_with(socket: &Path, limit: Duration, patience: Duration) -> Result<Self> {
        let name = socket.display();
        let stream = UnixStream::connect(socket).await.map_err(|e| {
            Error::with_source(ErrorKind::Connect, format!("could not connect to {name}"), e)
        })?;
        let pid = stream.peer_cred().ok().and_then(|cred| cred.pid());
        let (reader, writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        let greeting =
            timeout(limit, read_message(&mut reader, socket)).await.map_err(|_| {
                let why = format!(
                    "{name} sent no QMP greeting within {limit:?}: not a QMP socket, or another \
                 client is connected to it"
                );
                Error::new(ErrorKind::NotQmp, why)
            })??;
        let version = check_greeting(&greeting, socket)?;
        let events = broadcast::channel(EVENT_QUEUE).0;
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            pid,
            version,
            next_id: AtomicU64::new(1),
            pending: Mutex::new(Some(HashMap::new())),
            events: Mutex::new(Some(events)),
            writer: tokio::sync::Mutex::new(writer),
            reader: Mutex::new(None),
            patience,
        });
        let task = tokio::spawn(read_loop(reader, Arc::downgrade(&shared), socket.to_owned()));
        *lock(&shared.reader) = Some(task.abort_handle());
        let qmp = Self(shared);
        qmp.execute_within("qmp_capabilities", Value::Null, limit).await?;
        Ok(qmp)
    }

    /// The socket this is connected to.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// The process at the other end.
    pub fn pid(&self) -> Option<i32> {
        self.0.pid
    }

    /// How long an answer may take, or an event of a job.
    pub(crate) fn patience(&self) -> Duration {
        self.0.patience
    }

    /// The QEMU's version.
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// Whether the connection is still there.
    pub fn is_open(&self) -> bool {
        lock(&self.0.pending).is_some()
    }

    /// The events from now on.
    pub fn events(&self) -> Events {
        let receiver = lock(&self.0.events).as_ref().map(broadcast::Sender::subscribe);
        Events { receiver, socket: self.0.socket.clone() }
    }

    /// Runs a command and returns what it returned.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.execute_within(command, arguments, self.0.patience).await
    }

    /// [`Qmp::execute`] with another time limit. After a timeout the command may still run.
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value> {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let (sender, receiver) = oneshot::channel();
        match lock(&self.0.pending).as_mut() {
            Some(pending) => pending.insert(id, sender),
            None => return Err(closed(&self.0.socket).during(command)),
        };
        tracing::trace!(%message, "qmp");
        let answer = timeout(limit, async {
            self.send(&message).await?;
            receiver.await.map_err(|_| closed(&self.0.socket))
        });
        let Ok(answer) = answer.await else {
            if let Some(pending) = lock(&self.0.pending).as_mut() {
                pending.remove(&id);
            }
            let why = format!("{command}: qemu did not answer within {limit:?}");
            return Err(Error::new(ErrorKind::Timeout, why));
        };
        answer.map_err(|e| e.during(command))?.map_err(|error| {
            let text = error["desc"].as_str().unwrap_or("unknown error").to_owned();
            Error::new(ErrorKind::Command, format!("{command}: qemu refused: {text}"))
        })
    }

    async fn send(&self, message: &Value) -> Result<()> {
        let mut text = message.to_string();
        text.push('\n');
        let mut writer = self.0.writer.lock().await;
        // Whatever the system says, it means that QEMU is gone.
        writer.write_all(text.as_bytes()).await.map_err(|_| closed(&self.0.socket))
    }
}

async fn read_message(reader: &mut BufReader<OwnedReadHalf>, socket: &Path) -> Result<Value> {
    let mut line = Vec::new();
    let read = reader.take(MAX_MESSAGE).read_until(b'\n', &mut line).await;
    match read {
        Ok(n) if n > 0 && line.last() == Some(&b'\n') => {}
        Ok(n) if n as u64 == MAX_MESSAGE => {
            let why = format!("{}: a message of over {MAX_MESSAGE} bytes", socket.display());
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        _ => return Err(closed(socket)),
    }
    serde_json::from_slice(&line).map_err(|e| {
        let start = String::from_utf8_lossy(&line[..line.len().min(60)]).trim_end().to_owned();
        let why = format!("{}: not a QMP message: {start:?}", socket.display());
        Error::with_source(ErrorKind::NotQmp, why, e)
    })
}

fn check_greeting(greeting: &Value, socket: &Path) -> Result<Version> {
    let name = socket.display();
    let qemu = &greeting["QMP"]["version"]["qemu"];
    let part = |key: &str| qemu[key].as_u64();
    let (Some(major), Some(minor), Some(micro)) = (part("major"), part("minor"), part("micro"))
    else {
        let why = format!("{name}: not a QMP socket: it did not greet as QEMU does");
        return Err(Error::new(ErrorKind::NotQmp, why));
    };
    let version = Version(major, minor, micro);
    if version < OLDEST {
        let why = format!("{name}: QEMU {version} is too old: {OLDEST} or newer is needed");
        return Err(Error::new(ErrorKind::TooOld, why));
    }
    Ok(version)
}

async fn read_loop(
    mut reader: BufReader<OwnedReadHalf>,
    shared: std::sync::Weak<Shared>,
    socket: PathBuf,
) {
    loop {
        let message = read_message(&mut reader, &socket).await;
        let Some(shared) = shared.upgrade() else { return };
        match message {
            Ok(message) => dispatch(&shared, message),
            Err(error) => {
                tracing::debug!(%error, "monitor connection ended");
                lock(&shared.pending).take();
                lock(&shared.events).take();
                return;
            }
        }
    }
}

fn dispatch(shared: &Shared, mut message: Value) {
    if let Some(name) = message["event"].as_str() {
        let part = |key: &str| message["timestamp"][key].as_u64().unwrap_or(0);
        let at = Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"));
        let event = Event { name: name.to_owned(), data: message["data"].clone(), at };
        tracing::trace!(?event, "qmp");
        if let Some(events) = lock(&shared.events).as_ref() {
            // An error means that nobody listens, which is fine.
            let _ = events.send(event);
        }
        return;
    }
    let Some(id) = message["id"].as_u64() else {
        tracing::debug!(%message, "qmp message without id");
        return;
    };
    let reply = match message.get_mut("error") {
        Some(error) => Err(error.take()),
        None => Ok(message["return"].take()),
    };
    let sender = lock(&shared.pending).as_mut().and_then(|p| p.remove(&id));
    if let Some(sender) = sender {
        // An error means that the caller gave up.
        let _ = sender.send(reply);
    }
}
