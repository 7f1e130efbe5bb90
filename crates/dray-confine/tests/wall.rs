//! The wall holds: this program runs itself behind it, and tries to get out.

use dray_confine::{ASKED, Tool, launch_if_asked, launch_with};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{PipeWriter, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// An argument by which this program knows that it is behind the wall.
const INSIDE: &str = "--skip=is-behind-the-wall";
const PATIENCE: Duration = Duration::from_secs(20);
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;
/// Commands of `fcntl` that let a process have signals sent.
const SIGNALS: [(&str, libc::c_int); 3] =
    [("owner", libc::F_SETOWN), ("owner_ex", F_SETOWN_EX), ("kind of signal", F_SETSIG)];

fn arguments_after_inside() -> Option<Vec<String>> {
    let mut all = std::env::args().skip_while(|argument| argument != INSIDE);
    all.next()?;
    // The test harness takes words that begin so for its own.
    Some(all.map(|word| word.trim_start_matches("--skip=").to_owned()).collect())
}

/// The launcher, in this program.
#[test]
fn launcher() {
    launch_if_asked();
}

/// A copy of this program where any user may run it.
struct Inside {
    dir: tempfile::TempDir,
}

impl Inside {
    fn new() -> Self {
        launch_with(&["launcher", "--exact", "--nocapture", ASKED]);
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        std::fs::copy("/proc/self/exe", dir.path().join("probe")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tool(&self, test: &str, words: &[&str]) -> Tool {
        let mut tool = Tool::new(self.path("probe").to_str().unwrap());
        tool.args([test, "--exact", "--nocapture", "--test-threads=1", INSIDE]);
        tool.args(words.iter().map(|word| format!("--skip={word}")));
        tool
    }
}

fn said(stdout: &[u8]) -> BTreeMap<String, String> {
    let stdout = String::from_utf8_lossy(stdout);
    let lines = stdout.lines().filter_map(|line| line.split_once("= "));
    lines.map(|(key, value)| (key.trim().to_owned(), value.to_owned())).collect()
}

/// Has the system send a signal to `process` when something comes in through what this program reads.
#[expect(unsafe_code, reason = "no crate offers these commands")]
fn signal_through_descriptor(command: libc::c_int, process: Pid) -> std::io::Result<()> {
    #[repr(C)]
    struct Owner {
        kind: libc::c_int,
        process: libc::pid_t,
    }
    let (stdin, process) = (libc::STDIN_FILENO, process.as_raw_nonzero().get());
    let owner = Owner { kind: 1, process };
    let done = match command {
        // SAFETY: this command reads what `owner` is, and keeps no pointer to it.
        F_SETOWN_EX => unsafe { libc::fcntl(stdin, command, &raw const owner) },
        // SAFETY: this command takes a number.
        F_SETSIG => unsafe { libc::fcntl(stdin, command, libc::SIGKILL) },
        // SAFETY: as does this.
        _ => unsafe { libc::fcntl(stdin, command, process) },
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// What is tried from behind the wall.
#[test]
fn probe() {
    let Some(words) = arguments_after_inside() else { return };
    let tell = |key: &str, value: &dyn std::fmt::Debug| println!("{key} = {value:?}");
    let outcome = |done: Result<(), std::io::Error>| done.map_or("refused", |()| "done");
    println!();
    let (file, socket, parent) = (&words[0], &words[1], words[2].parse().unwrap());
    for (nth, path) in [file, "/etc/passwd", "/proc/1/environ", "/dev/null", "/"].iter().enumerate()
    {
        tell(&format!("open {nth}"), &outcome(File::open(path).map(drop)));
    }
    let beside = Path::new(file).with_extension("new");
    tell("create", &outcome(File::create(beside).map(drop)));
    tell("create in /tmp", &outcome(File::create("/tmp/dray-confine-probe").map(drop)));
    tell("remove", &outcome(std::fs::remove_file(file)));
    tell("rename", &outcome(std::fs::rename(file, "/tmp/dray-confine-probe")));
    tell("chmod", &outcome(std::fs::set_permissions(file, Permissions::from_mode(0o777))));
    tell("unix", &outcome(UnixStream::connect(socket).map(drop)));
    tell("datagram", &outcome(UnixDatagram::unbound().map(drop)));
    tell("tcp", &outcome(TcpStream::connect("127.0.0.1:1").map(drop)));
    tell("listen", &outcome(TcpListener::bind("[::1]:0").map(drop)));
    tell("process", &outcome(Command::new("/usr/bin/true").status().map(drop)));
    let parent = Pid::from_raw(parent).unwrap();
    tell("signal", &outcome(test_kill_process(parent).map_err(Into::into)));
    for (what, command) in SIGNALS {
        tell(what, &outcome(signal_through_descriptor(command, parent)));
    }
    let followed = nix::sys::ptrace::attach(nix::unistd::Pid::from_raw(1));
    tell("ptrace", &outcome(followed.map_err(Into::into)));
    let status = std::fs::read_to_string("/proc/self/status");
    tell("status", &outcome(status.map(drop)));
    tell("user", &rustix::process::getuid().as_raw());
    tell("environment", &std::env::vars_os().count());
    let mut handed = String::new();
    File::open("/usr/bin/env").unwrap();
    std::io::stdin().read_to_string(&mut handed).unwrap();
    tell("stdin", &handed);
    // It is looked at from outside until it is killed.
    std::thread::sleep(Duration::from_secs(600));
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} never came");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_tool_reaches_nothing_but_what_it_was_handed() {
    let inside = Inside::new();
    let (file, socket) = (inside.path("secret"), inside.path("socket"));
    std::fs::write(&file, "secret").unwrap();
    // Not even where the modes would let it.
    std::fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, Permissions::from_mode(0o777)).unwrap();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let parent = std::process::id().to_string();
    let words = [file.to_str().unwrap(), socket.to_str().unwrap(), &parent];
    let mut tool = inside.tool("probe", &words);
    assert_eq!(tool.hand(theirs), 4);
    let (mut out, to_out) = std::io::pipe().unwrap();
    let mut child = tool.spawn(to_out.into(), std::io::stderr().try_clone_to()).unwrap();
    let mut first = [0; 4096];
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("stdin = ") {
        let count = out.read(&mut first).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&first[..count]);
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let open = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap().count();
    child.kill().unwrap();
    child.wait().unwrap();
    let told = said(&text);
    let refused = [
        "open 0",
        "open 1",
        "open 2",
        "open 3",
        "open 4",
        "create",
        "create in /tmp",
        "remove",
        "rename",
        "chmod",
        "unix",
        "datagram",
        "tcp",
        "listen",
        "process",
        "signal",
        "ptrace",
        "status",
    ];
    for what in refused.into_iter().chain(SIGNALS.map(|(what, _)| what)) {
        assert_eq!(told.get(what).map(String::as_str), Some("\"refused\""), "{what}: {told:#?}");
    }
    assert_eq!(told["environment"], "0");
    assert_eq!(told["stdin"], "\"\"", "/dev/null");
    assert_eq!(open, 4, "0 to 2, and what was handed over");
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for sets in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(value(sets), ["0000000000000000"], "{sets}");
    }
    assert_eq!((value("NoNewPrivs:"), value("Seccomp:")), (vec!["1".into()], vec!["2".into()]));
    if rustix::process::geteuid().is_root() {
        let own = (1_900_000_000 + child.id()).to_string();
        assert_eq!((value("Uid:"), value("Gid:")), (vec![own.clone(); 4], vec![own; 4]));
        assert!(value("Groups:").is_empty(), "{status}");
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "secret");
}

/// Standard error as a descriptor of the tool's.
trait TryCloneTo {
    fn try_clone_to(&self) -> OwnedFd;
}

impl TryCloneTo for std::io::Stderr {
    fn try_clone_to(&self) -> OwnedFd {
        rustix::io::dup(self).unwrap()
    }
}

/// Behind the wall: waits for ever.
#[test]
fn waits() {
    if arguments_after_inside().is_some() {
        println!("waits = 1");
        std::thread::sleep(Duration::from_secs(600));
    }
}

/// An agent in the middle: starts a tool, and says which.
#[test]
fn agent_that_dies() {
    let Some(dir) = std::env::var_os("DRAY_CONFINE_TEST_DIR") else { return };
    launch_with(&["launcher", "--exact", "--nocapture", ASKED]);
    let mut tool = Tool::new(Path::new(&dir).join("probe").to_str().unwrap());
    tool.args(["waits", "--exact", "--nocapture", INSIDE]);
    let (mut out, to_out): (_, PipeWriter) = std::io::pipe().unwrap();
    // From a thread that ends, as an agent's do.
    let started = std::thread::spawn(move || {
        tool.spawn(to_out.into(), std::io::stderr().try_clone_to()).unwrap()
    });
    let mut child = started.join().unwrap();
    let mut said = [0; 64];
    while !String::from_utf8_lossy(&said).contains("waits = ") {
        assert!(out.read(&mut said).unwrap() > 0, "it ended");
    }
    std::fs::write(Path::new(&dir).join("pid.new"), child.id().to_string()).unwrap();
    std::fs::rename(Path::new(&dir).join("pid.new"), Path::new(&dir).join("pid")).unwrap();
    child.wait().unwrap();
}

#[test]
fn a_tool_outlives_the_thread_that_asked_for_it_and_ends_with_the_agent() {
    let inside = Inside::new();
    let mut agent = Command::new("/proc/self/exe")
        .args(["agent_that_dies", "--exact", "--nocapture"])
        .env("DRAY_CONFINE_TEST_DIR", inside.dir.path())
        .spawn()
        .unwrap();
    until("the tool", || inside.path("pid").exists());
    let pid: i32 = std::fs::read_to_string(inside.path("pid")).unwrap().parse().unwrap();
    let pid = Pid::from_raw(pid).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let state = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
        status.ok().filter(|status| !status.contains("State:\tZ"))
    };
    assert!(state().is_some(), "it ended with the thread");
    kill_process(Pid::from_child(&agent), Signal::KILL).unwrap();
    agent.wait().unwrap();
    until("its end", || state().is_none());
}

#[test]
fn a_tool_that_does_not_end_is_killed() {
    let inside = Inside::new();
    let began = Instant::now();
    let why = inside.tool("waits", &[]).run(Duration::from_millis(300)).unwrap_err();
    assert_eq!(why.kind(), std::io::ErrorKind::TimedOut, "{why}");
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn what_is_missing_is_told() {
    let inside = Inside::new();
    let why = Tool::new("no-such-program-of-qemu").run(PATIENCE).unwrap_err().to_string();
    assert!(why.contains("no-such-program-of-qemu"), "{why}");
    // Not a program: the launcher says so.
    std::fs::write(inside.path("text"), "#!/no/such/program\n").unwrap();
    std::fs::set_permissions(inside.path("text"), Permissions::from_mode(0o755)).unwrap();
    let finished = Tool::new(inside.path("text").to_str().unwrap()).run(PATIENCE).unwrap();
    assert_eq!(finished.status.code(), Some(126));
    let words = String::from_utf8_lossy(&finished.stderr).into_owned();
    assert!(words.contains("dray confine: start ") && words.contains("text"), "{words}");
}

/// A chain of as many images as there may be, and what belongs to it.
#[test]
fn a_tool_is_handed_a_long_chain() {
    let inside = Inside::new();
    let with = |count| {
        let mut tool = inside.tool("launcher", &[]);
        for _ in 0..count {
            tool.hand(File::open("/dev/null").unwrap());
        }
        tool.run(PATIENCE)
    };
    assert!(with(202).unwrap().status.success());
    assert!(with(252).unwrap().status.success());
    let why = with(253).unwrap_err().to_string();
    assert!(why.contains("too many descriptors"), "{why}");
}

/// QEMU's own tools run behind it.
#[test]
fn qemu_s_tools_start() {
    Inside::new();
    for name in ["qemu-img", "qemu-storage-daemon"] {
        let mut tool = Tool::new(name);
        tool.arg("--version");
        let Ok(finished) = tool.run(PATIENCE) else {
            println!("SKIP: there is no {name}");
            continue;
        };
        let words = String::from_utf8_lossy(&finished.stderr).into_owned();
        assert!(finished.status.success(), "{words}");
        assert!(String::from_utf8_lossy(&finished.stdout).contains("version"), "{finished:?}");
    }
}
