//! A client for one export of another NBD server on this host: QEMU's, `qemu-storage-daemon`,
//! `qemu-nbd`, nbdkit. It knows sockets and the protocol; what the bytes mean is the caller's.
//!
//! Any number of threads may use one [`Client`]; their requests are under way together. A thread of
//! the client's own receives the replies (`replies`) and hands each to who waits for it (`waiting`).
//! What the server says is checked before it is used: a reply that nobody asked for, of a wrong
//! length or kind, ends the connection, and everybody who waits is told.

mod error;
mod extents;
mod negotiate;
mod replies;
mod waiting;

pub use error::ClientError;
pub use extents::Extent;

use crate::proto::{REQUEST_MAGIC, cmd, cmd_flag, export};
use parking_lot::Mutex;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use waiting::{Asked, Waiting};

/// Longest read or write in one request; longer ones are cut. QEMU's limit is 32 MiB; shorter
/// requests let several threads share the connection more evenly.
const MAX_REQUEST: u64 = 4 << 20;

/// Longest range of one status, trim or zeroing request: below the 4 GiB of the field, and a
/// multiple of any block size.
const MAX_RANGE: u64 = 1 << 30;

/// How to use an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The export's name.
    pub export: String,
    /// Metadata contexts that [`Client::status`] shall know, such as `base:allocation` or
    /// `qemu:dirty-bitmap:NAME`. The connection is refused when the server lacks one.
    pub contexts: Vec<String>,
    /// A request that has had no reply for this long ends the connection; `None` waits for ever.
    pub patience: Option<Duration>,
}

impl Wish {
    /// The whole export, with `base:allocation`, without a limit of time.
    #[must_use]
    pub fn new(export: impl Into<String>) -> Self {
        let contexts = vec![crate::proto::BASE_ALLOCATION.to_owned()];
        Self { export: export.into(), contexts, patience: None }
    }
}

/// A connection to one export.
#[derive(Debug)]
pub struct Client {
    writer: Mutex<UnixStream>,
    waiting: Arc<Waiting>,
    receiver: Option<JoinHandle<()>>,
    len: u64,
    flags: u16,
    contexts: Vec<(String, u32)>,
    patience: Option<Duration>,
}

impl Client {
    /// Connects to the unix socket `path` and negotiates.
    ///
    /// # Errors
    /// Nobody listens, the export or a context is unknown there, or what answers is no NBD server
    /// with structured replies.
    pub fn connect(path: &Path, wish: &Wish) -> Result<Self, ClientError> {
        let stream =
            UnixStream::connect(path).map_err(|error| ClientError::connect(path, error))?;
        Self::on(stream, wish)
    }

