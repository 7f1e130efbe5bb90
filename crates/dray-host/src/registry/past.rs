//! QEMUs whose VMs have left this host, or have not come to it in the end. One may go on running, and somebody may let
//! its guest go on: the images are another host's by then, or have come back with the VM in another QEMU, under these
//! names or others. All that the old one still needs is to quit, and for that it wants its flushes answered.
//!
//! The list outlives the agent and not the host, and what becomes of the images changes nothing in it. It is written in
//! place, so that it can be written when the state directory is full.

use super::processes::{Process, Row, boot_id, decode, encode, room_in};
use super::{Entry, Registry};
use crate::process::{QemuProcess, boot};
use crate::record::{CopyState, ImageRecord};
use dray_files::StatePath;
use dray_image::{Disk, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use dray_types::MigrationId;
use std::io;
use std::sync::Arc;

/// Bytes of the list's file: room for 139 QEMUs that nobody has ended. It is one page, which an agent that is killed
/// writes whole or not at all.
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

/// What becomes of such a QEMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// Its VM is elsewhere.
    Left,
    /// An image that the VM had left with was claimed here. Its guest may go on, unless another process changes
    /// the image first.
    MayGoOn,
    /// Its guest has gone on.
    GoesOn,
}

const STANDINGS: [Standing; 3] = [Standing::Left, Standing::MayGoOn, Standing::GoesOn];

/// Such a QEMU, and the migration in which its VM left. One that had waited for a VM in vain is of no migration, and
/// neither is one that may go on no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Past {
    process: Process,
    migration: Option<MigrationId>,
    standing: Standing,
}

impl Past {
    fn left(process: Process, migration: Option<MigrationId>) -> Self {
        Self { process, migration, standing: Standing::Left }
    }
}

impl Row for Past {
    const MAGIC: &'static [u8; 8] = b"DRAYPVM2";
    const LEN: usize = Process::LEN + 17;

    fn put(self, place: &mut [u8]) {
        let (process, rest) = place.split_at_mut(Process::LEN);
        self.process.put(process);
        let id = self.migration.map_or(0, |migration| migration.0);
        rest[..16].copy_from_slice(&id.to_le_bytes());
        rest[16] = self.standing as u8;
    }

    fn get(place: &[u8]) -> Option<Self> {
        let (process, rest) = place.split_at(Process::LEN);
        let id = u128::from_le_bytes(rest[..16].try_into().ok()?);
        let migration = (id != 0).then_some(MigrationId(id));
        let standing = *STANDINGS.get(usize::from(rest[16]))?;
        Some(Self { process: Process::get(process)?, migration, standing })
    }
}

/// All of these QEMUs.
pub(super) struct PastVms {
    path: StatePath,
    all: Vec<Past>,
}

impl PastVms {
    /// Those that the file at `path` names, if it was written since the host was booted.
    pub(super) fn load(path: StatePath) -> Self {
        let known = path.read().ok().and_then(|bytes| decode(&bytes, &boot_id(&path)));
        let mut past = Self { path, all: known.unwrap_or_default() };
        past.all.retain(|past| past.process.runs());
        // So that there is room for it later.
        past.write();
        past
    }

    /// Its VM is elsewhere.
    fn note(&mut self, process: Process, migration: Option<MigrationId>) {
        if self.of(process).is_some_and(|past| past.standing == Standing::Left) {
            return;
        }
        self.all.retain(|past| past.process != process && past.process.runs());
        self.all.push(Past::left(process, migration));
        self.write();
    }

    /// An image with which the VM had left in this migration was claimed.
    fn may_go_on(&mut self, migration: MigrationId) {
        let left = |past: &&mut Past| past.standing == Standing::Left;
        let of = self.all.iter_mut().filter(|past| past.migration == Some(migration));
        of.filter(left).for_each(|past| past.standing = Standing::MayGoOn);
        self.write();
    }

    /// Those that may go on or do, of the VM that had left in this migration, and that run.
    fn claimed(&self, migration: MigrationId) -> impl Iterator<Item = &Past> {
        let of = self.all.iter().filter(move |past| past.migration == Some(migration));
        of.filter(|past| past.standing != Standing::Left && past.process.runs())
    }

