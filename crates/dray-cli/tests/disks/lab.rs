//! Two agents on loopback addresses of their own, and the local API asked from a plain thread.

use dray_files::record;
use dray_testkit::loopback::Loopback;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The command under test.
pub const DRAY: &str = env!("CARGO_BIN_EXE_dray");
/// Where every agent of a lab listens; hosts have addresses of their own.
const PORT: u16 = 7421;
/// What the hosts of a lab let each other do: everything.
pub const ALL_RIGHTS: &str =
    "rights = [\"receive\", \"observe\", \"read-replicas\", \"reuse\", \"store\"]";
/// An agent that has not answered by then never will.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const DEATH_TIMEOUT: Duration = Duration::from_secs(25);
/// The longest answer to a question that does not wait for anything.
const API_TIMEOUT: Duration = Duration::from_secs(40);

/// One host: its agent and its directories.
pub struct Host {
    /// Its name.
    pub name: &'static str,
    /// State, sockets, pool and log are below.
    pub dir: PathBuf,
    /// Where its agent listens.
    pub address: String,
    child: Option<Child>,
}

/// Two hosts that trust each other.
pub struct Lab {
    /// Everything is below.
    pub dir: TempDir,
    /// The source.
    pub a: Host,
    /// The target.
    pub b: Host,
    _net: Loopback,
}

/// Runs a command to its end and expects success.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Lab {
    /// Two hosts with configurations and certificates; no agent runs yet.
    pub fn new() -> Self {
        Self::with(|_, config| config)
    }

    /// The same with configurations that `change` has had a look at.
    pub fn with(change: impl Fn(&str, String) -> String) -> Self {
        let net = Loopback::reserve().unwrap();
        let dir = tempfile::Builder::new().prefix("dray-disks-").tempdir().unwrap();
        let pki = dir.path().join("pki");
        run(Command::new(DRAY).args(["pki", "init", "--dir"]).arg(&pki));
        let host = |name: &'static str, last: u8| {
            let mut issue = Command::new(DRAY);
            run(issue.args(["pki", "issue", name, "--address", "127.0.0.1", "--dir"]).arg(&pki));
            let address = format!("{}:{PORT}", net.address(last));
            Host { name, dir: dir.path().join(name), address, child: None }
        };
        let (a, b) = (host("hosta", 1), host("hostb", 2));
        for (host, peer) in [(&a, &b), (&b, &a)] {
            for part in ["pool", "state", "run"] {
                std::fs::create_dir_all(host.dir.join(part)).unwrap();
            }
            let config = change(host.name, config(host, peer, dir.path()));
            std::fs::write(host.config(), config).unwrap();
        }
        Self { dir, a, b, _net: net }
    }

    /// Both agents run.
    pub fn start(&mut self) {
        self.a.start();
        self.b.start();
    }

    /// A third host that the other two know, if neither runs yet.
    pub fn third(&self) -> Host {
        let name = "hostc";
        let pki = self.dir.path().join("pki");
        let mut issue = Command::new(DRAY);
        run(issue.args(["pki", "issue", name, "--address", "127.0.0.1", "--dir"]).arg(&pki));
        let net = self.a.address.rsplit_once('.').map_or("", |(net, _)| net);
        let address = format!("{net}.3:{PORT}");
        let host = Host { name, dir: self.dir.path().join(name), address, child: None };
        for part in ["pool", "state", "run"] {
            std::fs::create_dir_all(host.dir.join(part)).unwrap();
        }
        let own = config(&host, &self.a, self.dir.path()) + &peer(&self.b);
        std::fs::write(host.config(), own).unwrap();
        for other in [&self.a, &self.b] {
            let text = std::fs::read_to_string(other.config()).unwrap() + &peer(&host);
            std::fs::write(other.config(), text).unwrap();
        }
        host
    }

    /// The host of that name.
    pub fn host(&mut self, name: &str) -> &mut Host {
        if name == self.a.name { &mut self.a } else { &mut self.b }
    }
}

fn config(host: &Host, peer: &Host, dir: &Path) -> String {
    format!(
        "qmp_dirs = [\"{dir}\"]\n\
         [agent]\nname = \"{name}\"\nstate_dir = \"{own}/state\"\nrun_dir = \"{own}/run\"\n\
         listen = \"{listen}\"\n\
         [tls]\ndir = \"{dir}/pki/{name}\"\n\
         [[pool]]\nname = \"p\"\npath = \"{own}/pool\"\nreuse_domain = \"lab\"\n",
        dir = dir.display(),
        own = host.dir.display(),
        name = host.name,
        listen = host.address,
    ) + &self::peer(peer)
}

/// A peer in another host's configuration.
fn peer(peer: &Host) -> String {
    let (name, address) = (peer.name, &peer.address);
    format!("[[peer]]\nname = \"{name}\"\naddress = \"{address}\"\npools = [\"p\"]\n{ALL_RIGHTS}\n")
}

