//! A guest, its disks, and the QEMU that it is in; the one that waits for it, when it moves.

use crate::disk::Disk;
use crate::world::{LETTERS, World, text};
use dray_testkit::guest::{GuestVm, GuestVmBuilder, Monitor};
use dray_testkit::random::Random;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What a guest writes over; beyond what was seeded a qcow2 grows.
const SPAN: u64 = 16 << 20;
/// Errors reach the guest, which tells of them.
pub const DEVICE: &str = ",rerror=report,werror=report";
/// How long a monitor may be taken by an agent.
const TAKEN: Duration = Duration::from_secs(30);
/// How long a QEMU that was told to quit may take, and a guest that stands still to go on.
const QUIT: Duration = Duration::from_secs(15);
const STANDS_STILL: Duration = Duration::from_secs(60);
const MEMORY_MIB: u32 = 128;

/// A QEMU, and how much of its console was read.
pub struct Running {
    pub qemu: GuestVm,
    pub host: usize,
    other: PathBuf,
    read: usize,
}

pub struct Vm {
    pub number: usize,
    pub disks: Vec<Disk>,
    /// Where the guest is, or was last.
    pub running: Option<Running>,
    /// Where it is to go.
    pub waiting: Option<Running>,
    started: usize,
}

impl Running {
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.qemu.exited(), Ok(None))
    }

    pub fn qmp(&self) -> String {
        text(&self.qemu.qmp_path()).to_owned()
    }

    /// The answer of the monitor that is not dray's.
    pub fn tell(&self, command: &str) -> Result<Value, String> {
        let failed = |why: std::io::Error| format!("{command}: {why}");
        let mut monitor = Monitor::connect(&self.other, TAKEN).map_err(failed)?;
        monitor.ask(command).map_err(failed)
    }

    /// Whether its guest runs, as far as QEMU knows.
    pub fn runs(&mut self) -> Result<bool, String> {
        if self.has_ended() {
            return Ok(false);
        }
        let answer = self.tell("{\"execute\":\"query-status\"}")?;
        Ok(answer["return"]["running"] == true)
    }

    /// Whether no guest has ever said anything in it.
    pub fn is_silent(&mut self) -> bool {
        self.read == 0 && self.qemu.console().lines().is_empty()
    }

    /// Tells it to quit and waits for its end. `help` is what its operator does when it does not end; whether that
    /// cannot help, because its disks are not at this host any more.
    pub fn quit(mut self, help: impl FnOnce(usize) -> Result<bool, String>) -> Result<(), String> {
        if self.has_ended() {
            return Ok(());
        }
        let told = self.tell("{\"execute\":\"quit\"}");
        if self.qemu.wait_exit(QUIT).is_ok() {
            return Ok(());
        }
        if help(self.host)? {
            return self.qemu.kill().map(drop).map_err(|why| why.to_string());
        }
        let ended = self.qemu.wait_exit(QUIT).map(drop);
        ended.map_err(|why| format!("{} at {}: {why}, {told:?}", self.qmp(), LETTERS[self.host]))
    }

    /// The lines that its guest printed since the last call.
    fn news(&mut self) -> Vec<String> {
        let lines = self.qemu.console().lines_from(self.read);
        self.read += lines.len();
        lines
    }
}

impl Vm {
    /// Makes the disks at a host and boots a guest there.
    pub fn begin(world: &World, random: &mut Random, number: usize) -> Result<Self, String> {
        let host = random.below(2) as usize;
        let count = 1 + random.below(2) as usize;
        let disks = (0..count).map(|nth| Disk::make(world, host, random, number, nth));
        let disks = disks.collect::<Result<_, _>>()?;
        let mut vm = Self { number, disks, running: None, waiting: None, started: 0 };
        vm.boot(world, host, false)?;
        Ok(vm)
    }

    pub fn running(&mut self) -> Result<&mut Running, String> {
        self.running.as_mut().ok_or_else(|| "no guest".to_owned())
    }

    pub fn host(&self) -> usize {
        self.running.as_ref().map_or(0, |running| running.host)
    }