    fn goes_on(&self, migration: MigrationId) -> Option<Process> {
        let mut goes_on = self.claimed(migration).filter(|one| one.standing == Standing::GoesOn);
        goes_on.next().map(|past| past.process)
    }

    /// A process, if it is one of this host, is about to change an image that was claimed from this migration: it or the
    /// VM's old QEMU, never both. Who does so first shuts the others out for good; somebody may have `taken` its file,
    /// past this agent.
    fn may_change(
        &mut self,
        migration: MigrationId,
        process: Option<Process>,
        is_taken: bool,
    ) -> std::result::Result<(), Shut> {
        let own = process.and_then(|process| self.of(process)).copied();
        match (own.map(|own| own.standing), self.goes_on(migration)) {
            (Some(Standing::GoesOn), _) => return Ok(()),
            (Some(Standing::Left), _) => return Err(Shut::HasLeft),
            (_, Some(process)) => return Err(Shut::GoesOn(process)),
            (Some(Standing::MayGoOn) | None, None) => {}
        }
        let before = self.all.clone();
        for past in &mut self.all {
            if past.migration != Some(migration) || past.standing != Standing::MayGoOn {
                continue;
            }
            *past = match Some(past.process) == process && !is_taken {
                true => Past { standing: Standing::GoesOn, ..*past },
                false => Past::left(past.process, None),
            };
        }
        if let Err(why) = self.try_write() {
            // The next agent would let the other one have it.
            self.all = before;
            return Err(Shut::Unnoted(why));
        }
        if own.is_some() && is_taken { Err(Shut::HasLeft) } else { Ok(()) }
    }

    /// Somebody else has an image that was claimed from this migration, or has had it, past this agent.
    fn others_have_it(&mut self, migration: MigrationId) -> io::Result<()> {
        let may = |past: &&mut Past| {
            past.migration == Some(migration) && past.standing == Standing::MayGoOn
        };
        self.all.iter_mut().filter(may).for_each(|past| *past = Past::left(past.process, None));
        self.try_write()
    }

    /// Those of which this is true are so no longer; whether there was one.
    fn forget(&mut self, is_it: impl Fn(&Past) -> bool) -> bool {
        let before = self.all.len();
        self.all.retain(|past| !is_it(past));
        let any = self.all.len() < before;
        if any {
            self.write();
        }
        any
    }

    fn of(&self, process: Process) -> Option<&Past> {
        self.all.iter().find(|past| past.process == process)
    }

    /// Of more than there is room for, the next agent knows the youngest.
    fn try_write(&self) -> io::Result<()> {
        let first = self.all.len().saturating_sub(room_in::<Past>(LEN));
        let bytes = encode(&boot_id(&self.path), &self.all[first..], LEN);
        self.path.open_or_create().and_then(|file| file.write_at(&bytes, 0))
    }

    fn write(&self) {
        if let Err(why) = self.try_write() {
            tracing::warn!(%why, "cannot note which QEMUs are of VMs that have left this host");
        }
    }
}

/// The migration from which the image was claimed, if it has not left since.
fn claimed_from(record: &ImageRecord) -> Option<MigrationId> {
    let claim = record.claim.as_ref().filter(|claim| claim.epoch == record.epoch)?;
    claim.migration.filter(|_| record.state == CopyState::Owner)
}

/// Why a process may not change an image that was claimed.
pub(super) enum Shut {
    /// It is the VM's old QEMU, and another process has changed the image since.
    HasLeft,
    /// The VM's old QEMU goes on.
    GoesOn(Process),
    /// It cannot be written down that it has the image.
    Unnoted(io::Error),
}

impl Registry {
    /// The VM behind this monitor leaves this host in `migration` with the images of these names, which a guest may
    /// write. Its QEMU has nothing to do with any image any more, unless the VM [stays](Self::vm_stays) after all;
    /// neither has any other one that had these images and no others. Can be repeated.
    pub fn vm_leaves(&self, migration: MigrationId, names: &[String], monitor: &QemuProcess) {
        if boot().as_ref() != Some(&monitor.boot) {
            return;
        }
        let mut clients: Vec<Process> = Vec::new();
        for client in names.iter().flat_map(|name| self.clients_that_run(name)) {
            if !clients.contains(&client) {
                clients.push(client);
            }
        }
        let own = Process::itself(monitor, &clients);
        let only_these = |one: &&Process| own == Some(**one) || !self.has_other_than(**one, names);
        let mut leave: Vec<_> = own.into_iter().collect();
        leave.extend(clients.iter().filter(|one| one.is_emulator()).filter(only_these));
        // An emulator of another name, behind a manager.
        if leave.is_empty() && clients.len() == 1 && monitor.runs() {
            leave.extend(clients.iter().filter(only_these));
        }
        let mut past = self.past_vms.lock();
        leave.into_iter().for_each(|qemu| past.note(qemu, Some(migration)));
    }

