//! The program inside a test guest: writes and verifies disks as the console tells it.
//!
//! Commands, one a line; every command is answered by one line that begins with `OK` or `ERROR`
//! (after what it prints):
//! * `disks`: loads the driver of disks, so that `/dev/vda` … appear, and says `READY` before it is answered.
//!   Until then a guest knows nothing of its disks: one that was saved can go on with others
//! * `open disk=vda image=1 seeded=0` (bytes at the start that hold seeded content, not zeros), with
//!   `learn=1` what is on the disk is what was written last
//! * `start disk=vda block=65536 span=… rate=… pattern=random|seq …` (see [`workload::Options`])
//! * `T MILLISECONDS W|R FIRST COUNT`: one step of a trace; answered only when it is wrong
//! * `replay disk=vda steps=… threads=…`: does them; `steps` is how many there must be
//! * `stop`, `mark`, `report` (`disk=` optional: all), `flush`, `verify`, `dump`
//! * `trim disk=vda offset=… length=…`, `zero …`, `fill …` (writes the range once)
//! * `ping`, `poweroff`

mod console;
mod disk;
mod histogram;
mod steps;
mod workload;

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use console::Output;
use disk::{Aligned, Blocks, Disk};
use dray_guest::content::BLOCK;
use dray_guest::line::Line;
use steps::Steps;
use workload::{Options, Workload};

/// Blocks verified by one request.
const VERIFY_BLOCKS: u64 = 64;
/// The driver of disks; not there when the kernel has it built in.
const DISK_DRIVER: &str = "/modules/virtio_blk.ko";

#[derive(Default)]
struct Guest {
    disks: BTreeMap<String, Arc<Disk>>,
    workloads: Arc<Mutex<BTreeMap<String, Arc<Workload>>>>,
    steps: Steps,
}

fn main() -> std::io::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(console::PORT)?;
    let output = Output::start(port.try_clone()?);
    let mut guest = Guest::default();
    report_every_second(guest.workloads.clone(), output.clone());
    output.send("BOOTED");
    for text in console::commands(port) {
        if let Some(step) = text.strip_prefix("T ") {
            if let Err(why) = guest.steps.push(step) {
                output.send(format!("ERROR {text}: {why}"));
            }
            continue;
        }
        let line = Line::parse(&text);
        match guest.command(&line, &output) {
            Ok(()) => output.send(format!("OK {text}")),
            Err(why) => output.send(format!("ERROR {text}: {why}")),
        }
    }
    Ok(())
}

fn report_every_second(workloads: Arc<Mutex<BTreeMap<String, Arc<Workload>>>>, output: Output) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let running = workloads.lock().unwrap_or_else(PoisonError::into_inner);
            for workload in running.values() {
                output.offer(workload.second());
            }
        }
    });
}

impl Guest {
    fn command(&mut self, line: &Line, output: &Output) -> Result<(), String> {
        match line.word.as_str() {
            "ping" => Ok(()),
            "disks" => find_disks(output),
            "open" => self.open(line, output),
            "start" => self.start(line, output),
            "replay" => self.replay(line, output),
            "stop" => self.stop(line),
            "mark" => self.each_workload(line, |w| w.mark()),
            "report" => self.each_workload(line, |w| output.send(w.report())),
            "flush" => self.each_disk(line, |d| d.flush().map_err(|e| e.to_string())),
            "verify" => self.each_disk(line, |d| verify(d, output)),
            "dump" => self.each_disk(line, |d| dump(d, output)),
            "trim" => self.range(line, |d, b| d.trim(b)),
            "zero" => self.range(line, |d, b| d.zero(b)),
            "fill" => self.range(line, fill),
            "poweroff" => poweroff(),
            _ => Err("no such command".to_owned()),
        }
    }

    fn open(&mut self, line: &Line, output: &Output) -> Result<(), String> {
        let name = line.get("disk").ok_or("disk= is missing")?;
        let seeded: u64 = line.value("seeded", 0)?;
        let disk = Disk::open(name, line.value("image", 1)?, seeded / BLOCK as u64)
            .map_err(|e| format!("could not open {name}: {e}"))?;
        if line.value("learn", 0)? == 1 {
            for bad in disk.learn().map_err(|e| e.to_string())? {
                output.send(format!("BAD disk={name} {bad}"));
            }
        }
        self.disks.insert(name.to_owned(), Arc::new(disk));
        Ok(())
    }

    fn disk(&self, line: &Line) -> Result<&Arc<Disk>, String> {
        let name = line.get("disk").ok_or("disk= is missing")?;
        self.disks.get(name).ok_or_else(|| format!("{name} is not open"))
    }

    fn start(&mut self, line: &Line, output: &Output) -> Result<(), String> {
        let disk = self.disk(line)?.clone();
        let options = Options::parse(line, &disk)?;
        self.run(&disk, || Workload::start(disk.clone(), options, output.clone()));
        Ok(())
    }

