//! Decides how to settle an image, from its records and from observations of the image and its VM.
//!
//! A record says what was so once. Agents die, hosts lose power, and other programs start VMs, lock files and
//! change what QEMU has: [`rule`] names, for every combination of what is recorded and what is seen, the rule
//! that decides. It looks at nothing itself. Who looks, at a start, before a command or when a VM ends, says
//! what was seen, and does what the rule says.

use crate::record::{CopyState, ImageRecord};
use crate::released::Released;

/// What is recorded of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recorded {
    /// It is served to whoever asks.
    Plain,
    /// The same, and a process that runs has been its client.
    Resident,
    /// A VM's disk that was about to come under dray: it may be there, or on its file.
    Adopting,
    /// A VM's disk that has come under dray.
    Adopted,
    /// A VM's disk that was about to go back to QEMU: it may be there, or under dray.
    Releasing,
    /// A VM's disk that has gone back to QEMU, and is not forgotten here yet.
    Released,
    /// It takes part in a migration from here, or its chain goes over to another form.
    Moving,
    /// There is room for it, and it is on its way here.
    Prepared,
    /// It is owned here, and some of its blocks are at the source still.
    Incomplete,
    /// It came in a migration that is over.
    Arrived,
    /// Another host owns it: this is what was left behind.
    Replica,
}

/// The VM that an image was adopted from, or is released to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vm {
    /// Its process has ended, and so has every client of the image.
    Gone,
    /// Its process answers.
    Same,
    /// Its process has ended, and another one answers in its place, or has been the image's client and runs.
    Other,
    /// It may run: nobody has asked it, or it does not answer.
    Silent,
}

/// Where a VM has the disk, by its own answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disk {
    /// On the image's file.
    OnFile,
    /// On the image's export, directly or below something.
    OnExport,
    /// On something else, or the VM has it no more.
    Elsewhere,
    /// Not asked, or not told.
    Unknown,
}

/// Who has the locks of the image's file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// Nobody.
    Free,
    /// This agent.
    Ours,
    /// Somebody else, who may write to it.
    Others,
    /// The system does not tell.
    Unknown,
}

/// What is at the path at which the record has the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum File {
    /// The image, as far as can be told.
    AsRecorded,
    /// There is nothing at the path.
    Absent,
    /// Something that is not the image.
    Other,
}

/// An image at the moment at which it is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// What is recorded of it.
    pub recorded: Recorded,
    /// Its VM.
    pub vm: Vm,
    /// Where that has the disk.
    pub disk: Disk,
    /// Who has its file's locks.
    pub lock: Lock,
    /// What is at its path.
    pub file: File,
}

/// Why something is done with an image, or nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Rule {
    /// Its migration, or the change of its chain, decides: it is closed until a loop vouches for it.
    OfItsMigration,
    /// Another host owns it: it is not served.
    NotOwned,
    /// Its file is not there: it is closed, and opened when the file is there again.
    WaitsForFile,
    /// Another program has its file, or may have it, and no VM of dray's explains that: it is closed until it can
    /// be locked.
    WaitsForLock,
    /// Nothing stands against it: it is served and locked.
    Served,
    /// It is served to its VM. QEMU may still have locks of its own, so that dray takes its locks if it can.
    ServedToItsVm,
    /// A VM has the file itself, or another program has that of a VM's disk: nobody new is served, it is neither moved nor backed up, and what it holds
    /// counts as changed.
    InUseElsewhere,
    /// It may be QEMU's or dray's: it is not locked, nobody new is served, what it holds counts as changed, and
    /// the next look at its VM decides.
    Undecided,
    /// Its VM has ended, and another process that was attached to it writes to it: it is locked, so that nobody
    /// opens the file beside that, and nobody new is served.
    LeftToItsClients,
    /// The same, and another program has the file: not even the process that was attached is served until that
    /// program has let it go.
    TakenFromItsClients,
    /// The VM has ended: whoever starts it next opens the file itself. It is released, and forgotten here.
    VmHasEnded,
    /// The VM has its disk on something else: QEMU leaves the export, and it is as if the VM had ended.
    MovedAway,
    /// The disk came under dray: what QEMU wrote before is read, as far as QEMU knows it, and the adoption ends.
    CameUnderDray,
    /// The disk has stayed under dray: the release has not been.
    StayedUnderDray,
    /// The disk is on its file: the release ends, or the adoption has not been, which comes to the same.
    IsOnItsFile,
    /// There is no such combination: a VM that has ended, or that nobody has asked, shows no disk.
    Impossible,
}

/// Which locks dray has of an image's file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Locking {
    /// None: another program has the file, or may have it.
    None,
    /// Those that can be had; its VM may be about to let its own go.
    IfFree,
    /// Those of an owner: without them it is closed.
    Needed,
    /// The loop of its migration takes them.
    OfItsMigration,
}

impl Rule {
    /// Which locks dray takes.
    pub fn locking(self) -> Locking {
        match self {
            Self::OfItsMigration | Self::NotOwned => Locking::OfItsMigration,
            Self::Served | Self::WaitsForLock | Self::WaitsForFile => Locking::Needed,
            Self::ServedToItsVm
            | Self::LeftToItsClients
            | Self::TakenFromItsClients
            | Self::CameUnderDray
            | Self::StayedUnderDray => Locking::IfFree,
            Self::InUseElsewhere
            | Self::Undecided
            | Self::VmHasEnded
            | Self::MovedAway
            | Self::IsOnItsFile
            | Self::Impossible => Locking::None,
        }
    }

