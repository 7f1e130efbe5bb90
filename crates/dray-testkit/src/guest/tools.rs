//! External programs that tests use, and how a test says that it cannot run without one.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The QEMU that runs test guests.
pub const QEMU: &str = "qemu-system-x86_64";

/// Where a program is, by `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|p| p.is_file())
}

/// Returns whether all `programs` are installed; prints `SKIP: reason` if not.
#[must_use]
pub fn available(programs: &[&str]) -> bool {
    for program in programs {
        if find(program).is_none() {
            println!("SKIP: {program} is not installed");
            return false;
        }
    }
    true
}

/// Runs a program to its end; an exit code other than 0 is an error that holds what it printed.
pub fn run(program: &str, args: &[&str]) -> io::Result<Output> {
    let output = Command::new(program).args(args).output()?;
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{program} {}: {}: {said}", args.join(" "), output.status)))
}

/// Whether somebody who asks nobody can use an image's file.
pub fn opens(file: &Path) -> bool {
    run("qemu-img", &["info", "-U", &file.to_string_lossy()]).is_ok()
}

/// Writes what a qcow2 holds into the raw file `to`, also while somebody has it open.
pub fn qcow2_as_raw(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
    run("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", &from, &to]).map(drop)
}
