//! An agent that answers every command with a canned result and remembers what it was asked.

mod agent;
mod canned;
mod document;

pub use canned::{batch_ended, summary};

use agent::Agent;
use dray_agent::api::Server;
use dray_api::{AccessLevel, Command};
use dray_types::MigrationId;
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command as Process, Output, Stdio};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// The migration in every canned answer.
pub const ID: MigrationId = MigrationId(0x4f1c_0000_0000_0000_0000_0000_0000_0001);

/// A running fake agent; it ends with the value.
pub struct Fake {
    dir: TempDir,
    seen: Arc<Mutex<Vec<Value>>>,
    _runtime: tokio::runtime::Runtime,
}

/// What a run of `dray` left behind.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Fake {
    /// Starts one on a socket of its own.
    pub fn start() -> Self {
        let dir = TempDir::with_prefix("dray-cli-").expect("a temporary directory");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let agent = Agent { seen: seen.clone() };
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let path = dir.path().join("api.sock");
        let server = {
            let _inside = runtime.enter();
            Server::bind(&path, None, AccessLevel::Admin).expect("the socket can be bound")
        };
        runtime.spawn(async move { server.serve(agent, |_: &Command, _| Ok(())).await });
        Self { dir, seen, _runtime: runtime }
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    /// The commands it got, oldest first, as JSON.
    pub fn seen(&self) -> Vec<Value> {
        self.seen.lock().expect("no test has panicked here").clone()
    }

    /// `dray` with this agent's socket, ready to be given arguments.
    pub fn command(&self, args: &[&str]) -> Process {
        let mut process = dray(args);
        process.env("DRAY_SOCKET", self.socket());
        process
    }

    /// Runs `dray` to its end.
    pub fn run(&self, args: &[&str]) -> Ran {
        finish(self.command(args).output().expect("dray can be started"))
    }
}

/// `dray`, away from this terminal and its settings.
pub fn dray(args: &[&str]) -> Process {
    let mut process = Process::new(env!("CARGO_BIN_EXE_dray"));
    process.args(args).stdin(Stdio::null()).env_remove("DRAY_SOCKET").env_remove("COLUMNS");
    process
}

/// What the run left behind, as text.
pub fn finish(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    Ran {
        code: output.status.code().expect("dray ended by itself"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}
