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
use dray_image::{Descriptors, FileId, is_unseen};
use dray_qemu::adopt::node_of;
use dray_qemu::sign::{self, SIGNS};
use dray_qemu::{LayerPlan, Qmp};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::qemu_error;

/// Longest wait for a look at descriptors. It ends by itself a little earlier, if a thread was free for it.
const LONGEST: Duration = Duration::from_secs(4);

/// A descriptor of a process.
type Descriptor = (u32, u32);
/// Open files by descriptor.
type Files = BTreeMap<Descriptor, FileId>;

/// What a look at a VM has shown.
#[derive(Default)]
struct Seen {
    files: Files,
    /// Processes with too many descriptors, and what is said of them. Nothing is known of what these have.
    unseen: BTreeMap<u32, String>,
}

/// What is under one node of QEMU.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Found {
    /// This file, by the descriptors that lead to it.
    File(FileId, Vec<Descriptor>),
    /// QEMU gave no sign of it; or why it could not be seen.
    Unknown(Option<String>),
}

/// Refuses a file that the VM does not have open.
///
/// # Errors
/// That it has not, or that it cannot be seen.
pub async fn check(what: &str, vm: &QemuProcess, path: &Path, file: FileId) -> Result<(), Refusal> {
    match looked(vm, move |vm| has_it(vm, file)).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(other_file(what, vm, path, "")),
        Err(why) if is_unseen(&why) => Err(unseen(what, vm, &why.to_string())),
        Err(why) => {
            let pid = vm.pid;
            let why = format!(
                "the agent cannot find out which files its QEMU has open (process {pid}): {why}"
            );
            let hint = "the agent needs to read the process's folder in /proc: run it as root";
            Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
        }
    }
}

/// Whether the VM has a file open.
fn has_it(vm: &QemuProcess, file: FileId) -> io::Result<bool> {
    let Ok(pid) = u32::try_from(vm.pid) else { return Ok(false) };
    let look = Descriptors::begin();
    match look.has_open(pid, file) {
        Ok(false) if is_manager(vm) => Ok(look.is_open_elsewhere(file).unwrap_or(false)),
        has => has,
    }
}

/// Looks at descriptors on a thread where that may take a while.
async fn looked<T: Send + 'static>(
    vm: &QemuProcess,
    look: impl FnOnce(&QemuProcess) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let vm = vm.clone();
    let looking = tokio::task::spawn_blocking(move || look(&vm));
    match tokio::time::timeout(LONGEST, looking).await {
        Ok(seen) => seen.map_err(io::Error::other)?,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "looking at it takes too long")),
    }
}

