//! The machine: a QEMU whose guest has agents, the program `dray-power` and one disk.

use crate::guest::initramfs::{self, Boot, CPU, KERNEL_LINE};
use crate::guest::tools;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest that a machine may run.
const END: Duration = Duration::from_secs(500);
/// Its memory; the programs are in it twice while it boots.
const MEMORY: &str = "512";

/// What no console says: a panic of an agent, a file system that a cut has damaged.
const NEVER: [&str; 2] = ["panicked at", "EXT4-fs error"];

const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
for m in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$m.ko; done
/bin/busybox mkdir -p /a /b /run/a /run/b /tmp
/bin/busybox ip link set lo up
while [ ! -b /dev/vda3 ]; do /bin/busybox usleep 10000; done
/bin/dray-power
/bin/busybox sync
/bin/busybox poweroff -f
";

/// What is on the disk of a machine, and whether it is logged.
pub struct Machine<'a> {
    /// The disk; it is written to.
    pub disk: &'a Path,
    /// The log of that, if one is wanted.
    pub log: Option<&'a Path>,
    /// Words for `dray-power`.
    pub order: &'a str,
    /// What its console says goes here.
    pub console: &'a Path,
}

/// What is booted; says why machines cannot run here.
///
/// # Errors
/// What is missing.
pub fn boot(dray: &Path) -> Result<Boot, String> {
    let program = initramfs::guest_program("dray-power", std::env::var_os("DRAY_POWER_PROGRAM"))?;
    let small = initramfs::target_dir().join(format!("dray-{}", std::process::id()));
    let (from, to) = (dray.to_string_lossy(), small.to_string_lossy());
    tools::run("strip", &["-o", &to, &from]).map_err(|why| why.to_string())?;
    let mut files =
        vec![("bin/dray".to_owned(), small.clone()), ("bin/dray-power".to_owned(), program)];
    for library in libraries(dray).map_err(|why| format!("{}: {why}", dray.display()))? {
        files.push((library.trim_start_matches('/').to_owned(), PathBuf::from(&library)));
    }
    let files: Vec<_> = files.iter().map(|(to, from)| (to.as_str(), from.clone())).collect();
    let boot = initramfs::assemble("power", INIT, &files);
    fs::remove_file(&small).map_err(|why| format!("{to}: {why}"))?;
    boot
}

/// The paths of a program's shared libraries, its loader too.
fn libraries(program: &Path) -> io::Result<BTreeSet<String>> {
    let output = tools::run("ldd", &[&program.to_string_lossy()])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(str::to_owned).collect())
}

impl Machine<'_> {
    /// Runs it until it turns itself off; what its program said.
    ///
    /// # Errors
    /// When it does not end, or its program failed.
    pub fn run(&self, boot: &Boot) -> io::Result<String> {
        let console = File::create(self.console)?;
        let mut child =
            Qemu(self.command(boot)?.stdout(console.try_clone()?).stderr(console).spawn()?);
        let deadline = Instant::now() + END;
        while child.0.try_wait()?.is_none() {
            if Instant::now() > deadline {
                return Err(self.failed("it does not end"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let said = String::from_utf8_lossy(&fs::read(self.console)?).into_owned();
        let result = said.lines().find_map(|line| line.strip_prefix("RESULT "));
        let failed = said.lines().find_map(|line| line.strip_prefix("FAILED "));
        if let Some(bad) = said.lines().find(|line| NEVER.iter().any(|word| line.contains(word))) {
            return Err(self.failed(bad));
        }
        match result {
            Some(result) => Ok(result.trim().to_owned()),
            None => Err(self.failed(failed.unwrap_or("it ended without a word"))),
        }
    }

    fn failed(&self, why: &str) -> io::Error {
        io::Error::other(format!("the machine (its console: {}): {why}", self.console.display()))
    }

    fn command(&self, boot: &Boot) -> io::Result<Command> {
        let accel = std::env::var("DRAY_TEST_ACCEL").unwrap_or("tcg,thread=multi".to_owned());
        let file = |node: &str, path: &Path| {
            // Flushes take their place in the log when they are asked for: see `super::log`.
            let cache = "cache.no-flush=on";
            format!("driver=file,node-name={node},filename={},{cache}", path.display())
        };
        let mut command = Command::new(tools::QEMU);
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-machine", "pc", "-accel", &accel, "-cpu", CPU, "-smp", "2", "-m", MEMORY])
            .args(["-serial", "stdio"])
            .arg("-kernel")
            .arg(&boot.kernel)
            .arg("-initrd")
            .arg(&boot.initramfs)
            .args(["-append", &format!("{KERNEL_LINE} {}", self.order)])
            .args(["-blockdev", &file("data", self.disk)]);
        let mut node = "data";
        if let Some(log) = self.log {
            File::create(log)?;
            node = "logged";
            let log = file("log", log);
            let logged =
                "driver=blklogwrites,node-name=logged,file=data,log=log,log-sector-size=512";
            command.args(["-blockdev", &log, "-blockdev", logged]);
        }
        command
            .args(["-device", &format!("virtio-blk-pci,drive={node},write-cache=on")])
            .stdin(Stdio::null());
        Ok(command)
    }
}

/// A process that does not outlive its test.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        // Both fail only when it has been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
