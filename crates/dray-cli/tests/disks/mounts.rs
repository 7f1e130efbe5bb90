//! File systems and block devices of their own, so that they can be full, read-only or broken. They
//! need root; a test that cannot have one says why and counts as skipped.

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command that only root may run; prints why it cannot be if so.
fn privileged(command: &mut Command) -> Option<String> {
    let user = std::fs::metadata("/proc/self").unwrap().uid();
    if user != 0 {
        println!("SKIP: {} needs root, this is user {user}", command.get_program().display());
        return None;
    }
    let done = command.output();
    let why = match done {
        Ok(done) if done.status.success() => {
            return Some(String::from_utf8_lossy(&done.stdout).trim().to_owned());
        }
        Ok(done) => String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        Err(why) => why.to_string(),
    };
    println!("SKIP: {command:?} does not work here: {why}");
    None
}

/// A mounted file system.
pub struct Mount {
    /// Where it is.
    pub path: PathBuf,
    /// What it lies on.
    _device: Option<Loop>,
}

impl Mount {
    /// A file system in memory.
    pub fn tmpfs(path: &Path, options: &str) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(path);
        privileged(&mut mount)?;
        Some(Self { path: path.to_owned(), _device: None })
    }

    /// A file system in memory that has no direct I/O.
    pub fn ramfs(path: &Path) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        privileged(Command::new("mount").args(["-t", "ramfs", "ramfs"]).arg(path))?;
        Some(Self { path: path.to_owned(), _device: None })
    }

    /// A file system on a device; it has no journal, so that only what is written to it fails.
    pub fn ext2(path: &Path, device: Loop) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        privileged(Command::new("mkfs.ext2").args(["-q", "-m", "0", "-b", "4096"]).arg(&device.0))?;
        privileged(Command::new("mount").arg(&device.0).arg(path))?;
        let _ = std::fs::remove_dir(path.join("lost+found"));
        Some(Self { path: path.to_owned(), _device: Some(device) })
    }

    /// From here on nothing can be written.
    pub fn make_read_only(&self) -> Option<()> {
        let mut mount = Command::new("mount");
        privileged(mount.args(["-o", "remount,ro"]).arg(&self.path)).map(drop)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Agents may still have files open; the directory goes with the test.
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// From here on the device over `file` fails every write behind its first `good` bytes.
pub fn break_behind(file: &File, good: u64) {
    file.set_len(good).unwrap();
    fcntl_add_seals(file, SealFlags::GROW).unwrap();
}

/// A block device over a file.
pub struct Loop(pub PathBuf);

impl Loop {
    /// Over this file.
    pub fn over(file: &Path) -> Option<Self> {
        let name = privileged(Command::new("losetup").args(["-f", "--show"]).arg(file))?;
        let device = Self(name.into());
        // The kernel keeps the flag from whoever had the device before.
        privileged(Command::new("blockdev").arg("--setrw").arg(&device.0))?;
        Some(device)
    }

    /// Over a file in memory of `size` bytes.
    pub fn in_memory(size: u64) -> Option<(Self, File)> {
        let file = File::from(memfd_create("device", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(size).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        Some((Self::over(Path::new(&path))?, file))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.0).status();
        // It stays until whoever has it open has closed it.
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}
