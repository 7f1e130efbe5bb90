//! Two hosts with an agent each, commands to them that have a deadline, and where logs are kept.

use dray_testkit::lab::{Answer, Host, Lab};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

pub const LETTERS: [&str; 2] = ["a", "b"];
/// How long any command may take on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// The exit codes of `dray` with which an operator is to live; the others are defects.
const REFUSALS: [i32; 14] = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 130];
/// The repository of both hosts.
pub const REPOSITORY: &str = "shelf";

/// The hosts, and the folder of their repository.
pub struct World {
    pub lab: Lab,
    _shelf: tempfile::TempDir,
}

/// What a command came to.
#[derive(Debug)]
pub enum Outcome {
    Done(Value),
    /// Why not, and the exit code.
    Refused(i32, String),
}

/// Where the logs of a failed seed are kept.
pub fn kept(seed: u64) -> PathBuf {
    crate::WALK.kept(crate::WORKSPACE, seed)
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("paths of the walk are text")
}

impl World {
    /// New hosts that run, with a repository that both know.
    pub fn begin() -> io::Result<Self> {
        let shelf = tempfile::Builder::new().prefix("dray-walk-shelf-").tempdir()?;
        let url = format!("file://{}/repository", text(shelf.path()));
        let settings = format!(
            "[limits]\nlink_dead_seconds = 2\nlink_timeout_seconds = 15\n[[backup]]\nname = \
             '{REPOSITORY}'\nurl = '{url}'\n"
        );
        let lab = Lab::with_settings("walk", Path::new(env!("CARGO_BIN_EXE_dray")), &settings)?;
        lab.start()?;
        lab.host("a").json(&["backups", "init", REPOSITORY])?;
        Ok(Self { lab, _shelf: shelf })
    }

    pub fn host(&self, i: usize) -> &Host {
        self.lab.host(LETTERS[i])
    }

    /// A host's name, as `--to` takes it.
    pub fn name(i: usize) -> String {
        format!("host{}", LETTERS[i])
    }

    /// The file of an image under the name that only the owner's has.
    pub fn file(&self, i: usize, name: &str) -> PathBuf {
        self.host(i).pool().join(name)
    }

    /// Runs a command to its end. One that does not end, or ends in a way that no operator can live with, is an
    /// error.
    pub fn ask(&self, i: usize, args: &[&str]) -> Result<Outcome, String> {
        let child = self.host(i).spawn(args).map_err(|why| why.to_string())?;
        Self::outcome(child, &format!("{} {args:?}", LETTERS[i]))
    }

    /// The same for a command that was begun before.
    pub fn outcome(child: Child, what: &str) -> Result<Outcome, String> {
        let answer = Answer::within(child, DEADLINE).map_err(|why| format!("{what}: {why}"))?;
        let answer = answer.ok_or(format!("{what}: no answer within {DEADLINE:?}"))?;
        let said = answer.stderr.trim().to_owned();
        match answer.json() {
            Ok(value) => Ok(Outcome::Done(value)),
            Err(_) if REFUSALS.contains(&answer.code) => Ok(Outcome::Refused(answer.code, said)),
            Err(why) => Err(format!("{what}: {why}")),
        }
    }

    /// A list that an agent shows.
    pub fn list(&self, i: usize, what: &str) -> Result<Vec<Value>, String> {
        match self.ask(i, &[what])? {
            Outcome::Done(Value::Array(all)) => Ok(all),
            Outcome::Done(one) => Ok(vec![one]),
            Outcome::Refused(code, why) => Err(format!("{what} at {}: {code} {why}", LETTERS[i])),
        }
    }

    /// What an agent says of an image; null if it does not know it.
    pub fn image(&self, i: usize, name: &str) -> Result<Value, String> {
        let all = self.list(i, "images")?;
        Ok(all.into_iter().find(|image| image["name"] == name).unwrap_or_default())
    }
}
