//! The kernel and the initramfs that test guests boot: busybox, the virtio modules of the host's
//! Debian cloud kernel, and the guest program, built here as a static binary.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::cpio::Archive;
use super::tools;

/// The modules a guest needs, in the order in which they must be loaded.
const MODULES: [&str; 7] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    DISK_DRIVER,
    "virtio_console",
];

/// The guest program loads it, when the console tells it to.
const DISK_DRIVER: &str = "virtio_blk";

/// The processor of test guests. Emulated, one with fewer features boots in a third less time: the
/// kernel patches itself for each of them.
pub(crate) const CPU: &str = "qemu64";

/// The kernel's command line. It leaves out what an emulated kernel needs long for and no test asks
/// for: tests of its ciphers, and parts that only set themselves up.
pub(crate) const KERNEL_LINE: &str = "console=ttyS0 quiet panic=-1 cryptomgr.notests \
     initcall_blacklist=cubictcp_register,init_kprobe_trace,load_system_certificate_list";

const KERNEL_PREFIX: &str = "vmlinuz-";
const KERNEL_SUFFIX: &str = "-cloud-amd64";

const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
for m in $(/bin/busybox cat /modules/order); do
    [ $m = virtio_blk ] || /bin/busybox insmod /modules/$m.ko
done
while [ ! -c /dev/vport0p1 ]; do /bin/busybox usleep 10000; done
/dray-guest
echo dray-guest ended with $?
/bin/busybox poweroff -f
";

/// What QEMU boots.
#[derive(Clone, Debug)]
pub struct Boot {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// Whether the guest has no driver of disks before it is told to load it.
    pub disks_are_late: bool,
}

/// Builds the initramfs once per process; the error says what is missing.
pub fn boot() -> Result<&'static Boot, String> {
    static BOOT: OnceLock<Result<Boot, String>> = OnceLock::new();
    BOOT.get_or_init(build).as_ref().map_err(Clone::clone)
}

/// Whether guests can be started here; prints `SKIP: reason` if not.
#[must_use]
pub fn available() -> bool {
    if !tools::available(&[tools::QEMU, "qemu-img", "qemu-io", "qemu-nbd"]) {
        return false;
    }
    match boot() {
        Ok(_) => true,
        Err(why) => {
            println!("SKIP: {why}");
            false
        }
    }
}

fn build() -> Result<Boot, String> {
    let program = guest_program("dray-guest", std::env::var_os("DRAY_GUEST_PROGRAM"))?;
    assemble("initramfs", INIT, &[("dray-guest", program)])
}

/// Builds an initramfs of this name: busybox, the modules, the program `init`, which is a script, and
/// more files under their paths.
pub(crate) fn assemble(name: &str, init: &str, files: &[(&str, PathBuf)]) -> Result<Boot, String> {
    let (kernel, release) = find_kernel()?;
    let busybox = tools::find("busybox").ok_or("busybox is not installed (busybox-static)")?;
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "proc", "sys", "modules"] {
        archive.directory(directory);
    }
    archive.device("dev/console", 5, 1);
    archive.file("init", init.as_bytes());
    archive.file("bin/busybox", &read(&busybox)?);
    for (path, from) in files {
        archive.parents(path);
        archive.file(path, &read(from)?);
    }
    let mut order = Vec::new();
    for module in MODULES {
        if let Some(content) = find_module(&release, module, &busybox)? {
            archive.file(&format!("modules/{module}.ko"), &content);
            order.push(module);
        }
    }
    archive.file("modules/order", order.join("\n").as_bytes());
    fs::create_dir_all(target_dir()).map_err(|e| format!("{}: {e}", target_dir().display()))?;
    let path = target_dir().join(format!("{name}-{release}-{}.cpio", std::process::id()));
    let shared = target_dir().join(format!("{name}-{release}.cpio"));
    fs::write(&path, archive.finish()).map_err(|e| format!("{}: {e}", path.display()))?;
    // Several test processes build it at the same time; each sees a whole file.
    fs::rename(&path, &shared).map_err(|e| format!("{}: {e}", shared.display()))?;
    let disks_are_late = order.contains(&DISK_DRIVER);
    Ok(Boot { kernel, initramfs: shared, disks_are_late })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The newest cloud kernel that has its modules.
fn find_kernel() -> Result<(PathBuf, String), String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/boot").map_err(|e| format!("/boot: {e}"))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(release) = name.strip_prefix(KERNEL_PREFIX) else { continue };
        let modules = Path::new("/lib/modules").join(release);
        if release.ends_with(KERNEL_SUFFIX) && modules.is_dir() {
            found.push((version(release), entry.path(), release.to_owned()));
        }
    }
    let (_, kernel, release) =
        found.into_iter().max().ok_or("no guest kernel (linux-image-cloud-amd64)")?;
    Ok((kernel, release))
}

fn version(release: &str) -> Vec<u64> {
    release.split(|c: char| !c.is_ascii_digit()).filter_map(|p| p.parse().ok()).collect()
}

/// A module's content; `None` when it is built into the kernel.
fn find_module(release: &str, name: &str, busybox: &Path) -> Result<Option<Vec<u8>>, String> {
    let root = Path::new("/lib/modules").join(release);
    let file = format!("{name}.ko");
    if let Some(path) = search(&root.join("kernel/drivers"), &file) {
        return unpack(&path, busybox).map(Some);
    }
    let builtin = fs::read_to_string(root.join("modules.builtin")).unwrap_or_default();
    if builtin.lines().any(|line| line.ends_with(&format!("/{file}"))) {
        return Ok(None);
    }
    Err(format!("kernel {release} has no module {name}"))
}

fn search(dir: &Path, file: &str) -> Option<PathBuf> {
    let mut below = Vec::new();
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            below.push(path);
        } else if entry.file_name().to_string_lossy().starts_with(file) {
            return Some(path);
        }
    }
    below.iter().find_map(|dir| search(dir, file))
}

fn unpack(path: &Path, busybox: &Path) -> Result<Vec<u8>, String> {
    let mut command = match path.extension().and_then(OsStr::to_str) {
        Some("ko") => return read(path),
        Some("xz") => {
            let mut command = Command::new(busybox);
            command.arg("xzcat");
            command
        }
        Some("zst") => {
            let mut command = Command::new("zstd");
            command.arg("-dcq");
            command
        }
        _ => return Err(format!("{}: unknown module format", path.display())),
    };
    let output = command.arg(path).output().map_err(|e| format!("{}: {e}", path.display()))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("{}: could not be unpacked", path.display()))
    }
}

/// Where what is built for guests lies.
pub(crate) fn target_dir() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| workspace().join("target")).join("guest")
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds a program of guests, or takes the one that is `given`.
pub(crate) fn guest_program(name: &str, given: Option<OsString>) -> Result<PathBuf, String> {
    if let Some(path) = given {
        return Ok(path.into());
    }
    let triple = "x86_64-unknown-linux-gnu";
    let dir = target_dir();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(workspace())
        // The flags of the outer build are not those of a program for another machine.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .args(["rustc", "--quiet", "--release", "--package", "dray-guest", "--bin", name])
        .args(["--target", triple, "--target-dir"])
        .arg(&dir)
        .args(["--", "-C", "target-feature=+crt-static", "-C", "strip=symbols"])
        .output()
        .map_err(|e: io::Error| format!("cargo could not be started: {e}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} does not build: {said}"));
    }
    Ok(dir.join(triple).join("release").join(name))
}
