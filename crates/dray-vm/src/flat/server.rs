//! One QEMU storage daemon that serves one chain on a private socket.
//!
//! It runs behind a wall ([`dray_confine`]) and opens nothing: each image comes through a socket at whose
//! other end this agent is ([`Layer`]), and what lies on what is said here, not by the images. Reading,
//! the agent opens the chain beside whoever else has it; writing, it takes QEMU's locks.
//!
//! A daemon ends with its agent. The next one looks for it all the same before it starts its own.

use super::layer::{self, Admits, Layer};
use dray_confine::Tool;
use dray_host::record::chain::ChainLayer;
use dray_host::stamp::check_open;
use dray_image::growable_len;
use dray_types::MAX_CHAIN;
use dray_types::text::harmless;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// The program.
const PROGRAM: &str = "qemu-storage-daemon";
/// The name of its only export.
pub const EXPORT: &str = "chain";
/// How long it may take until it listens: 30 ms on an idle machine.
const START: Duration = Duration::from_secs(20);
/// How long it may take to write down what it holds back and leave, and a killed one to be gone.
const END: Duration = Duration::from_secs(30);
/// How often is looked.
const POLL: Duration = Duration::from_millis(2);
/// Longest part of its last words that is told, in bytes.
const WORDS: usize = 400;

/// A daemon that listens.
pub struct Server {
    child: Child,
    files: Files,
    /// What it has of the chain. Closed when it has ended.
    layers: Vec<Layer>,
}

/// What a daemon serves.
pub struct Chained<'a> {
    /// The chain, the active image first.
    pub layers: &'a [ChainLayer],
    /// Where the active image is.
    pub active: &'a Path,
    /// Length of what is seen at the top.
    pub len: u64,
    /// The active image is written.
    pub write: bool,
    /// Says which files it may have.
    pub admits: &'a dyn Admits,
}

/// What it leaves in the run directory.
struct Files {
    socket: PathBuf,
    log: PathBuf,
}

impl Files {
    fn of(place: &Path) -> Self {
        Self { socket: place.with_extension("sock"), log: place.with_extension("log") }
    }

    fn remove(&self) {
        for path in [&self.socket, &self.log] {
            // It may not have come so far.
            let _ = std::fs::remove_file(path);
        }
    }

    /// The end of what the daemon has said.
    fn words(&self) -> String {
        let said = std::fs::read(&self.log).unwrap_or_default();
        let tail = &said[said.len().saturating_sub(WORDS)..];
        harmless(String::from_utf8_lossy(tail).trim().replace('\n', "; "))
    }
}

/// The socket of the daemon at `place`.
pub fn socket(place: &Path) -> PathBuf {
    Files::of(place).socket
}

impl Server {
    /// Starts a daemon for a chain, and waits until it listens.
    ///
    /// # Errors
    /// When there is no such program, an image cannot be given to it, or with its last words when it does
    /// not start.
    pub fn start(place: &Path, chain: &Chained<'_>) -> io::Result<Self> {
        let files = Files::of(place);
        end_leftover(place)?;
        files.remove();
        let mut layers = chain.open()?;
        let mut tool = Tool::new(PROGRAM);
        let nodes = chain.nodes(&mut tool, &mut layers)?;
        tool.args(nodes);
        let started = listening(&files.socket).and_then(|socket| {
            let number = tool.hand(socket);
            tool.args(["--nbd-server".to_owned(), format!("addr.type=fd,addr.str={number}")]);
            tool.args(["--export".to_owned(), chain.export(place)]);
            let log: OwnedFd = File::create(&files.log)?.into();
            tool.spawn(log.try_clone()?, log)
        });
        let child = started.map_err(|why| {
            files.remove();
            let hint = "install it: it comes with QEMU (Debian: qemu-system-common)";
            io::Error::new(why.kind(), format!("start {PROGRAM}: {why}; {hint}"))
        })?;
        let mut server = Self { child, files, layers };
        server.wait_listening()?;
        Ok(server)
    }

    fn wait_listening(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START;
        while UnixStream::connect(&self.files.socket).is_err() {
            if let Some(status) = self.child.try_wait()? {
                let words = self.files.words();
                return Err(io::Error::other(format!("{PROGRAM} ended with {status}: {words}")));
            }
            if Instant::now() > deadline {
                let seconds = START.as_secs();
                return Err(io::Error::other(format!("{PROGRAM} is not ready after {seconds} s")));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Whether it is still there.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Its process.
    #[cfg(test)]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Tells it to write down what it holds back and to leave.
    ///
    /// # Errors
    /// When it does not, or was gone before.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            return Err(io::Error::other(format!("{PROGRAM} had ended before: {status}")));
        }
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let deadline = Instant::now() + END;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    let words = self.files.words();
                    return Err(io::Error::other(format!(
                        "{PROGRAM} ended with {status}: {words}"
                    )));
                }
                None if Instant::now() > deadline => {
                    return Err(io::Error::other(format!("{PROGRAM} does not end")));
                }
                None => std::thread::sleep(POLL),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended cannot be killed, and needs not be.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.layers.clear();
        self.files.remove();
    }
}

