//! A chain of images as one image, read through QEMU's storage daemon.
//!
//! The daemon is started when it is first needed and again whenever it is gone; who reads waits
//! meanwhile, as for a lost source. Writes (a merge back) are not tried again: what a daemon that
//! died had not written down is lost, and [`Chain::life`] tells the merger so.

use super::ChainLayer;
use super::server::{EXPORT, Server, socket};
use dray_image::{Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode};
use dray_nbd::client::{Client, ClientError, Wish};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Pause before a daemon is started again.
const RETRY: Duration = Duration::from_millis(50);
/// The context that tells data from holes.
const ALLOCATION: &str = "base:allocation";
/// Its flag of what reads as zeros.
const ZERO: u32 = 2;
/// Bytes whose extents are asked for at once: what comes back is bounded by it.
const MAP_BYTES: u64 = 64 << 20;
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
    /// `place`. Who reads waits for `stall` while there is no daemon, or for ever.
    pub fn new(
        place: PathBuf,
        layers: Vec<ChainLayer>,
        len: u64,
        stall: Option<Duration>,
    ) -> Arc<Self> {
        let active = layers.first().map(|layer| layer.path.clone()).unwrap_or_default();
        let (write, access) = (false, Access::Open);
        let state = State { active, write, access, life: 0, asked: 0, open: None };
        Arc::new(Self { place, layers, len, stall, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The active image's file is at `path` from now on. A daemon that has it open keeps it.
    pub fn moved(&self, path: &Path) {
        self.state().active = path.to_owned();
    }

    /// Whether its active image was at `path` when it was described.
    pub fn is_of(&self, path: &Path) -> bool {
        self.layers.first().is_some_and(|layer| layer.path == path)
    }

    /// Ends a daemon that only reads, at once, and lets nobody start another one: who reads waits.
    pub fn hold(&self) {
        let mut state = self.state();
        state.open = None;
        state.access = state.access.held();
    }

    /// The chain may be read again.
    pub fn resume(&self) {
        let mut state = self.state();
        state.access = state.access.resumed();
    }

    /// Starts the daemon if there is none, and checks what it serves.
    ///
    /// # Errors
    /// Why it cannot be started or asked.
    pub fn open(&self) -> io::Result<()> {
        self.client().map(drop).map_err(io::Error::other)
    }

    /// From now on the chain may be written, or may not: by another daemon, once this one has
    /// written down what it held back. One that was finished is open again.
    ///
    /// # Errors
    /// When the one does not end or the other does not start; who reads tries again.
    pub fn set_writable(&self, write: bool) -> io::Result<()> {
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
    pub fn finish(&self) -> io::Result<()> {
        let mut state = self.state();
        let ended = end(&mut state);
        state.write = false;
        state.access = state.access.held();
        ended
    }

    /// Ends the daemon for good.
    pub fn close(&self) {
        let mut state = self.state();
        state.access = Access::Closed;
        state.open = None;
    }

    /// How often it was asked for something.
    pub fn asked(&self) -> u64 {
        self.state().asked
    }

    /// Ends a daemon that only reads until somebody asks again.
    pub fn rest(&self) {
        let mut state = self.state();
        if !state.write {
            state.open = None;
        }
    }

    /// Which daemon it is: a number that changes with every start. What was written in one life and
    /// not flushed may be lost in the next.
    pub fn life(&self) -> u64 {
        self.state().life
    }

    fn client(&self) -> std::result::Result<Arc<Client>, String> {
        let mut state = self.state();
        state.asked += 1;
        match state.access {
            Access::Open => {}
            Access::Held => return Err("its disk is being moved onto it or away".to_owned()),
            Access::Closed => return Err("the image has left this host".to_owned()),
        }
        if let Some((client, server)) = &mut state.open {
            if client.broken().is_none() && server.is_alive() {
                return Ok(Arc::clone(client));
            }
            let chain = self.shown();
            tracing::warn!(chain, "its storage daemon is gone: starting it again");
            state.open = None;
        }
        let server = Server::start(&self.place, &self.layers, &state.active, state.write)
            .map_err(|why| why.to_string())?;
        let wish = Wish { patience: self.stall, ..Wish::new(EXPORT) };
        let client = Client::connect(&socket(&self.place), &wish).map_err(|why| why.to_string())?;
        if client.len() != self.len {
            return Err(format!("it has {} bytes and should have {}", client.len(), self.len));
        }
        state.life += 1;
        let client = Arc::new(client);
        state.open = Some((Arc::clone(&client), server));
        Ok(client)
    }

    /// Asks until there is an answer.
    fn ask<T>(
        &self,
        what: &str,
        mut request: impl FnMut(&Client) -> std::result::Result<T, ClientError>,
    ) -> Result<T> {
        let deadline = self.stall.map(|stall| Instant::now() + stall);
        loop {
            let why = match self.client() {
                Ok(client) => match request(&client) {
                    Ok(answer) => return Ok(answer),
                    Err(why) if !why.ends_connection() => return Err(self.failed(what, &why)),
                    Err(why) => why.to_string(),
                },
                Err(why) => why,
            };
            let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if over || self.state().access == Access::Closed {
                let context = format!("{what} {}", self.shown());
                return Err(Error::new(ErrorKind::Unavailable, context, &why));
            }
            tracing::debug!(chain = self.shown(), why, "waiting for the chain");
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
            Error::new(ErrorKind::Unavailable, format!("{what} {}", self.shown()), &why)
        })?;
        request(&client).map_err(|why| self.failed(what, &why))
    }

    fn shown(&self) -> String {
        self.layers.first().map(|layer| layer.path.display().to_string()).unwrap_or_default()
    }

    fn failed(&self, what: &str, why: &ClientError) -> Error {
        let full = matches!(why, ClientError::Server { errno: FULL, .. });
        let kind = if full { ErrorKind::NoSpace } else { ErrorKind::Io };
        Error::new(kind, format!("{what} {}", self.shown()), &why.to_string())
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
        self.ask("reading chain", |client| client.read(offset, buf))
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

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        let (mut at, end) = (offset, offset + len);
        let mut found: Vec<Extent> = Vec::new();
        while at < end {
            let part = MAP_BYTES.min(end - at);
            for piece in self.ask("mapping chain", |client| client.status(ALLOCATION, at, part))? {
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
pub(super) mod tests {
    use super::*;
    use std::process::Command;

    /// How often is looked whether another thread has come somewhere.
    const POLL: Duration = Duration::from_millis(1);

    /// Length of the fixture's disk: not a whole number of clusters.
    pub const LEN: u64 = (4 << 20) + 1536;

    fn qemu_img(args: &[&str]) {
        let done = Command::new("qemu-img").args(args).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// What a chain holds, as QEMU's own tool reads it.
    pub fn contents(top: &Path) -> Vec<u8> {
        let raw = top.with_extension("seen");
        let paths = [top, &raw].map(|path| path.to_str().unwrap().to_owned());
        qemu_img(&["check", &paths[0]]);
        qemu_img(&["convert", "-O", "raw", &paths[0], &paths[1]]);
        std::fs::read(raw).unwrap()
    }

    /// Three images, the lower ones with what the upper ones overwrite; and what is seen.
    pub fn fixture(dir: &Path) -> (Vec<ChainLayer>, Vec<u8>) {
        let mut seen = vec![0; LEN as usize];
        let mut layers: Vec<ChainLayer> = Vec::new();
        for (nth, name) in ["base", "middle", "top"].into_iter().enumerate() {
            let path = dir.join(name).with_extension("qcow2");
            let shown = path.to_str().unwrap().to_owned();
            let len = LEN.to_string();
            match layers.first() {
                Some(below) => {
                    let below = below.path.to_str().unwrap();
                    qemu_img(&["create", "-f", "qcow2", "-b", below, "-F", "qcow2", &shown]);
                }
                None => qemu_img(&["create", "-f", "qcow2", &shown, &len]),
            }
            let (from, bytes) = (nth << 20, 1 << 20);
            let write = format!("write -P {} {from} {}", nth + 1, bytes + (bytes >> 1));
            let done = Command::new("qemu-io").args(["-c", &write, &shown]).output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
            seen[from..from + bytes + (bytes >> 1)].fill(nth as u8 + 1);
            let (format, protocol) = ("qcow2".to_owned(), "file".to_owned());
            layers.insert(0, ChainLayer { path, format, protocol });
        }
        (layers, seen)
    }

    impl Chain {
        /// Kills its daemon as somebody else would.
        pub fn kill_daemon(&self) {
            let state = self.state();
            let (_, server) = state.open.as_ref().unwrap();
            rustix::process::kill_process(server.pid(), rustix::process::Signal::KILL).unwrap();
        }
    }

    #[test]
    fn a_chain_is_read_through_a_daemon_that_may_die() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, seen) = fixture(dir.path());
        let chain = Chain::new(dir.path().join("chain"), layers, LEN, None);
        let mut buf = vec![0; LEN as usize];
        chain.read_at(&mut buf, 0).unwrap();
        assert!(buf == seen);
        let hole = |extent: &Extent| extent.kind == ExtentKind::Hole;
        let extents = chain.extents(0, LEN, 9).unwrap();
        let data: u64 = extents.iter().filter(|extent| !hole(extent)).map(|e| e.len).sum();
        assert_eq!(data, (3 << 20) + (1 << 19), "{extents:?}");
        for life in 2..5 {
            chain.kill_daemon();
            buf.fill(0);
            chain.read_at(&mut buf[100..9000], 1 << 20).unwrap();
            assert!(buf[100..9000] == seen[1 << 20..(1 << 20) + 8900]);
            assert_eq!(chain.life(), life);
        }
        chain.close();
        assert!(chain.read_at(&mut buf[..512], 0).is_err());
        assert!(!dir.path().join("chain.sock").exists());
    }

    /// While its disk is exchanged nobody may start a daemon; who reads waits for the new name.
    #[test]
    fn a_chain_that_is_held_is_read_when_it_has_its_new_name() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, seen) = fixture(dir.path());
        let (top, hidden) = (layers[0].path.clone(), dir.path().join("hidden.qcow2"));
        let place = dir.path().join("chain");
        let chain = Chain::new(place, layers, LEN, Some(Duration::from_secs(20)));
        let peeks = crate::flat::peeks::Peeks::default();
        peeks.add(&chain, || None);
        chain.open().unwrap();
        peeks.hold(&top);
        assert!(!dir.path().join("chain.sock").exists(), "its daemon has ended");
        let reader = std::thread::spawn({
            let chain = Arc::clone(&chain);
            move || {
                let mut buf = vec![0; LEN as usize];
                chain.read_at(&mut buf, 0).map(|()| buf)
            }
        });
        while chain.asked() < 2 {
            std::thread::sleep(POLL);
        }
        std::fs::rename(&top, &hidden).unwrap();
        peeks.go_on(&dir.path().join("other.qcow2"), &top);
        assert!(chain.open().is_err(), "another chain's exchange is none of its business");
        peeks.go_on(&top, &hidden);
        assert!(reader.join().unwrap().unwrap() == seen);
    }

    /// What is finished for QEMU to take back stays ended, whoever reads.
    #[test]
    fn a_chain_that_was_finished_is_not_opened_by_a_reader() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, _) = fixture(dir.path());
        let chain =
            Chain::new(dir.path().join("chain"), layers, LEN, Some(Duration::from_secs(20)));
        chain.set_writable(true).unwrap();
        chain.write_at(&[7; 512], 0, false).unwrap();
        chain.finish().unwrap();
        let before = chain.asked();
        let reader = std::thread::spawn({
            let chain = Arc::clone(&chain);
            move || {
                let mut buf = [0; 512];
                chain.read_at(&mut buf, 0).map(|()| buf)
            }
        });
        while chain.asked() < before + 2 {
            std::thread::sleep(POLL);
        }
        assert!(!dir.path().join("chain.sock").exists());
        chain.set_writable(false).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), [7; 512]);
        chain.close();
        chain.resume();
        assert!(chain.open().is_err(), "closed is for good");
    }

    #[test]
    fn an_agent_ends_what_the_one_before_has_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, _) = fixture(dir.path());
        let start = |place: &Path| Server::start(place, &layers, &layers[0].path, false).unwrap();
        let mut left = ["chain-1", "peek-1"].map(|place| start(&dir.path().join(place)));
        let mut others = start(&dir.path().join("else"));
        crate::flat::end_leftovers(dir.path());
        assert!(left.iter_mut().all(|server| !server.is_alive()));
        assert!(others.is_alive(), "that one is not an agent's");
        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        assert!(!names.iter().any(|name| name.ends_with("-1.sock")), "{names:?}");
        assert!(!names.iter().any(|name| name.ends_with("-1.log")), "{names:?}");
    }

    #[test]
    fn a_daemon_that_was_left_behind_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, _) = fixture(dir.path());
        let place = dir.path().join("chain");
        let left = Server::start(&place, &layers, &layers[0].path, true).unwrap();
        let chain = Chain::new(place, layers, LEN, None);
        chain.set_writable(true).unwrap();
        chain.write_at(&[7; 512], 0, true).unwrap();
        assert!(left.finish().is_err(), "it was ended before");
    }

    #[test]
    fn what_cannot_be_opened_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (mut layers, _) = fixture(dir.path());
        layers[2].path = dir.path().join("gone.qcow2");
        let chain = Chain::new(dir.path().join("chain"), layers, LEN, Some(Duration::ZERO));
        let why = chain.read_at(&mut [0; 512], 0).unwrap_err().to_string();
        assert!(why.contains("gone.qcow2"), "{why}");
    }
}
