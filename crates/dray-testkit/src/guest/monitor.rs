//! A QEMU's monitor (QMP), for whoever is not dray.

use serde_json::Value;
use std::io::{self, BufRead, BufReader, Lines, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);
/// How often one that is taken is asked again.
const POLL: Duration = Duration::from_millis(20);

/// A monitor that takes commands.
pub struct Monitor {
    stream: UnixStream,
    lines: Lines<BufReader<UnixStream>>,
}

impl Monitor {
    /// Connects. A monitor has one client: QEMU turns others away while an agent uses it, so that one is asked
    /// again that hangs up before it has greeted.
    ///
    /// # Errors
    /// When it is not there, or is taken for longer than `patience`.
    pub fn connect(path: &Path, patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        loop {
            match Self::greeted(path) {
                Ok(monitor) => return Ok(monitor),
                Err(why) if Instant::now() > deadline => {
                    return Err(io::Error::other(format!("{}: {why}", path.display())));
                }
                Err(_) => std::thread::sleep(POLL),
            }
        }
    }

    /// Connects and does what a monitor wants first.
    fn greeted(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
        lines.next().ok_or_else(gone)??;
        let mut monitor = Self { stream, lines };
        // An event may come before the answer, so that the next line is not always the answer.
        match monitor.ask("{\"execute\":\"qmp_capabilities\"}")? {
            Value::Null => Err(gone()),
            _ => Ok(monitor),
        }
    }

    /// One command and the whole answer to it, `return` or `error`; null when QEMU hangs up instead.
    ///
    /// # Errors
    /// When it cannot be asked, does not answer in time, or answers no JSON.
    pub fn ask(&mut self, command: &str) -> io::Result<Value> {
        // At once: a QEMU that is told to quit does not wait for the line's end.
        (&self.stream).write_all(format!("{command}\n").as_bytes())?;
        loop {
            let line = match self.lines.next() {
                Some(Ok(line)) => line,
                Some(Err(why)) if why.kind() == io::ErrorKind::WouldBlock => return Err(why),
                _ => return Ok(Value::Null),
            };
            let answer: Value = serde_json::from_str(&line)?;
            if answer.get("return").is_some() || answer.get("error").is_some() {
                return Ok(answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Monitor;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::thread;
    use std::time::Duration;

    #[test]
    fn an_event_before_an_answer_is_not_taken_for_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("a socket");
        let qemu = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut commands = BufReader::new(stream.try_clone().expect("a clone")).lines();
            stream.write_all(b"{\"QMP\":{}}\n").expect("a greeting");
            for answer in ["{}", "[1]"] {
                commands.next().expect("a command").expect("a line");
                let said = format!("{{\"event\":\"RESET\"}}\n{{\"return\":{answer}}}\n");
                stream.write_all(said.as_bytes()).expect("an answer");
            }
        });
        let mut monitor = Monitor::connect(&path, Duration::from_secs(5)).expect("a monitor");
        assert_eq!(
            monitor.ask("{\"execute\":\"query-block\"}").expect("an answer")["return"][0],
            1
        );
        qemu.join().expect("the other side");
    }
}