fn unseen(what: &str, vm: &QemuProcess, why: &str) -> Refusal {
    let pid = vm.pid;
    let why =
        format!("the agent cannot find out which files its QEMU has open (process {pid}): {why}");
    let hint = "see why that process has so much open; a vm that was started anew has less";
    Refusal::new(ErrorKind::Conflict, what, why).hint(hint)
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
pub async fn check_path(what: &str, vm: &QemuProcess, path: &Path) -> Result<(), Refusal> {
    check(what, vm, path, file_at(what, path)?).await
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
    check(what, vm, path, file).await?;
    let failed = |why: dray_qemu::Error| qemu_error(what, &why);
    match under(vm, qmp, node).await.map_err(failed)? {
        Found::File(found, _) if found == file => Ok(()),
        Found::File(..) => Err(other_file(what, vm, path, &format!(" as node {node}"))),
        Found::Unknown(Some(why)) => Err(unseen(what, vm, &why)),
        Found::Unknown(None) if is_left(vm, qmp, node, file).await.map_err(failed)? => Ok(()),
        Found::Unknown(None) => {
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

/// So often a node gives a sign, as long as others give theirs at the same time.
const MOST_SIGNS: usize = 5;

/// What is under a node: where QEMU has a lock just as long as it gives the sign.
async fn under(vm: &QemuProcess, qmp: &Qmp, node: &str) -> dray_qemu::Result<Found> {
    let mut unseen = None;
    for sign in SIGNS {
        let mut each_time: Option<Files> = None;
        for _ in 0..MOST_SIGNS {
            let before = locked(vm, sign.byte).await;
            let given = sign::while_given(qmp, node, sign, locked(vm, sign.byte)).await?;
            let after = locked(vm, sign.byte).await;
            let Some(given) = given else { break };
            unseen = [&before, &given, &after].iter().find_map(|seen| seen.why()).or(unseen);
            let lasting = both(each_time.take(), lasting_as_long(given, [&before, &after]));
            if let Some(found) = only(lasting.clone()) {
                return Ok(found);
            }
            // Of a manager's VMs another one may have given a sign at the same time.
            if lasting.is_empty() {
                break;
            }
            each_time = Some(lasting);
        }
    }
    Ok(Found::Unknown(unseen))
}

/// What was seen each time, so far and now.
fn both(before: Option<Files>, mut now: Files) -> Files {
    if let Some(before) = before {
        now.retain(|descriptor, file| before.get(descriptor) == Some(file));
    }
    now
}

/// What was seen while the sign was given, and neither before nor after. A process that was not seen once may have had
/// its locks all the time.
fn lasting_as_long(given: Seen, others: [&Seen; 2]) -> Files {
    let mut files = given.files;
    for other in others {
        files.retain(|descriptor, _| {
            !other.files.contains_key(descriptor) && !other.unseen.contains_key(&descriptor.0)
        });
    }
    files
}

/// The one file to which all these descriptors lead.
fn only(files: Files) -> Option<Found> {
    let file = *files.values().next()?;
    let is_one = files.values().all(|other| *other == file);
    is_one.then(|| Found::File(file, files.into_keys().collect()))
}

/// Whether a node of which QEMU gives no sign has this file, because no other node can have what QEMU has open of it.
async fn is_left(vm: &QemuProcess, qmp: &Qmp, node: &str, file: FileId) -> dray_qemu::Result<bool> {
    let mut open = all(vm, Descriptors::open_files).await.files;
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
            Found::Unknown(_) => return Ok(false),
        }
    }
    Ok(open.values().any(|left| *left == file))
}

/// The open files on which the VM has a lock on this byte.
async fn locked(vm: &QemuProcess, byte: u64) -> Seen {
    all(vm, move |look, pid| look.files_locked_at(pid, byte)).await
}

/// The open files of the VM, as `of` tells them of one process.
async fn all(
    vm: &QemuProcess,
    of: impl Fn(&Descriptors, u32) -> io::Result<BTreeMap<u32, FileId>> + Send + 'static,
) -> Seen {
    let seen = looked(vm, move |vm| {
        let (look, mut seen) = (Descriptors::begin(), Seen::default());
        processes(vm).into_iter().for_each(|pid| seen.add(pid, of(&look, pid)));
        Ok(seen)
    });
    seen.await.unwrap_or_else(|why| {
        let pid = u32::try_from(vm.pid).unwrap_or_default();
        Seen { unseen: BTreeMap::from([(pid, why.to_string())]), ..Seen::default() }
    })
}

impl Seen {
    /// A process that has ended, or may not be seen, has nothing open.
    fn add(&mut self, pid: u32, files: io::Result<BTreeMap<u32, FileId>>) {
        match files {
            Ok(files) => {
                self.files.extend(files.into_iter().map(|(number, file)| ((pid, number), file)));
            }
            Err(why) if is_unseen(&why) => drop(self.unseen.insert(pid, why.to_string())),
            Err(_) => {}
        }
    }

    /// Why something was not seen.
    fn why(&self) -> Option<String> {
        self.unseen.values().next().cloned()
    }
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
    fn who_was_not_seen_once_gives_no_sign() {
        let file = FileId::File(1, 5);
        let seen = |files: &[Descriptor], unseen: &[u32]| Seen {
            files: files.iter().map(|descriptor| (*descriptor, file)).collect(),
            unseen: unseen.iter().map(|pid| (*pid, "too many".to_owned())).collect(),
        };
        let left = |before: &Seen, after: &Seen| -> Vec<Descriptor> {
            lasting_as_long(seen(&[(7, 3), (8, 4)], &[]), [before, after]).into_keys().collect()
        };
        let none: Vec<Descriptor> = Vec::new();
        assert_eq!(left(&seen(&[], &[]), &seen(&[], &[])), [(7, 3), (8, 4)]);
        assert_eq!(left(&seen(&[(7, 3)], &[]), &seen(&[(8, 4)], &[])), none);
        // It had its locks before, as far as anybody knows.
        assert_eq!(left(&seen(&[], &[7]), &seen(&[], &[])), [(8, 4)]);
        assert_eq!(left(&seen(&[], &[]), &seen(&[], &[7, 8])), none);
    }

    /// A manager's VMs are looked at together.
    #[test]
    fn what_another_vm_shows_at_the_same_time_does_not_count() {
        let (own, others) = (FileId::File(1, 5), FileId::File(1, 6));
        let first = Files::from([((7, 3), own), ((8, 4), others)]);
        assert!(only(both(None, first.clone())).is_none());
        let then = Files::from([((7, 3), own), ((8, 4), own), ((9, 5), others)]);
        let Some(Found::File(file, at)) = only(both(Some(first), then)) else {
            panic!("it is seen each time");
        };
        assert!(file == own && at.into_iter().eq([(7, 3)]));
    }

    /// The agent's own tasks go on meanwhile, and a refusal says why.
    #[tokio::test]
    async fn a_process_with_too_many_descriptors_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let id = file_at("x", file.path()).unwrap();
        let script = "ulimit -n 20000 && exec 3<\"$0\" && i=10; while [ $i -lt 9000 ]; do \
                      eval \"exec $i</dev/null\"; i=$((i+1)); done; echo ready; read x";
        let mut child = std::process::Command::new("bash")
            .args(["-c", script])
            .arg(file.path())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let (pid, socket) = (i32::try_from(child.id()).unwrap(), "/x".into());
        let vm = QemuProcess { socket, pid, started: 1, boot: String::new() };
        let other = FileId::File(0, 0);
        let why = check("use disk0", &vm, file.path(), other).await.unwrap_err().to_string();
        let seen = all(&vm, Descriptors::open_files).await;
        let found = check("use disk0", &vm, file.path(), id).await;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(why.contains("more than 8192 descriptors"), "{why}");
        assert!(seen.files.is_empty() && seen.why().is_some());
        found.unwrap();
    }

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
