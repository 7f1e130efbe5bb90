//! A VM's disks come to dray where they are, go back to QEMU, and grow on dray.

use crate::disk::{Format, Home};
use crate::walk::Walk;

/// By how much a disk grows, and how long it becomes at most.
const GROWS: u64 = 4 << 20;
const LONGEST: u64 = 64 << 20;

impl Walk<'_> {
    pub fn adopt(&mut self, number: usize) -> Result<(), String> {
        let running = self.vms[number].running()?;
        let (host, qmp) = (running.host, running.qmp());
        self.ask(host, &["adopt", "--qmp", &qmp])?;
        self.vms[number].goes_on()
    }

    /// Whoever manages the VM has all its disks in files then.
    pub fn release(&mut self, number: usize) -> Result<(), String> {
        let running = self.vms[number].running()?;
        let (host, qmp) = (running.host, running.qmp());
        // One that is refused may have given back some of the disks.
        self.ask(host, &["release", "--qmp", &qmp])?;
        let vm = &mut self.vms[number];
        for disk in vm.disks.iter_mut().filter(|disk| disk.home == Home::Dray) {
            disk.find_home(&self.world, host)?;
        }
        vm.goes_on()
    }

    /// A raw disk grows under its guest, which opens it anew.
    pub fn resize_disk(&mut self, number: usize) -> Result<(), String> {
        let running = self.vms[number].running()?;
        let (host, qmp) = (running.host, running.qmp());
        let disks = &self.vms[number].disks;
        let Some(nth) = disks.iter().position(|disk| disk.format == Format::Raw) else {
            return Ok(());
        };
        let file = disks[nth].file.clone();
        let size = crate::judge::length(&self.world.file(host, &file)) + GROWS;
        if size > LONGEST {
            return Ok(());
        }
        let args = ["resize", &file, &size.to_string(), "--qmp", &qmp];
        if self.ask(host, &args)?.is_none() {
            return self.vms[number].goes_on();
        }
        self.vms[number].goes_on()?;
        let vm = &mut self.vms[number];
        for command in ["stop", "flush", "verify"] {
            vm.command(command)?;
        }
        vm.hear()?;
        vm.disks[nth].flushed.grow(size);
        vm.open(true)?;
        let device = vm.disks[nth].device.clone();
        let fill = format!("fill disk={device} offset={} length=8192", size - GROWS + 4096);
        vm.command(&fill)?;
        vm.command("flush")?;
        vm.start_work()
    }
}
