//! Starts a QEMU for a test and ends it.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::console::Console;
use super::saved::{self, Shape};
use super::{initramfs, tools};
use serde_json::Value;

/// How long QEMU may take to open its sockets, and to leave when asked.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a guest may take to boot on a busy machine; 3 s on an idle one.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// The kernel's check of the timer counts ticks for some milliseconds of real time, and panics on a machine
/// that is too busy to emulate them.
const NO_TIMER_CHECK: &str = "no_timer_check";
/// What a guest's memory has beyond whole MiB. An emulating QEMU before 9.0 misses guest stores while
/// it moves memory whose size is a multiple of 256 KiB: where it takes dirty bits by the word it
/// leaves the pages writable unseen, and some guests fall over at the target, with dray or without
/// (the example `qemu_alone` counts them). Page by page, as it does for other sizes, it is right.
const ODD_KIB: u32 = 8;
/// The first PCI slot of the disks; fixed, so that source and target agree.
const FIRST_DISK_SLOT: usize = 6;

/// A virtio disk.
#[derive(Clone, Debug)]
pub struct GuestDisk {
    /// The device's id, by which disks of source and target pair.
    pub qdev: String,
    /// The block node it sits on.
    pub node: String,
    /// More device options, `,rerror=stop`.
    pub options: String,
}

/// What to start.
#[derive(Clone, Debug)]
pub struct GuestVmBuilder {
    dir: PathBuf,
    name: String,
    memory_mib: u32,
    blockdevs: Vec<String>,
    disks: Vec<GuestDisk>,
    args: Vec<String>,
    incoming: bool,
    bare: bool,
    booted: bool,
    user: Option<u32>,
}

/// A running QEMU; dropping it kills the process.
pub struct GuestVm {
    child: Child,
    dir: PathBuf,
    name: String,
    console: Option<Console>,
}

impl GuestVm {
    /// Describes a VM whose sockets and logs are in `dir` and begin with `name`.
    pub fn builder(dir: &Path, name: &str) -> GuestVmBuilder {
        GuestVmBuilder {
            dir: dir.to_owned(),
            name: name.to_owned(),
            memory_mib: 256,
            blockdevs: Vec::new(),
            disks: Vec::new(),
            args: Vec::new(),
            incoming: false,
            bare: false,
            booted: false,
            user: None,
        }
    }

    /// The QMP socket.
    pub fn qmp_path(&self) -> PathBuf {
        self.dir.join(format!("{}.qmp", self.name))
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The guest program's console.
    ///
    /// # Panics
    /// For a VM without a guest ([`GuestVmBuilder::bare`]).
    pub fn console(&mut self) -> &mut Console {
        self.console.as_mut().expect("this vm has no guest")
    }

    /// Waits until the guest program is ready, with its disks.
    pub fn wait_ready(&mut self) -> io::Result<()> {
        self.console().send("disks")?;
        self.wait_for("READY")
    }

    /// Waits until the guest program runs; it knows no disks yet.
    pub(super) fn wait_booted(&mut self) -> io::Result<()> {
        self.wait_for("BOOTED")
    }

    fn wait_for(&mut self, word: &str) -> io::Result<()> {
        let said = self.console().wait_for(BOOT_TIMEOUT, |line| line == word);
        said.map(|_| ())
            .map_err(|e| io::Error::other(format!("guest did not boot: {e}: {}", self.log())))
    }

    /// What QEMU and the guest's kernel said.
    pub fn log(&self) -> String {
        let read = |what: &str| {
            let path = self.dir.join(format!("{}.{what}", self.name));
            String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
        };
        format!("{}{}", read("said"), read("serial"))
    }

    /// How QEMU ended, if it did.
    pub fn exited(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until QEMU leaves by itself.
    pub fn wait_exit(&mut self, timeout: Duration) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("{} is still running", self.name)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills QEMU (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Stops QEMU itself (SIGSTOP): it answers nothing until [`go_on`](Self::go_on).
    pub fn pause(&self) -> io::Result<()> {
        self.signal(rustix::process::Signal::STOP)
    }

    /// Lets a stopped QEMU go on.
    pub fn go_on(&self) -> io::Result<()> {
        self.signal(rustix::process::Signal::CONT)
    }

    fn signal(&self, signal: rustix::process::Signal) -> io::Result<()> {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal)?;
        Ok(())
    }

    fn connect_console(&mut self) -> io::Result<()> {
        let path = self.dir.join(format!("{}.console", self.name));
        self.console = Some(Console::connect(&path)?);
        Ok(())
    }

    fn wait_for_socket(&mut self, path: &Path) -> io::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !is_listening(self.child.id(), path) {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!("qemu ended: {status}: {}", self.log())));
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("qemu did not start: {}", self.log())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Whether the process listens on a socket: between binding and listening a client is refused, and
/// another process may still listen on one that had the same name. Connecting to find out would take
/// QMP's only place.
fn is_listening(pid: u32, path: &Path) -> bool {
    const ACCEPTS: u64 = 0x1_0000;
    let sockets = fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default();
    sockets.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let flags = fields.get(3).and_then(|f| u64::from_str_radix(f, 16).ok()).unwrap_or(0);
        flags & ACCEPTS != 0
            && fields.get(7).is_some_and(|name| Path::new(name) == path)
            && fields.get(6).is_some_and(|inode| holds_socket(pid, inode))
    })
}

