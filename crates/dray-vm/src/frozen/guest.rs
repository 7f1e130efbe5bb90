//! Freezing a guest's file systems, through the QEMU guest agent in it.
//!
//! The guest agent speaks lines of JSON over a socket. Whatever else may have been said to it
//! before, a byte 0xff and `guest-sync-delimited` begin a conversation. That a guest which was asked
//! to freeze thaws again, [`frozen`](super) sees to.

use crate::own::connect_now;
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

/// A conversation with a guest agent.
pub(super) struct Guest {
    stream: UnixStream,
}

fn line(command: &str, arguments: &Value) -> Vec<u8> {
    format!("{}\n", json!({ "execute": command, "arguments": arguments })).into_bytes()
}

fn protocol(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

impl Guest {
    /// Begins to speak with the guest agent that listens on `socket`.
    ///
    /// # Errors
    /// When it cannot be reached, or does not answer.
    pub(super) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = connect_now(socket)?;
        stream.set_write_timeout(Some(ANSWER))?;
        let mut guest = Self { stream };
        let id = std::process::id();
        guest.stream.write_all(&[DELIMITER])?;
        guest.say("guest-sync-delimited", &json!({ "id": id }))?;
        let end = Instant::now() + ANSWER;
        // What was said before belongs to somebody else.
        while guest.hear(end)?["return"] != id {}
        Ok(guest)
    }

    fn say(&mut self, command: &str, arguments: &Value) -> io::Result<()> {
        self.stream.write_all(&line(command, arguments))
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
                Ok(0) => return Err(protocol("the guest agent has disconnected")),
                Ok(_) if byte[0] == DELIMITER => line.clear(),
                Ok(_) => line.push(byte[0]),
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
                Err(why) => return Err(why),
            }
            if line.len() > MAX_LINE {
                return Err(protocol("the guest agent's answer is too long"));
            }
        }
        // A line that is no JSON is what somebody else left behind.
        Ok(serde_json::from_slice(&line).unwrap_or(Value::Null))
    }

    fn ask(&mut self, command: &str, patience: Duration) -> io::Result<Value> {
        self.say(command, &json!({}))?;
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

    /// The same conversation, for somebody else to say something in it.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) fn stream(&self) -> io::Result<UnixStream> {
        self.stream.try_clone()
    }

    /// Freezes the guest's file systems.
    ///
    /// # Errors
    /// When the guest agent refuses, takes too long, or has no file system that can be frozen. The guest may be
    /// frozen all the same.
    pub(super) fn freeze(&mut self) -> io::Result<()> {
        let count = self.ask("guest-fsfreeze-freeze", FREEZE)?;
        match count.as_u64() {
            None | Some(0) => Err(protocol("the guest has no file system that can be frozen")),
            Some(_) => Ok(()),
        }
    }

    /// Thaws the guest's file systems. Returns how many were frozen, as far as the guest agent tells.
    ///
    /// # Errors
    /// When the guest agent does not say that it did.
    pub(super) fn thaw(&mut self) -> io::Result<Option<u64>> {
        Ok(self.ask("guest-fsfreeze-thaw", ANSWER)?.as_u64())
    }
}

/// Asks whoever listens at the other end to thaw the guest, without waiting for an answer: a guest agent that is
/// busy freezing thaws right after.
///
/// # Errors
/// What the socket reports.
pub(super) fn ask_to_thaw(mut stream: &UnixStream) -> io::Result<()> {
    stream.write_all(&line("guest-fsfreeze-thaw", &json!({})))
}
