//! Which processes were attached to an image: what a closed export lets wait (I8), and what it
//! refuses because it is new.
//!
//! The list outlives the agent and not the host: after a reboot nobody was attached. It is written in
//! place, into room that was taken when the image came, so that it can be written when the state
//! directory is full; a list that cannot be read names nobody.

use super::processes::{Process, boot_id, decode, encode};
use super::{Entry, Registry};
use crate::process::QemuProcess;
use crate::record::{CopyState, ImageRecord};
use dray_files::StatePath;
use dray_files::files::BOOT_LEN;
use std::io;

/// Processes that are remembered of one image: a disk has one QEMU, and now and then a tool.
const MOST: usize = 24;
/// Bytes of the file: a sector, so that a write of it is not torn.
const LEN: usize = 512;

/// The clients of one image.
pub(super) struct KnownClients {
    path: StatePath,
    boot: [u8; BOOT_LEN],
    known: Vec<Process>,
    /// Those that this agent has seen attached: who is not there any more has left.
    seen: Vec<Seen>,
    admitted: Option<Admitted>,
}

/// A client that this agent has seen.
struct Seen {
    process: Process,
    /// How many of its connections are open. They are told of in any order.
    connections: i64,
    /// It was cut off, and has not come back to the image's new disk yet.
    is_cut_off: bool,
}

/// A client that was let in and may not have attached itself yet.
struct Admitted {
    process: Process,
    at_ms: u64,
}

/// How long a client that was let in may take to attach itself, in milliseconds.
const ENTERING_MS: u64 = 10_000;

impl KnownClients {
    /// Those that the file at `path` names, if it was written since the host was booted.
    pub(super) fn load(path: &StatePath) -> Self {
        let boot = boot_id(path);
        let bytes = path.read().unwrap_or_default();
        let known = decode(&bytes, &boot).unwrap_or_default();
        Self { path: path.clone(), boot, known, seen: Vec::new(), admitted: None }
    }

    /// Takes the room that the list needs, with nobody in it.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn make(path: &StatePath) -> io::Result<()> {
        path.create()?.write_at(&encode::<Process>(&boot_id(path), &[], LEN), 0)
    }

    /// Whether the process was attached.
    pub(super) fn knows(&self, process: Process) -> bool {
        self.known.contains(&process)
    }

    /// Whether one of them still runs, attached or not.
    fn any_runs(&self) -> bool {
        self.first_that_runs().is_some()
    }

    fn first_that_runs(&self) -> Option<Process> {
        self.known.iter().find(|one| one.runs()).copied()
    }

    /// One of them that runs and that this agent has not seen, or has cut off since.
    fn absent(&self) -> Option<Process> {
        let seen =
            |one: &Process| self.seen.iter().any(|seen| seen.process == *one && !seen.is_cut_off);
        self.known.iter().find(|one| one.runs() && !seen(one)).copied()
    }

    /// Who has the image: who is attached, was let in just now, or comes back.
    fn holders(&self, now_ms: u64) -> impl Iterator<Item = Process> {
        let entering = self.admitted.as_ref();
        let entering = entering.filter(move |one| now_ms.abs_diff(one.at_ms) < ENTERING_MS);
        let attached = self.seen.iter().filter(|seen| seen.connections > 0);
        let seen =
            |one: &Process| self.seen.iter().any(|seen| seen.process == *one && !seen.is_cut_off);
        let absent = self.known.iter().filter(move |one| !seen(one)).copied();
        let all = attached.map(|seen| seen.process).chain(absent);
        all.chain(entering.map(|one| one.process)).filter(Process::runs)
    }

    /// Another process that has the image, while this one has it not.
    fn who_else_has(&self, process: Process, now_ms: u64) -> Option<Process> {
        let first = self.holders(now_ms).next();
        first.filter(|_| !self.holders(now_ms).any(|one| one == process))
    }

    /// Who is attached is cut off, and comes back to another disk of the image.
    pub(super) fn cut_off(&mut self) {
        let attached = self.seen.iter_mut().filter(|seen| seen.connections > 0);
        attached.for_each(|seen| seen.is_cut_off = true);
    }

    /// A connection of the process begins, or ends.
    fn count(&mut self, process: Process, more: i64) {
        match self.seen.iter_mut().find(|seen| seen.process == process) {
            Some(seen) => seen.connections += more,
            None => {
                self.seen.retain(|seen| seen.process.runs());
                self.seen.push(Seen { process, connections: more, is_cut_off: false });
            }
        }
    }

    /// A connection of the process has ended.
    fn left(&mut self, process: Process) {
        self.count(process, -1);
    }

    /// The process is attached.
    pub(super) fn note(&mut self, process: Process) {
        self.count(process, 1);
        let seen = self.seen.iter_mut().filter(|seen| seen.process == process);
        seen.for_each(|seen| seen.is_cut_off = false);
        if self.knows(process) {
            return;
        }
        if self.known.len() >= MOST {
            // One that has ended comes back no more.
            let ended = self.known.iter().position(|one| !one.runs()).unwrap_or_default();
            self.known.remove(ended);
        }
        self.known.push(process);
        let bytes = encode(&self.boot, &self.known, LEN);
        let file = self.path.open_or_create();
        // Whoever comes is known also when the file system is mounted anew.
        let noted = file.and_then(|file| file.write_at(&bytes, 0).and_then(|()| file.sync()));
        if let Err(why) = noted {
            // Its requests fail instead of waiting if the agent comes back and cannot serve them.
            tracing::debug!(path = %self.path.display(), %why, "cannot note who is attached");
        }
    }
}

