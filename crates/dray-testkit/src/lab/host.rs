//! One host of a lab: its agent's files and process.

use super::{Place, text};
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use std::time::{Duration, Instant};

/// How long an agent may take until it answers; a tenth of a second on an idle machine.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long an agent may take to leave when asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a condition that nobody announces is looked at.
const POLL: Duration = Duration::from_millis(10);

/// A host: an agent, its pool, its sockets.
pub struct Host {
    letter: String,
    address: String,
    dir: PathBuf,
    dray: PathBuf,
    /// Words before the agent's own command.
    within: Vec<String>,
    agent: Mutex<Option<Child>>,
}

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    /// Its exit code; -1 when a signal ended it.
    pub code: i32,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl Answer {
    /// The last line of its output, as JSON: the result of a command run with `--json`.
    ///
    /// # Errors
    /// When it failed or printed none.
    pub fn json(&self) -> io::Result<Value> {
        let last = self.stdout.lines().next_back().unwrap_or_default();
        match serde_json::from_str(last) {
            Ok(value) if self.code == 0 => Ok(value),
            _ => Err(io::Error::other(format!("not a result: {self:?}"))),
        }
    }
}

impl Host {
    pub(super) fn new(
        root: &Path,
        letter: &str,
        place: &Place,
        peers: &[(&str, &str)],
        dray: &Path,
        settings: &str,
    ) -> io::Result<Self> {
        let (dir, address) = (root.join(letter), place.address.as_str());
        for part in ["pool", "state", "run"] {
            fs::create_dir_all(dir.join(part))?;
        }
        let mut config = format!(
            "qmp_dirs = ['{root}']\n[agent]\nname = 'host{letter}'\nstate_dir = '{dir}/state'\n\
             run_dir = '{dir}/run'\nlisten = '{address}:7421'\n[tls]\ndir = '{root}/pki/host{letter}'\n\
             [[pool]]\nname = 'pool'\npath = '{dir}/pool'\nreuse_domain = 'lab'\n",
            root = text(root),
            dir = text(&dir),
        );
        for (peer, address) in peers {
            config += &format!(
                "[[peer]]\nname = 'host{peer}'\naddress = '{address}:7421'\npools = ['pool']\n\
                 rights = ['receive', 'observe', 'read-replicas', 'reuse', 'store']\n"
            );
        }
        fs::write(dir.join("dray.toml"), config + settings)?;
        Ok(Self {
            letter: letter.to_owned(),
            address: address.to_owned(),
            dir,
            dray: dray.to_owned(),
            within: place.within.clone(),
            agent: Mutex::new(None),
        })
    }

    /// Its letter in the lab.
    pub fn letter(&self) -> &str {
        &self.letter
    }

    /// Its name, as peers know it.
    pub fn name(&self) -> String {
        format!("host{}", self.letter)
    }

    /// The address it listens on.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Where its files are: `dray.toml`, `pool`, `state`, `run`, `log`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its only pool.
    pub fn pool(&self) -> PathBuf {
        self.dir.join("pool")
    }

    /// Where its NBD server listens.
    pub fn nbd_socket(&self) -> PathBuf {
        self.dir.join("run/nbd.sock")
    }

    /// Where its agent takes commands.
    pub fn api_socket(&self) -> PathBuf {
        self.dir.join("run/api.sock")
    }

    /// What its agent has logged, over all its starts.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// The lines of its log that warn or tell of an error.
    pub fn warnings(&self) -> Vec<String> {
        let serious = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        self.log().lines().filter(serious).map(str::to_owned).collect()
    }

    /// The process id of its running agent.
    pub fn pid(&self) -> Option<u32> {
        self.agent().as_ref().map(Child::id)
    }

    /// Starts its agent and waits until it takes commands.
    ///
    /// # Errors
    /// When the agent ends or does not answer in time; the error holds its log.
    pub fn start(&self) -> io::Result<()> {
        self.start_with(&[])
    }

