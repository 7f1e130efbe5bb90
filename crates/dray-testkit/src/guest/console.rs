//! The host's end of the guest program's console.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dray_guest::line::Line;

/// How long a command may take; a dump of a large disk takes seconds under emulation.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Inbox {
    lines: Vec<String>,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

/// A connected console. Lines are kept, so waiting for one never misses it.
pub struct Console {
    stream: UnixStream,
    shared: Arc<Shared>,
    /// Lines before this were already looked at by [`Console::wait_for`].
    seen: usize,
}

impl Console {
    /// Connects to QEMU's socket.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let shared = Arc::new(Shared::default());
        let (reader, inbox) = (stream.try_clone()?, shared.clone());
        std::thread::spawn(move || collect(reader, &inbox));
        Ok(Self { stream, shared, seen: 0 })
    }

    /// Waits for the next line that `wanted` accepts and returns it.
    pub fn wait_for(
        &mut self,
        timeout: Duration,
        wanted: impl Fn(&str) -> bool,
    ) -> io::Result<String> {
        let deadline = Instant::now() + timeout;
        let mut inbox = self.shared.lock();
        loop {
            while let Some(line) = inbox.lines.get(self.seen) {
                self.seen += 1;
                if wanted(line) {
                    return Ok(line.clone());
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if inbox.ended || left.is_zero() {
                let why = if inbox.ended { "the console ended" } else { "timed out" };
                let last = inbox.lines.last().cloned().unwrap_or_default();
                return Err(io::Error::other(format!("{why}; last line: {last:?}")));
            }
            let wait = self.shared.arrived.wait_timeout(inbox, left);
            inbox = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a command without waiting for its answer.
    pub fn send(&mut self, command: &str) -> io::Result<()> {
        self.stream.write_all(format!("{command}\n").as_bytes())
    }

    /// Waits for the answer to `command`; returns the lines printed before it. The console keeps
    /// them all: see [`Console::complaints`].
    pub fn answer(&mut self, command: &str, timeout: Duration) -> io::Result<Vec<String>> {
        let from = self.seen;
        let (ok, error) = (format!("OK {command}"), format!("ERROR {command}: "));
        let answer = self.wait_for(timeout, |line| line == ok || line.starts_with(&error))?;
        if answer.starts_with("ERROR") {
            return Err(io::Error::other(answer));
        }
        Ok(self.shared.lock().lines[from..self.seen - 1].to_vec())
    }

    /// Sends a command and waits for its answer.
    pub fn command(&mut self, command: &str) -> io::Result<Vec<String>> {
        self.send(command)?;
        self.answer(command, COMMAND_TIMEOUT)
    }

    /// Runs `report` and returns its line for `disk`.
    pub fn report(&mut self, disk: &str) -> io::Result<Line> {
        let lines = self.command(&format!("report disk={disk}"))?;
        let mut reports = lines.iter().map(|l| Line::parse(l));
        reports
            .find(|l| l.word == "REPORT" && l.get("disk") == Some(disk))
            .ok_or_else(|| io::Error::other(format!("no report for {disk}")))
    }

    /// Every line so far that says something is wrong with a disk.
    pub fn complaints(&self) -> Vec<String> {
        let wrong = |l: &&String| l.starts_with("BAD ") || l.starts_with("IOERROR ");
        self.shared.lock().lines.iter().filter(wrong).cloned().collect()
    }

    /// The lines from the `first` one on.
    pub fn lines_from(&self, first: usize) -> Vec<String> {
        self.shared.lock().lines.get(first..).unwrap_or_default().to_vec()
    }

    /// Every line so far.
    pub fn lines(&self) -> Vec<String> {
        self.shared.lock().lines.clone()
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // Ends the collecting thread; QEMU may be gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn collect(stream: UnixStream, shared: &Shared) {
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { break };
        shared.lock().lines.push(line);
        shared.arrived.notify_all();
    }
    shared.lock().ended = true;
    shared.arrived.notify_all();
}
