//! A guest's disk: its file, and how QEMU is told of it.

use crate::world::{World, text};
use dray_testkit::guest::{Bystander, tools};
use dray_testkit::random::Random;
use serde_json::Value;

/// Bytes of a disk, and of them those that hold something from the start.
const SIZE: u64 = 32 << 20;
const SEEDED: u64 = 6 << 20;

/// What is in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Raw,
    Qcow2,
}

/// Where whoever starts the VM has its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// In a file, which QEMU opens.
    File,
    /// On dray's socket.
    Dray,
}

pub struct Disk {
    /// The name of its file in the pools.
    pub file: String,
    pub format: Format,
    pub home: Home,
    /// The backing file of its qcow2, which holds what the disk began with.
    base: Option<String>,
    /// Its name in the guest, and of its device in QEMU.
    pub device: String,
    pub qdev: String,
    /// What was flushed.
    pub flushed: Bystander,
}

impl Format {
    pub fn word(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl Disk {
    /// The `nth` disk of a VM, and its file at a host. `image` is its number in what it holds.
    pub fn make(
        world: &World,
        host: usize,
        random: &mut Random,
        vm: usize,
        nth: usize,
    ) -> Result<Self, String> {
        // Both formats are met in each walk.
        let format = if (vm + nth).is_multiple_of(2) { Format::Raw } else { Format::Qcow2 };
        let mut disk = Self {
            file: format!("vm{vm}-{nth}.{}", format.word()),
            format,
            home: random.pick(&[Home::File, Home::File, Home::Dray]),
            base: None,
            device: format!("vd{}", char::from(b'a' + nth as u8)),
            qdev: format!("disk{nth}"),
            flushed: Bystander::new((10 * (vm + 1) + nth) as u64, SIZE, SEEDED),
        };
        if format == Format::Qcow2 && random.chance(50) {
            (disk.base, disk.home) = (Some(format!("vm{vm}-{nth}-base.qcow2")), Home::File);
        }
        disk.fill(world, host).map_err(|why| format!("{}: {why}", disk.file))?;
        Ok(disk)
    }

    fn fill(&self, world: &World, host: usize) -> std::io::Result<()> {
        let path = world.file(host, &self.file);
        if self.format == Format::Qcow2 {
            let raw = world.lab.dir().join("seed.raw");
            self.flushed.create_raw(&raw)?;
            let whole = self.base.as_ref().map_or(path.clone(), |base| world.file(host, base));
            let convert = ["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&whole)];
            tools::run("qemu-img", &convert)?;
            if let Some(base) = &self.base {
                // By a name that is right at either host.
                let create = ["create", "-f", "qcow2", "-b", base, "-F", "qcow2", text(&path)];
                tools::run("qemu-img", &create)?;
            }
            std::fs::remove_file(&raw)?;
        } else {
            self.flushed.create_raw(&path)?;
        }
        if self.home == Home::Dray {
            let add = ["images", "add", &self.file, text(&path), "--format", self.format.word()];
            world.host(host).json(&add)?;
        }
        Ok(())
    }

    /// The `-blockdev` of a QEMU that is started at a host.
    pub fn blockdev(&self, world: &World, host: usize, nth: usize) -> String {
        let protocol = match self.home {
            Home::Dray => format!(
                "driver=nbd,server.type=unix,server.path={},export={},reconnect-delay=300",
                text(&world.host(host).nbd_socket()),
                self.file
            ),
            Home::File => format!("driver=file,filename={}", text(&world.file(host, &self.file))),
        };
        if self.format == Format::Qcow2 {
            let below: String = protocol.split(',').map(|one| format!(",file.{one}")).collect();
            // A file finds its backing file by itself.
            let on_dray = self.base.is_some() && self.home == Home::Dray;
            let backing = if on_dray { format!(",backing=base{nth}") } else { String::new() };
            format!("driver=qcow2,node-name=node{nth},discard=unmap{below}{backing}")
        } else {
            format!("{protocol},node-name=node{nth},discard=unmap")
        }
    }

    /// The `-blockdev` of its backing file, where QEMU does not find that by itself.
    pub fn base_blockdev(&self, world: &World, host: usize, nth: usize) -> Option<String> {
        let base = self.base.as_ref().filter(|_| self.home == Home::Dray)?;
        let file = world.file(host, base);
        Some(format!(
            "driver=qcow2,node-name=base{nth},read-only=on,file.driver=file,file.filename={}",
            text(&file)
        ))
    }

    /// Where the disk is after a move that was prepared so: dray has it there, or QEMU.
    pub fn moved(&mut self, world: &World, host: usize, prepared: &Value) -> Result<(), String> {
        let images = prepared["images"].as_array().ok_or("no images")?;
        // Only what QEMU is to open, not what is below it.
        let opened =
            |image: &Value| image["blockdev"].as_array().is_some_and(|all| !all.is_empty());
        let own = |image: &&Value| image["device"] == self.qdev.as_str() && opened(image);
        let image = images.iter().find(own);
        let export = image.and_then(|image| image["export"].as_str()).ok_or("no such device")?;
        if export != self.file {
            self.flattened(world, host, export);
        }
        self.find_home(world, host)
    }

    /// A disk that was flattened is raw at the target, unless that has made a qcow2 of it.
    fn flattened(&mut self, world: &World, host: usize, export: &str) {
        if !world.file(host, &self.file).exists() {
            self.base = None;
            self.file = export.to_owned();
            self.format = Format::Raw;
        }
    }

    /// What the manager of the VM writes down: it starts the VM as it runs now.
    pub fn find_home(&mut self, world: &World, host: usize) -> Result<(), String> {
        let owned = world.image(host, &self.file)?["state"] == "owner";
        self.home = if owned { Home::Dray } else { Home::File };
        Ok(())
    }
}
