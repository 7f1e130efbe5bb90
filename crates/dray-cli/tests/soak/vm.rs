//! The guest, its disks, and the QEMU that it is in; the one that waits for it, when it moves.

use crate::world::{LETTERS, World};
use dray_guest::line::Line;
use dray_testkit::guest::{Bystander, GuestVm, GuestVmBuilder, tools};
use dray_testkit::random::Random;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of a disk, and of them those that hold something from the start.
const SIZE: u64 = 48 << 20;
const SEEDED: u64 = 12 << 20;
/// What the guest writes over; beyond what was seeded a qcow2 grows.
const SPAN: u64 = 32 << 20;
/// Errors reach the guest, which tells of them.
const DEVICE: &str = ",rerror=report,werror=report";

/// How a disk began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Raw, on dray's socket.
    Resident,
    /// Raw, a file of QEMU's own.
    Plain,
    /// A qcow2 on dray's socket, which grows.
    Growing,
}

pub struct Disk {
    pub kind: Kind,
    /// Its name in the pools, and in the guest.
    pub file: String,
    pub device: String,
    /// What was flushed.
    pub flushed: Bystander,
}

/// A QEMU, and how much of its console was read.
pub struct Running {
    pub qemu: GuestVm,
    pub host: usize,
    read: usize,
    /// When each disk was last seen to be written.
    wrote: BTreeMap<String, Instant>,
}

pub struct Vm {
    pub disks: Vec<Disk>,
    /// Where the guest is, or was last.
    pub running: Option<Running>,
    /// Where it is to go.
    pub waiting: Option<Running>,
    started: usize,
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

impl Running {
    fn new(qemu: GuestVm, host: usize) -> Self {
        Self { qemu, host, read: 0, wrote: BTreeMap::new() }
    }

    /// The lines that it printed since the last call.
    pub fn news(&mut self) -> Vec<String> {
        let lines = self.qemu.console().lines_from(self.read);
        self.read += lines.len();
        for line in lines.iter().map(|line| Line::parse(line)).filter(|line| line.word == "STAT") {
            if line.value("writes", 0u64).is_ok_and(|writes| writes > 0) {
                let disk = line.get("disk").unwrap_or_default().to_owned();
                self.wrote.insert(disk, Instant::now());
            }
        }
        lines
    }

    /// Whether so many disks have been written since a moment.
    pub fn writes(&self, disks: usize, since: Instant) -> bool {
        self.wrote.values().filter(|&&at| at > since).count() == disks
    }

    pub fn has_ended(&mut self) -> bool {
        !matches!(self.qemu.exited(), Ok(None))
    }

    pub fn qmp(&self) -> String {
        text(&self.qemu.qmp_path()).to_owned()
    }
}

impl Vm {
    /// Makes the disks at host a and boots a guest there.
    pub fn begin(world: &World, random: &mut Random) -> Result<Self, String> {
        let mut kinds = vec![Kind::Resident, Kind::Plain, Kind::Growing];
        kinds.rotate_left(random.below(3) as usize);
        let disk = |(i, kind): (usize, Kind)| Disk {
            kind,
            file: format!("disk{i}.{}", if kind == Kind::Growing { "qcow2" } else { "raw" }),
            device: format!("vd{}", char::from(b'a' + i as u8)),
            flushed: Bystander::new(i as u64 + 1, SIZE, SEEDED),
        };
        let disks: Vec<Disk> = kinds.into_iter().enumerate().map(disk).collect();
        for disk in &disks {
            make(world, disk)?;
        }
        let mut vm = Self { disks, running: None, waiting: None, started: 0 };
        vm.boot(world, 0, false)?;
        Ok(vm)
    }

    /// Boots a guest at a host that has the disks. One that shall `learn` takes what it
    /// finds on them.
    pub fn boot(&mut self, world: &World, host: usize, learn: bool) -> Result<(), String> {
        let images = images(world, host)?;
        let mut builder = self.builder(world).booted();
        for i in 0..self.disks.len() {
            builder = builder.blockdev(self.blockdev(world, host, i, &images));
            builder = builder.disk_with(&format!("disk{i}"), &format!("node{i}"), DEVICE);
        }
        let mut qemu = builder.start().map_err(|why| format!("boot: {why}"))?;
        qemu.wait_ready().map_err(|why| format!("boot: {why}"))?;
        for disk in &self.disks {
            let learn = if learn { " learn=1" } else { "" };
            let open = format!("{}{learn}", disk.flushed.open_command(&disk.device));
            qemu.console().command(&open).map_err(|why| format!("{open}: {why}"))?;
        }
        self.running = Some(Running::new(qemu, host));
        self.start_work()
    }

