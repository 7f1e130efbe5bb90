//! Whether a VM has the files open that lie at the paths by which QEMU knows them: a path may lead to another file
//! since (a golden image was renewed by a rename, a link leads elsewhere), or may never have led to the same one (a
//! QEMU in a mount namespace of its own).
//!
//! Behind a monitor's socket the system may show a manager that has made the socket, or carries it. Then any process
//! counts that has the file open.

use dray_api::{ErrorKind, Refusal};
use dray_host::process::QemuProcess;
use dray_image::{FileId, has_open, is_open_elsewhere};
use std::path::Path;

/// Refuses a file that the VM does not have open.
///
/// # Errors
/// That it has not, or that it cannot be seen.
pub fn check(what: &str, vm: &QemuProcess, path: &Path, file: FileId) -> Result<(), Refusal> {
    let (pid, shown) = (vm.pid, path.display());
    let (why, hint) = match u32::try_from(pid).map(|pid| has_open(pid, file)) {
        Ok(Ok(true)) => return Ok(()),
        Ok(Ok(false)) if !is_qemu(pid) && is_open_elsewhere(file).unwrap_or(false) => return Ok(()),
        Ok(Err(why)) => (
            format!(
                "the agent cannot find out which files its QEMU has open (process {pid}): {why}"
            ),
            "the agent needs to read the process's folder in /proc: run it as root",
        ),
        _ => (
            format!("{shown} is not the file that its QEMU has open (process {pid})"),
            "give the file that QEMU has open this name again, or start the vm again on the \
             present file",
        ),
    };
    Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
}

/// Whether a process is called as QEMU's are.
fn is_qemu(pid: i32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    ["qemu", "kvm"].iter().any(|prefix| name.starts_with(prefix))
}

/// The same for what lies at a path now.
///
/// # Errors
/// That nothing does, or that the VM does not have it open.
pub fn check_path(what: &str, vm: &QemuProcess, path: &Path) -> Result<(), Refusal> {
    let found = std::fs::metadata(path).map_err(|why| {
        let why = format!("{}: {why}", path.display());
        Refusal::new(ErrorKind::Conflict, what, why)
            .hint("give the file that QEMU has open this name again")
    })?;
    check(what, vm, path, FileId::of(&found))
}