    /// Boots a guest at a host that has the disks. One that shall `learn` takes what it finds on them.
    pub fn boot(&mut self, world: &World, host: usize, learn: bool) -> Result<(), String> {
        let (builder, other) = self.builder(world);
        let mut builder = builder.booted();
        for (nth, disk) in self.disks.iter().enumerate() {
            let below = disk.base_blockdev(world, host, nth);
            builder = below.into_iter().fold(builder, GuestVmBuilder::blockdev);
            builder = builder.blockdev(disk.blockdev(world, host, nth));
            builder = builder.disk_with(&disk.qdev, &format!("node{nth}"), DEVICE);
        }
        let failed =
            |why: std::io::Error| format!("vm{} boots at {}: {why}", self.number, LETTERS[host]);
        let mut qemu = builder.start().map_err(failed)?;
        qemu.wait_ready().map_err(failed)?;
        self.running = Some(Running { qemu, host, other, read: 0 });
        self.open(learn)?;
        self.start_work()
    }

    /// Has the guest open its disks.
    pub fn open(&mut self, learn: bool) -> Result<(), String> {
        let learn = if learn { " learn=1" } else { "" };
        for nth in 0..self.disks.len() {
            let disk = &self.disks[nth];
            let open = format!("{}{learn}", disk.flushed.open_command(&disk.device));
            self.command(&open)?;
        }
        Ok(())
    }

    /// Lets the guest write.
    pub fn start_work(&mut self) -> Result<(), String> {
        for nth in 0..self.disks.len() {
            let device = &self.disks[nth].device;
            let start = format!(
                "start disk={device} span={SPAN} block=8192 rate=150000 flush=8 threads=2 log=1"
            );
            self.command(&start)?;
        }
        Ok(())
    }

    /// A command to the guest; the lines that it prints.
    pub fn command(&mut self, command: &str) -> Result<Vec<String>, String> {
        let number = self.number;
        let answer = self.running()?.qemu.console().command(command);
        answer.map_err(|why| format!("vm{number}: {command}: {why}"))
    }

    fn builder(&mut self, world: &World) -> (GuestVmBuilder, PathBuf) {
        self.started += 1;
        let (dir, name) = (world.lab.dir(), format!("vm{}-{}", self.number, self.started));
        let other = dir.join(format!("{name}.other"));
        let monitor = format!("unix:{},server=on,wait=off", text(&other));
        let builder = GuestVm::builder(&dir, &name).memory_mib(MEMORY_MIB);
        (builder.arg("-qmp").arg(&monitor), other)
    }

    /// Starts the QEMU that waits for the guest, with what `dray prepare` printed.
    pub fn start_waiting(
        &mut self,
        world: &World,
        host: usize,
        prepared: &Value,
    ) -> Result<(), String> {
        let (builder, other) = self.builder(world);
        let builder = builder.waiting(prepared, DEVICE).map_err(|why| why.to_string())?;
        let qemu = builder.start().map_err(|why| format!("the waiting QEMU: {why}"))?;
        self.waiting = Some(Running { qemu, host, other, read: 0 });
        Ok(())
    }

    /// Takes the flushes that the guest has told of; how many. Whatever it complains about is an error.
    pub fn hear(&mut self) -> Result<u64, String> {
        let mut flushes = 0;
        // The one that the guest leaves first: what it said there is older.
        for qemu in [&mut self.running, &mut self.waiting].into_iter().flatten() {
            let lines = qemu.news();
            for disk in &mut self.disks {
                flushes += disk.flushed.apply_flushes(&disk.device, &lines);
            }
            let bad = |line: &&String| line.starts_with("IOERROR ") || line.starts_with("BAD ");
            if let Some(line) = lines.iter().find(bad) {
                return Err(format!("vm{} at {}: {line}", self.number, LETTERS[qemu.host]));
            }
        }
        Ok(flushes)
    }

    /// The guest goes on writing to each disk. It may stand still first: QEMU connects to an agent that was away
    /// in its own time.
    pub fn goes_on(&mut self) -> Result<(), String> {
        let (deadline, before) = (Instant::now() + STANDS_STILL, self.writes()?);
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let after = self.writes()?;
            if before.iter().zip(&after).all(|(before, after)| after > before) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("vm{} stands still: {before:?} {after:?}", self.number));
            }
        }
    }

    /// The writes of each disk so far, from the guest itself.
    fn writes(&mut self) -> Result<Vec<u64>, String> {
        let devices: Vec<String> = self.disks.iter().map(|disk| disk.device.clone()).collect();
        let number = self.number;
        let console = self.running()?.qemu.console();
        let writes = devices.iter().map(|device| {
            let report = console.report(device).map_err(|why| format!("vm{number}: {why}"))?;
            report.value("writes", 0u64)
        });
        writes.collect()
    }
}