/// Whether one of the process's descriptors is the socket with this number.
fn holds_socket(pid: u32, inode: &str) -> bool {
    let wanted = format!("socket:[{inode}]");
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors
        .flatten()
        .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == Path::new(&wanted)))
}

impl Drop for GuestVm {
    fn drop(&mut self) {
        // Both fail only when QEMU has already been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl GuestVmBuilder {
    /// The guest's memory, 256 MiB unless set, and 8 KiB more.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Adds a `-blockdev` argument.
    #[must_use]
    pub fn blockdev(mut self, argument: impl Into<String>) -> Self {
        self.blockdevs.push(argument.into());
        self
    }

    /// Adds a virtio disk on a block node; the guest sees vda, vdb … in this order.
    #[must_use]
    pub fn disk(self, qdev: &str, node: &str) -> Self {
        self.disk_with(qdev, node, "")
    }

    /// Adds a virtio disk with more device options (`,rerror=stop`).
    #[must_use]
    pub fn disk_with(mut self, qdev: &str, node: &str, options: &str) -> Self {
        let (qdev, node, options) = (qdev.to_owned(), node.to_owned(), options.to_owned());
        self.disks.push(GuestDisk { qdev, node, options });
        self
    }

    /// Adds any other argument.
    #[must_use]
    pub fn arg(mut self, argument: &str) -> Self {
        self.args.push(argument.to_owned());
        self
    }

    /// The VM waits for a migration, and stays stopped after it.
    #[must_use]
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// The same, with the nodes that `dray prepare` has printed and their disks, which get these device `options`.
    ///
    /// # Errors
    /// What is not as it prints it.
    pub fn waiting(self, prepared: &Value, options: &str) -> io::Result<Self> {
        let wrong =
            |what: &str| io::Error::other(format!("{what} in what was prepared: {prepared}"));
        let mut builder = self.incoming();
        for image in prepared["images"].as_array().ok_or_else(|| wrong("no images"))? {
            let lines = image["blockdev"].as_array().map_or(&[][..], Vec::as_slice);
            let Some(top) = lines.last().and_then(Value::as_str) else { continue };
            for line in lines.iter().filter_map(Value::as_str) {
                builder = builder.blockdev(line);
            }
            let top: Value = serde_json::from_str(top).map_err(io::Error::other)?;
            let qdev = image["device"].as_str().ok_or_else(|| wrong("no device"))?;
            let node = top["node-name"].as_str().ok_or_else(|| wrong("no node"))?;
            builder = builder.disk_with(qdev, node, options);
        }
        Ok(builder)
    }

    /// No kernel, no console: a stopped QEMU with disks, up in a few hundred milliseconds.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.bare = true;
        self
    }

