//! A VM's QEMU ends, and whoever manages the VM starts it again.

use crate::disk::Home;
use crate::judge;
use crate::walk::Walk;
use crate::world::LETTERS;
use dray_testkit::guest::tools;
use std::time::{Duration, Instant};

/// How long whoever starts a VM waits for the lock of its disk.
const UNLOCKED: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(200);
/// The longest time that an agent or a VM is away.
const AWAY: Duration = Duration::from_secs(3);

impl Walk<'_> {
    /// The VM is killed and started again, with or without an end of the agent at its host, in either order.
    pub fn start_again(&mut self, number: usize) -> Result<(), String> {
        let host = self.vms[number].host();
        match self.random.below(3) {
            0 => {
                self.kill_vm(number)?;
                self.boot(number, host)
            }
            1 => self.power_failure(number, true),
            _ => self.power_failure(number, false),
        }
    }

    /// Kills the QEMU that the guest is in.
    pub fn kill_vm(&mut self, number: usize) -> Result<(), String> {
        let vm = &mut self.vms[number];
        let running = vm.running()?;
        running.qemu.kill().map_err(|why| why.to_string())?;
        self.counts.add("VMs killed", 1);
        self.tell(format!("   vm{number} is killed"));
        self.hear()
    }

    /// Agent and VM end at once, as when the host loses its power, and are back in either order. The other VM at
    /// the host goes on: its disks wait for the agent.
    fn power_failure(&mut self, number: usize, vm_first: bool) -> Result<(), String> {
        let host = self.vms[number].host();
        self.kill_agent(host, true)?;
        self.kill_vm(number)?;
        std::thread::sleep(self.random.time(AWAY));
        self.back_in_order(number, host, vm_first)
    }

    /// Agent and VM are back, the VM first if `vm_first` and if it can do without the agent.
    pub fn back_in_order(
        &mut self,
        number: usize,
        host: usize,
        vm_first: bool,
    ) -> Result<(), String> {
        let files = self.vms[number].disks.iter().all(|disk| {
            disk.home == Home::File && tools::opens(&self.world.file(host, &disk.file))
        });
        if !(vm_first && files) {
            self.counts.add("VMs back after their agent", 1);
            self.start_agent(host)?;
            return self.boot(number, host);
        }
        self.counts.add("VMs back before their agent", 1);
        self.boot_now(number, host)?;
        self.start_agent(host)
    }

    /// Starts the VM once its disks are where its manager has them.
    pub fn boot(&mut self, number: usize, host: usize) -> Result<(), String> {
        for disk in self.vms[number].disks.iter().filter(|disk| disk.home == Home::File) {
            self.await_file(host, &disk.file)?;
        }
        self.boot_now(number, host)
    }

    /// Waits until dray has let a file go whose VM has ended.
    fn await_file(&self, host: usize, file: &str) -> Result<(), String> {
        let deadline = Instant::now() + UNLOCKED;
        loop {
            let image = self.world.image(host, file)?;
            if image["state"] != "owner" {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("a vm that has ended cannot open its disk: {image}"));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Starts the VM: what its disks hold is what was flushed, or newer.
    fn boot_now(&mut self, number: usize, host: usize) -> Result<(), String> {
        let vm = &mut self.vms[number];
        let bytes = judge::judge_lost(&self.world, vm, host)?;
        self.counts.add("MiB compared", bytes >> 20);
        self.counts.add("boots", 1);
        self.tell(format!("   vm{number} boots at {}", LETTERS[host]));
        let began = Instant::now();
        self.vms[number].boot(&self.world, host, true)?;
        self.tell(format!("   vm{number} runs after {:.1?}", began.elapsed()));
        Ok(())
    }
}
