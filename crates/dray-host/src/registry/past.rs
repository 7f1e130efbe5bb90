//! QEMUs whose VMs have left this host, or have not come to it in the end. One may go on running, and somebody may let
//! its guest go on: the images are another host's by then, or have come back with the VM in another QEMU, under these
//! names or others. All that the old one still needs is to quit, and for that it wants its flushes answered.
//!
//! The list outlives the agent and not the host, and what becomes of the images changes nothing in it. It is written in
//! place, so that it can be written when the state directory is full.

use super::processes::{Process, boot_id, decode, encode, room_in};
use super::{Entry, Registry};
use crate::process::{QemuProcess, boot};
use dray_files::StatePath;
use dray_image::{Disk, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use std::sync::Arc;

/// Bytes of the list's file: room for some hundreds of QEMUs that nobody has ended.
const LEN: usize = 4096;

/// An image as such a QEMU sees it: nothing is read and nothing is changed.
pub(super) struct PastImage(pub(super) Arc<Disk>);

fn has_left<T>() -> Result<T> {
    let why = "the vm has left this host with the image; this qemu is of the past, end it";
    Err(Error::new(ErrorKind::Unavailable, "serving the image", why))
}

impl Image for PastImage {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<()> {
        has_left()
    }

    fn write_at(&self, _data: &[u8], _offset: u64, _fua: bool) -> Result<()> {
        has_left()
    }

    fn zero(&self, _offset: u64, _len: u64, _mode: ZeroMode, _fua: bool) -> Result<()> {
        has_left()
    }

    fn discard(&self, _offset: u64, _len: u64, _fua: bool) -> Result<()> {
        has_left()
    }

    /// All was durable when the image left, and nothing was written since.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn extents(&self, _offset: u64, _len: u64, _max: usize) -> Result<Vec<Extent>> {
        has_left()
    }
}

/// The processes of these QEMUs.
pub(super) struct PastVms {
    path: StatePath,
    all: Vec<Process>,
}

impl PastVms {
    /// Those that the file at `path` names, if it was written since the host was booted.
    pub(super) fn load(path: StatePath) -> Self {
        let known = path.read().ok().and_then(|bytes| decode(&bytes, &boot_id(&path)));
        let mut past = Self { path, all: known.unwrap_or_default() };
        past.all.retain(Process::runs);
        // So that there is room for it later.
        past.write();
        past
    }

    /// It waits for a VM, and has had none.
    fn forget(&mut self, process: Process) -> bool {
        let before = self.all.len();
        self.all.retain(|past| *past != process);
        let known = self.all.len() < before;
        if known {
            self.write();
        }
        known
    }

    /// Its VM is elsewhere.
    fn note(&mut self, process: Process) {
        if self.all.contains(&process) {
            return;
        }
        self.all.retain(Process::runs);
        self.all.push(process);
        self.write();
    }

    /// Of more than there is room for, the next agent knows the youngest.
    fn write(&self) {
        let first = self.all.len().saturating_sub(room_in(LEN));
        let bytes = encode(&boot_id(&self.path), &self.all[first..], LEN);
        if let Err(why) = self.path.open_or_create().and_then(|file| file.write_at(&bytes, 0)) {
            tracing::warn!(%why, "cannot note which QEMUs are of VMs that have left this host");
        }
    }
}

impl Registry {
    /// The VM behind this monitor has left this host with the image called `name`: should its QEMU go on running, that has
    /// nothing to do with any image any more. The monitor's socket may have been made by a manager, which has other VMs:
    /// only a process that was attached to the image is the QEMU.
    pub fn vm_has_left(&self, name: &str, monitor: &QemuProcess) {
        if boot().as_ref() != Some(&monitor.boot) {
            return;
        }
        let clients = self.clients_that_run(name);
        let qemu = clients.iter().find(|one| one.is(monitor)).or(match &clients[..] {
            [only] if monitor.runs() => Some(only),
            _ => None,
        });
        qemu.into_iter().for_each(|qemu| self.past_vms.lock().note(*qemu));
    }

    /// The QEMU behind this monitor had waited for the VM of the image called `name`, which is not to come to it any
    /// more: it may have the VM's memory. The process, if it was attached to the image.
    pub fn vm_does_not_come(&self, name: &str, monitor: &QemuProcess) -> Option<Process> {
        if boot().as_ref() != Some(&monitor.boot) {
            return None;
        }
        let qemu = self.clients_that_run(name).into_iter().find(|one| one.is(monitor))?;
        self.past_vms.lock().note(qemu);
        Some(qemu)
    }

    /// This QEMU waits for a VM, and has had none, whatever it had waited for before. The process, if it was taken
    /// for one of the past.
    pub fn vm_may_come(&self, monitor: &QemuProcess) -> Option<Process> {
        let mut past = self.past_vms.lock();
        let qemu = past.all.iter().find(|past| past.is(monitor)).copied()?;
        past.forget(qemu).then_some(qemu)
    }

    /// Whether the VM of this QEMU, which runs, has left this host.
    pub fn has_left(&self, qemu: &QemuProcess) -> bool {
        self.past_vms.lock().all.iter().any(|past| past.is(qemu))
    }

    /// Whether this process is of a VM that has left this host.
    pub fn is_of_past_vm(&self, process: Process) -> bool {
        self.past_vms.lock().all.contains(&process)
    }
}

impl Entry {
    /// What the QEMU of a VM gets that has left this host.
    pub fn past(&self) -> Arc<dyn Image> {
        Arc::clone(&self.past) as _
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::started;

    #[test]
    fn the_next_agent_knows_the_qemus_of_the_past_that_still_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("past.vms"));
        let pid = std::process::id();
        let own = Process { pid, started: started(pid as i32).unwrap() };
        let mut past = PastVms::load(path.clone());
        let room = std::fs::metadata(path.path()).unwrap().len();
        past.note(own);
        past.note(own);
        past.note(Process { pid: 1 << 30, started: 7 });
        let mut next = PastVms::load(path.clone());
        assert_eq!(next.all, [own], "the other one has ended");
        assert!(next.forget(own) && !next.forget(own));
        assert!(PastVms::load(path.clone()).all.is_empty());
        assert_eq!(std::fs::metadata(path.path()).unwrap().len(), room, "it takes no more room");
    }
}
