//! Questions to a peer one after the other, each with its answer, over streams that are kept open for the
//! next ones: its backup store, and its replicas.

use crate::memory::Held;
use crate::tls::Identity;
use crate::{AGENT, BlockingStream, DialSettings, NetError, NetErrorKind, dial, turns};
use dray_wire::store::{self, LENGTHS};
use dray_wire::{Hello, StreamKind};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// A stream that nobody has used for this long is not used any more: the peer may have restarted.
const UNUSED: Duration = Duration::from_secs(10);
/// Who answers ends a stream on which nothing has come, or nothing of an answer was taken, for this long: it has a
/// thread, and holds the answer in memory. Nobody would have used it again.
pub const IDLE: Duration = Duration::from_secs(60);

/// The way to a peer.
pub struct Questions {
    identity: Identity,
    peer: String,
    address: String,
    kind: StreamKind,
    idle: Mutex<Vec<(Instant, BlockingStream)>>,
}

impl Questions {
    /// To `peer` at `address`, over streams of this kind.
    pub fn new(identity: Identity, peer: &str, address: &str, kind: StreamKind) -> Self {
        let (peer, address) = (peer.to_owned(), address.to_owned());
        Self { identity, peer, address, kind, idle: Mutex::default() }
    }

    /// The peer's name.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// A stream that waits, or a new one.
    fn stream(&self) -> io::Result<BlockingStream> {
        {
            let mut idle = self.idle.lock();
            idle.retain(|(since, _)| since.elapsed() < UNUSED);
            if let Some((_, stream)) = idle.pop() {
                return Ok(stream);
            }
        }
        self.dial().map_err(io::Error::other)
    }

    fn dial(&self) -> Result<BlockingStream, NetError> {
        let local = |why: io::Error| NetError::new(NetErrorKind::Local, why.to_string());
        let open = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let hello = Hello {
                agent: AGENT.to_owned(),
                migration: None,
                session: 0,
                stream: 0,
                features: Vec::new(),
            };
            let (name, address) = (&self.peer, &self.address);
            let settings = DialSettings::default();
            runtime.map_err(local)?.block_on(async {
                let dialled = dial(&self.identity, name, address, self.kind, &hello, &settings);
                dialled.await?.into_blocking()
            })
        };
        let turn = turns::turn(&self.address)?;
        // On a thread of its own: the caller may be a task of another runtime.
        let opened = std::thread::scope(|scope| {
            let opened = scope.spawn(open).join();
            opened.unwrap_or_else(|_| Err(local(io::Error::other("the dialling thread died"))))
        });
        turn.heard(&opened);
        opened
    }

    /// Asks one thing.
    ///
    /// # Errors
    /// `InvalidInput` for a question that no peer would take; whatever else keeps the answer away.
    pub fn ask<A: DeserializeOwned>(
        &self,
        ask: &impl Serialize,
        body: &[u8],
    ) -> io::Result<(A, Vec<u8>)> {
        let head = store::encode(ask, body.len())
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        let mut stream = self.stream()?;
        let lost = |why: io::Error| {
            io::Error::new(why.kind(), format!("lost the connection to {}: {why}", self.peer))
        };
        stream.write_both(&head, body).map_err(lost)?;
        let answer = read::<A>(&mut stream).map_err(lost)?;
        let answer = answer.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
        let mut idle = self.idle.lock();
        idle.push((Instant::now(), stream));
        Ok(answer)
    }
}

/// The next message of a stream; none at its end.
///
/// # Errors
/// What the socket says; `Other` when it is no message.
pub fn read<T: DeserializeOwned>(stream: &mut BlockingStream) -> io::Result<Option<(T, Vec<u8>)>> {
    let Some((head, body)) = lengths(stream)? else { return Ok(None) };
    rest(stream, head, body).map(Some)
}

/// A question of a peer.
#[derive(Debug)]
pub struct Asked<T> {
    /// What it asks.
    pub ask: T,
    /// The bytes that came with it.
    pub body: Vec<u8>,
    /// Their place in the peer's memory.
    pub held: Held,
}

/// Reads the questions of a peer and writes the answers. What both take of memory has a place in that peer's.
#[derive(Debug)]
pub struct Answering<'s> {
    stream: &'s mut BlockingStream,
    runtime: Handle,
    most_head: usize,
    most_body: usize,
}

impl<'s> Answering<'s> {
    /// Takes heads and bodies of at most so many bytes. `runtime` has the clock by which a thread waits for memory.
    pub fn new(
        stream: &'s mut BlockingStream,
        runtime: Handle,
        most_head: usize,
        most_body: usize,
    ) -> Self {
        Self { stream, runtime, most_head, most_body }
    }

    /// The next question; none at the end of the stream.
    ///
    /// # Errors
    /// What the socket says; `InvalidData` when the question is too long, `TimedOut` when it comes too slowly or
    /// finds no place.
    pub fn question<T: DeserializeOwned>(&mut self) -> io::Result<Option<Asked<T>>> {
        let Some((head, body)) = lengths(self.stream)? else { return Ok(None) };
        if head > self.most_head || body > self.most_body {
            let why = format!("a question with {head} and {body} bytes is too long");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let held = self.place(head + body)?;
        self.end_in(head + body);
        let (ask, body) = rest(self.stream, head, body)?;
        self.stream.end_by(None);
        Ok(Some(Asked { ask, body, held }))
    }

    /// Waits for a place for so many bytes. Who waits has none: of those that have, each can go on.
    ///
    /// # Errors
    /// `TimedOut` when none becomes free.
    pub fn place(&self, bytes: usize) -> io::Result<Held> {
        let placed = self.runtime.block_on(self.stream.memory().for_answer(bytes));
        placed.map_err(|why| io::Error::new(io::ErrorKind::TimedOut, why.to_string()))
    }

    /// Writes an answer, whose body has the place `held`.
    ///
    /// # Errors
    /// What the socket says; `TimedOut` when the peer takes it too slowly.
    pub fn answer<A: Serialize>(
        &mut self,
        answer: &A,
        body: &[u8],
        mut held: Held,
    ) -> io::Result<()> {
        let head = store::encode(answer, body.len()).map_err(io::Error::other)?;
        held.keep(head.len() + body.len());
        self.end_in(head.len() + body.len());
        self.stream.write_both(&head, body)?;
        self.stream.end_by(None);
        Ok(())
    }

    /// As much as one answer can have.
    pub fn most(&self) -> usize {
        self.stream.memory().longest_answer()
    }

    fn end_in(&mut self, bytes: usize) {
        self.stream.end_by(Some(Instant::now() + self.stream.memory().time_for(bytes)));
    }
}

/// The lengths of the head and the body that follow.
fn lengths(stream: &mut BlockingStream) -> io::Result<Option<(usize, usize)>> {
    let mut lengths = [0; LENGTHS];
    if !stream.read_all_or_end(&mut lengths)? {
        return Ok(None);
    }
    store::decode_lengths(lengths).map(Some).map_err(io::Error::other)
}

fn rest<T: DeserializeOwned>(
    stream: &mut BlockingStream,
    head: usize,
    body: usize,
) -> io::Result<(T, Vec<u8>)> {
    let (mut head, mut body) = (vec![0; head], vec![0; body]);
    let whole = stream.read_all_or_end(&mut head)? && stream.read_all_or_end(&mut body)?;
    if !whole {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((store::decode(&head).map_err(io::Error::other)?, body))
}