impl Chained<'_> {
    /// Opens the images, the active one first.
    fn open(&self) -> io::Result<Vec<Layer>> {
        if self.layers.len() > MAX_CHAIN {
            let why = format!("the chain has more than {MAX_CHAIN} images");
            return Err(io::Error::other(why));
        }
        let open = |(depth, layer): (usize, &ChainLayer)| {
            let path = if depth == 0 { self.active } else { &layer.path };
            let write = self.writes(depth);
            let file = layer::open(path, &layer.format, write, self.admits)?;
            check_open(path, &file, layer.seen.as_ref())?;
            // Read, it may grow too: until the disk leaves it, whatever its QEMU writes there has to be seen.
            let room = room(&file, &layer.format, self.len)?;
            Layer::serve(file, path, write, room)
        };
        self.layers.iter().enumerate().map(open).collect()
    }

    fn writes(&self, depth: usize) -> bool {
        depth == 0 && self.write
    }

    /// The arguments for the chain's nodes, from its base up. Each image's own is named as its depth.
    fn nodes(&self, tool: &mut Tool, opened: &mut [Layer]) -> io::Result<Vec<String>> {
        let mut arguments = Vec::new();
        let mut below = Value::Null;
        for (depth, (layer, open)) in self.layers.iter().zip(opened).enumerate().rev() {
            let reads = !self.writes(depth);
            let (file, top) = (format!("file{depth}"), top(depth));
            let mut protocol = layer::node(tool.hand(open.socket()?), reads);
            protocol["node-name"] = file.clone().into();
            let mut format = json!({
                "driver": layer.format, "node-name": top, "read-only": reads, "discard": "unmap",
                "file": file,
            });
            // Named or not: what an image itself names is not looked at.
            if layer.format != "raw" {
                format["backing"] = below;
            }
            below = top.into();
            for node in [protocol, format] {
                arguments.extend(["--blockdev".to_owned(), node.to_string()]);
            }
        }
        Ok(arguments)
    }

    /// What is exported, described by its place: so it is found when it was left behind.
    fn export(&self, place: &Path) -> String {
        let (mark, top, on) = (mark(place), top(0), if self.write { "on" } else { "off" });
        format!("{mark}type=nbd,id={EXPORT},node-name={top},name={EXPORT},writable={on}")
    }
}

fn top(depth: usize) -> String {
    format!("layer{depth}")
}

/// Length that a tool sees of an image that it writes: a raw one has its own, others grow.
fn room(file: &File, format: &str, len: u64) -> io::Result<Option<u64>> {
    Ok(match format {
        "raw" => None,
        _ => Some(growable_len(file.metadata()?.len(), len)),
    })
}

/// A socket at `path`, for the daemon to listen on: until it does, nobody is let in.
fn listening(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(socket)
}

/// The beginning of the argument by which the daemon at `place` is known.
fn mark(place: &Path) -> String {
    // A comma in a path is written twice.
    format!("description={},", place.display().to_string().replace(',', ",,"))
}

/// Ends a daemon that an agent before this one has left behind at `place`.
fn end_leftover(place: &Path) -> io::Result<()> {
    let mark = mark(place);
    end_those(|word| word.starts_with(mark.as_bytes()))
}

/// Ends every daemon that an agent before this one has left behind at a place whose path begins with
/// `places`, and removes its files.
///
/// # Errors
/// When one does not end, or the directory cannot be read.
pub(super) fn end_leftovers(dir: &Path, places: &str) -> io::Result<()> {
    let mark = mark(&dir.join(places));
    let wanted = mark.trim_end_matches(',');
    end_those(|word| word.starts_with(wanted.as_bytes()))?;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(places)) {
            Files::of(&path).remove();
        }
    }
    Ok(())
}

/// Ends the daemons one of whose arguments is `wanted`.
fn end_those(wanted: impl Fn(&[u8]) -> bool) -> io::Result<()> {
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(pid) = name.parse().ok().and_then(Pid::from_raw) else { continue };
        // Gone meanwhile, or another user's.
        let Ok(line) = std::fs::read(path.join("cmdline")) else { continue };
        let mut words = line.split(|&byte| byte == 0);
        let program = words.next().unwrap_or_default();
        if !program.ends_with(PROGRAM.as_bytes()) || !words.any(&wanted) {
            continue;
        }
        kill_process(pid, Signal::KILL)?;
        let deadline = Instant::now() + END;
        while !is_over(&path) {
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("an earlier {PROGRAM} ({name}) stays")));
            }
            std::thread::sleep(POLL);
        }
    }
    Ok(())
}

/// Whether the process of this directory in `/proc` has ended with all its threads. A killed one loses
/// its memory and its command line first, and its files, with their locks, after that.
fn is_over(process: &Path) -> bool {
    let Ok(status) = std::fs::read_to_string(process.join("status")) else { return true };
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.map(str::trim).unwrap_or_default()
    };
    // Nobody may have waited for it yet.
    value("State:").starts_with(['Z', 'X']) && matches!(value("Threads:"), "0" | "1")
}
