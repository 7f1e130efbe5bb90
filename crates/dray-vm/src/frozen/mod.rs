//! Which guests may be frozen. Every guest that was asked to freeze thaws again, whatever happens to the agent.
//!
//! That a guest may be frozen is durable before it is asked to, and until it has said that it thawed. Who keeps them
//! [thaws what is left over](FrozenGuests::thaw_left): by a guest agent that did not answer, or by an earlier agent. An agent that is told to
//! end asks all guests to thaw, as nobody may start the next one.

mod guest;

use dray_files::StatePath;
use guest::{Guest, ask_to_thaw};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// The guests of this host that may be frozen, by the socket of their guest agent.
pub struct FrozenGuests {
    note: StatePath,
    /// Why the note of an earlier agent cannot be read.
    unread: Option<String>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// As it is durable.
    sockets: BTreeSet<PathBuf>,
    /// Those that somebody here will thaw, with the conversation once it has begun.
    talks: BTreeMap<PathBuf, Option<UnixStream>>,
    /// All were asked to thaw: the agent ends.
    ends: bool,
}

/// A guest whose file systems are frozen; dropping it thaws them.
#[must_use = "dropping it thaws the guest"]
pub struct Frozen<'a> {
    all: &'a FrozenGuests,
    socket: &'a Path,
    guest: Guest,
    armed: bool,
}

impl FrozenGuests {
    /// Why it cannot be said which guests an earlier agent has frozen.
    pub fn unread(&self) -> Option<&String> {
        self.unread.as_ref()
    }

    /// The guests that the file at `note` names.
    pub fn open(note: StatePath) -> Self {
        let (sockets, unread) = match note.peek() {
            Ok(sockets) => (sockets, None),
            Err(why) if why.kind() == io::ErrorKind::NotFound => (BTreeSet::new(), None),
            Err(why) => (BTreeSet::new(), Some(format!("{}: {why}", note.display()))),
        };
        Self { note, unread, known: Mutex::new(Known { sockets, ..Known::default() }) }
    }

    /// Freezes the file systems of the guest whose agent listens on `socket`.
    ///
    /// # Errors
    /// When that cannot be noted, or the guest agent cannot be reached, refuses, takes too long, or has no file
    /// system that can be frozen. The guest is thawed then.
    pub fn freeze<'a>(&'a self, socket: &'a Path) -> io::Result<Frozen<'a>> {
        self.note(socket)?;
        let guest = self.talk(socket).inspect_err(|_| self.leave(socket, true))?;
        let mut frozen = Frozen { all: self, socket, guest, armed: true };
        frozen.guest.freeze()?;
        Ok(frozen)
    }

    /// Begins to speak with a guest that is noted.
    fn talk(&self, socket: &Path) -> io::Result<Guest> {
        let guest = Guest::connect(socket)?;
        let stream = guest.stream()?;
        let mut known = self.known.lock();
        if known.ends {
            return Err(ends());
        }
        known.talks.insert(socket.to_owned(), Some(stream));
        Ok(guest)
    }

    /// The guest may be frozen from now on.
    fn note(&self, socket: &Path) -> io::Result<()> {
        let mut known = self.known.lock();
        if known.ends {
            return Err(ends());
        }
        if known.sockets.contains(socket) {
            return Err(io::Error::other("the guest is already frozen for another backup"));
        }
        let mut sockets = known.sockets.clone();
        sockets.insert(socket.to_owned());
        self.note.put(&sockets)?;
        known.sockets = sockets;
        known.talks.insert(socket.to_owned(), None);
        Ok(())
    }

    /// Nobody here speaks with the guest any more. One that has not `thawed` stays noted.
    fn leave(&self, socket: &Path, thawed: bool) {
        let mut known = self.known.lock();
        known.talks.remove(socket);
        if !thawed || !known.sockets.remove(socket) {
            return;
        }
        // One that is noted in vain is asked to thaw in vain.
        if let Err(why) = self.note.put(&known.sockets) {
            tracing::warn!(%why, "cannot note that a guest has thawed");
        }
    }

    /// The agent ends: all guests are asked to thaw, and none is frozen any more.
    pub fn thaw_all(&self) {
        let mut known = self.known.lock();
        known.ends = true;
        for (socket, stream) in &known.talks {
            let Some(stream) = stream else { continue };
            if let Err(why) = ask_to_thaw(stream) {
                tracing::warn!(socket = %socket.display(), %why, "a guest may stay frozen");
            }
        }
    }

    /// The guests that nobody here speaks with.
    pub fn left(&self) -> Vec<PathBuf> {
        let known = self.known.lock();
        known.sockets.iter().filter(|socket| !known.talks.contains_key(*socket)).cloned().collect()
    }