    /// Whether a client is served that was not attached before.
    pub fn serves_new(self) -> bool {
        matches!(self, Self::Served | Self::ServedToItsVm)
    }

    /// Whether a client is served that was attached before.
    pub fn serves_attached(self) -> bool {
        self != Self::TakenFromItsClients
    }

    /// Whether what dray has tracked is everything that was written.
    pub fn trusts(self) -> bool {
        matches!(
            self,
            Self::Served | Self::ServedToItsVm | Self::StayedUnderDray | Self::OfItsMigration
        )
    }
}

/// The rule that decides about an image.
pub fn rule(seen: Seen) -> Rule {
    let Seen { recorded, vm, disk, lock, file } = seen;
    if matches!(vm, Vm::Gone | Vm::Silent) && disk != Disk::Unknown {
        return Rule::Impossible;
    }
    match recorded {
        Recorded::Moving | Recorded::Prepared | Recorded::Incomplete => Rule::OfItsMigration,
        Recorded::Replica => Rule::NotOwned,
        _ if file != File::AsRecorded => Rule::WaitsForFile,
        Recorded::Plain | Recorded::Resident | Recorded::Arrived => of_unadopted(disk, lock),
        Recorded::Adopted => of_adopted(vm, disk, lock),
        Recorded::Adopting | Recorded::Released => of_halfway(vm, disk, Rule::CameUnderDray),
        Recorded::Releasing => of_halfway(vm, disk, Rule::StayedUnderDray),
    }
}

/// No VM is known to have its file itself.
fn of_unadopted(disk: Disk, lock: Lock) -> Rule {
    match (disk, lock) {
        (Disk::OnFile, _) => Rule::InUseElsewhere,
        (_, Lock::Others | Lock::Unknown) => Rule::WaitsForLock,
        (Disk::OnExport | Disk::Elsewhere | Disk::Unknown, Lock::Free | Lock::Ours) => Rule::Served,
    }
}

/// When it was last seen, its VM had the disk on the export.
fn of_adopted(vm: Vm, disk: Disk, lock: Lock) -> Rule {
    match (vm, disk, lock) {
        (Vm::Gone, _, _) | (Vm::Other, Disk::OnFile | Disk::Elsewhere, _) => Rule::VmHasEnded,
        (Vm::Other, Disk::Unknown, Lock::Others) => Rule::TakenFromItsClients,
        (Vm::Other, Disk::Unknown, Lock::Free | Lock::Ours | Lock::Unknown) => {
            Rule::LeftToItsClients
        }
        (Vm::Same, Disk::OnFile, _) => Rule::IsOnItsFile,
        (Vm::Same, Disk::Elsewhere, _) => Rule::MovedAway,
        (_, Disk::OnExport | Disk::Unknown, Lock::Others) => Rule::InUseElsewhere,
        // Its own VM, or one that was started on the export.
        (_, Disk::OnExport | Disk::Unknown, Lock::Free | Lock::Ours | Lock::Unknown) => {
            Rule::ServedToItsVm
        }
        (Vm::Silent, Disk::OnFile | Disk::Elsewhere, _) => Rule::Impossible,
    }
}

/// An agent died while the disk went over. `on_export`: what it means that its own VM has it there. Another VM
/// has it there since it was started, and nobody knows what the one before it did.
fn of_halfway(vm: Vm, disk: Disk, on_export: Rule) -> Rule {
    match (vm, disk) {
        (Vm::Gone, _) | (Vm::Other, Disk::OnFile | Disk::Elsewhere) => Rule::VmHasEnded,
        (Vm::Other, Disk::OnExport) => Rule::CameUnderDray,
        (Vm::Same, Disk::OnExport) => on_export,
        (Vm::Same, Disk::OnFile) => Rule::IsOnItsFile,
        (Vm::Same, Disk::Elsewhere) => Rule::MovedAway,
        (Vm::Same | Vm::Other, Disk::Unknown) | (Vm::Silent, _) => Rule::Undecided,
    }
}

impl Recorded {
    /// What a record and the note of a release say together. `missing`: blocks that are not here yet; `client`:
    /// a process that has been its client runs.
    pub fn of(record: &ImageRecord, note: Option<&Released>, missing: bool, client: bool) -> Self {
        match record.state {
            CopyState::Replica => return Self::Replica,
            CopyState::Incoming => return Self::Prepared,
            CopyState::Owner if missing => return Self::Incomplete,
            CopyState::Owner => {}
        }
        if record.migration.is_some() || record.flat.is_some() || record.swap.is_some() {
            return Self::Moving;
        }
        match (note, &record.adopted) {
            (Some(note), None) if note.done => Self::Released,
            (Some(note), Some(_)) if note.done => Self::Adopting,
            (Some(_), _) => Self::Releasing,
            (None, Some(adopted)) if adopted.done => Self::Adopted,
            (None, Some(_)) => Self::Adopting,
            (None, None) if record.epoch > dray_types::Epoch(1) => Self::Arrived,
            (None, None) if client => Self::Resident,
            (None, None) => Self::Plain,
        }
    }
}

#[cfg(test)]
mod tests;
