//! A chain of images as one image, read through QEMU's storage daemon.
//!
//! The daemon is started when it is first needed and again whenever it is gone; who reads waits
//! meanwhile, as for a lost source. Writes (a merge back) are not tried again: what a daemon that
//! died had not written down is lost, and [`Chain::life`] tells the merger so.

use super::layer::Admits;
use super::server::{Chained, EXPORT, Server, socket};
use dray_host::flat::ChainImage;
use dray_host::record::chain::ChainLayer;
use dray_image::{Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode};
use dray_nbd::client::{Client, ClientError, Wish};
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause before a daemon is started again.
const RETRY: Duration = Duration::from_millis(50);
/// The context that tells data from holes.
const ALLOCATION: &str = "base:allocation";
/// Its flag of what reads as zeros.
const ZERO: u32 = 2;
/// Bytes whose extents are asked for at once: what comes back is bounded by it.
const MAP_BYTES: u64 = 64 << 20;
/// Longest wait for what is data and what is a hole. Without it everything counts as data, so that
/// nothing, least of all the start of an agent, stands still over a chain that cannot be read.
const MAPPING: Duration = Duration::from_secs(10);
/// Unit in which QEMU's formats allocate.
const CLUSTER: u32 = 64 << 10;
/// The number of a full disk, as the NBD protocol has it.
const FULL: u32 = 28;

/// A chain.
pub struct Chain {
    place: PathBuf,
    layers: Vec<ChainLayer>,
    len: u64,
    stall: Option<Duration>,
    admits: Arc<dyn Admits>,
    state: Mutex<State>,
}

struct State {
    active: PathBuf,
    write: bool,
    access: Access,
    life: u64,
    asked: u64,
    open: Option<(Arc<Client>, Server)>,
}

/// Whether a chain may be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Access {
    /// By a daemon that is started when it is needed.
    Open,
    /// Not now: QEMU has its files, or is about to. Who reads waits.
    Held,
    /// Never again.
    Closed,
}