impl Host {
    /// Its configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.join("dray.toml")
    }

    /// Its state directory.
    pub fn state(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Its only pool.
    pub fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    /// The socket of its local API.
    pub fn api(&self) -> PathBuf {
        self.dir.join("run/api.sock")
    }

    /// The socket of its exports.
    pub fn nbd(&self) -> PathBuf {
        self.dir.join("run/nbd.sock")
    }

    /// What its agent has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Starts the agent and waits until it answers.
    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// The same with variables in its environment.
    pub fn start_with(&mut self, variables: &[(&str, &str)]) {
        self.spawn(variables);
        let deadline = Instant::now() + START_TIMEOUT;
        while self.ask(json!("info")).is_err() {
            assert!(Instant::now() < deadline, "{} does not start: {}", self.name, self.log());
            assert!(!self.has_died(), "{} died at its start: {}", self.name, self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts the agent and waits for nothing.
    pub fn spawn(&mut self, variables: &[(&str, &str)]) {
        assert!(self.child.is_none(), "{} runs already", self.name);
        let path = self.dir.join("log");
        let log = std::fs::File::options().create(true).append(true).open(path).unwrap();
        let child = Command::new(DRAY)
            .args(["agent", "--config"])
            .arg(self.config())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    /// Whether the agent has ended by itself; it is then no longer there.
    pub fn has_died(&mut self) -> bool {
        let ended = self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some());
        if ended {
            self.child = None;
        }
        ended
    }

    /// Waits until the agent has ended by itself. Its connections end a little earlier.
    pub fn await_death(&mut self) -> Result<(), String> {
        wait_for(&format!("the death of {}", self.name), DEATH_TIMEOUT, || self.has_died())
    }

    /// Whether an agent should be there.
    pub fn is_up(&self) -> bool {
        self.child.is_some()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    /// The agent's process; 0 if there is none.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Sends the agent a signal that it lives through.
    pub fn signal(&self, name: &str) {
        let pid = self.pid();
        run(Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()));
    }

    /// Whether a signal has stopped it.
    pub fn is_stopped(&self) -> bool {
        let pid = self.pid();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    }

    /// Ends the agent in order.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        run(Command::new("kill").arg(child.id().to_string()));
        assert!(child.wait().unwrap().success(), "{}: {}", self.name, self.log());
    }

    /// Asks the agent's API.
    pub fn ask(&self, command: Value) -> Result<Value, Value> {
        ask(&self.api(), command)
    }

    /// Runs `dray` against the agent.
    pub fn dray(&self, args: &[&str]) -> Output {
        Command::new(DRAY).arg("--socket").arg(self.api()).args(args).output().unwrap()
    }

    /// The image of that name, as the agent shows it.
    pub fn image(&self, name: &str) -> Option<Value> {
        image(&self.api(), name)
    }

    /// Serves a file of the pool under its own name.
    pub fn add(&self, name: &str) {
        let path = self.pool().join(name);
        let command = json!({"image-add": {"name": name, "path": path}});
        self.ask(command).unwrap_or_else(|why| panic!("cannot add {name}: {why}"));
    }

    /// Every migration the agent knows.
    pub fn migrations(&self) -> Vec<Value> {
        let answer = self.ask(json!({"status": {}})).unwrap_or_default();
        answer.as_array().cloned().unwrap_or_default()
    }

    /// The only migration's current state, or nothing when there is none.
    pub fn progress(&self) -> Option<(String, Value)> {
        let first = self.migrations().into_iter().next()?;
        Some((first["state"].as_str()?.to_owned(), first["progress"].clone()))
    }

    /// Folders of migrations that are not forgotten yet.
    pub fn open_migrations(&self) -> usize {
        std::fs::read_dir(self.dir.join("state/migrations")).map_or(0, Iterator::count)
    }

    /// Names of the files in the pool, the hidden ones too.
    pub fn files(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.pool())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Asks the API on `socket` once.
pub fn ask(socket: &Path, command: Value) -> Result<Value, Value> {
    let io = |why: std::io::Error| Value::String(why.to_string());
    let mut stream = UnixStream::connect(socket).map_err(io)?;
    stream.set_read_timeout(Some(API_TIMEOUT)).map_err(io)?;
    writeln!(stream, "{}", json!({"version": 1, "command": command})).map_err(io)?;
    for line in BufReader::new(stream).lines() {
        let mut answer: Value = serde_json::from_str(&line.map_err(io)?).unwrap();
        if answer.get("event").is_none() {
            let error = answer["error"].take();
            return if error.is_null() { Ok(answer["result"].take()) } else { Err(error) };
        }
    }
    Err("the agent hung up".into())
}

/// The image of that name, as the agent on `socket` shows it.
pub fn image(socket: &Path, name: &str) -> Option<Value> {
    let images = ask(socket, json!("images")).ok()?;
    images.as_array()?.iter().find(|image| image["name"] == name).cloned()
}

/// Waits until `done` says so, or says what it is waiting for.
pub fn wait_for(
    what: &str,
    timeout: Duration,
    mut done: impl FnMut() -> bool,
) -> Result<(), String> {
    let deadline = Instant::now() + timeout;
    while !done() {
        if Instant::now() > deadline {
            return Err(format!("{what}: not within {} s", timeout.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Whether QEMU's tools can open the image under this path.
pub fn opens(path: &Path) -> bool {
    let run = Command::new("qemu-img").args(["info", "-f", "raw"]).arg(path).output().unwrap();
    run.status.success()
}

/// What a record of an agent's state directory says.
pub fn read_record(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap();
    String::from_utf8(record::unseal(&bytes).unwrap().to_vec()).unwrap()
}

/// Lets a record say something else, as if the agent had written it.
pub fn write_record(path: &Path, text: &str) {
    std::fs::write(path, record::seal(text.as_bytes())).unwrap();
}
