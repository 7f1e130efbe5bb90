//! The control stream of a migration: messages both ways, and whether the link lives.
//!
//! A message goes out at once; when there is none for a while a ping goes out. A link on which no
//! byte arrives for a while is down: said once, as the last item of the receiving side. Pings are
//! not handed on.
//!
//! A message has a place in the [`memory`](crate::memory) of its peer from its length on until whoever it was handed
//! to has done with it.

use crate::error::{NetError, NetErrorKind};
use crate::memory::{Held, PeerMemory};
use crate::stats::NetStats;
use crate::stream::{Stream, Tls};
use crate::tls;
use dray_types::{Attempt, Epoch};
use dray_wire::control::{self, Bounded};
use dray_wire::{Envelope, ToSource, ToTarget};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Encoded bytes that may wait to be written. A peer that reads so slowly is as good as gone.
const MAX_WAITING: usize = 2 * control::MAX_CONTROL as usize;
/// Bytes written with one call.
const BATCH: usize = 64 * 1024;
/// Memory that a message gets before its bytes are there.
const PIECE: usize = 1 << 20;
/// Messages handed on that may wait for their reader; beyond it the peer is slowed down.
const INBOX: usize = 256;

/// A message that a control stream carries.
pub trait ControlMessage: Serialize + DeserializeOwned + Bounded + Send + 'static {
    /// The message that says nothing.
    const PING: Self;
    /// Whether it is that one.
    fn is_ping(&self) -> bool;
}

impl ControlMessage for ToTarget {
    const PING: Self = Self::Ping;
    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

impl ControlMessage for ToSource {
    const PING: Self = Self::Ping;
    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

/// When to ping and when to give up.
#[derive(Clone, Copy, Debug)]
pub struct ControlSettings {
    /// A ping is sent when nothing was for this long.
    pub ping: Duration,
    /// The link is down when nothing arrives for this long.
    pub dead: Duration,
}

impl Default for ControlSettings {
    fn default() -> Self {
        Self { ping: Duration::from_secs(1), dead: Duration::from_secs(5) }
    }
}

/// The sending side; cheap to clone, usable from any thread. When the last one is dropped, what
/// was sent is written and the stream finished in order.
#[derive(Debug)]
pub struct ControlSender<Tx> {
    queue: mpsc::UnboundedSender<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    kind: PhantomData<fn(Tx)>,
}

impl<Tx> Clone for ControlSender<Tx> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), waiting: Arc::clone(&self.waiting), kind: PhantomData }
    }
}

impl<Tx> ControlSender<Tx> {
    /// A sender without a stream, and where its messages arrive: for a simulated network.
    pub fn without_stream() -> (Self, mpsc::UnboundedReceiver<Vec<u8>>) {
        let (queue, messages) = mpsc::unbounded_channel();
        (Self { queue, waiting: Arc::default(), kind: PhantomData }, messages)
    }
}

impl<Tx: ControlMessage> ControlSender<Tx> {
    /// Queues a message; does not wait.
    ///
    /// # Errors
    /// `Broken` when the link is down or the peer does not read, `Protocol` when the message is
    /// over its limit.
    pub fn send(&self, message: &Envelope<Tx>) -> Result<(), NetError> {
        let bytes = control::encode(message)?;
        let len = bytes.len();
        if self.waiting.fetch_add(len, Relaxed) + len > MAX_WAITING {
            let what = "the peer does not read its control messages";
            return Err(NetError::new(NetErrorKind::Broken, what));
        }
        let gone = || NetError::new(NetErrorKind::Broken, "the control stream is down");
        self.queue.send(bytes).map_err(|_| gone())
    }
}

/// A message, and its place in memory.
type Placed<Rx> = Result<(Envelope<Rx>, Held), NetError>;

/// The receiving side. When it is dropped the connection is closed.
#[derive(Debug)]
pub struct ControlReceiver<Rx> {
    inbox: mpsc::Receiver<Placed<Rx>>,
    /// The place of the message that was handed on last.
    last: Held,
}

impl<Rx> ControlReceiver<Rx> {
    /// The next message; an error once, when the link is down (`Closed` when the peer finished in
    /// order); then nothing. The message before it counts as handled.
    pub async fn next(&mut self) -> Option<Result<Envelope<Rx>, NetError>> {
        self.last = Held::default();
        let next = self.inbox.recv().await?;
        Some(next.map(|(message, held)| {
            self.last = held;
            message
        }))
    }

    /// The same for who hands the message on: it counts as handled when its place is dropped.
    pub async fn next_held(&mut self) -> Option<Result<(Envelope<Rx>, Held), NetError>> {
        self.inbox.recv().await
    }
}

/// Starts the tasks of a control stream. Must be called within a tokio runtime.
pub fn control_stream<Tx: ControlMessage, Rx: ControlMessage>(
    mut stream: Stream,
    settings: ControlSettings,
    stats: &Arc<NetStats>,
) -> (ControlSender<Tx>, ControlReceiver<Rx>) {
    stream.count_into(stats);
    let peer = stream.peer.clone();
    let (read, write) = tokio::io::split(stream.tls);
    let (queue, messages) = mpsc::unbounded_channel();
    let (to_inbox, inbox) = mpsc::channel(INBOX);
    let waiting = Arc::new(AtomicUsize::new(0));
    let writer = Writer { tls: write, messages, waiting: Arc::clone(&waiting), settings };
    let memory = stream.memory;
    let reader = Reader { tls: read, settings, memory, kind: PhantomData::<fn() -> Rx> };
    tokio::spawn(async move {
        let why = tokio::select! {
            why = writer.run::<Tx>() => why,
            why = reader.run(&to_inbox) => why,
            () = to_inbox.closed() => return,
        };
        let why = why.into_net(&peer).doing("control stream");
        // Fails only when nobody listens any more.
        let _ = to_inbox.send(Err(why)).await;
    });
    (
        ControlSender { queue, waiting, kind: PhantomData },
        ControlReceiver { inbox, last: Held::default() },
    )
}

