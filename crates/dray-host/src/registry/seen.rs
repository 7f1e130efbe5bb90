//! What can be seen of an image from this host, without asking its VM, and the rule that follows from it.

use super::used::{ids_of, wanted_hold};
use super::{Entry, Registry};
use crate::process::QemuProcess;
use crate::record::ImageRecord;
use crate::settle::{Disk, File, Lock, Locking, Recorded, Rule, Seen, Vm, rule};
use dray_image::FileId;
use std::io;

/// Why an image may not be used, and what settles it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Objection {
    /// Why.
    pub why: String,
    /// What an operator can do.
    pub hint: String,
}

impl Registry {
    /// What is seen of an image when nobody asks its VM.
    pub fn seen(&self, entry: &Entry) -> Seen {
        let record = entry.record();
        let vm = match self.vm_of(&record) {
            Some(qemu) if qemu.runs() => Vm::Silent,
            Some(_) if self.a_client_runs(&record.name) => Vm::Other,
            Some(_) => Vm::Gone,
            None => Vm::Silent,
        };
        self.seen_with(entry, vm, Disk::Unknown)
    }

    /// What is seen of an image when `process` has just said where it has the disk. None where the system does
    /// not tell which process it is.
    pub fn seen_by(&self, entry: &Entry, process: Option<&QemuProcess>, disk: Disk) -> Seen {
        let own = self.vm_of(&entry.record());
        match (own, process) {
            (Some(own), Some(process)) if !own.is_process(process) => {
                if own.runs() {
                    // It has not said anything; what another has there, its lock tells.
                    return self.seen(entry);
                }
                self.seen_with(entry, Vm::Other, disk)
            }
            _ => self.seen_with(entry, Vm::Same, disk),
        }
    }

    fn seen_with(&self, entry: &Entry, vm: Vm, disk: Disk) -> Seen {
        let recorded = self.recorded(entry);
        Seen { recorded, vm, disk, lock: lock_of(entry), file: file_of(entry) }
    }

    fn recorded(&self, entry: &Entry) -> Recorded {
        let record = entry.record();
        let note = self.released.of(record.id);
        let missing = entry.disk.missing_count() > 0;
        let recorded =
            Recorded::of(&record, note.as_ref(), missing, self.a_client_runs(&record.name));
        let settled = matches!(
            recorded,
            Recorded::Plain | Recorded::Resident | Recorded::Arrived | Recorded::Adopted
        );
        // A note that cannot be read may say anything.
        if settled && note.is_none() && self.released.knows(record.id) {
            return Recorded::Releasing;
        }
        recorded
    }

    /// The QEMU that an image was adopted from, or that it is being released to.
    pub fn vm_of(&self, record: &ImageRecord) -> Option<QemuProcess> {
        let adopted = record.adopted.as_ref().and_then(|adopted| adopted.qemu.clone());
        adopted.or_else(|| self.released.of(record.id).map(|note| note.qemu))
    }

    /// The rule that decides about an image, as far as it is known without asking its VM.
    pub fn rule_of(&self, entry: &Entry) -> Rule {
        rule(self.seen(entry))
    }

    /// Why nobody new may use an image now, and what settles it; none when nothing stands against it here.
    pub fn objection(&self, entry: &Entry) -> Option<Objection> {
        let record = entry.record();
        let (name, path) = (&record.name, record.path.display());
        let (why, hint) = match entry.used_elsewhere() {
            Ok(Some(by)) => (
                format!("the file of image '{name}' is in use elsewhere: {path}: {by}"),
                self.look_hint(&record, "stop what uses its file"),
            ),
            Err(why) => (
                format!("it cannot be said who uses image '{name}': {path}: {why}"),
                "see what is wrong with the file system".to_owned(),
            ),
            Ok(None) => return self.objection_by_rule(entry, &record),
        };
        Some(Objection { why, hint })
    }

