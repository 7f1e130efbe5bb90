//! A host: its agent, and what that says.

use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The longest answer to a question that does not wait for anything.
const API_TIMEOUT: Duration = Duration::from_secs(30);

/// One host.
pub struct Host {
    /// `a` or `b`: its file system is mounted there.
    pub letter: &'static str,
    child: Option<Child>,
}

impl Host {
    /// A host whose agent does not run.
    pub fn new(letter: &'static str) -> Self {
        Self { letter, child: None }
    }

    /// Starts its agent; what it logs goes to the console.
    pub fn start(&mut self) -> io::Result<()> {
        let console = OpenOptions::new().write(true).open("/dev/console")?;
        let child = Command::new("/bin/dray")
            .args(["agent", "--config", &format!("/{}/dray.toml", self.letter)])
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            .spawn()?;
        self.child = Some(child);
        Ok(())
    }

    /// Whether an agent was started here and has not ended.
    pub fn is_up(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Kills its agent, which gets no chance to put anything in order.
    pub fn kill(&mut self) -> io::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// The socket of its exports.
    pub fn nbd(&self) -> PathBuf {
        Path::new("/run").join(self.letter).join("nbd.sock")
    }

    /// Asks its agent.
    pub fn ask(&self, command: &Value) -> Result<Value, String> {
        let ask = || -> io::Result<Value> {
            let path = Path::new("/run").join(self.letter).join("api.sock");
            let mut stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(API_TIMEOUT))?;
            writeln!(stream, "{}", json!({"version": 1, "command": command}))?;
            for line in BufReader::new(stream).lines() {
                let answer: Value = serde_json::from_str(&line?)?;
                if answer.get("event").is_none() {
                    return Ok(answer);
                }
            }
            Err(io::Error::other("the agent hung up"))
        };
        let mut answer = ask().map_err(|why| format!("{}: {why}", self.letter))?;
        match answer["error"].take() {
            Value::Null => Ok(answer["result"].take()),
            error => Err(format!("{}: {error}", self.letter)),
        }
    }

    /// The image of that name.
    pub fn image(&self, name: &str) -> Option<Value> {
        let images = self.ask(&json!("images")).ok()?;
        images.as_array()?.iter().find(|image| image["name"] == name).cloned()
    }

    /// The only migration that it shows.
    pub fn migration(&self) -> Option<Value> {
        self.ask(&json!({"status": {}})).ok()?.as_array()?.first().cloned()
    }

    /// Migrations that it has not forgotten.
    pub fn open_migrations(&self) -> usize {
        std::fs::read_dir(format!("/{}/state/migrations", self.letter)).map_or(0, Iterator::count)
    }
}