/// Why a control stream ended.
enum Down {
    Io(io::Error),
    Net(NetError),
}

impl Down {
    fn into_net(self, peer: &str) -> NetError {
        match self {
            Self::Io(why) => tls::translate(why, peer),
            Self::Net(why) => why,
        }
    }
}

impl From<io::Error> for Down {
    fn from(why: io::Error) -> Self {
        Self::Io(why)
    }
}

impl From<dray_wire::WireError> for Down {
    fn from(why: dray_wire::WireError) -> Self {
        Self::Net(why.into())
    }
}

struct Writer {
    tls: WriteHalf<Tls>,
    messages: mpsc::UnboundedReceiver<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    settings: ControlSettings,
}

impl Writer {
    /// Writes until the connection breaks; never ends otherwise.
    async fn run<Tx: ControlMessage>(mut self) -> Down {
        match self.write_all::<Tx>().await {
            Err(why) => why,
            // The last sender is gone. The peer's messages still count, so only the reader ends.
            Ok(()) => match self.tls.shutdown().await {
                Ok(()) => std::future::pending().await,
                Err(why) => why.into(),
            },
        }
    }

    async fn write_all<Tx: ControlMessage>(&mut self) -> Result<(), Down> {
        let ping = Envelope { epoch: Epoch(0), attempt: Attempt(0), body: Tx::PING };
        let ping = control::encode(&ping)?;
        loop {
            let Ok(message) = timeout(self.settings.ping, self.messages.recv()).await else {
                self.tls.write_all(&ping).await?;
                self.tls.flush().await?;
                continue;
            };
            let Some(mut batch) = message else { return Ok(()) };
            while batch.len() < BATCH {
                let Ok(more) = self.messages.try_recv() else { break };
                batch.extend(more);
            }
            self.tls.write_all(&batch).await?;
            self.tls.flush().await?;
            self.waiting.fetch_sub(batch.len(), Relaxed);
        }
    }
}

struct Reader<Rx> {
    tls: ReadHalf<Tls>,
    settings: ControlSettings,
    memory: PeerMemory,
    kind: PhantomData<fn() -> Rx>,
}

impl<Rx: ControlMessage> Reader<Rx> {
    async fn run(mut self, inbox: &mpsc::Sender<Placed<Rx>>) -> Down {
        loop {
            match self.message().await {
                Err(why) => return why,
                Ok((message, _)) if message.body.is_ping() => {}
                Ok(message) => {
                    // Fails only when nobody listens; the stream's task ends by itself then.
                    let _ = inbox.send(Ok(message)).await;
                }
            }
        }
    }

    async fn message(&mut self) -> Result<(Envelope<Rx>, Held), Down> {
        let len = self.len().await?;
        let mut body = Vec::new();
        if len > control::MAX_SHORT as usize {
            self.read_up_to(&mut body, control::KIND_LEN).await?;
        }
        control::check_kind::<Rx>(&body, len)?;
        // The link is not silent meanwhile: nobody reads it.
        let held = self.memory.for_message(len).await.map_err(Down::Net)?;
        let limit = self.memory.time_for(len);
        body.reserve_exact(len - body.len());
        timeout(limit, self.read_up_to(&mut body, len)).await.map_err(|_| {
            let seconds = limit.as_secs();
            let what = format!("a message of {len} bytes was not complete after {seconds} s");
            Down::Net(NetError::new(NetErrorKind::Timeout, what))
        })??;
        Ok((self.decode(body).await?, held))
    }

    async fn len(&mut self) -> Result<usize, Down> {
        let mut len = [0; 4];
        let mut have = 0;
        while have < len.len() {
            match self.some(&mut len[have..]).await? {
                0 if have == 0 => {
                    let what = "the peer finished it";
                    return Err(Down::Net(NetError::new(NetErrorKind::Closed, what)));
                }
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                count => have += count,
            }
        }
        Ok(control::decode_len(len)?)
    }

    /// Reads until there are `len` bytes; memory is touched as they arrive, not as they were announced.
    async fn read_up_to(&mut self, body: &mut Vec<u8>, len: usize) -> Result<(), Down> {
        while body.len() < len {
            let have = body.len();
            body.resize(len.min(have + PIECE), 0);
            let count = self.some(&mut body[have..]).await?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            body.truncate(have + count);
        }
        Ok(())
    }

    /// A long one takes a while, and several times its length: not on the threads of all tasks, and one after the
    /// other.
    async fn decode(&self, body: Vec<u8>) -> Result<Envelope<Rx>, Down> {
        if body.len() <= control::MAX_SHORT as usize {
            return Ok(control::decode(&body)?);
        }
        let _turn = self.memory.turn_to_decode().await;
        let decoded = tokio::task::spawn_blocking(move || control::decode(&body)).await;
        Ok(decoded.map_err(io::Error::other)??)
    }

    async fn some(&mut self, out: &mut [u8]) -> Result<usize, Down> {
        match timeout(self.settings.dead, self.tls.read(out)).await {
            Ok(result) => Ok(result?),
            Err(_) => {
                let seconds = self.settings.dead.as_secs_f32();
                let what = format!("nothing arrived for {seconds} s");
                Err(Down::Net(NetError::new(NetErrorKind::Timeout, what)))
            }
        }
    }
}
