//! Whether a VM has the files open that lie at the paths by which QEMU knows them: a path may lead to another file
//! since (a golden image was renewed by a rename, a link leads elsewhere, two disks have exchanged their names), or
//! may never have led to the same one (a QEMU in a mount namespace of its own).
//!
//! * [`check`] and [`check_path`] only look: whether the VM has the file open at all. It may be another disk's.
//! * [`check_node`] and [`check_layer`] ask QEMU for a [`sign`], so that they know which file is under one node.
//!   Whatever makes dray write or copy a file in the place of a node's needs these.
//!
//! Where QEMU gives no sign, as on a node with `locking=off`, the file has to be the one that is left when the files of
//! all other nodes are known.
//!
//! Behind a monitor's socket the system may show a manager that has made the socket, or carries it. Then any process
//! counts that has the file open.

use dray_api::{ErrorKind, Refusal};
use dray_host::process::{QemuProcess, has_walls};
use dray_image::{FileId, files_locked_at, has_open, is_open_elsewhere, open_files};
use dray_qemu::adopt::node_of;
use dray_qemu::sign::{self, SIGNS};
use dray_qemu::{LayerPlan, Qmp};
use std::collections::BTreeMap;
use std::path::Path;

use crate::qemu_error;

/// A descriptor of a process.
type Descriptor = (u32, u32);
/// Open files by descriptor.
type Files = BTreeMap<Descriptor, FileId>;

/// What is under one node of QEMU.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Found {
    /// This file, by the descriptors that lead to it.
    File(FileId, Vec<Descriptor>),
    /// QEMU gave no sign of it.
    Unknown,
}

/// Refuses a file that the VM does not have open.
///
/// # Errors
/// That it has not, or that it cannot be seen.
pub fn check(what: &str, vm: &QemuProcess, path: &Path, file: FileId) -> Result<(), Refusal> {
    let pid = vm.pid;
    let (why, hint) = match u32::try_from(pid).map(|pid| has_open(pid, file)) {
        Ok(Ok(true)) => return Ok(()),
        Ok(Ok(false)) if is_manager(vm) && is_open_elsewhere(file).unwrap_or(false) => {
            return Ok(());
        }
        Ok(Err(why)) => (
            format!(
                "the agent cannot find out which files its QEMU has open (process {pid}): {why}"
            ),
            "the agent needs to read the process's folder in /proc: run it as root",
        ),
        _ => return Err(other_file(what, vm, path, "")),
    };
    Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
}

fn other_file(what: &str, vm: &QemuProcess, path: &Path, as_what: &str) -> Refusal {
    let (shown, pid) = (path.display(), vm.pid);
    let why = format!("{shown} is not the file that its QEMU has open{as_what} (process {pid})");
    Refusal::new(ErrorKind::Conflict, what, why).hint(
        "give the file that QEMU has open this name again, or start the vm again on the present \
         file",
    )
}

/// Whether the process behind the monitor is a manager's, and the disks are open in another one: it is root's or the
/// agent's own, and not called as QEMU's are. Anybody may call himself what he likes; of who has less rights than the
/// agent only what he has open himself counts.
fn is_manager(vm: &QemuProcess) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{}/comm", vm.pid)).unwrap_or_default();
    vm.user().is_some_and(|user| !has_walls(user))
        && !["qemu", "kvm"].iter().any(|prefix| name.starts_with(prefix))
}

/// The same for what lies at a path now.
///
/// # Errors
/// That nothing does, or that the VM does not have it open.
pub fn check_path(what: &str, vm: &QemuProcess, path: &Path) -> Result<(), Refusal> {
    check(what, vm, path, file_at(what, path)?)
}

fn file_at(what: &str, path: &Path) -> Result<FileId, Refusal> {
    let found = std::fs::metadata(path).map_err(|why| {
        let why = format!("{}: {why}", path.display());
        Refusal::new(ErrorKind::Conflict, what, why)
            .hint("give the file that QEMU has open this name again")
    })?;
    Ok(FileId::of(&found))
}

/// Refuses a layer whose node has another file than `file`, which lies at the layer's path; without one, what lies
/// there now. The layer is on its file.
///
/// # Errors
/// That it has, or that it cannot be found out.
pub async fn check_layer(
    what: &str,
    vm: &QemuProcess,
    qmp: &Qmp,
    plan: &LayerPlan,
    file: Option<FileId>,
) -> Result<(), Refusal> {
    let path = plan.path();
    let file = file.map_or_else(|| file_at(what, &path), Ok)?;
    let node = node_of(qmp, plan).await.map_err(|why| qemu_error(what, &why))?;
    check_node(what, vm, qmp, &node, (&path, file)).await
}

