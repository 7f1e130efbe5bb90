//! Walls between VMs: an image is one VM's, and the QEMU of another one does not get it, also where both run
//! as the same user.
//!
//! Whoever is root could take the file itself, and so could the agent's own user: nothing is kept from them.
//! Everybody else gets what nobody else has: an image is that of the QEMU that it was adopted from, else of the
//! first that comes, until it has left or ended. A QEMU comes back after a restart of the agent, and has its
//! images meanwhile.

use super::{ImageExports, process_of};
use dray_files::unix_ms;
use dray_host::process::{QemuProcess, has_walls};
use dray_host::registry::Process;
use dray_serve::{Client, ExportError};

impl ImageExports {
    /// Lets a client in to an image, unless another VM has it.
    pub(super) fn admit(&self, name: &str, client: &Client) -> Result<(), ExportError> {
        if !is_walled_off(client) {
            return Ok(());
        }
        let Some(process) = process_of(client) else { return Err(unknown(name)) };
        if let Some(qemu) = self.adopted_from_another(name, process)
            && !self.0.get(name).is_some_and(|entry| self.comes_under_dray(&entry, client))
        {
            return Err(refusal(name, qemu.pid));
        }
        let admitted = self.0.let_in(name, process, unix_ms());
        admitted.map_err(|holder| refusal(name, holder.pid))
    }

    /// Whether a client may learn of an image: nobody else has it.
    pub(super) fn may_see(&self, name: &str, client: &Client) -> bool {
        if !is_walled_off(client) {
            return true;
        }
        process_of(client).is_some_and(|process| {
            self.adopted_from_another(name, process).is_none()
                && self.0.who_else_has(name, process, unix_ms()).is_none()
        })
    }

    /// The QEMU that an image was adopted from, if it runs and is another process. One that was attached since is
    /// the QEMU itself, whose monitor belongs to another process.
    fn adopted_from_another(&self, name: &str, process: Process) -> Option<QemuProcess> {
        let qemu = self.0.get(name)?.record().adopted?.qemu?;
        let other = u32::try_from(qemu.pid) != Ok(process.pid) && qemu.runs();
        (other && !self.0.was_attached(name, process)).then_some(qemu)
    }
}

/// Whether something is kept from a client of this host. Over TCP its certificate says what it may open.
fn is_walled_off(client: &Client) -> bool {
    client.user.is_some_and(has_walls)
}

/// Who connected may have ended and left the connection to anybody, or runs where this host's processes are not
/// seen.
fn unknown(name: &str) -> ExportError {
    ExportError::Refused(format!("it is not known which process wants image '{name}'"))
}