    fn replay(&mut self, line: &Line, output: &Output) -> Result<(), String> {
        let disk = self.disk(line)?.clone();
        let options = Options::parse(line, &disk)?;
        let steps = std::mem::take(&mut self.steps);
        let wanted: usize = line.value("steps", 0)?;
        if steps.len() != wanted || !steps.fit(disk.block_count()) {
            return Err(format!("{} steps, or one past the disk's end", steps.len()));
        }
        self.run(&disk, || Workload::replay(disk.clone(), options, steps, output.clone()));
        Ok(())
    }

    /// Stops the disk's workload, if there is one, and starts another.
    fn run(&self, disk: &Disk, start: impl FnOnce() -> Arc<Workload>) {
        let mut running = self.workloads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = running.remove(&disk.name) {
            old.stop();
        }
        disk.mark();
        running.insert(disk.name.clone(), start());
    }

    /// Stops writing; the counts stay for `report`.
    fn stop(&self, line: &Line) -> Result<(), String> {
        self.each_workload(line, |w| w.stop())
    }

    fn each_workload(&self, line: &Line, f: impl Fn(&Workload)) -> Result<(), String> {
        let running = self.workloads.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = line.get("disk");
        for workload in running.values() {
            if wanted.is_none_or(|name| name == workload.disk.name) {
                f(workload);
            }
        }
        Ok(())
    }

    fn each_disk(
        &self,
        line: &Line,
        f: impl Fn(&Disk) -> Result<(), String>,
    ) -> Result<(), String> {
        let wanted = line.get("disk");
        for disk in self.disks.values() {
            if wanted.is_none_or(|name| name == disk.name) {
                f(disk)?;
            }
        }
        Ok(())
    }

    fn range(
        &self,
        line: &Line,
        f: impl Fn(&Disk, Blocks) -> std::io::Result<()>,
    ) -> Result<(), String> {
        let disk = self.disk(line)?;
        let block = BLOCK as u64;
        let (offset, length) = (line.value("offset", 0)?, line.value("length", block)?);
        let blocks = Blocks { first: offset / block, count: length / block };
        if !offset.is_multiple_of(block) || !length.is_multiple_of(block) || length == 0 {
            return Err(format!("offset and length must be multiples of {BLOCK}"));
        }
        if blocks.first + blocks.count > disk.block_count() {
            return Err("the range ends past the disk".to_owned());
        }
        f(disk, blocks).map_err(|e| e.to_string())
    }
}

fn find_disks(output: &Output) -> Result<(), String> {
    if Path::new(DISK_DRIVER).exists() {
        busybox(&["insmod", DISK_DRIVER])?;
    }
    output.send("READY");
    Ok(())
}

fn verify(disk: &Disk, output: &Output) -> Result<(), String> {
    let mut buf = Aligned::new(VERIFY_BLOCKS as usize * BLOCK);
    let mut bad = 0;
    for first in (0..disk.block_count()).step_by(VERIFY_BLOCKS as usize) {
        let count = VERIFY_BLOCKS.min(disk.block_count() - first);
        let claim = disk.claim(Blocks { first, count });
        let found = disk.verify(&claim, &mut buf).map_err(|e| format!("block {first}: {e}"))?;
        for text in found {
            output.send(format!("BAD disk={} {text}", disk.name));
            bad += 1;
        }
    }
    output.send(Line::new("VERIFIED").with("disk", &disk.name).with("bad", bad));
    if bad == 0 { Ok(()) } else { Err(format!("{bad} blocks are wrong")) }
}

fn dump(disk: &Disk, output: &Output) -> Result<(), String> {
    let runs = disk.written_runs();
    for (first, count, seq) in &runs {
        output.send(format!("D {} {first:x} {count:x} {seq:x}", disk.name));
    }
    output.send(Line::new("DUMPED").with("disk", &disk.name).with("runs", runs.len()));
    Ok(())
}

fn fill(disk: &Disk, blocks: Blocks) -> std::io::Result<()> {
    let mut buf = Aligned::new(VERIFY_BLOCKS as usize * BLOCK);
    let end = blocks.first + blocks.count;
    for first in (blocks.first..end).step_by(VERIFY_BLOCKS as usize) {
        let claim = disk.claim(Blocks { first, count: VERIFY_BLOCKS.min(end - first) });
        let seq = disk.prepare(&claim, &mut buf)?;
        disk.write(&claim, &mut buf, seq)?;
    }
    Ok(())
}

fn poweroff() -> Result<(), String> {
    busybox(&["poweroff", "-f"])
}

fn busybox(args: &[&str]) -> Result<(), String> {
    let said = Command::new("/bin/busybox").args(args).output().map_err(|e| e.to_string())?;
    if said.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", args.join(" "), String::from_utf8_lossy(&said.stderr)))
}