impl Registry {
    /// This process is attached to the image called `name`.
    pub fn attached(&self, name: &str, process: Process) {
        if let Some(known) = self.lock_clients().get_mut(name) {
            known.note(process);
        }
    }

    /// A connection of this process to the image called `name` has ended.
    pub fn detached(&self, name: &str, process: Process) {
        if let Some(known) = self.lock_clients().get_mut(name) {
            known.left(process);
        }
    }

    /// The clients of an image are about to be cut off, and come back to another disk of it.
    pub(super) fn cut_off_clients(&self, name: &str) {
        self.lock_clients().get_mut(name).into_iter().for_each(KnownClients::cut_off);
    }

    /// The QEMU that an image was adopted from, or released to, if it has ended: nobody will come back for the
    /// disk. Who answered for the VM may be another process than its QEMU (a manager may have made the monitor's
    /// socket); so nobody who was attached to the image may run any more either.
    pub fn ended_vm(&self, record: &ImageRecord) -> Option<QemuProcess> {
        let qemu = self.vm_of(record).filter(|qemu| !qemu.runs())?;
        (!self.a_client_runs(&record.name)).then_some(qemu)
    }

    /// Whether a process runs that was attached to the image called `name`.
    pub(super) fn a_client_runs(&self, name: &str) -> bool {
        self.lock_clients().get(name).is_some_and(KnownClients::any_runs)
    }

    /// The processes that run and were attached to the image called `name`.
    pub fn clients_that_run(&self, name: &str) -> Vec<Process> {
        let all = self.lock_clients();
        let known = all.get(name).into_iter().flat_map(|clients| &clients.known);
        known.filter(|one| one.runs()).copied().collect()
    }

    /// A process that uses the image although it may not be attached just now, as since a restart of the agent: it
    /// comes back, and finds what is there then. One that this agent has seen, and that is not attached any more,
    /// has left; but the VM of a disk that was adopted stays until that is released.
    pub fn absent_client(&self, entry: &Entry) -> Option<Process> {
        let record = entry.record();
        if !self.is_served_here(&record) {
            return None;
        }
        let find = |which: fn(&KnownClients) -> Option<Process>| {
            self.lock_clients().get(&record.name).and_then(which)
        };
        match record.adopted {
            None => find(KnownClients::absent),
            Some(_) => find(KnownClients::first_that_runs).or_else(|| {
                let qemu = self.vm_of(&record).filter(QemuProcess::runs)?;
                let pid = u32::try_from(qemu.pid).ok()?;
                Some(Process { pid, started: qemu.started })
            }),
        }
    }

    /// Whether clients of an image get what they ask for: another host has what was left behind here, and QEMU the
    /// file of a disk that was released.
    fn is_served_here(&self, record: &ImageRecord) -> bool {
        let released = || self.released.of(record.id).is_some_and(|note| note.done);
        record.state == CopyState::Owner && (record.adopted.is_some() || !released())
    }