    /// The same with variables in its environment.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(&self, variables: &[(&str, &str)]) -> io::Result<()> {
        let mut log = OpenOptions::new().create(true).append(true).open(self.dir.join("log"))?;
        let from = log.seek(SeekFrom::End(0))?;
        let words = self.within.iter().map(OsStr::new).chain([self.dray.as_os_str()]);
        let words: Vec<&OsStr> = words.collect();
        let child = Command::new(words[0])
            .args(&words[1..])
            .args(["agent", "--config", text(&self.dir.join("dray.toml"))])
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut agent = self.agent();
        let child = agent.insert(child);
        let deadline = Instant::now() + START_TIMEOUT;
        while UnixStream::connect(self.api_socket()).is_err() {
            let ended = child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let said = said_since(&self.dir.join("log"), from)?;
                return Err(io::Error::other(format!("agent {}: {ended:?}: {said}", self.letter)));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Kills its agent (SIGKILL) and waits for its end.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill9(&self) -> io::Result<()> {
        if let Some(mut child) = self.agent().take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Waits until its agent has stopped itself (`DRAY_STOP_BEFORE`).
    ///
    /// # Errors
    /// When it does not stop in time, or ends.
    pub fn wait_stopped(&self, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now() + timeout;
        let Some(pid) = self.pid() else { return Err(io::Error::other("no agent runs")) };
        // The state is the word after the name, which is in parentheses.
        while !fs::read_to_string(format!("/proc/{pid}/stat"))?.contains(") T ") {
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("agent {} does not stop", self.letter)));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Stops its agent (SIGSTOP) until [`go_on`](Self::go_on).
    ///
    /// # Errors
    /// When there is none.
    pub fn pause(&self) -> io::Result<()> {
        self.signal(rustix::process::Signal::STOP)
    }

    /// Lets a stopped agent go on.
    ///
    /// # Errors
    /// When there is none.
    pub fn go_on(&self) -> io::Result<()> {
        self.signal(rustix::process::Signal::CONT)
    }

    fn signal(&self, signal: rustix::process::Signal) -> io::Result<()> {
        let agent = self.agent();
        let child = agent.as_ref().ok_or_else(|| io::Error::other("no agent runs"))?;
        rustix::process::kill_process(rustix::process::Pid::from_child(child), signal)?;
        Ok(())
    }

    /// Migrations that it has not forgotten: folders in its state directory.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn open_migrations(&self) -> io::Result<usize> {
        Ok(fs::read_dir(self.dir.join("state/migrations"))?.count())
    }

    /// Asks its agent to end (SIGTERM) and waits for it.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn stop(&self) -> io::Result<()> {
        let Some(mut child) = self.agent().take() else { return Ok(()) };
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while child.try_wait()?.is_none() {
            if Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::other(format!("agent {} does not end", self.letter)));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// A `dray` command on this host that is not started yet.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.dray);
        command.arg("--socket").arg(self.api_socket()).args(args).stdin(Stdio::null());
        command
    }

    /// Runs a `dray` command on this host.
    ///
    /// # Errors
    /// When it cannot be started; a command that fails is an [`Answer`].
    pub fn dray(&self, args: &[&str]) -> io::Result<Answer> {
        self.command(args).output().map(answer)
    }

    /// Runs a `dray` command with `--json` and returns its result.
    ///
    /// # Errors
    /// When it fails.
    pub fn json(&self, args: &[&str]) -> io::Result<Value> {
        let args: Vec<&str> = std::iter::once("--json").chain(args.iter().copied()).collect();
        self.dray(&args)?.json()
    }

    /// Starts a `dray` command with `--json`; [`Answer::of`] waits for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, args: &[&str]) -> io::Result<Child> {
        let mut command = self.command(&["--json"]);
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    }

    /// The answer to a `dray` command run with `--json`, or none within `limit`: whoever asked has gone then.
    ///
    /// # Errors
    /// When it cannot be started, or its output cannot be read.
    pub fn ask(&self, args: &[&str], limit: Duration) -> io::Result<Option<Answer>> {
        Answer::within(self.spawn(args)?, limit)
    }

    /// Waits until a migration that this host knows is as `wanted`, and returns its status.
    ///
    /// # Errors
    /// When that takes longer than `timeout`; the error holds the last status.
    pub fn wait_status(
        &self,
        timeout: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> io::Result<Value> {
        let deadline = Instant::now() + timeout;
        loop {
            let found = self.json(&["status"])?;
            let all = found.as_array().cloned().unwrap_or_else(|| vec![found.clone()]);
            if let Some(status) = all.into_iter().find(|status| wanted(status)) {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("not in time: {found}")));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Names of the files in its pool, hidden ones too.
    ///
    /// # Errors
    /// When the pool cannot be read.
    pub fn pool_files(&self) -> io::Result<Vec<String>> {
        let names = fs::read_dir(self.pool())?
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    fn agent(&self) -> MutexGuard<'_, Option<Child>> {
        self.agent.lock()
    }
}

impl Answer {
    /// Waits for a command that [`Host::spawn`] has started.
    ///
    /// # Errors
    /// When its output cannot be read.
    pub fn of(child: Child) -> io::Result<Self> {
        child.wait_with_output().map(answer)
    }
}

impl Answer {
    /// The answer of a command that [`Host::spawn`] has started, or none within `limit`: it is killed then.
    ///
    /// # Errors
    /// When its output cannot be read.
    pub fn within(child: Child, limit: Duration) -> io::Result<Option<Self>> {
        let pid = rustix::process::Pid::from_child(&child);
        let (sender, answers) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // Nobody waits any more when it comes late.
            let _ = sender.send(Self::of(child));
        });
        match answers.recv_timeout(limit) {
            Ok(answer) => answer.map(Some),
            Err(_) => {
                // It may have ended this very moment.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                Ok(None)
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may have ended already, and there is nobody to tell.
        let _ = self.kill9();
        end_daemons(&self.dir.join("run"));
    }
}

/// Ends the storage daemons that an agent which was killed has left behind with sockets in `run`: no
/// other agent comes that does it.
fn end_daemons(run: &Path) {
    let Ok(processes) = fs::read_dir("/proc") else { return };
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        if line.starts_with("qemu-storage-daemon") && line.contains(text(run)) {
            let Some(pid) = rustix::process::Pid::from_raw(pid) else { continue };
            // It may end by itself just now.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn answer(output: Output) -> Answer {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Answer {
        code: output.status.code().unwrap_or(-1),
        stdout: text(&output.stdout),
        stderr: text(&output.stderr),
    }
}

fn said_since(log: &Path, from: u64) -> io::Result<String> {
    let mut file = File::open(log)?;
    file.seek(SeekFrom::Start(from))?;
    let mut said = String::new();
    file.read_to_string(&mut said)?;
    Ok(said)
}
