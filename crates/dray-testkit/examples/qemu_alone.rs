//! Moves a writing guest between two QEMUs on one host with QEMU's own means alone, again and
//! again, and counts how many guests did not survive it: the reference to hold against a guest that
//! dies after a move with dray. An emulating QEMU before 9.0 loses some of those whose memory is a
//! multiple of 256 KiB, more on a busy machine.
//!
//! `cargo run -p dray-testkit --example qemu_alone [rounds [memory, as qemu's -m has it]]`

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use dray_testkit::guest::{Bystander, GuestVm};
use serde_json::{Value, json};

const SIZE: u64 = 96 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// As long as a guest that lost memory took to fall over, several times.
const WATCH: Duration = Duration::from_secs(3);

fn main() -> io::Result<()> {
    let rounds: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(10);
    let memory = std::env::args().nth(2);
    let mut lost = 0;
    for round in 1..=rounds {
        match survives(memory.as_deref()) {
            Ok(downtime) => println!("{round}: well, stopped for {downtime} ms"),
            Err(why) => {
                lost += 1;
                println!("{round}: LOST: {why}");
            }
        }
    }
    println!("{lost} of {rounds} guests lost");
    Ok(())
}

/// Moves one guest; the error says how it fell. Returns QEMU's downtime in ms.
fn survives(memory: Option<&str>) -> io::Result<u64> {
    let dir = tempfile::tempdir()?;
    let bystander = Bystander::new(1, SIZE, 24 << 20);
    let path = dir.path().join("disk.raw");
    bystander.create_raw(&path)?;
    let node = format!("driver=file,node-name=node0,filename={}", path.display());
    let builder = |name| {
        let builder = GuestVm::builder(dir.path(), name).memory_mib(192);
        let builder = builder.blockdev(node.clone()).disk("disk0", "node0");
        // QEMU takes the last.
        memory.map_or(builder.clone(), |size| builder.arg("-m").arg(size))
    };
    let mut source = builder("source").start()?;
    source.wait_ready()?;
    source.console().command(&bystander.open_command("vda"))?;
    source.console().command("start disk=vda span=50331648 block=16384 rate=2000000 flush=32")?;
    std::thread::sleep(Duration::from_millis(700));
    let mut target = builder("target").incoming().start()?;
    let downtime = move_memory(&source.qmp_path(), &target.qmp_path(), dir.path())?;
    let watched = Instant::now();
    while watched.elapsed() < WATCH {
        if let Err(why) = target.console().report("vda") {
            return Err(io::Error::other(format!("{why}\n{}", target.log())));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(downtime)
}

fn move_memory(source: &Path, target: &Path, dir: &Path) -> io::Result<u64> {
    let uri = format!("unix:{}", dir.join("memory.sock").display());
    let (mut source, mut target) = (Qmp::connect(source)?, Qmp::connect(target)?);
    for qmp in [&mut source, &mut target] {
        let on = |name| json!({"capability": name, "state": true});
        let capabilities = [on("pause-before-switchover"), on("late-block-activate")];
        qmp.ask("migrate-set-capabilities", &json!({"capabilities": capabilities}))?;
    }
    target.ask("migrate-incoming", &json!({"uri": uri}))?;
    source.ask("migrate", &json!({"uri": uri}))?;
    source.wait_for("pre-switchover")?;
    source.ask("migrate-continue", &json!({"state": "pre-switchover"}))?;
    let done = source.wait_for("completed")?;
    target.wait_for("completed")?;
    target.ask("cont", &json!({}))?;
    Ok(done["downtime"].as_u64().unwrap_or(0))
}

struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Qmp {
    fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        let lines = BufReader::new(stream.try_clone()?);
        let mut qmp = Self { stream, lines };
        qmp.ask("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> io::Result<Value> {
        writeln!(self.stream, "{}", json!({"execute": command, "arguments": arguments}))?;
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line)? == 0 {
                return Err(io::Error::other("qemu left"));
            }
            let answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(format!("{command}: {error}")));
            }
            if let Some(answer) = answer.get("return") {
                return Ok(answer.clone());
            }
        }
    }

    fn wait_for(&mut self, status: &str) -> io::Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.ask("query-migrate", &json!({}))?;
            if answer["status"] == status {
                return Ok(answer);
            }
            if answer["status"] == "failed" || Instant::now() > deadline {
                return Err(io::Error::other(format!("no {status}: {answer}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