    /// Thaws a guest that was left over.
    ///
    /// # Errors
    /// Why it may still be frozen.
    pub fn thaw_left(&self, socket: &Path) -> io::Result<()> {
        let thawed = match Guest::connect(socket) {
            Ok(mut guest) => guest.thaw().map(drop),
            // Its QEMU has ended.
            Err(why) if is_gone(&why) => Ok(()),
            Err(why) => Err(why),
        };
        self.leave(socket, thawed.is_ok());
        thawed
    }
}

fn ends() -> io::Error {
    io::Error::other("the agent ends")
}

fn is_gone(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

impl Frozen<'_> {
    /// Thaws the guest.
    ///
    /// # Errors
    /// When the guest agent does not say that it did, or that the guest had thawed before: then the file systems
    /// were not frozen all the time.
    pub fn thaw(mut self) -> io::Result<()> {
        self.armed = false;
        let count = self.guest.thaw();
        self.all.leave(self.socket, count.is_ok());
        if count? == Some(0) || self.all.known.lock().ends {
            return Err(io::Error::other("the guest's file systems had thawed too early"));
        }
        Ok(())
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        // A guest that is still busy freezing thaws right after.
        let thawed = self.guest.thaw();
        if let Err(why) = &thawed {
            tracing::warn!(%why, "a guest may still be frozen");
        }
        self.all.leave(self.socket, thawed.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    fn guests(dir: &Path) -> FrozenGuests {
        FrozenGuests::open(StatePath::real(dir.join("frozen.json")))
    }

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
            while reader.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
                let from = line.iter().rposition(|&b| b == 0xff).map_or(0, |at| at + 1);
                let said: Value = serde_json::from_slice(&line[from..]).unwrap();
                line.clear();
                let command = said["execute"].as_str().unwrap().to_owned();
                if command == "guest-sync-delimited" {
                    let id = &said["arguments"]["id"];
                    stream.write_all(&[0xff]).unwrap();
                    writeln!(stream, "{}", json!({ "return": id })).unwrap();
                    continue;
                }
                let answer = answers.iter().find(|(known, _)| *known == command);
                // Whoever ends does not wait for it.
                let _ = writeln!(stream, "{}", answer.unwrap().1);
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
        guests(dir.path()).freeze(&socket).unwrap().thaw().unwrap();
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
        let why = guests(dir.path()).freeze(&socket).map(drop).unwrap_err();
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
        let all = guests(dir.path());
        let frozen = all.freeze(&socket).unwrap();
        assert!(frozen.thaw().unwrap_err().to_string().contains("too early"));
        assert_eq!(guest.join().unwrap().len(), 2);
    }

    const WELL: [(&str, &str); 2] = [
        ("guest-fsfreeze-freeze", r#"{"return": 1}"#),
        ("guest-fsfreeze-thaw", r#"{"return": 1}"#),
    ];

    #[test]
    fn a_guest_that_an_earlier_agent_froze_thaws() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, guest) = agent(dir.path(), &WELL);
        let (earlier, socket_of) = (guests(dir.path()), socket.clone());
        // Nobody thaws it any more.
        std::mem::forget(earlier.freeze(&socket_of).unwrap());
        let gone = earlier.known.lock().talks.remove(&socket).flatten().unwrap();
        gone.shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(guest.join().unwrap(), ["guest-fsfreeze-freeze"]);
        std::fs::remove_file(&socket).unwrap();
        let (socket, guest) = agent(dir.path(), &WELL);
        let next = guests(dir.path());
        assert_eq!(next.left(), std::slice::from_ref(&socket));
        assert!(next.freeze(&socket).is_err(), "it is still to thaw");
        next.thaw_left(&socket).unwrap();
        assert_eq!(guest.join().unwrap(), ["guest-fsfreeze-thaw"]);
        assert!(next.left().is_empty() && guests(dir.path()).left().is_empty());
    }

    #[test]
    fn a_guest_whose_qemu_has_ended_need_not_thaw() {
        let dir = tempfile::tempdir().unwrap();
        let all = guests(dir.path());
        let socket = dir.path().join("gone.sock");
        all.note(&socket).unwrap();
        let next = guests(dir.path());
        next.thaw_left(&socket).unwrap();
        assert!(next.left().is_empty());
    }

    #[test]
    fn an_agent_that_ends_thaws_its_guests_and_freezes_none() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, guest) = agent(dir.path(), &WELL);
        let all = guests(dir.path());
        let frozen = all.freeze(&socket).unwrap();
        all.thaw_all();
        let why = frozen.thaw().unwrap_err();
        assert!(why.to_string().contains("too early"), "{why}");
        assert_eq!(guest.join().unwrap()[1..], ["guest-fsfreeze-thaw"; 2]);
        assert!(all.note(&dir.path().join("other")).is_err());
    }
}