    /// Lets the guest write.
    pub fn start_work(&mut self) -> Result<(), String> {
        let running = self.running.as_mut().ok_or("no guest")?;
        for disk in &self.disks {
            let start = format!(
                "start disk={} span={SPAN} block=8192 rate=400000 flush=8 threads=2 log=1",
                disk.device
            );
            running.qemu.console().command(&start).map_err(|why| format!("{start}: {why}"))?;
        }
        Ok(())
    }

    fn builder(&mut self, world: &World) -> GuestVmBuilder {
        self.started += 1;
        GuestVm::builder(&world.lab.dir(), &format!("vm{}", self.started)).memory_mib(160)
    }

    /// Where QEMU finds a disk: at dray, if it has it, or in its file.
    fn blockdev(&self, world: &World, host: usize, i: usize, images: &[Value]) -> String {
        let disk = &self.disks[i];
        let served = images
            .iter()
            .any(|image| image["name"] == disk.file.as_str() && image["state"] == "owner");
        let at = world.host(host);
        let protocol = if served {
            let socket = at.nbd_socket();
            let socket = socket.display();
            format!(
                "driver=nbd,server.type=unix,server.path={socket},export={},reconnect-delay=300",
                disk.file
            )
        } else {
            format!("driver=file,filename={}", at.pool().join(&disk.file).display())
        };
        if disk.kind == Kind::Growing {
            let below = protocol.split(',').map(|option| format!(",file.{option}"));
            let below: String = below.collect();
            format!("driver=qcow2,node-name=node{i},discard=unmap{below}")
        } else {
            format!("{protocol},node-name=node{i},discard=unmap")
        }
    }

    /// Starts the QEMU that waits for the guest, with what `dray prepare` printed.
    pub fn start_waiting(
        &mut self,
        world: &World,
        host: usize,
        prepared: &Value,
    ) -> Result<(), String> {
        let builder = self.builder(world);
        let builder = builder.waiting(prepared, DEVICE).map_err(|why| why.to_string())?;
        let qemu = builder.start().map_err(|why| format!("the waiting QEMU: {why}"))?;
        self.waiting = Some(Running::new(qemu, host));
        Ok(())
    }

    /// The QEMUs at a host end, as when it is rebooted.
    pub fn lose_qemus(&mut self, host: usize) {
        for qemu in [&mut self.running, &mut self.waiting].into_iter().flatten() {
            if qemu.host == host {
                // One that has ended already is as good.
                let _ = qemu.qemu.kill();
            }
        }
    }

    pub fn host(&self) -> usize {
        self.running.as_ref().map_or(0, |running| running.host)
    }
}

/// Makes a disk's image at host a, and tells dray of it unless QEMU opens it itself.
fn make(world: &World, disk: &Disk) -> Result<(), String> {
    let a = world.host(0);
    let path = a.pool().join(&disk.file);
    let failed = |why: std::io::Error| format!("{}: {why}", disk.file);
    if disk.kind == Kind::Growing {
        let raw = world.lab.dir().join("seed.raw");
        disk.flushed.create_raw(&raw).map_err(failed)?;
        let convert = ["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&path)];
        tools::run("qemu-img", &convert).map_err(failed)?;
        std::fs::remove_file(&raw).map_err(failed)?;
    } else {
        disk.flushed.create_raw(&path).map_err(failed)?;
    }
    if disk.kind == Kind::Plain {
        return Ok(());
    }
    let format = if disk.kind == Kind::Growing { "qcow2" } else { "raw" };
    let add = ["images", "add", &disk.file, text(&path), "--format", format];
    a.json(&add).map(drop).map_err(failed)
}

/// What an agent says of its images.
pub fn images(world: &World, host: usize) -> Result<Vec<Value>, String> {
    let answer = world.host(host).json(&["images"]);
    let answer = answer.map_err(|why| format!("images at {}: {why}", LETTERS[host]))?;
    Ok(answer.as_array().cloned().unwrap_or_default())
}

/// Waits until a QEMU ends, and kills it after that. Whether it ended by itself.
pub fn await_end(qemu: &mut GuestVm, patience: Duration) -> bool {
    let end = Instant::now() + patience;
    while Instant::now() < end {
        if matches!(qemu.exited(), Ok(Some(_))) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = qemu.kill();
    false
}

/// A disk's file at a host, under the name that only the owner's has.
pub fn path(world: &World, host: usize, disk: &Disk) -> PathBuf {
    world.host(host).pool().join(&disk.file)
}
