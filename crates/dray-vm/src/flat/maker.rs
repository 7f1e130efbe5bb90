//! QEMU's tools make an empty qcow2 in a file that this agent has open, and remove from one what nothing refers
//! to. They get no path.
//!
//! `qemu-img create` knows no file but by its path, so the storage daemon does it, told through its monitor.

use super::layer::{Layer, node};
use dray_confine::Tool;
use dray_types::text::harmless;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, PipeReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// Checks a qcow2.
pub(super) const CHECKER: &str = "qemu-img";
/// Makes one.
pub(super) const MAKER: &str = "qemu-storage-daemon";
/// How long either may take: it writes or reads the tables of one image.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often is looked whether the maker has come somewhere.
const POLL: Duration = Duration::from_millis(2);
/// Most lines that the maker says in one answer, and the longest of them in bytes.
const LINES: usize = 100;
const LINE: usize = 64 << 10;
/// Longest part of its last words that is told, in bytes.
const WORDS: u64 = 400;
/// The maker's job.
const JOB: &str = "make";

/// Makes an empty qcow2 for a disk of `len` bytes in an open file, which may grow to `room` bytes.
pub(super) fn make(file: File, path: &Path, len: u64, room: u64) -> io::Result<()> {
    let mut layer = Layer::serve(file, path, true, Some(room))?;
    let mut tool = Tool::new(MAKER);
    let mut below = node(tool.hand(layer.socket()?), false);
    below["node-name"] = "file".into();
    let (ours, theirs) = UnixStream::pair()?;
    let monitor = format!("socket,id=monitor,fd={}", tool.hand(theirs));
    tool.args(["--blockdev", &below.to_string(), "--chardev", &monitor]);
    tool.args(["--monitor", "chardev=monitor"]);
    let ((from, words), null) = (io::pipe()?, File::options().write(true).open("/dev/null")?);
    let mut child = tool.spawn(null.into(), words.into())?;
    let until = Instant::now() + PATIENCE;
    let made = Monitor::greeted(ours, until).and_then(|mut monitor| monitor.make(len));
    match made.and_then(|()| ended(&mut child, until)) {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(said(&format!("it ended with {status}"), from)),
        Err(why) => {
            // One that has ended needs not be killed.
            let _ = child.kill();
            child.wait()?;
            Err(said(&why.to_string(), from))
        }
    }
}

/// Waits until the maker has ended.
fn ended(child: &mut Child, until: Instant) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        left(until)?;
        std::thread::sleep(POLL);
    }
}

/// How long the maker may still take.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it takes too long")
}

/// What the maker failed of, with its last words.
fn said(why: &str, from: PipeReader) -> io::Error {
    let mut words = Vec::new();
    // What came is told.
    let _ = from.take(WORDS).read_to_end(&mut words);
    let words = harmless(String::from_utf8_lossy(&words).trim().replace('\n', "; "));
    io::Error::other(format!("{MAKER}: {why}; {words}"))
}

/// Removes clusters from a qcow2 to which nothing in it refers.
pub(super) fn remove_leaks(file: File, path: &Path, room: u64) -> io::Result<()> {
    let mut layer = Layer::serve(file, path, true, Some(room))?;
    let mut tool = Tool::new(CHECKER);
    let below = node(tool.hand(layer.socket()?), false);
    let image = json!({"driver": "qcow2", "file": below, "backing": null});
    tool.args(["check", "-q", "-r", "leaks", &format!("json:{image}")]);
    let done = tool.run(PATIENCE)?;
    if done.status.success() {
        return Ok(());
    }
    let words = harmless(String::from_utf8_lossy(&done.stderr).trim());
    Err(io::Error::other(format!("{CHECKER}: {words}")))
}

/// The maker's monitor. Whatever is asked there is answered in time, or fails.
struct Monitor {
    to: UnixStream,
    from: BufReader<UnixStream>,
    until: Instant,
}

impl Monitor {
    fn greeted(to: UnixStream, until: Instant) -> io::Result<Self> {
        let mut monitor = Self { from: BufReader::new(to.try_clone()?), to, until };
        monitor.line()?;
        monitor.ask("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    fn line(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            // Both ends of one socket have the same limits.
            self.to.set_read_timeout(Some(left(self.until)?))?;
            let came = match self.from.fill_buf() {
                Ok([]) => return Err(io::Error::other("it has ended")),
                Ok(came) => came,
                Err(why) if why.kind() == ErrorKind::WouldBlock => return Err(late()),
                Err(why) => return Err(why),
            };
            let end = came.iter().position(|&byte| byte == b'\n').map_or(came.len(), |at| at + 1);
            line.extend_from_slice(&came[..end]);
            self.from.consume(end);
            if line.len() > LINE {
                return Err(io::Error::other("it says too much"));
            }
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// The answer; events before it are nobody's.
    fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let asked = json!({"execute": command, "arguments": arguments});
        self.to.set_write_timeout(Some(left(self.until)?))?;
        self.to.write_all(format!("{asked}\n").as_bytes())?;
        for _ in 0..LINES {
            let mut answer = self.line()?;
            if let Some(why) = answer["error"]["desc"].as_str() {
                return Err(io::Error::other(harmless(why)));
            }
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
        Err(io::Error::other("it does not answer"))
    }

    /// Has the qcow2 made, and the maker leave.
    fn make(&mut self, len: u64) -> io::Result<()> {
        let options = json!({"driver": "qcow2", "file": "file", "size": len});
        self.ask("blockdev-create", json!({"job-id": JOB, "options": options}))?;
        let jobs = loop {
            let jobs = self.ask("query-jobs", json!({}))?;
            if jobs[0]["status"] == "concluded" {
                break jobs;
            }
            std::thread::sleep(POLL);
        };
        if let Some(why) = jobs[0]["error"].as_str() {
            return Err(io::Error::other(harmless(why)));
        }
        self.ask("job-dismiss", json!({"id": JOB}))?;
        self.ask("quit", json!({})).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a maker that answers every line by `answer`, a byte at a time.
    fn made(within: Duration, pause: Duration, answer: &'static str) -> io::Result<()> {
        let (ours, mut theirs) = UnixStream::pair()?;
        std::thread::spawn(move || {
            let mut asked = BufReader::new(theirs.try_clone().unwrap()).lines();
            loop {
                for byte in answer.bytes().chain([b'\n']) {
                    std::thread::sleep(pause);
                    if theirs.write_all(&[byte]).is_err() {
                        return;
                    }
                }
                if asked.next().is_none() {
                    return;
                }
            }
        });
        Monitor::greeted(ours, Instant::now() + within)
            .and_then(|mut monitor| monitor.make(1 << 20))
    }

    #[test]
    fn a_maker_that_never_ends_is_not_waited_for() {
        let never = r#"{"return": [{"status": "running"}]}"#;
        for pause in [0, 100] {
            let why =
                made(Duration::from_millis(300), Duration::from_millis(pause), never).unwrap_err();
            assert_eq!(why.kind(), ErrorKind::TimedOut, "{why}");
        }
    }

    #[test]
    fn a_maker_that_has_made_it_is_asked_no_more() {
        let done = r#"{"return": [{"status": "concluded"}]}"#;
        made(PATIENCE, Duration::ZERO, done).unwrap();
    }
}