/// Refuses a file, which lies at a path, that is not the one under a node of QEMU.
///
/// # Errors
/// That it is not, or that it cannot be found out.
pub async fn check_node(
    what: &str,
    vm: &QemuProcess,
    qmp: &Qmp,
    node: &str,
    (path, file): (&Path, FileId),
) -> Result<(), Refusal> {
    // It says what is wrong in the usual case, without QEMU's help.
    check(what, vm, path, file)?;
    let failed = |why: dray_qemu::Error| qemu_error(what, &why);
    match under(vm, qmp, node).await.map_err(failed)? {
        Found::File(found, _) if found == file => Ok(()),
        Found::File(..) => Err(other_file(what, vm, path, &format!(" as node {node}"))),
        Found::Unknown if is_left(vm, qmp, node, file).await.map_err(failed)? => Ok(()),
        Found::Unknown => {
            let shown = path.display();
            let why =
                format!("it cannot be found out whether its QEMU has {shown} under node {node}");
            Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "QEMU shows it by its locks on the file: leave out locking=off, or use it for one \
                 disk of the vm only",
            ))
        }
    }
}

/// What is under a node: where QEMU has a lock just as long as it gives the sign.
async fn under(vm: &QemuProcess, qmp: &Qmp, node: &str) -> dray_qemu::Result<Found> {
    for sign in SIGNS {
        let before = locked(vm, sign.byte);
        let given = sign::while_given(qmp, node, sign, || locked(vm, sign.byte)).await?;
        let after = locked(vm, sign.byte);
        let Some(mut given) = given else { continue };
        given.retain(|descriptor, _| {
            !before.contains_key(descriptor) && !after.contains_key(descriptor)
        });
        if let Some(found) = only(given) {
            return Ok(found);
        }
    }
    Ok(Found::Unknown)
}

/// The one file to which all these descriptors lead.
fn only(files: Files) -> Option<Found> {
    let file = *files.values().next()?;
    let is_one = files.values().all(|other| *other == file);
    is_one.then(|| Found::File(file, files.into_keys().collect()))
}

/// Whether a node of which QEMU gives no sign has this file, because no other node can have what QEMU has open of it.
async fn is_left(vm: &QemuProcess, qmp: &Qmp, node: &str, file: FileId) -> dray_qemu::Result<bool> {
    let mut open = all(vm, open_files);
    let nodes = sign::file_nodes(qmp).await?;
    if !nodes.iter().any(|other| other == node) {
        return Ok(false);
    }
    for other in nodes {
        if other == node {
            continue;
        }
        match under(vm, qmp, &other).await? {
            Found::File(_, taken) => open.retain(|descriptor, _| !taken.contains(descriptor)),
            Found::Unknown => return Ok(false),
        }
    }
    Ok(open.values().any(|left| *left == file))
}

/// The open files on which the VM has a lock on this byte.
fn locked(vm: &QemuProcess, byte: u64) -> Files {
    all(vm, |pid| files_locked_at(pid, byte))
}

/// The open files of the VM, as `of` tells them of one process. One that cannot be seen has none.
fn all(vm: &QemuProcess, of: impl Fn(u32) -> std::io::Result<BTreeMap<u32, FileId>>) -> Files {
    let files =
        |pid| of(pid).into_iter().flatten().map(move |(number, file)| ((pid, number), file));
    processes(vm).into_iter().flat_map(files).collect()
}

/// The process of the VM; where that is a manager's, all but this one.
fn processes(vm: &QemuProcess) -> Vec<u32> {
    if !is_manager(vm) {
        return u32::try_from(vm.pid).into_iter().collect();
    }
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_that_is_seen_on_two_files_tells_nothing() {
        let file = |number| FileId::File(1, number);
        let of = |files: &[(u32, u64)]| {
            only(files.iter().map(|(number, inode)| ((7, *number), file(*inode))).collect())
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(3, 5)]), Some(Found::File(file(5), vec![(7, 3)])));
        assert_eq!(of(&[(3, 5), (4, 6)]), None);
        assert_eq!(of(&[(3, 5), (4, 5)]), Some(Found::File(file(5), vec![(7, 3), (7, 4)])));
    }
}