    /// Whether this process is a client of an image that a guest may write, and that is not one of these.
    fn has_other_than(&self, process: Process, names: &[String]) -> bool {
        let others = self.all().into_iter().map(|entry| entry.record());
        let mut others = others.filter(|it| !it.read_only && !names.contains(&it.name));
        others.any(|it| self.clients_that_run(&it.name).contains(&process))
    }

    /// The VM of this migration has come back before it ran elsewhere.
    pub fn vm_stays(&self, migration: MigrationId) {
        self.past_vms.lock().forget(|past| past.migration == Some(migration));
    }

    /// An operator has claimed an image with which the VM has left in this migration: its guest, as it was at the
    /// handover, may go on, or the VM is started anew.
    pub(crate) fn vm_may_go_on(&self, migration: MigrationId) {
        self.past_vms.lock().may_go_on(migration);
    }

    /// The migration from which the image of `record` was claimed, if the VM's old QEMU may go on with it or does.
    pub(super) fn contested(&self, record: &ImageRecord) -> Option<MigrationId> {
        let past = self.past_vms.lock();
        claimed_from(record).filter(|&migration| past.claimed(migration).next().is_some())
    }

    /// The VM of this migration was started anew past this agent: its old QEMU does not go on.
    pub(super) fn others_have_it(&self, migration: MigrationId) -> io::Result<()> {
        self.past_vms.lock().others_have_it(migration)
    }

    /// See [`PastVms::may_change`].
    pub(super) fn may_change(
        &self,
        migration: MigrationId,
        process: Option<Process>,
        is_taken: bool,
    ) -> std::result::Result<(), Shut> {
        self.past_vms.lock().may_change(migration, process, is_taken)
    }

    /// The QEMUs of the past that have had the image called `name`.
    pub(crate) fn past_clients(&self, name: &str) -> Vec<Process> {
        let mut clients = self.clients_that_run(name);
        let past = self.past_vms.lock();
        clients.retain(|&client| past.of(client).is_some());
        clients
    }

    /// A QEMU that has had the image called `name` and runs, and whose VM has not left this host.
    pub fn emulator_at(&self, name: &str) -> Option<Process> {
        let clients = self.clients_that_run(name);
        let past = self.past_vms.lock();
        clients.into_iter().find(|&client| client.is_emulator() && past.of(client).is_none())
    }

    /// The QEMU with this monitor had waited for a VM that does not come to it. It may have the VM's memory.
    pub fn vm_does_not_come(&self, monitor: &QemuProcess) {
        if boot().as_ref() == Some(&monitor.boot) {
            let own = Process::itself(monitor, &[]);
            own.into_iter().for_each(|qemu| self.past_vms.lock().note(qemu, None));
        }
    }

    /// This QEMU waited for a VM that comes to another one now.
    pub fn is_replaced(&self, qemu: Process) {
        self.past_vms.lock().note(qemu, None);
    }

    /// This QEMU waits for a VM, and has had none, whatever it had waited for before. Whether it was taken for one of
    /// the past.
    pub fn vm_may_come(&self, qemu: Process) -> bool {
        self.past_vms.lock().forget(|past| past.process == qemu && past.migration.is_none())
    }

    /// Whether the VM of this QEMU, which runs, has left this host.
    pub fn has_left(&self, qemu: &QemuProcess) -> bool {
        let past = self.past_vms.lock();
        past.all.iter().any(|past| past.standing == Standing::Left && past.process.is(qemu))
    }

    /// The same for good: no migration that is open may bring the VM back to it.
    pub fn has_left_for_good(&self, qemu: &QemuProcess) -> bool {
        let past = self.past_vms.lock().all.iter().find(|past| past.process.is(qemu)).copied();
        let records = self.all_records();
        past.filter(|past| past.standing == Standing::Left).is_some_and(|past| {
            let is_open = |migration| records.iter().any(|one| one.migration == Some(migration));
            !past.migration.is_some_and(is_open)
        })
    }