    /// Lets a process in to the image called `name`, at this time since the epoch, unless another one has it.
    ///
    /// # Errors
    /// The process that has it.
    pub fn let_in(&self, name: &str, process: Process, now_ms: u64) -> Result<(), Process> {
        let mut all = self.lock_clients();
        let Some(known) = all.get_mut(name) else { return Ok(()) };
        match known.who_else_has(process, now_ms) {
            Some(holder) => Err(holder),
            None => {
                known.admitted = Some(Admitted { process, at_ms: now_ms });
                Ok(())
            }
        }
    }

    /// Another process that has the image called `name`, while this one has it not.
    pub fn who_else_has(&self, name: &str, process: Process, now_ms: u64) -> Option<Process> {
        self.lock_clients().get(name).and_then(|known| known.who_else_has(process, now_ms))
    }

    /// Whether this process was attached to the image before, in this boot of the host.
    pub fn was_attached(&self, name: &str, process: Process) -> bool {
        self.lock_clients().get(name).is_some_and(|known| known.knows(process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::started;

    fn process(pid: u32) -> Process {
        Process { pid, started: 1 << 40 | u64::from(pid) }
    }

    /// An empty list.
    fn list() -> (tempfile::TempDir, StatePath) {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("a.clients"));
        KnownClients::make(&path).unwrap();
        (dir, path)
    }

    /// A process that runs.
    fn own() -> Process {
        let pid = std::process::id();
        Process { pid, started: started(pid as i32).unwrap() }
    }

    #[test]
    fn who_was_attached_is_known_to_the_next_agent() {
        let (_dir, path) = list();
        let mut known = KnownClients::load(&path);
        assert!(!known.knows(process(7)));
        known.note(process(7));
        let mut next = KnownClients::load(&path);
        assert!(next.knows(process(7)));
        assert!(!next.knows(Process { pid: 7, started: 5 }), "the number was used again");
        let own = own();
        next.note(own);
        (0..100).for_each(|pid| next.note(process(1000 + pid)));
        let next = KnownClients::load(&path);
        assert!(next.knows(process(1099)) && !next.knows(process(7)));
        assert!(next.knows(own), "it still runs, whoever came and went");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), LEN as u64, "it takes no more room");
    }

    #[test]
    fn who_ran_before_and_has_not_come_back_is_absent() {
        let (_dir, path) = list();
        let own = own();
        let mut known = KnownClients::load(&path);
        known.note(process(7));
        known.note(own);
        assert_eq!(known.absent(), None, "it is there, or has left since");
        let mut known = KnownClients::load(&path);
        assert_eq!(known.absent(), Some(own), "the other one has ended");
        known.note(own);
        assert_eq!(known.absent(), None);
        known.cut_off();
        assert_eq!(known.absent(), Some(own));
        // Its first connection is told of when the second one has begun.
        known.note(own);
        known.left(own);
        assert_eq!(known.absent(), None);
        known.left(own);
        known.cut_off();
        assert_eq!(known.absent(), None, "it had left before");
    }

    /// Only one process at a time has an image, and one that has left has it no more.
    #[test]
    fn an_image_is_held_by_who_is_there_or_comes_back() {
        let (_dir, path) = list();
        let own = own();
        let holder = |known: &KnownClients, now| known.holders(now).next();
        let mut known = KnownClients::load(&path);
        assert_eq!(holder(&known, 0), None);
        known.note(own);
        known.note(process(7));
        assert_eq!(holder(&known, 0), Some(own), "the other one has ended");
        assert_eq!(known.who_else_has(own, 0), None);
        assert_eq!(known.who_else_has(process(8), 0), Some(own));
        assert_eq!(holder(&KnownClients::load(&path), 0), Some(own), "it comes back");
        known.cut_off();
        known.left(own);
        assert_eq!(holder(&known, 0), Some(own), "it comes back");
        known.note(own);
        known.left(own);
        assert_eq!(holder(&known, 0), None, "it has left");
        known.admitted = Some(Admitted { process: own, at_ms: 1 });
        assert_eq!(holder(&known, ENTERING_MS), Some(own));
        assert_eq!(holder(&known, ENTERING_MS + 1), None, "it has only looked");
    }
}
