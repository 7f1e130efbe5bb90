//! Orderly restarts under a real QEMU block client: its guest must not see one error.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Fixture, have};

/// More than the restarts in which nine of ten showed the fault.
const RESTARTS: usize = 24;
/// Only a failing test ever waits so long.
const LIMIT: Duration = Duration::from_secs(120);

/// A file name that makes QEMU wait for a server that is away.
fn patient(socket: &Path) -> String {
    let server = serde_json::json!({"type": "unix", "path": socket});
    let file = serde_json::json!({"driver": "nbd", "server": server, "reconnect-delay": 60});
    format!("json:{}", serde_json::json!({"driver": "raw", "file": file}))
}

/// Ends what it holds also when the test fails.
struct Bench(Child);

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bench(socket: &Path, options: &[&str]) -> Bench {
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-t", "none", "-c", "100000000"]).args(options).arg(patient(socket));
    Bench(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Puts a new socket into the place of the old one before the old server leaves: QEMU finds
/// somebody at once, instead of after a second.
fn restart(fixture: &mut Fixture) -> usize {
    let next: PathBuf = fixture.dir.path().join("next.sock");
    let handle = fixture.server.bind_unix(&next, 0o660, None).unwrap();
    std::fs::rename(&next, fixture.socket()).unwrap();
    std::mem::replace(&mut fixture.handle, handle).shutdown()
}

fn is_served(fixture: &Fixture, bench: &mut Bench) -> bool {
    let begin = Instant::now();
    while fixture.handle.connections("") == 0 {
        assert!(begin.elapsed() < LIMIT, "qemu does not come back");
        if bench.0.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

fn said(bench: &mut Bench) -> String {
    let mut said = String::new();
    let _ = std::io::Read::read_to_string(&mut bench.0.stderr.take().unwrap(), &mut said);
    said
}

/// Restarts the server again and again while QEMU keeps many requests under way.
fn survives(test: &str, options: &[&str]) {
    if !have(test, "qemu-img") {
        return;
    }
    // A multiple of every request here: qemu-img would go past the end.
    let mut fixture = Fixture::with_file(63 << 20);
    let mut bench = bench(&fixture.socket(), options);
    for nth in 0..RESTARTS {
        assert!(is_served(&fixture, &mut bench), "restart {nth}: {}", said(&mut bench));
        // Every restart shall find it in another moment.
        std::thread::sleep(Duration::from_millis(20 + 7 * (nth as u64 % 5)));
        assert_eq!(restart(&mut fixture), 0);
    }
    assert!(is_served(&fixture, &mut bench), "{}", said(&mut bench));
    assert!(bench.0.try_wait().unwrap().is_none(), "{}", said(&mut bench));
}

#[test]
fn a_guest_that_writes_and_flushes_sees_no_restart() {
    let options = ["-w", "-d", "64", "-s", "4096", "-S", "69632", "--flush-interval=64"];
    survives("a_guest_that_writes_and_flushes_sees_no_restart", &options);
}

#[test]
fn a_guest_that_reads_sees_no_restart() {
    survives("a_guest_that_reads_sees_no_restart", &["-d", "64", "-s", "65536"]);
}

#[test]
fn a_guest_with_long_writes_sees_no_restart() {
    survives("a_guest_with_long_writes_sees_no_restart", &["-w", "-d", "8", "-s", "3145728"]);
}
