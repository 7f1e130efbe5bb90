//! The command line of a running QEMU, and what it becomes for the QEMU that waits for the same VM at
//! another host.
//!
//! * [`option`]: options and the fields of their values.
//! * [`judge`]: what cannot be repeated, and what an option needs there.

mod judge;
mod option;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::qmp::Qmp;
use option::Opt;

/// Options that say how QEMU begins: the one that waits begins otherwise, and as the user that the other has become.
const BEGINNINGS: [&str; 5] = ["-S", "-incoming", "-loadvm", "-preconfig", "-runas"];
/// A longer command line is not read, in bytes, nor one with more options.
const MAX_BYTES: u64 = 1 << 20;
const MAX_OPTIONS: usize = 4096;

/// How a process was started.
#[derive(Clone, Debug)]
pub struct CommandLine {
    program: String,
    options: Vec<Opt>,
    directory: Option<PathBuf>,
}

/// What the command line of a running QEMU does not tell.
#[derive(Clone, Debug, Default)]
pub struct Running {
    /// The machine type with its version (`pc-q35-7.2`), where the command line may have an alias.
    pub machine: Option<String>,
    /// The ids of all devices that have one.
    pub devices: BTreeSet<String>,
}

impl Running {
    /// Asks QEMU.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn of(qmp: &Qmp) -> Result<Self> {
        let devices = qmp.execute("qom-list", json!({ "path": "/machine/peripheral" })).await?;
        let of_device =
            |child: &&Value| child["type"].as_str().is_some_and(|kind| kind.starts_with("child<"));
        let devices = devices.as_array().into_iter().flatten().filter(of_device);
        let devices = devices.filter_map(|child| Some(child["name"].as_str()?.to_owned()));
        let kind = json!({ "path": "/machine", "property": "type" });
        let kind = qmp.execute("qom-get", kind).await?;
        let machine = kind.as_str().and_then(|kind| kind.strip_suffix("-machine"));
        Ok(Self { machine: machine.map(str::to_owned), devices: devices.collect() })
    }
}

/// A disk that moves.
#[derive(Clone, Debug)]
pub struct MovedDisk {
    /// The id of its device.
    pub device: String,
    /// The values of the `-blockdev` options that take the place of the old ones; the last is the node that the
    /// device is on.
    pub blockdevs: Vec<String>,
}

/// The command line of the QEMU that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// The program.
    pub program: String,
    /// Each option, and its value if it has one.
    pub options: Vec<(String, Option<String>)>,
    /// What has to be done by hand: each is a sentence about something that was left out.
    pub left_out: Vec<String>,
    /// Files that QEMU reads.
    pub reads: Vec<PathBuf>,
    /// Sockets that it makes.
    pub makes: Vec<PathBuf>,
    /// Where it has to be started, when one of its file names is relative.
    pub directory: Option<PathBuf>,
}

impl CommandLine {
    /// That of a process of this host.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of_process(pid: i32) -> Result<Self> {
        let path = format!("/proc/{pid}/cmdline");
        let mut bytes = Vec::new();
        let read = File::open(&path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
        read.map_err(|e| {
            let what = format!("could not read qemu's command line from {path}");
            Error::with_source(ErrorKind::NotFound, what, e)
        })?;
        let refused = |why: &str| Error::new(ErrorKind::Refused, format!("{path}: {why}"));
        let text = String::from_utf8(bytes).map_err(|_| refused("it is not utf-8"))?;
        let args: Vec<String> = text.split_terminator('\0').map(str::to_owned).collect();
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
        let line = Self { directory, ..Self::of_arguments(&args) };
        if text.len() as u64 == MAX_BYTES || line.options.len() > MAX_OPTIONS {
            return Err(refused("it is longer than any of a qemu"));
        }
        match line.is_of_qemu() {
            true => Ok(line),
            false => Err(refused("its program is not called like a qemu")),
        }
    }

    /// What a QEMU says that it was started with is repeated at another host, so it must at least be one by name.
    fn is_of_qemu(&self) -> bool {
        let name = Path::new(&self.program).file_name().unwrap_or_default().to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
        (name.starts_with("qemu-") || name == "kvm" || name == "qemu")
            && self.program.chars().all(plain)
    }

