//! Freezing a guest's file systems for a moment, through the QEMU guest agent in it.
//!
//! The guest agent speaks lines of JSON over a socket. Whatever else may have been said to it
//! before, a byte 0xff and `guest-sync-delimited` begin a conversation. A guest that was asked to
//! freeze is asked to thaw, whatever happens.

use serde_json::{Value, json};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a guest may take to write its caches out and freeze.
const FREEZE: Duration = Duration::from_secs(30);
/// How long any other answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// Longest answer.
const MAX_LINE: usize = 64 << 10;
const DELIMITER: u8 = 0xff;

/// A guest whose file systems are frozen; dropping it thaws them.
#[must_use = "dropping it thaws the guest"]
pub struct Frozen {
    guest: Guest,
    armed: bool,
}

struct Guest {
    stream: UnixStream,
}

fn protocol(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

impl Guest {
    fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_write_timeout(Some(ANSWER))?;
        let mut guest = Self { stream };
        let id = std::process::id();
        guest.stream.write_all(&[DELIMITER])?;
        guest.say("guest-sync-delimited", json!({ "id": id }))?;
        let end = Instant::now() + ANSWER;
        // What was said before belongs to somebody else.
        while guest.hear(end)?["return"] != id {}
        Ok(guest)
    }

    fn say(&mut self, command: &str, arguments: Value) -> io::Result<()> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.stream.write_all(line.as_bytes())
    }

    /// The next answer that comes before `end`.
    fn hear(&mut self, end: Instant) -> io::Result<Value> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(protocol("the guest agent does not answer"));
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut byte = [0];
            match self.stream.read(&mut byte) {
                Ok(0) => return Err(protocol("the guest agent hung up")),
                Ok(_) if byte[0] == DELIMITER => line.clear(),
                Ok(_) => line.push(byte[0]),
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
                Err(why) => return Err(why),
            }
            if line.len() > MAX_LINE {
                return Err(protocol("the guest agent's answer has no end"));
            }
        }
        // A line that is no JSON is what somebody else left behind.
        Ok(serde_json::from_slice(&line).unwrap_or(Value::Null))
    }

    fn ask(&mut self, command: &str, patience: Duration) -> io::Result<Value> {
        self.say(command, json!({}))?;
        let end = Instant::now() + patience;
        loop {
            let answer = self.hear(end)?;
            if let Some(error) = answer.get("error") {
                let why = error["desc"].as_str().unwrap_or("no reason was given");
                return Err(protocol(format!("the guest agent refused {command}: {why}")));
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
        }
    }
}

impl Frozen {
    /// Freezes the file systems of the guest whose agent listens on `socket`.
    ///
    /// # Errors
    /// When the guest agent cannot be reached, refuses, takes too long, or has no file system that
    /// can be frozen. The guest is thawed then.
    pub fn freeze(socket: &Path) -> io::Result<Self> {
        let mut frozen = Self { guest: Guest::connect(socket)?, armed: true };
        let count = frozen.guest.ask("guest-fsfreeze-freeze", FREEZE)?;
        if count.as_u64().unwrap_or(0) == 0 {
            return Err(protocol("the guest has no file system that can be frozen"));
        }
        Ok(frozen)
    }

    /// Thaws the guest.
    ///
    /// # Errors
    /// When the guest agent does not say that it did, or that the guest had thawed before: then the
    /// file systems were not frozen all the time.
    pub fn thaw(mut self) -> io::Result<()> {
        self.armed = false;
        let count = self.guest.ask("guest-fsfreeze-thaw", ANSWER)?;
        match count.as_u64() {
            Some(0) => Err(protocol("the guest's file systems had thawed too early")),
            _ => Ok(()),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        // A guest that is still busy freezing thaws right after.
        if let Err(why) = self.guest.ask("guest-fsfreeze-thaw", ANSWER) {
            tracing::warn!(%why, "a guest may still be frozen; thaw it with its guest agent");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    /// A guest agent that answers each command with one of these and tells what it was asked.
    fn agent(
        dir: &Path,
        answers: &'static [(&'static str, &'static str)],
    ) -> (std::path::PathBuf, JoinHandle<Vec<String>>) {
        let socket = dir.join("qga.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            stream.write_all(b"{\"return\": 7}\n").unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).unwrap() > 0 {
                let from = line.iter().rposition(|&b| b == DELIMITER).map_or(0, |at| at + 1);
                let said: Value = serde_json::from_slice(&line[from..]).unwrap();
                line.clear();
                let command = said["execute"].as_str().unwrap().to_owned();
                if command == "guest-sync-delimited" {
                    let id = &said["arguments"]["id"];
                    stream.write_all(&[DELIMITER]).unwrap();
                    writeln!(stream, "{}", json!({ "return": id })).unwrap();
                    continue;
                }
                let answer = answers.iter().find(|(known, _)| *known == command);
                writeln!(stream, "{}", answer.unwrap().1).unwrap();
                asked.push(command);
            }
            asked
        };
        (socket, std::thread::spawn(serve))
    }

    #[test]
    fn a_guest_is_frozen_and_thawed() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, guest) = agent(
            dir.path(),
            &[
                ("guest-fsfreeze-freeze", r#"{"return": 2}"#),
                ("guest-fsfreeze-thaw", r#"{"return": 2}"#),
            ],
        );
        Frozen::freeze(&socket).unwrap().thaw().unwrap();
        assert_eq!(guest.join().unwrap(), ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]);
    }

    #[test]
    fn a_guest_that_refuses_is_thawed_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, guest) = agent(
            dir.path(),
            &[
                ("guest-fsfreeze-freeze", r#"{"error": {"class": "x", "desc": "no way"}}"#),
                ("guest-fsfreeze-thaw", r#"{"return": 0}"#),
            ],
        );
        let why = Frozen::freeze(&socket).map(drop).unwrap_err();
        assert!(why.to_string().contains("no way"), "{why}");
        assert_eq!(guest.join().unwrap(), ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]);
    }

    #[test]
    fn file_systems_that_thawed_too_early_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, guest) = agent(
            dir.path(),
            &[
                ("guest-fsfreeze-freeze", r#"{"return": 1}"#),
                ("guest-fsfreeze-thaw", r#"{"return": 0}"#),
            ],
        );
        let frozen = Frozen::freeze(&socket).unwrap();
        assert!(frozen.thaw().unwrap_err().to_string().contains("too early"));
        assert_eq!(guest.join().unwrap().len(), 2);
    }
}