    /// The same of an image whose file nobody else has.
    fn objection_by_rule(&self, entry: &Entry, record: &ImageRecord) -> Option<Objection> {
        let (name, path) = (&record.name, record.path.display());
        let (why, hint) = match self.rule_of(entry) {
            Rule::Undecided => (
                format!("the disk of image '{name}' may be on dray or on its file"),
                self.look_hint(record, "end the vm that uses it"),
            ),
            Rule::LeftToItsClients => (
                format!(
                    "the vm of image '{name}' has ended, and another process is attached to it"
                ),
                "end that process; `dray images` shows the clients".to_owned(),
            ),
            Rule::VmHasEnded => (
                format!("the vm of image '{name}' has ended, and its disk is released"),
                "try again in a moment; `dray images` shows it".to_owned(),
            ),
            Rule::WaitsForFile => (
                format!("image '{name}' is not the file that is at {path} now"),
                format!("put its file back there, or `dray images remove {name}`"),
            ),
            // Its own loop, or what is said of copies that were left behind, keeps that door.
            Rule::OfItsMigration | Rule::NotOwned => return None,
            rule if rule.serves_new() => return None,
            _ => (
                format!("it cannot be said who has image '{name}'"),
                self.look_hint(record, "stop what uses its file"),
            ),
        };
        Some(Objection { why, hint })
    }

    /// What settles where an image is: its VM is asked, if it runs.
    fn look_hint(&self, record: &ImageRecord, otherwise: &str) -> String {
        match self.vm_of(record).filter(QemuProcess::runs) {
            Some(qemu) => format!(
                "`dray release --qmp {}` looks where the vm has its disk, and settles it",
                qemu.socket.display()
            ),
            None => otherwise.to_owned(),
        }
    }

    /// At the start: takes the locks of an image, if the rule says so. Who has the file when that fails may write
    /// to it, so that its line ends.
    pub(super) fn lock_at_start(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let locking = match self.rule_of(entry).locking() {
            _ if self.released.knows(record.id) => Locking::None,
            // A migration of a disk that its VM may have itself.
            Locking::OfItsMigration if record.adopted.is_some() => match self.ended_vm(&record) {
                Some(_) => Locking::None,
                None => Locking::IfFree,
            },
            locking => locking,
        };
        match locking {
            Locking::None => Ok(()),
            Locking::IfFree => {
                entry.regain_locks();
                Ok(())
            }
            Locking::OfItsMigration | Locking::Needed => entry.take_locks().map_err(|why| {
                if let Err(why) = self.line_path(&record.name).remove() {
                    tracing::error!(image = record.name, %why, "cannot end an image's line");
                }
                io::Error::other(why)
            }),
        }
    }

    /// Locks that another program was in the way of are taken as soon as it is not, unless the image is about to be
    /// QEMU's.
    pub(super) fn retry_locks(&self) {
        for entry in self.all().into_iter().filter(|entry| entry.lacks_locks()) {
            let name = entry.record().name;
            let Ok(_operation) = self.operate(&name, "release") else { continue };
            let wanted = self.rule_of(&entry).locking() != Locking::None;
            if wanted && entry.lacks_locks() && entry.try_locks() {
                tracing::info!(image = name, "its file is locked again");
            }
        }
    }

    /// At the start: a line is trusted only if the rule says so.
    pub(super) fn settle_at_start(&self, entry: &Entry) {
        match self.rule_of(entry) {
            _ if self.released.knows(entry.record().id) => {
                entry.line().inspect(|line| line.suspect());
            }
            rule if !rule.trusts() => self.distrust(entry),
            _ => {}
        }
    }

    /// Somebody else may have written to an image: everything in it counts as changed, also after a restart.
    pub fn distrust(&self, entry: &Entry) {
        let Some(line) = entry.line() else { return };
        // With a note it is so until that is settled.
        if self.released.knows(entry.record().id) {
            return line.suspect();
        }
        if let Err(why) = line.settle(&entry.disk, None) {
            tracing::warn!(image = entry.record().name, %why, "cannot note that it counts as changed");
            line.suspect();
        }
    }
}

fn lock_of(entry: &Entry) -> Lock {
    match (entry.used_elsewhere(), wanted_hold(&entry.record())) {
        (Ok(Some(_)), _) => Lock::Others,
        (Ok(None), Some(_)) if entry.has_locks() => Lock::Ours,
        (Ok(None), _) => Lock::Free,
        (Err(_), _) => Lock::Unknown,
    }
}

/// Whether the file that is open is the one that is at the image's path.
fn file_of(entry: &Entry) -> File {
    let record = entry.record();
    let open = ids_of(&record, &*entry.file);
    let Some(path) = record.current_path().ok().filter(|_| !open.is_empty()) else {
        return File::AsRecorded;
    };
    match std::fs::metadata(path) {
        Ok(found) if open.contains(&FileId::of(&found)) => File::AsRecorded,
        Ok(_) => File::Other,
        Err(why) if why.kind() == io::ErrorKind::NotFound => File::Absent,
        // It is open, and this is all that is known of it.
        Err(_) => File::AsRecorded,
    }
}