fn refusal(name: &str, pid: impl std::fmt::Display) -> ExportError {
    ExportError::Refused(format!("image '{name}' belongs to the vm of process {pid}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat::Pools;
    use dray_config::Config;
    use dray_host::record::ImageRecord;
    use dray_host::registry::{Process, Registry};
    use dray_host::store::Store;
    use dray_serve::Exports;
    use dray_types::ImageId;
    use dray_types::MigrationId;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::sync::Arc;

    const USER: u32 = 65534;

    /// A host with an image, of which no VM is known.
    fn exports(dir: &Path) -> ImageExports {
        let at = dir.display();
        let text = format!(
            "[agent]\nname = 'hosta'\n[tls]\ndir = '{at}'\n[[pool]]\nname = 'p'\npath = '{at}'\n"
        );
        let config = Arc::new(Config::parse(&text, &dir.join("dray.toml")).unwrap());
        let store = Store::open(&dir.join("state")).unwrap();
        let registry = Registry::load(store, Arc::new(Pools(config))).unwrap();
        let path = dir.join("disk.raw");
        std::fs::write(&path, [0; 8192]).unwrap();
        let record = ImageRecord::owned("disk.raw".into(), ImageId(8), path, 8192);
        let file = registry.open_file(&record).unwrap();
        let _entry = registry.add(record, file).unwrap();
        ImageExports(registry)
    }

    /// A QEMU of that user; none where this user may not start it.
    fn vm() -> Option<(Child, Client)> {
        let child = Command::new("sleep").arg("60").uid(USER).spawn().ok()?;
        let process = dray_serve::Process::find(child.id());
        Some((child, Client { process, user: Some(USER) }))
    }

    #[test]
    fn of_two_vms_of_one_user_neither_gets_what_the_other_has() {
        let Some((mut one, first)) = vm() else { return println!("SKIP: not root") };
        let (mut other, second) = vm().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let opens = |client: &Client| exports.open("disk.raw", client).is_ok();
        let sees = |client: &Client| exports.is_for("disk.raw", client);
        let root = Client { user: Some(0), ..second };
        let remote = Client::default();
        assert!(sees(&first) && sees(&second), "nobody has it yet");
        assert!(opens(&first));
        exports.attached("disk.raw", &first, 1);
        assert!(opens(&first) && sees(&first), "with any number of connections");
        assert!(!opens(&second) && !sees(&second));
        assert!(opens(&root) && opens(&remote), "there is no wall for them");
        exports.detached("disk.raw", &first, 0);
        // It was let in again a moment ago, so it may be about to come.
        assert!(!opens(&second));
        one.kill().unwrap();
        one.wait().unwrap();
        assert!(opens(&second), "the one that had it has ended");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    /// A VM that runs as root has what it has, too.
    #[test]
    fn what_roots_vm_has_no_other_gets() {
        let Some((mut child, client)) = vm() else { return println!("SKIP: not root") };
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let process = dray_serve::Process::find(std::process::id());
        let root = Client { process, user: Some(0) };
        exports.attached("disk.raw", &root, 1);
        assert!(exports.open("disk.raw", &client).is_err() && !exports.is_for("disk.raw", &client));
        exports.detached("disk.raw", &root, 0);
        assert!(exports.open("disk.raw", &client).is_ok());
        exports.attached("disk.raw", &client, 1);
        exports.attached("disk.raw", &root, 1);
        assert!(exports.open("disk.raw", &client).is_ok(), "a tool of root's looks at it");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Whoever its user is: it may have been let go on, and the image may have come back in another VM.
    #[test]
    fn the_qemu_of_a_vm_that_has_left_changes_nothing_any_more_and_can_quit() {
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let process = dray_serve::Process::find(std::process::id());
        let root = Client { process, user: Some(0) };
        exports.attached("disk.raw", &root, 1);
        let before = exports.open("disk.raw", &root).unwrap();
        before.write_at(&[1], 0, false).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let monitor = QemuProcess::find(Path::new("/qmp"), own).unwrap();
        exports.0.vm_leaves(MigrationId(1), &["disk.raw".to_owned()], &monitor);
        exports.detached("disk.raw", &root, 0);
        let past = exports.open("disk.raw", &root).unwrap();
        assert_eq!(past.geometry(), before.geometry());
        past.write_at(&[2], 0, false).unwrap_err();
        past.zero(0, 1, dray_image::ZeroMode::MayUnmap, false).unwrap_err();
        past.discard(0, 4096, false).unwrap_err();
        past.read_at(&mut [0], 0).unwrap_err();
        past.flush().unwrap();
        // Another one has the image meanwhile.
        let mut found = [0];
        let other = exports.open("disk.raw", &Client::default()).unwrap();
        other.read_at(&mut found, 0).unwrap();
        assert_eq!(found, [1]);
    }

    /// Who made the socket of its monitor has other VMs, too.
    #[test]
    fn the_manager_of_a_vm_that_has_left_is_not_of_the_past() {
        let Some((mut child, qemu)) = vm() else { return println!("SKIP: not root") };
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        exports.attached("disk.raw", &qemu, 1);
        let own = i32::try_from(std::process::id()).unwrap();
        let manager = QemuProcess::find(Path::new("/qmp"), own).unwrap();
        exports.0.vm_leaves(MigrationId(1), &["disk.raw".to_owned()], &manager);
        assert!(!exports.0.has_left(&manager));
        let of_vm = QemuProcess::find(Path::new("/qmp"), child.id() as i32).unwrap();
        assert!(exports.0.has_left(&of_vm));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Something that looks like a QEMU, which has these images.
    fn emulator(exports: &ImageExports, dir: &Path, images: &[&str]) -> (Child, Client) {
        let program = dir.join("qemu-system-x");
        if !program.exists() {
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        }
        let child = Command::new(program).arg("60").spawn().unwrap();
        let process = dray_serve::Process::find(child.id());
        let client = Client { process, user: Some(0) };
        images.iter().for_each(|name| exports.attached(name, &client, 1));
        (child, client)
    }

    fn changes(exports: &ImageExports, client: &Client) -> bool {
        exports.open("disk.raw", client).unwrap().write_at(&[2], 0, false).is_ok()
    }

    /// The image's first QEMU was not ended, and the VM's is another one by now; a manager answers for both.
    #[test]
    fn of_a_vm_that_leaves_no_qemu_that_had_only_its_images_stays() {
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let path = dir.path().join("other.raw");
        std::fs::write(&path, [0; 8192]).unwrap();
        let record = ImageRecord::owned("other.raw".into(), ImageId(9), path, 8192);
        let file = exports.0.open_file(&record).unwrap();
        let _other = exports.0.add(record, file).unwrap();
        let (mut old, first) = emulator(&exports, dir.path(), &["disk.raw"]);
        let (mut now, second) = emulator(&exports, dir.path(), &["disk.raw"]);
        let (mut another, third) = emulator(&exports, dir.path(), &["disk.raw", "other.raw"]);
        let own = i32::try_from(std::process::id()).unwrap();
        let manager = QemuProcess::find(Path::new("/qmp"), own).unwrap();
        exports.0.vm_leaves(MigrationId(1), &["disk.raw".to_owned()], &manager);
        assert!(!changes(&exports, &first) && !changes(&exports, &second));
        assert!(changes(&exports, &third), "it has another image");
        exports.0.vm_stays(MigrationId(2));
        assert!(!changes(&exports, &first));
        exports.0.vm_stays(MigrationId(1));
        assert!(changes(&exports, &first) && changes(&exports, &second));
        for child in [&mut old, &mut now, &mut another] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// It may have a guest's memory, and may not have come to an image at all.
    #[test]
    fn a_qemu_that_waited_in_vain_is_of_the_past_until_it_waits_again() {
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let (mut child, client) = emulator(&exports, dir.path(), &[]);
        let pid = i32::try_from(child.id()).unwrap();
        let monitor = QemuProcess::find(Path::new("/qmp"), pid).unwrap();
        exports.0.vm_does_not_come(&monitor);
        assert!(!changes(&exports, &client));
        let process = Process::itself(&monitor, &[]).unwrap();
        assert!(exports.0.vm_may_come(process) && !exports.0.vm_may_come(process));
        assert!(changes(&exports, &client));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Who connected has ended, and anybody may have the connection by now.
    #[test]
    fn a_process_that_is_not_known_gets_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let exports = exports(dir.path());
        let client = Client { process: None, user: Some(USER) };
        assert!(exports.open("disk.raw", &client).is_err());
        assert!(!exports.is_for("disk.raw", &client));
    }
}