    /// Whether this process is of a VM that is not here, as far as the image of `record` has to do with it. As long as
    /// the VM is leaving with that image, it may have to come back to it, whatever the record says by then of who owns
    /// the image: its disk is closed.
    pub fn is_of_past_vm(&self, process: Process, record: &ImageRecord) -> bool {
        let past = self.past_vms.lock().of(process).copied();
        let is_leaving = |past: Past| {
            past.migration.is_some()
                && past.migration == record.migration
                && record.state != CopyState::Incoming
        };
        past.is_some_and(|past| match past.standing {
            Standing::Left => !is_leaving(past),
            // With what was claimed as it was at the handover, and with nothing that has come since.
            Standing::MayGoOn => !is_leaving(past) && claimed_from(record) != past.migration,
            Standing::GoesOn => false,
        })
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
        let migration = Some(MigrationId(7));
        past.note(own, migration);
        past.note(own, None);
        past.note(Process { pid: 1 << 30, started: 7 }, None);
        let mut next = PastVms::load(path.clone());
        assert_eq!(next.all, [Past::left(own, migration)], "the other one has ended");
        assert_eq!(std::fs::metadata(path.path()).unwrap().len(), room, "it takes no more room");
        assert!(next.forget(|past| past.process == own) && !next.forget(|_| true));
        assert!(PastVms::load(path).all.is_empty());
    }

    fn running() -> (std::process::Child, Process) {
        let child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process { pid: child.id(), started: started(child.id() as i32).unwrap() };
        (child, process)
    }

    /// Also when the agent is started anew at any time, and the image is claimed again.
    #[test]
    fn of_an_old_qemu_and_a_new_one_only_the_first_changes_a_claimed_image() {
        let dir = tempfile::tempdir().unwrap();
        let migration = MigrationId(7);
        let ((mut old, was), (mut new, comes)) = (running(), running());
        for (first, second) in [(was, comes), (comes, was)] {
            let path = StatePath::real(dir.path().join(format!("past.{}", first.pid)));
            let restarted = || PastVms::load(path.clone());
            restarted().note(was, Some(migration));
            restarted().may_go_on(migration);
            assert_eq!(restarted().claimed(migration).count(), 1);
            assert!(restarted().may_change(migration, Some(first), false).is_ok());
            restarted().may_go_on(migration);
            assert!(restarted().may_change(migration, Some(first), false).is_ok());
            let shut = restarted().may_change(migration, Some(second), false);
            assert!(matches!(shut, Err(Shut::GoesOn(_) | Shut::HasLeft)));
            // One that cannot be told apart is not the old one.
            assert_eq!(restarted().may_change(migration, None, false).is_ok(), first == comes);
        }
        let full = dir.path().join("full");
        std::fs::create_dir(&full).unwrap();
        let mut unnoted = PastVms::load(StatePath::real(full.join("past")));
        unnoted.note(was, Some(migration));
        unnoted.may_go_on(migration);
        std::fs::remove_dir_all(&full).unwrap();
        for process in [was, comes] {
            let shut = unnoted.may_change(migration, Some(process), false);
            assert!(matches!(shut, Err(Shut::Unnoted(_))), "nobody has it before that is written");
        }
        std::fs::create_dir(&full).unwrap();
        assert!(unnoted.may_change(migration, Some(comes), false).is_ok());
        let path = StatePath::real(dir.path().join("past.taken"));
        PastVms::load(path.clone()).note(was, Some(migration));
        PastVms::load(path.clone()).may_go_on(migration);
        let taken = PastVms::load(path.clone()).may_change(migration, Some(was), true);
        assert!(matches!(taken, Err(Shut::HasLeft)), "somebody else has the file");
        assert!(PastVms::load(path).may_change(migration, Some(was), false).is_err());
        let path = StatePath::real(dir.path().join(format!("past.{}", was.pid)));
        // The VM leaves once more.
        PastVms::load(path.clone()).note(was, Some(MigrationId(8)));
        assert_eq!(PastVms::load(path).all, [Past::left(was, Some(MigrationId(8)))]);
        for child in [&mut old, &mut new] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