impl Chain {
    /// The chain of `layers`, `len` bytes long as its guest sees it. The daemon's socket is beside
    /// `place`, and it gets what `admits` lets it have. Who reads waits for `stall` while there is no
    /// daemon, or for ever.
    pub fn new(
        place: PathBuf,
        layers: Vec<ChainLayer>,
        len: u64,
        stall: Option<Duration>,
        admits: Arc<dyn Admits>,
    ) -> Arc<Self> {
        let active = layers.first().map(|layer| layer.path.clone()).unwrap_or_default();
        let (write, access) = (false, Access::Open);
        let state = State { active, write, access, life: 0, asked: 0, open: None };
        Arc::new(Self { place, layers, len, stall, admits, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl ChainImage for Chain {
    /// The active image's file is at `path` from now on. A daemon that has it open keeps it.
    fn moved(&self, path: &Path) {
        self.state().active = path.to_owned();
    }

    /// Whether its active image was at `path` when it was described.
    fn is_of(&self, path: &Path) -> bool {
        self.layers.first().is_some_and(|layer| layer.path == path)
    }

    /// Ends a daemon that only reads, at once, and lets nobody start another one: who reads waits.
    fn hold(&self) {
        let mut state = self.state();
        state.open = None;
        state.access = state.access.held();
    }

    /// The chain may be read again.
    fn resume(&self) {
        let mut state = self.state();
        state.access = state.access.resumed();
    }

    /// Starts the daemon if there is none, and checks what it serves.
    ///
    /// # Errors
    /// Why it cannot be started or asked.
    fn open(&self) -> io::Result<()> {
        self.client().map(drop)
    }

    /// From now on the chain may be written, or may not: by another daemon, once this one has
    /// written down what it held back. One that was finished is open again.
    ///
    /// # Errors
    /// When the one does not end or the other does not start; who reads tries again.
    fn set_writable(&self, write: bool) -> io::Result<()> {
        {
            let mut state = self.state();
            state.access = state.access.resumed();
            if state.write != write {
                let ended = end(&mut state);
                state.write = write;
                // One that only read had nothing to write down.
                if !write {
                    ended?;
                }
            }
        }
        self.open()
    }

    /// Ends the daemon after it has written down everything: the files are whole, and nobody has
    /// them open. Who reads waits from now on, until [`set_writable`](Self::set_writable): another
    /// daemon would keep QEMU from taking the chain back.
    ///
    /// # Errors
    /// When it has not; it may have lost what was written since the last flush.
    fn finish(&self) -> io::Result<()> {
        let mut state = self.state();
        let ended = end(&mut state);
        state.write = false;
        state.access = state.access.held();
        ended
    }

    /// Ends the daemon for good.
    fn close(&self) {
        let mut state = self.state();
        state.access = Access::Closed;
        state.open = None;
    }

    /// How often it was asked for something.
    fn asked(&self) -> u64 {
        self.state().asked
    }

    /// Ends a daemon that only reads until somebody asks again.
    fn rest(&self) {
        let mut state = self.state();
        if !state.write {
            state.open = None;
        }
    }

    /// Which daemon it is: a number that changes with every start. What was written in one life and
    /// not flushed may be lost in the next.
    fn life(&self) -> u64 {
        self.state().life
    }
}

impl Chain {
    fn client(&self) -> io::Result<Arc<Client>> {
        let mut state = self.state();
        state.asked += 1;
        match state.access {
            Access::Open => {}
            Access::Held => return Err(io::Error::other("its disk is being exchanged")),
            Access::Closed => return Err(io::Error::other("the image has left this host")),
        }
        if let Some((client, server)) = &mut state.open {
            if client.broken().is_none() && server.is_alive() {
                return Ok(Arc::clone(client));
            }
            let chain = self.shown();
            tracing::warn!(chain, "its storage daemon has ended: starting it again");
            state.open = None;
        }
        let server = Server::start(&self.place, &self.chained(&state))?;
        let wish = Wish { patience: self.stall, ..Wish::new(EXPORT) };
        let client = Client::connect(&socket(&self.place), &wish).map_err(io::Error::other)?;
        if client.len() != self.len {
            let why = format!("it has {} bytes and should have {}", client.len(), self.len);
            return Err(io::Error::other(why));
        }
        state.life += 1;
        let client = Arc::new(client);
        state.open = Some((Arc::clone(&client), server));
        Ok(client)
    }

    /// What a daemon of its is to serve.
    fn chained<'a>(&'a self, state: &'a State) -> Chained<'a> {
        let (active, write) = (state.active.as_path(), state.write);
        Chained { layers: &self.layers, active, len: self.len, write, admits: &*self.admits }
    }

    /// Asks until there is an answer, for so long or for ever.
    fn ask<T>(
        &self,
        what: &str,
        patience: Option<Duration>,
        mut request: impl FnMut(&Client) -> std::result::Result<T, ClientError>,
    ) -> Result<T> {
        let deadline = patience.map(|patience| Instant::now() + patience);
        loop {
            let why = match self.client() {
                Ok(client) => match request(&client) {
                    Ok(answer) => return Ok(answer),
                    Err(why) if !why.ends_connection() => return Err(self.failed(what, &why)),
                    Err(why) => io::Error::other(why),
                },
                Err(why) => why,
            };
            let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if over || self.state().access == Access::Closed {
                let context = format!("{what} {}", self.shown());
                return Err(Error::with_source(ErrorKind::Unavailable, context, why));
            }
            tracing::debug!(chain = self.shown(), %why, "waiting for the chain");
            std::thread::sleep(RETRY);
        }
    }

    /// Asks once.
    fn tell(
        &self,
        what: &str,
        request: impl FnOnce(&Client) -> std::result::Result<(), ClientError>,
    ) -> Result<()> {
        let client = self.client().map_err(|why| {
            Error::with_source(ErrorKind::Unavailable, format!("{what} {}", self.shown()), why)
        })?;
        request(&client).map_err(|why| self.failed(what, &why))
    }

    fn shown(&self) -> String {
        self.layers.first().map(|layer| layer.path.display().to_string()).unwrap_or_default()
    }

    fn failed(&self, what: &str, why: &ClientError) -> Error {
        let full = matches!(why, ClientError::Server { errno: FULL, .. });
        let context = format!("{what} {}", self.shown());
        if full {
            // QEMU's words do not say so.
            let why = format!("No space left on device ({why})");
            return Error::new(ErrorKind::NoSpace, context, &why);
        }
        Error::new(ErrorKind::Io, context, &why.to_string())
    }
}

impl Access {
    fn held(self) -> Self {
        if self == Self::Closed { self } else { Self::Held }
    }

    fn resumed(self) -> Self {
        if self == Self::Closed { self } else { Self::Open }
    }
}

/// Ends the daemon of a chain in good order.
fn end(state: &mut State) -> io::Result<()> {
    let Some((client, server)) = state.open.take() else { return Ok(()) };
    drop(client);
    server.finish()
}

impl Image for Chain {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, min_block: 1, preferred_block: CLUSTER, read_only: true }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.ask("reading chain", self.stall, |client| client.read(offset, buf))
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.tell("writing chain", |client| client.write(offset, data))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        let unmap = mode == ZeroMode::MayUnmap;
        self.tell("zeroing chain", |client| client.write_zeroes(offset, len, unmap))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        self.tell("flushing chain", Client::flush)
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        let (mut at, end) = (offset, offset + len);
        let mut found: Vec<Extent> = Vec::new();
        let patience = Some(self.stall.map_or(MAPPING, |stall| stall.min(MAPPING)));
        while at < end {
            let part = MAP_BYTES.min(end - at);
            let status = |client: &Client| client.status(ALLOCATION, at, part);
            for piece in self.ask("mapping chain", patience, status)? {
                let zero = piece.flags & ZERO != 0;
                let kind = if zero { ExtentKind::Hole } else { ExtentKind::Data };
                let full = found.len() >= max;
                match found.last_mut() {
                    Some(last) if last.kind == kind => last.len += piece.len,
                    _ if full => return Ok(found),
                    _ => found.push(Extent { len: piece.len, kind }),
                }
            }
            at += part;
        }
        Ok(found)
    }
}

#[cfg(test)]
pub(super) mod tests;
