//! What happens in the middle of a move. Each fault alone is harmless, by the failure table.

use crate::others::Overlay;
use crate::walk::Walk;
use crate::world::LETTERS;
use dray_testkit::guest::tools;
use std::time::Duration;

/// How long an agent is away at most before it is started again.
const AWAY: Duration = Duration::from_secs(2);
/// When a fault comes, after the one before or the beginning of the move.
const AFTER: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    Cancel,
    Terminate,
    Kill,
    KillVm,
    PowerFailure,
    Snapshot,
}

/// How often each is drawn.
const ALL: [(Fault, usize); 6] = [
    (Fault::Cancel, 3),
    (Fault::Terminate, 4),
    (Fault::Kill, 4),
    (Fault::KillVm, 2),
    (Fault::PowerFailure, 2),
    (Fault::Snapshot, 2),
];

/// What becomes of a VM whose QEMU was killed in a move.
#[derive(Default)]
pub struct Aftermath {
    pub overlay: Option<Overlay>,
}

impl Walk<'_> {
    /// Faults to come in a move, by their order.
    pub fn draw_faults(&mut self, of_vm: bool) -> Vec<Fault> {
        let count = self.random.pick(&[0, 0, 1, 1, 1, 2]);
        let all = ALL.iter().flat_map(|&(fault, often)| std::iter::repeat_n(fault, often));
        let vms = [Fault::KillVm, Fault::PowerFailure, Fault::Snapshot];
        let all: Vec<Fault> = all.filter(|fault| of_vm || !vms.contains(fault)).collect();
        let mut faults: Vec<Fault> = (0..count).map(|_| self.random.pick(&all)).collect();
        // A guest whose QEMU is killed loses its overlay, which is no matter of dray's.
        let kills = |fault: &Fault| matches!(fault, Fault::KillVm | Fault::PowerFailure);
        if faults.iter().any(kills) {
            faults.retain(|fault| *fault != Fault::Snapshot);
        }
        faults.dedup();
        faults
    }

    /// Does one of them, some time later.
    pub fn fault(
        &mut self,
        fault: Fault,
        source: usize,
        vm: Option<usize>,
        after: &mut Aftermath,
    ) -> Result<(), String> {
        std::thread::sleep(self.random.time(AFTER));
        self.counts.add(format!("{fault:?} in a move"), 1);
        match (fault, vm) {
            (Fault::Terminate | Fault::Kill, _) => {
                let host = self.random.below(2) as usize;
                self.restart_agent(host, fault == Fault::Kill)
            }
            (Fault::KillVm, Some(number)) => self.kill_vm(number),
            (Fault::PowerFailure, Some(number)) => self.power_failure_in_move(number, source),
            (Fault::Snapshot, Some(number)) => {
                after.overlay = self.snapshot(number)?;
                Ok(())
            }
            _ => self.cancel(source),
        }
    }

    fn cancel(&mut self, source: usize) -> Result<(), String> {
        let discard: &[&str] = if self.random.chance(50) { &["--discard"] } else { &[] };
        self.ask(source, &[&["cancel"], discard].concat()).map(drop)
    }

    /// Agent and VM at the source end. If the disks are still this host's the manager starts the VM.
    fn power_failure_in_move(&mut self, number: usize, source: usize) -> Result<(), String> {
        self.kill_agent(source, true)?;
        self.kill_vm(number)?;
        std::thread::sleep(self.random.time(AWAY));
        let vm_first = self.random.chance(50);
        let disks = self.vms[number].disks.iter();
        let here = disks.map(|disk| self.world.file(source, &disk.file));
        if vm_first && here.into_iter().all(|file| tools::opens(&file)) {
            return self.back_in_order(number, source, true);
        }
        // The VM follows when it is known where its disks are.
        self.start_agent(source)
    }

    fn restart_agent(&mut self, host: usize, kill: bool) -> Result<(), String> {
        self.kill_agent(host, kill)?;
        std::thread::sleep(self.random.time(AWAY));
        self.start_agent(host)
    }

    /// Ends an agent, with SIGKILL or SIGTERM.
    pub fn kill_agent(&mut self, host: usize, kill: bool) -> Result<(), String> {
        let (agent, letter) = (self.world.host(host), LETTERS[host]);
        let ended = if kill { agent.kill9() } else { agent.stop() };
        ended.map_err(|why| format!("the end of agent {letter}: {why}"))?;
        self.counts.add(if kill { "agents killed" } else { "agents ended" }, 1);
        self.tell(format!("   agent {letter} ends, killed: {kill}"));
        Ok(())
    }

    pub fn start_agent(&mut self, host: usize) -> Result<(), String> {
        let started = self.world.host(host).start();
        started.map_err(|why| format!("agent {} does not start: {why}", LETTERS[host]))?;
        self.tell(format!("   agent {} is back", LETTERS[host]));
        Ok(())
    }
}
