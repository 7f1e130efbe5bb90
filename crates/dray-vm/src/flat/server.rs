//! One QEMU storage daemon that serves one chain on a private socket.
//!
//! It outlives an agent that is killed, and then serves nobody: the next agent ends it before it
//! starts its own. Reading, it opens the chain beside whoever else has it; writing, it takes QEMU's
//! locks.

use dray_host::record::chain::ChainLayer;
use dray_types::text::harmless;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
    /// Starts a daemon for the chain, whose active image is at `active`, and waits until it listens.
    ///
    /// # Errors
    /// When there is no such program, or with its last words when it does not start.
    pub fn start(
        place: &Path,
        layers: &[ChainLayer],
        active: &Path,
        write: bool,
    ) -> io::Result<Self> {
        let files = Files::of(place);
        end_leftover(&files.socket)?;
        files.remove();
        let log = File::create(&files.log)?;
        let readable = Readable::make(active)?;
        let spawned = Command::new(PROGRAM)
            .args(arguments(&files.socket, layers, active, write))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn();
        let child = spawned.map_err(|why| {
            files.remove();
            let hint = "install it: it comes with QEMU (Debian: qemu-system-common)";
            io::Error::new(why.kind(), format!("start {PROGRAM}: {why}; {hint}"))
        })?;
        let mut server = Self { child, files };
        server.wait_listening()?;
        drop(readable);
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
        self.files.remove();
    }
}

/// What the daemon is told: the chain from its base up, and to export what is seen at its top.
fn arguments(socket: &Path, layers: &[ChainLayer], active: &Path, write: bool) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut below = Value::Null;
    for (depth, layer) in layers.iter().enumerate().rev() {
        let path = if depth == 0 { active } else { &layer.path };
        let (file, top) = (format!("file{depth}"), format!("layer{depth}"));
        let reads = depth > 0 || !write;
        let node = |driver: &str, name: &str| {
            json!({
                "driver": driver, "node-name": name, "read-only": reads, "force-share": reads,
                "discard": "unmap",
            })
        };
        let (mut protocol, mut format) = (node(&layer.protocol, &file), node(&layer.format, &top));
        protocol["filename"] = path.to_string_lossy().into();
        format["file"] = file.into();
        if layer.format == "qcow2" {
            format["backing"] = below;
        }
        below = top.into();
        for node in [protocol, format] {
            arguments.extend(["--blockdev".to_owned(), node.to_string()]);
        }
    }
    let (top, on) = (below.as_str().unwrap_or_default(), if write { "on" } else { "off" });
    let export = format!("type=nbd,id={EXPORT},node-name={top},name={EXPORT},writable={on}");
    let rest = ["--nbd-server".to_owned(), address(socket), "--export".to_owned(), export];
    arguments.extend(rest);
    arguments
}

fn address(socket: &Path) -> String {
    // A comma in a path is written twice.
    format!("addr.type=unix,addr.path={}", socket.display().to_string().replace(',', ",,"))
}

/// Ends a daemon that an agent before this one has left behind at `socket`.
fn end_leftover(socket: &Path) -> io::Result<()> {
    let wanted = address(socket);
    end_those(|word| word == wanted.as_bytes())
}

/// Ends every daemon that an agent before this one has left behind at a place whose path begins with
/// `places`, and removes its files.
///
/// # Errors
/// When one does not end, or the directory cannot be read.
pub(super) fn end_leftovers(dir: &Path, places: &str) -> io::Result<()> {
    let wanted = address(&dir.join(places));
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

/// A file of mode 0000 that an agent which is not root has to open up for a moment.
struct Readable<'a>(Option<&'a Path>);

impl<'a> Readable<'a> {
    fn make(path: &'a Path) -> io::Result<Self> {
        let mode = path.metadata()?.permissions().mode();
        if rustix::process::geteuid().is_root() || mode & 0o777 != 0 {
            return Ok(Self(None));
        }
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(Self(Some(path)))
    }
}

impl Drop for Readable<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0
            && let Err(why) = std::fs::set_permissions(path, Permissions::from_mode(0o0))
        {
            tracing::warn!(path = %path.display(), %why, "cannot close a chain's file again");
        }
    }
}