    /// Understands a program and its arguments.
    fn of_arguments(args: &[String]) -> Self {
        let (program, args) = args
            .split_first()
            .map_or((String::new(), args), |(program, args)| (program.clone(), args));
        Self { program, options: Opt::all(args), directory: None }
    }

    /// What starts a QEMU that waits for this VM: the same, but that the disks that move are on other nodes,
    /// and the monitor `at` is a socket with another path, `there`.
    pub fn waiting(&self, running: &Running, disks: &[MovedDisk], monitor: Monitor<'_>) -> Waiting {
        let mut waiting = Waiting { program: self.program.clone(), ..Waiting::default() };
        let gone = self.nodes_of(disks);
        let (mut placed, mut has_machine) = (false, false);
        for opt in &self.options {
            if BEGINNINGS.contains(&opt.name.as_str()) {
                continue;
            }
            let is_device = opt.name == "-device";
            if is_device && !placed {
                waiting.place(disks);
                placed = true;
            }
            if gone.has(opt) || is_device && is_unplugged(opt, running) {
                continue;
            }
            has_machine |= matches!(opt.name.as_str(), "-machine" | "-M");
            let opt = monitor.moved(&pinned(&on_new_node(opt, disks), running));
            match judge::cannot(&opt) {
                Some(why) => waiting.left_out.push(why),
                None => waiting.add(&opt),
            }
        }
        if !placed {
            waiting.place(disks);
        }
        if let Some(machine) = running.machine.as_ref().filter(|_| !has_machine) {
            waiting.options.insert(0, ("-machine".to_owned(), Some(machine.clone())));
        }
        waiting.options.push(("-S".to_owned(), None));
        waiting.options.push(("-incoming".to_owned(), Some("defer".to_owned())));
        waiting.left_out.extend(self.plugged(running, disks));
        let paths = waiting.reads.iter().chain(&waiting.makes);
        waiting.directory =
            self.directory.clone().filter(|_| paths.into_iter().any(|p| p.is_relative()));
        waiting
    }

    /// The nodes that the disks that move are on, down to their files, and their old style drives.
    fn nodes_of(&self, disks: &[MovedDisk]) -> Gone {
        let mut gone = Gone::default();
        for disk in disks {
            gone.nodes.extend(disk.blockdevs.iter().filter_map(|value| node_name(value)));
            let device = self.options.iter().find(|opt| is_device_of(opt, disk));
            gone.nodes.extend(device.and_then(|device| device.get("drive")));
        }
        let named: Vec<_> = self
            .options
            .iter()
            .filter(|opt| opt.name == "-blockdev")
            .map(names_and_values)
            .collect();
        let known: BTreeSet<&String> = named.iter().flat_map(|(names, _)| names).collect();
        // Until no node that is gone names another.
        loop {
            let before = gone.nodes.len();
            for (names, values) in &named {
                if names.iter().any(|name| gone.nodes.contains(name)) {
                    let below = values.iter().filter(|value| known.contains(value));
                    gone.nodes.extend(below.cloned());
                }
            }
            if gone.nodes.len() == before {
                return gone;
            }
        }
    }

    /// Devices that were added while the VM ran.
    fn plugged(&self, running: &Running, disks: &[MovedDisk]) -> Vec<String> {
        let devices = self.options.iter().filter(|opt| opt.name == "-device");
        let given: BTreeSet<String> = devices.filter_map(|opt| opt.get("id")).collect();
        let added = running.devices.difference(&given);
        let sentence = |id: &String| {
            let disk = disks.iter().find(|disk| disk.device == *id);
            let drive =
                disk.and_then(top_node).map_or(String::new(), |top| format!(" and drive={top}"));
            format!(
                "the device {id} was added while the vm ran: write a -device with id={id}{drive} for it"
            )
        };
        added.map(sentence).collect()
    }
}

