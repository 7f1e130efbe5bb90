//! Which client of the images is the QEMU behind a monitor. A manager that has made the monitor's socket answers for it:
//! the process at the other end is no client then.

use dray_host::process::QemuProcess;
use dray_host::registry::Process;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The QEMUs that have waited for a VM, by their monitors.
#[derive(Default)]
pub struct Behind(BTreeMap<PathBuf, Process>);

impl Behind {
    /// The QEMU behind this monitor, of `clients` in the order in which they came. Where a manager answers for it, it is
    /// the one that was found at first, or the emulator that has come last and is behind no other monitor.
    pub(super) fn find(&mut self, monitor: &QemuProcess, clients: &[Process]) -> Option<Process> {
        let own = clients.iter().find(|one| one.is(monitor));
        let known = self.0.get(&monitor.socket).filter(|one| clients.contains(one));
        let newest = || clients.iter().rfind(|one| one.is_emulator() && !self.knows(**one));
        let found = own.or(known).or_else(newest).copied()?;
        self.0.insert(monitor.socket.clone(), found);
        Some(found)
    }

    /// Whether none has been looked for.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this one was behind a monitor.
    pub(super) fn knows(&self, one: Process) -> bool {
        self.0.values().any(|known| *known == one)
    }
}
