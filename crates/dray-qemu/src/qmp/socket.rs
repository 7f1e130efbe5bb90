//! A connection to the socket of a QEMU's monitor.

use super::{Answer, Channel, EVENT_QUEUE, Event, Monitored, OLDEST, Version, closed, line};
use crate::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot};
use tokio::time::timeout;

type Reply = std::result::Result<Value, Value>;

struct Shared {
    socket: PathBuf,
    next_id: AtomicU64,
    pending: Mutex<Option<HashMap<u64, oneshot::Sender<Reply>>>>,
    events: Mutex<Option<broadcast::Sender<Event>>>,
    /// None after a command was given up half written: whatever followed would be appended to it.
    writer: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
}

/// A connection; closed when it is dropped.
pub(super) struct Connection {
    shared: Arc<Shared>,
    reader: tokio::task::AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A command that waits for its answer. Given up, it is waited for no longer.
struct Waiting<'a> {
    shared: &'a Shared,
    id: u64,
    reply: oneshot::Receiver<Reply>,
}

impl<'a> Waiting<'a> {
    fn begin(shared: &'a Shared, id: u64) -> Option<Self> {
        let (sender, reply) = oneshot::channel();
        shared.pending.lock().as_mut()?.insert(id, sender);
        Some(Self { shared, id, reply })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(pending) = self.shared.pending.lock().as_mut() {
            pending.remove(&self.id);
        }
    }
}

impl Connection {
    /// Connects and reads the greeting, which says whether a QEMU that is new enough listens there.
    pub(super) async fn open(socket: &Path, limit: Duration) -> Result<(Self, Monitored)> {
        let name = socket.display();
        let stream = UnixStream::connect(socket).await.map_err(|e| {
            Error::with_source(ErrorKind::Connect, format!("could not connect to {name}"), e)
        })?;
        let peer = stream.peer_cred().ok();
        let (pid, user) = (peer.and_then(|peer| peer.pid()), peer.map(|peer| peer.uid()));
        let (reader, writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        let greeting =
            timeout(limit, read_message(&mut reader, || false, socket)).await.map_err(|_| {
                let why = format!(
                    "{name} sent no QMP greeting within {limit:?}: not a QMP socket, or another \
                     client is connected to it"
                );
                Error::new(ErrorKind::NotQmp, why)
            })??;
        let version = check_greeting(&greeting, socket)?;
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            next_id: AtomicU64::new(1),
            pending: Mutex::new(Some(HashMap::new())),
            events: Mutex::new(Some(broadcast::channel(EVENT_QUEUE).0)),
            writer: tokio::sync::Mutex::new(Some(writer)),
        });
        let task = tokio::spawn(read_loop(reader, Arc::downgrade(&shared), socket.to_owned()));
        let connection = Self { shared, reader: task.abort_handle() };
        Ok((connection, Monitored { socket: socket.to_owned(), pid, user, version }))
    }

    async fn ask(&self, command: &str, arguments: Value) -> Result<Value> {
        let shared = &*self.shared;
        let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let gone = || closed(&shared.socket).during(command);
        let mut waiting = Waiting::begin(shared, id).ok_or_else(gone)?;
        tracing::trace!(%message, "qmp");
        self.send(&message).await.map_err(|why| why.during(command))?;
        (&mut waiting.reply).await.map_err(|_| gone())?.map_err(|error| {
            let text = error["desc"].as_str().unwrap_or("unknown error").to_owned();
            Error::new(ErrorKind::Command, format!("{command}: qemu refused: {text}"))
        })
    }

    async fn send(&self, message: &Value) -> Result<()> {
        let mut text = message.to_string();
        text.push('\n');
        let gone = || closed(&self.shared.socket);
        let mut slot = self.shared.writer.lock().await;
        let mut writer = slot.take().ok_or_else(gone)?;
        // Whatever the system says, it means that QEMU is gone.
        writer.write_all(text.as_bytes()).await.map_err(|_| gone())?;
        *slot = Some(writer);
        Ok(())
    }
}

impl Channel for Connection {
    fn execute<'a>(&'a self, command: &'a str, arguments: Value) -> Answer<'a> {
        Box::pin(self.ask(command, arguments))
    }

    fn events(&self) -> Option<broadcast::Receiver<Event>> {
        self.shared.events.lock().as_ref().map(broadcast::Sender::subscribe)
    }

    fn is_open(&self) -> bool {
        self.shared.pending.lock().is_some()
    }
}

/// The next message: an event, or where one is `awaited` an answer. What nobody waits for is left out.
async fn read_message(
    reader: &mut BufReader<OwnedReadHalf>,
    awaited: impl Fn() -> bool,
    socket: &Path,
) -> Result<Value> {
    loop {
        let line = line::read(reader, socket).await?;
        match line::parse(&line, awaited(), socket)? {
            Some(message) => return Ok(message),
            None => tracing::debug!(bytes = line.len(), "a long qmp message that nobody awaits"),
        }
    }
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
        let awaited = || {
            let shared = shared.upgrade();
            shared.is_some_and(|shared| {
                shared.pending.lock().as_ref().is_some_and(|of| !of.is_empty())
            })
        };
        let message = read_message(&mut reader, awaited, &socket).await;
        let Some(shared) = shared.upgrade() else { return };
        match message {
            Ok(message) => dispatch(&shared, message),
            Err(error) => {
                tracing::debug!(%error, "monitor connection ended");
                shared.pending.lock().take();
                shared.events.lock().take();
                return;
            }
        }
    }
}

fn dispatch(shared: &Shared, mut message: Value) {
    if let Some(name) = message["event"].as_str() {
        let part = |key: &str| message["timestamp"][key].as_u64().unwrap_or(0);
        let (seconds, micros) = (part("seconds"), part("microseconds"));
        let at = Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros));
        let event = Event { name: name.to_owned(), data: message["data"].clone(), at };
        tracing::trace!(?event, "qmp");
        if let Some(events) = shared.events.lock().as_ref() {
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
    let sender = shared.pending.lock().as_mut().and_then(|p| p.remove(&id));
    if let Some(sender) = sender {
        // An error means that the caller gave up.
        let _ = sender.send(reply);
    }
}