/// The QMP socket by which dray reaches the VM here, and its path at the target.
#[derive(Clone, Copy, Debug)]
pub struct Monitor<'a> {
    /// Here.
    pub here: &'a Path,
    /// There; as here when absent.
    pub there: Option<&'a Path>,
}

impl Monitor<'_> {
    /// The option with the path that the socket has there.
    fn moved(&self, opt: &Opt) -> Opt {
        let (Some(there), Some(path)) = (self.there, judge::makes(opt)) else { return opt.clone() };
        if path != self.here {
            return opt.clone();
        }
        let (here, there) = (self.here.to_string_lossy(), there.to_string_lossy());
        match opt.name == "-chardev" {
            true => opt.with("path", &there),
            false => {
                Opt { name: opt.name.clone(), value: Some(opt.text().replacen(&*here, &there, 1)) }
            }
        }
    }
}

/// Block nodes and drives that the QEMU that waits has otherwise.
#[derive(Default)]
struct Gone {
    nodes: BTreeSet<String>,
}

impl Gone {
    fn has(&self, opt: &Opt) -> bool {
        match opt.name.as_str() {
            "-blockdev" => names_and_values(opt).0.iter().any(|name| self.nodes.contains(name)),
            "-drive" => {
                let names = [opt.get("id"), opt.get("node-name")];
                names.into_iter().flatten().any(|name| self.nodes.contains(&name))
            }
            _ => false,
        }
    }
}

impl Waiting {
    fn place(&mut self, disks: &[MovedDisk]) {
        let values = disks.iter().flat_map(|disk| &disk.blockdevs).cloned();
        self.options.extend(values.map(|value| ("-blockdev".to_owned(), Some(value))));
    }

    fn add(&mut self, opt: &Opt) {
        self.reads.extend(judge::reads(opt));
        self.makes.extend(judge::makes(opt));
        self.options.push((opt.name.clone(), opt.value.clone()));
    }
}

/// The names that a `-blockdev` gives to its nodes, and all its other values.
fn names_and_values(opt: &Opt) -> (Vec<String>, Vec<String>) {
    let is_name = |key: &str| key == "node-name" || key.ends_with(".node-name");
    let (names, values): (Vec<_>, Vec<_>) =
        opt.fields().into_iter().partition(|(key, _)| is_name(key));
    let texts = |fields: Vec<(String, String)>| fields.into_iter().map(|(_, text)| text).collect();
    (texts(names), texts(values))
}

fn node_name(blockdev: &str) -> Option<String> {
    let value: Value = serde_json::from_str(blockdev).ok()?;
    Some(value["node-name"].as_str()?.to_owned())
}

fn top_node(disk: &MovedDisk) -> Option<String> {
    node_name(disk.blockdevs.last()?)
}

/// Whether the option is the disk's device: by its id, or by the node that it is on.
fn is_device_of(opt: &Opt, disk: &MovedDisk) -> bool {
    let top = top_node(disk);
    opt.name == "-device"
        && (opt.get("id").as_ref() == Some(&disk.device)
            || top.is_some() && opt.get("drive") == top)
}

fn is_unplugged(opt: &Opt, running: &Running) -> bool {
    opt.get("id").is_some_and(|id| !running.devices.contains(&id))
}

/// A device of a disk that moves is on its new node.
fn on_new_node(opt: &Opt, disks: &[MovedDisk]) -> Opt {
    let disk = disks.iter().find(|disk| is_device_of(opt, disk));
    match disk.and_then(top_node) {
        Some(top) if opt.get("drive").as_ref() != Some(&top) => opt.with("drive", &top),
        _ => opt.clone(),
    }
}

/// The machine is of the version that runs: what an alias stands for depends on QEMU's version.
fn pinned(opt: &Opt, running: &Running) -> Opt {
    let Some(machine) = &running.machine else { return opt.clone() };
    if !matches!(opt.name.as_str(), "-machine" | "-M") {
        return opt.clone();
    }
    let unnamed = opt.fields().first().is_some_and(|(key, _)| key.is_empty());
    opt.with(if unnamed { "" } else { "type" }, machine)
}

#[cfg(test)]
mod tests;