    /// Negotiates on a connection that stands.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn on(stream: UnixStream, wish: &Wish) -> Result<Self, ClientError> {
        let agreed = negotiate::negotiate(&stream, wish)?;
        let waiting = Arc::new(Waiting::default());
        let receiver = {
            let (stream, waiting) = (stream.try_clone()?, Arc::clone(&waiting));
            let run = move || replies::receive(stream, &waiting);
            std::thread::Builder::new().name("nbd-client".into()).spawn(run)?
        };
        Ok(Self {
            writer: Mutex::new(stream),
            waiting,
            receiver: Some(receiver),
            len: agreed.len,
            flags: agreed.flags,
            contexts: agreed.contexts,
            patience: wish.patience,
        })
    }

    /// The export's length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the export has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.flags & export::READ_ONLY != 0
    }

    /// Why the connection has ended, if it has.
    #[must_use]
    pub fn broken(&self) -> Option<ClientError> {
        self.waiting.broken()
    }

    /// Fills `into` from `offset`.
    ///
    /// # Errors
    /// The range is not in the export, the server failed, or the connection has ended. What is in
    /// `into` means nothing then.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), ClientError> {
        self.check(offset, into.len() as u64)?;
        let mut at = offset;
        for part in into.chunks_mut(MAX_REQUEST as usize) {
            let asked = Asked::Read { offset: at, len: part.len() };
            let reply = self.ask(asked, cmd::READ, 0, at, part.len() as u64, &[])?;
            part.copy_from_slice(&reply.data);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes `data` at `offset`; durable only after [`flush`](Self::flush).
    ///
    /// # Errors
    /// As [`read`](Self::read); an unknown part may have been written.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.check(offset, data.len() as u64)?;
        let mut at = offset;
        for part in data.chunks(MAX_REQUEST as usize) {
            self.ask(Asked::Done, cmd::WRITE, 0, at, part.len() as u64, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes `len` bytes at `offset` read as zeros; with `may_unmap` they may become a hole.
    ///
    /// # Errors
    /// As [`write`](Self::write), or the server does not offer it.
    pub fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<(), ClientError> {
        self.offers(export::SEND_WRITE_ZEROES, "zeroing")?;
        let flags = if may_unmap { 0 } else { cmd_flag::NO_HOLE };
        self.over(offset, len, |at, len| {
            self.ask(Asked::Done, cmd::WRITE_ZEROES, flags, at, len, &[]).map(drop)
        })
    }

    /// Makes everything durable that was answered before.
    ///
    /// # Errors
    /// The server failed, or the connection has ended.
    pub fn flush(&self) -> Result<(), ClientError> {
        if self.flags & export::SEND_FLUSH == 0 {
            return Ok(());
        }
        self.ask(Asked::Done, cmd::FLUSH, 0, 0, 0, &[]).map(drop)
    }

    /// What the metadata context `context` says of `len` bytes at `offset`: extents without a gap,
    /// from `offset` on, exactly `len` bytes in all.
    ///
    /// # Errors
    /// The context was not wished for, the range is not in the export, the server failed, or the
    /// connection has ended.
    pub fn status(&self, context: &str, offset: u64, len: u64) -> Result<Vec<Extent>, ClientError> {
        let known = self.contexts.iter().find(|(name, _)| name == context);
        let id = known.ok_or_else(|| ClientError::Context(context.to_owned()))?.1;
        self.check(offset, len)?;
        let mut all = Vec::new();
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let part = MAX_RANGE.min(end - at);
            let reply = self.ask(Asked::Status { id }, cmd::BLOCK_STATUS, 0, at, part, &[])?;
            at = extents::append(&mut all, &reply.extents, at, end)?;
        }
        Ok(all)
    }

    fn over(
        &self,
        offset: u64,
        len: u64,
        request: impl Fn(u64, u64) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        self.check(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let part = MAX_RANGE.min(end - at);
            request(at, part)?;
            at += part;
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), ClientError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then_some(()).ok_or(ClientError::Outside { offset, len, end: self.len })
    }

    fn offers(&self, flag: u16, what: &'static str) -> Result<(), ClientError> {
        (self.flags & flag != 0).then_some(()).ok_or(ClientError::NotOffered(what))
    }

    /// Sends a request and waits for its reply.
    fn ask(
        &self,
        asked: Asked,
        command: u16,
        flags: u16,
        offset: u64,
        len: u64,
        data: &[u8],
    ) -> Result<waiting::Reply, ClientError> {
        let cookie = self.waiting.expect(asked)?;
        let len = u32::try_from(len).expect("requests are cut below 4 GiB");
        if let Err(error) = self.send(flags, command, cookie, offset, len, data) {
            self.end(ClientError::Broken(error.to_string()));
        }
        let reply = self.waiting.wait(cookie, self.patience);
        if let Err(error @ ClientError::TooSlow(_)) = &reply {
            self.end(error.clone());
        }
        reply
    }

    fn send(
        &self,
        flags: u16,
        command: u16,
        cookie: u64,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> std::io::Result<()> {
        let mut header = Vec::with_capacity(28);
        header.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header.extend_from_slice(&flags.to_be_bytes());
        header.extend_from_slice(&command.to_be_bytes());
        header.extend_from_slice(&cookie.to_be_bytes());
        header.extend_from_slice(&offset.to_be_bytes());
        header.extend_from_slice(&len.to_be_bytes());
        let mut writer = self.writer.lock();
        // Rust's own sockets are sent to without SIGPIPE.
        writer.write_all(&header)?;
        writer.write_all(data)
    }

    /// Ends the connection for everyone; the first reason stays.
    fn end(&self, why: ClientError) {
        self.waiting.fail(why);
        let writer = self.writer.lock();
        let _ = writer.shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.waiting.broken().is_none() {
            // A server that has gone needs no farewell.
            let _ = self.send(0, cmd::DISC, 0, 0, 0, &[]);
        }
        self.end(ClientError::Broken("the client has left".into()));
        if let Some(receiver) = self.receiver.take() {
            let _ = receiver.join();
        }
    }
}
