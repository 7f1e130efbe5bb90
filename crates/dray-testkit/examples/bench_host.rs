//! One host's QEMUs for `bench/migrate.py`, started in that host's network namespace. Takes one
//! command a line and answers each with one line, `OK …` or `ERROR …`; ends, with its QEMUs, at the
//! end of its input.
//!
//! ```text
//! bench_host DIRECTORY MEMORY_MIB
//!   image PATH SIZE_MIB SEEDED_MIB [NTH]  makes the nth disk's image; 1
//!   boot NAME NODE BLOCKDEV…              boots a guest whose disk is on NODE
//!   wait NAME NODE BLOCKDEV…              starts a QEMU that waits for it
//!   tell NAME COMMAND…                    a command for the guest; its last line of report
//!   load NAME LOAD DISK_MIB SECONDS SEED  replays a server's load; answers with its bytes written a second
//!   stat NAME                             the last of the guest's own lines, one a second
//!   complaints NAME                       how often the guest saw an error or a wrong block
//!   cpu NAME                              CPU seconds that QEMU has used
//!   kill NAME
//! ```
//! A BLOCKDEV is JSON without spaces.

use dray_testkit::guest::{Bystander, GuestVm};
use dray_trace::generate::Load;
use dray_trace::{Op, Record};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Requests that the guest has at its disk at once, at most.
const DEPTH: u32 = 16;
/// A guest command under emulation on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

struct Host {
    dir: PathBuf,
    memory_mib: u32,
    vms: BTreeMap<String, GuestVm>,
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, memory] = &args[..] else {
        return Err(io::Error::other("usage: bench_host DIRECTORY MEMORY_MIB"));
    };
    let memory_mib = memory.parse().map_err(io::Error::other)?;
    let mut host = Host { dir: dir.into(), memory_mib, vms: BTreeMap::new() };
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match host.command(&words) {
            Ok(said) => format!("OK {said}"),
            Err(why) => format!("ERROR {}", why.to_string().replace('\n', " ")),
        };
        println!("{answer}");
        io::stdout().flush()?;
    }
    Ok(())
}

impl Host {
    fn command(&mut self, words: &[&str]) -> io::Result<String> {
        match words {
            ["image", path, size, seeded, nth @ ..] => {
                let mib = |n: &str| number(n).map(|n| n * MIB);
                let nth = nth.first().map_or(Ok(1), |nth| number(nth))?;
                let bystander = Bystander::new(nth, mib(size)?, mib(seeded)?);
                bystander.create_raw(Path::new(path)).map(|()| String::new())
            }
            ["boot", name, node, blockdev @ ..] => self.start(name, node, blockdev, false),
            ["wait", name, node, blockdev @ ..] => self.start(name, node, blockdev, true),
            ["tell", name, command @ ..] => self.tell(name, &command.join(" ")),
            ["load", name, load, disk, seconds, seed] => {
                self.load(name, load, [number(disk)?, number(seconds)?, number(seed)?])
            }
            ["stat", name] => {
                let lines = self.vm(name)?.console().lines();
                let last = lines.iter().rev().find(|line| line.starts_with("STAT"));
                Ok(last.cloned().unwrap_or_default())
            }
            ["complaints", name] => {
                let count = self.vm(name)?.console().complaints().len();
                Ok(count.to_string())
            }
            ["cpu", name] => cpu_seconds(self.vm(name)?.pid()),
            ["kill", name] => {
                // A QEMU that has ended by itself is gone all the same.
                self.vms.remove(*name);
                Ok(String::new())
            }
            _ => Err(io::Error::other("no such command")),
        }
    }

    fn vm(&mut self, name: &str) -> io::Result<&mut GuestVm> {
        self.vms.get_mut(name).ok_or_else(|| io::Error::other(format!("no vm named {name}")))
    }

    fn start(
        &mut self,
        name: &str,
        node: &str,
        blockdev: &[&str],
        waits: bool,
    ) -> io::Result<String> {
        let mut vm = GuestVm::builder(&self.dir, name).memory_mib(self.memory_mib);
        if waits {
            vm = vm.incoming();
        }
        for argument in blockdev {
            vm = vm.blockdev(*argument);
        }
        // A second monitor for the bench to watch, while dray has the first. Shared, so that QEMU may
        // export the disk's node beside the guest.
        let watch = self.dir.join(format!("{name}.qmp.watch"));
        let watch = format!("unix:{},server=on,wait=off", watch.display());
        let mut vm = vm.disk_with("disk0", node, ",share-rw=on").arg("-qmp").arg(&watch).start()?;
        if !waits {
            vm.wait_ready()?;
        }
        let qmp = vm.qmp_path().to_string_lossy().into_owned();
        self.vms.insert(name.to_owned(), vm);
        Ok(qmp)
    }

    /// Gives the guest the accesses of a load and starts them. The load's disk is made as large as
    /// the guest's; places and rates are its own.
    fn load(&mut self, name: &str, load: &str, how: [u64; 3]) -> io::Result<String> {
        let [disk_mib, seconds, seed] = how;
        let mut spec = load.parse::<Load>().map_err(io::Error::other)?.spec();
        spec.layout.disk = disk_mib * MIB;
        let end = seconds * 1_000_000_000;
        let records: Vec<Record> =
            spec.records(seed).take_while(|record| record.time_ns < end).collect();
        let console = self.vm(name)?.console();
        for record in &records {
            console.send(&step(record))?;
        }
        let command = format!("replay disk=vda steps={} threads={DEPTH} block=4096", records.len());
        console.command(&command)?;
        let written: u64 = records.iter().filter(|r| r.op == Op::Write).map(|r| r.length).sum();
        Ok((written / seconds).to_string())
    }

    fn tell(&mut self, name: &str, command: &str) -> io::Result<String> {
        let console = self.vm(name)?.console();
        console.send(command)?;
        let lines = console.answer(command, TIMEOUT)?;
        let report = lines.iter().rev().find(|line| line.starts_with("REPORT"));
        Ok(report.cloned().unwrap_or_default())
    }
}

fn number(word: &str) -> io::Result<u64> {
    word.parse().map_err(io::Error::other)
}

/// An access as the guest program takes it, in whole blocks.
fn step(record: &Record) -> String {
    let op = if record.op == Op::Write { 'W' } else { 'R' };
    let first = record.offset / BLOCK;
    let count = record.end().div_ceil(BLOCK) - first;
    format!("T {} {op} {first} {count}", record.time_ns / 1_000_000)
}

/// User and system time of a process so far, in seconds.
fn cpu_seconds(pid: u32) -> io::Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |ix: usize| fields.get(ix).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    // utime and stime are fields 14 and 15 of the line, 12 and 13 after the name.
    Ok(format!("{:.2}", (ticks(11) + ticks(12)) as f64 / 100.0))
}