    /// The guest goes on from a state that was saved when one like it had booted: it is ready in a tenth of
    /// the time. Its QEMU has received a migration, as one that was moved before. For a VM whose devices are its
    /// disks and nothing else.
    #[must_use]
    pub fn booted(mut self) -> Self {
        self.booted = true;
        self
    }

    /// QEMU runs as this user, in the group of the same number; who starts it must be root.
    #[must_use]
    pub fn user(mut self, user: u32) -> Self {
        self.user = Some(user);
        self
    }

    /// The command line.
    pub fn command(&self) -> io::Result<Command> {
        let path = |what: &str| self.dir.join(format!("{}.{what}", self.name));
        let socket = |what: &str| format!("{},server=on,wait=off", path(what).display());
        let accel = std::env::var("DRAY_TEST_ACCEL").unwrap_or("tcg,thread=multi".to_owned());
        let mut command = Command::new(tools::QEMU);
        command
            .args(["-name", &self.name, "-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-machine", "pc", "-accel", &accel, "-cpu", initramfs::CPU])
            .args([
                "-m",
                &format!("{}k", self.memory_mib * 1024 + ODD_KIB),
                "-qmp",
                &format!("unix:{}", socket("qmp")),
            ]);
        if !self.bare {
            let boot = initramfs::boot().map_err(io::Error::other)?;
            command.arg("-kernel").arg(&boot.kernel).arg("-initrd").arg(&boot.initramfs);
            let line = format!("{} {NO_TIMER_CHECK}", initramfs::KERNEL_LINE);
            command.args(["-append", &line, "-no-reboot"]);
            command.args(["-serial", &format!("file:{}", path("serial").display())]);
            command.args(["-device", "virtio-serial-pci,id=ports,addr=0x5"]);
            command.args(["-chardev", &format!("socket,id=console,path={}", socket("console"))]);
            command.args(["-device", "virtserialport,chardev=console,name=dray"]);
        }
        for blockdev in &self.blockdevs {
            command.args(["-blockdev", blockdev]);
        }
        for (i, disk) in self.disks.iter().enumerate() {
            let slot = FIRST_DISK_SLOT + i;
            let GuestDisk { qdev, node, options } = disk;
            let device = format!("virtio-blk-pci,id={qdev},drive={node},addr={slot:#x}{options}");
            command.args(["-device", &device]);
        }
        if self.incoming {
            command.args(["-incoming", "defer"]);
        }
        if self.incoming || self.bare {
            command.arg("-S");
        }
        command.args(&self.args);
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        Ok(command)
    }

    /// What a guest that need not boot goes on from.
    fn saved_state(&self) -> io::Result<Option<File>> {
        if !self.booted {
            return Ok(None);
        }
        saved::state(Shape { memory_mib: self.memory_mib, disks: self.disks.len() })
    }

    /// Starts QEMU and connects the console; [`GuestVm::wait_ready`] waits for the boot.
    pub fn start(&self) -> io::Result<GuestVm> {
        let mut command = self.command()?;
        command.stdin(Stdio::null());
        if let Some(state) = self.saved_state()? {
            command.args(["-incoming", "fd:0"]).stdin(state);
        }
        self.start_with(command)
    }

    /// The same with another command, which starts a QEMU with the sockets of this one in its own process.
    pub fn start_with(&self, mut command: Command) -> io::Result<GuestVm> {
        let said = File::create(self.dir.join(format!("{}.said", self.name)))?;
        for socket in ["qmp", "console"] {
            // A VM of the same name may have run before in this test.
            let _ = fs::remove_file(self.dir.join(format!("{}.{socket}", self.name)));
        }
        let child = command.stdout(said.try_clone()?).stderr(said).spawn()?;
        let (dir, name) = (self.dir.clone(), self.name.clone());
        let mut vm = GuestVm { child, dir, name, console: None };
        let qmp = vm.qmp_path();
        vm.wait_for_socket(&qmp)?;
        if !self.bare {
            vm.wait_for_socket(&self.dir.join(format!("{}.console", self.name)))?;
            vm.connect_console()?;
        }
        Ok(vm)
    }
}
