//! Which client of the images is the QEMU behind a monitor. A manager that has made the monitor's socket answers for it:
//! the process at the other end is no client then.

use dray_host::process::QemuProcess;
use dray_host::registry::Process;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The QEMUs that have waited for a VM, by their monitors.
#[derive(Default)]
pub struct Behind {
    known: BTreeMap<PathBuf, Process>,
    /// More than one was looked for: an agent that was restarted knows of none before.
    again: bool,
}

impl Behind {
    /// The QEMU behind this monitor, of `clients` in the order in which they came. Where a manager answers for it, it is
    /// the one that was found at first, or the emulator that has come last and is behind no other monitor.
    pub(super) fn find(&mut self, monitor: &QemuProcess, clients: &[Process]) -> Option<Process> {
        self.again = !self.known.is_empty();
        let known = self.known.get(&monitor.socket).filter(|one| clients.contains(one));
        let newest = || clients.iter().rfind(|one| one.is_emulator() && !self.knows(**one));
        let own = Process::itself(monitor, clients);
        let found = own.or_else(|| known.or_else(newest).copied())?;
        self.known.insert(monitor.socket.clone(), found);
        Some(found)
    }

    /// Those that the QEMU `now`, which this monitor was found to be of, replaces: the one that waited `before`, by its
    /// monitor, and whoever was found behind another one.
    pub(super) fn replaced(
        &self,
        now: Process,
        monitor: &QemuProcess,
        before: Option<&QemuProcess>,
        clients: &[Process],
    ) -> Vec<Process> {
        let Some(before) = before.filter(|before| *before != monitor) else { return Vec::new() };
        let own = Process::itself(before, clients);
        let forgotten = !self.again && before.is_process(monitor);
        let is_one = |one: &Process| self.knows(*one) || forgotten && one.is_emulator();
        let others = clients.iter().copied().filter(is_one);
        own.into_iter().chain(others).filter(|one| *one != now).collect()
    }

    /// Whether this one was behind a monitor.
    fn knows(&self, one: Process) -> bool {
        self.known.values().any(|known| *known == one)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::process::{Child, Command};

    /// Programs that look like QEMUs, and end with the test.
    struct Emulators(tempfile::TempDir, Vec<Child>);

    impl Emulators {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            symlink("/bin/sleep", dir.path().join("qemu-system-x")).unwrap();
            Self(dir, Vec::new())
        }

        /// One more, and a monitor of its own.
        fn start(&mut self) -> (Process, QemuProcess) {
            let child = Command::new(self.0.path().join("qemu-system-x")).arg("60").spawn();
            let child = child.unwrap();
            let monitor = monitor(&format!("/{}", child.id()), child.id());
            self.1.push(child);
            (Process::itself(&monitor, &[]).expect("an emulator"), monitor)
        }
    }

    impl Drop for Emulators {
        fn drop(&mut self) {
            for child in &mut self.1 {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }

    fn monitor(socket: &str, pid: u32) -> QemuProcess {
        QemuProcess::find(Path::new(socket), i32::try_from(pid).unwrap()).unwrap()
    }

    /// This process is no QEMU, and answers for some.
    fn manager(socket: &str) -> QemuProcess {
        monitor(socket, std::process::id())
    }

    #[test]
    fn a_qemu_that_answers_for_itself_replaces_the_one_before_it() {
        let mut all = Emulators::new();
        let ((first, one), (second, two)) = (all.start(), all.start());
        let mut behind = Behind::default();
        assert_eq!(behind.find(&one, &[first]), Some(first));
        assert!(behind.replaced(first, &one, None, &[first]).is_empty());
        assert!(behind.replaced(first, &one, Some(&one), &[first]).is_empty());
        // It need not have come to an image yet, and the first need not be there any more.
        assert_eq!(behind.find(&two, &[]), Some(second));
        assert_eq!(behind.replaced(second, &two, Some(&one), &[]), [first]);
        let taken = QemuProcess { socket: one.socket.clone(), ..two };
        assert_eq!(Behind::default().find(&taken, &[first]), Some(second), "by its socket's name");
    }

    #[test]
    fn behind_a_manager_the_one_that_came_last_replaces_those_before_it() {
        let mut all = Emulators::new();
        let (first, second) = (all.start().0, all.start().0);
        let (one, two) = (manager("/one"), manager("/two"));
        let mut behind = Behind::default();
        assert_eq!(behind.find(&one, &[first]), Some(first));
        let both = [first, second];
        assert_eq!(behind.find(&two, &both), Some(second));
        assert_eq!(behind.replaced(second, &two, Some(&one), &both), [first]);
        // The first one waits once more.
        assert_eq!(behind.find(&one, &both), Some(first));
        assert_eq!(behind.replaced(first, &one, Some(&two), &both), [second]);
        let mut restarted = Behind::default();
        assert_eq!(restarted.find(&two, &both), Some(second));
        assert_eq!(restarted.replaced(second, &two, Some(&one), &both), [first]);
    }
}
