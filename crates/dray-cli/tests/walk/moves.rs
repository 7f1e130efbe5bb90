//! A VM moves to the other host, with faults on the way, until it is known where it is.

use crate::disk::Home;
use crate::faults::Aftermath;
use crate::judge;
use crate::loose_moves::Moving;
use crate::walk::Walk;
use crate::world::{LETTERS, World};
use dray_testkit::guest::tools;
use serde_json::Value;
use std::time::{Duration, Instant};

const STRATEGIES: [&str; 6] = ["pre-copy", "post-copy", "hybrid", "auto", "auto", "mirror"];
const RATES: [&str; 3] = ["60Mbit", "150Mbit", "1Gbit"];
/// How long after the end of all migrations it may take until a guest runs.
const RUNS: Duration = Duration::from_secs(30);
/// So many of a hundred VMs move together with an image.
const BESIDE: u64 = 25;
const POLL: Duration = Duration::from_millis(200);

/// Where the guest is after a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Guest {
    Stayed,
    Moved,
    Died,
}

impl Walk<'_> {
    pub fn move_vm(&mut self, number: usize) -> Result<(), String> {
        let source = self.vms[number].host();
        let target = 1 - source;
        let Some(prepared) = self.prepare(number, source, target)? else { return Ok(()) };
        self.vms[number].start_waiting(&self.world, target, &prepared)?;
        let faults = self.draw_faults(true);
        let args = self.arguments(number, target)?;
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        self.tell(format!("   {} → {}: {words:?}, {faults:?}", LETTERS[source], LETTERS[target]));
        let spawned = self.world.host(source).spawn(&words).map_err(|why| why.to_string())?;
        let beside = self.begin_beside()?;
        let mut after = Aftermath::default();
        for fault in faults {
            self.fault(fault, source, Some(number), &mut after)?;
        }
        let outcome = World::outcome(spawned, &format!("{words:?}"))?;
        let summary = self.note(&words, outcome);
        self.end_beside(beside)?;
        let guest = self.where_is(number)?;
        self.tell(format!("   {guest:?}"));
        match guest {
            Guest::Moved => self.arrived(number, target, &prepared, summary.as_ref())?,
            Guest::Stayed if summary.is_some() => {
                return Err("the move is complete, and the guest is at the source".to_owned());
            }
            Guest::Stayed => self.stayed(number, after)?,
            Guest::Died => self.died(number)?,
        }
        self.vms[number].goes_on()
    }

    /// Now and then an image moves at the same time.
    fn begin_beside(&mut self) -> Result<Option<Moving>, String> {
        if !self.random.chance(BESIDE) {
            return Ok(None);
        }
        let nth = self.random.below(self.images.len() as u64) as usize;
        self.counts.add("images that move beside a VM", 1);
        self.begin_image(nth).map(Some)
    }

    /// Everything that is under way ends.
    fn end_beside(&mut self, beside: Option<Moving>) -> Result<(), String> {
        let Some(mut moving) = beside else { return self.settle() };
        self.stop_client(&mut moving)?;
        let done = self.await_image(&mut moving)?;
        self.settle()?;
        self.end_image(&moving, done)
    }

    fn prepare(
        &mut self,
        number: usize,
        source: usize,
        target: usize,
    ) -> Result<Option<Value>, String> {
        let (qmp, to) = (self.vms[number].running()?.qmp(), World::name(target));
        let mut args = vec!["prepare", "--qmp", &qmp, "--to", &to];
        if self.random.chance(10) {
            args.extend(["--chain", "flatten"]);
            let format = ["--target-format", "qcow2"];
            args.extend(if self.random.chance(50) { &format[..] } else { &[] });
            self.counts.add("flattened", 1);
        }
        self.ask(source, &args)
    }

    fn arguments(&mut self, number: usize, target: usize) -> Result<Vec<String>, String> {
        let vm = &mut self.vms[number];
        let there = vm.waiting.as_ref().ok_or("no target")?.qmp();
        let qmp = vm.running()?.qmp();
        let to = World::name(target);
        let args = ["migrate", "--qmp", &qmp, "--to", &to, "--target-qmp", &there];
        let mut args: Vec<String> = args.iter().map(|&word| word.to_owned()).collect();
        args.extend(self.options());
        Ok(args)
    }

    /// How anything moves.
    pub fn options(&mut self) -> Vec<String> {
        let random = &mut self.random;
        let mut options = vec!["--strategy", random.pick(&STRATEGIES)];
        options.extend(["--bandwidth", random.pick(&RATES)]);
        options.extend(["--release", random.pick(&["as-before", "as-before", "always", "never"])]);
        for (flag, percent) in
            [("--verify", 30), ("--no-reuse", 20), ("--remove-replica", 20), ("--no-backups", 40)]
        {
            if random.chance(percent) {
                options.push(flag);
            }
        }
        options.into_iter().map(str::to_owned).collect()
    }

    /// At no more than one host the guest runs. Nothing is under way any more.
    fn where_is(&mut self, number: usize) -> Result<Guest, String> {
        let deadline = Instant::now() + RUNS;
        loop {
            self.hear()?;
            let vm = &mut self.vms[number];
            let here = vm.running()?.runs()?;
            let there = match vm.waiting.as_mut().map_or(Ok(false), |waiting| waiting.runs()) {
                // One whose migration ended while it opened its disks waits for them, and is of no use.
                Err(_) if vm.waiting.as_mut().is_some_and(|waiting| waiting.is_silent()) => {
                    self.counts.add("waiting QEMUs that answer nobody", 1);
                    false
                }
                there => there?,
            };
            match (here, there) {
                (true, true) => return Err(format!("vm{number} runs at both hosts")),
                (true, false) => return Ok(Guest::Stayed),
                (false, true) => return Ok(Guest::Moved),
                (false, false) if vm.running()?.has_ended() => return Ok(Guest::Died),
                (false, false) if Instant::now() > deadline => {
                    return Err(format!("vm{number} runs nowhere, and nobody has killed it"));
                }
                (false, false) => std::thread::sleep(POLL),
            }
        }
    }

    fn arrived(
        &mut self,
        number: usize,
        target: usize,
        prepared: &Value,
        summary: Option<&Value>,
    ) -> Result<(), String> {
        self.counts.add("VMs moved", 1);
        if summary.is_some_and(|summary| summary["verified"] == false) {
            return Err(format!("not equal: {summary:?}"));
        }
        let vm = &mut self.vms[number];
        let old = std::mem::replace(&mut vm.running, vm.waiting.take());
        old.map_or(Ok(()), |old| old.quit(|host| self.unstall(number, host)))?;
        let vm = &mut self.vms[number];
        for disk in &mut vm.disks {
            disk.moved(&self.world, target, prepared)?;
        }
        Ok(())
    }

    /// The way out for a QEMU at the source that does not end: what it waits for there fails. Where a move has removed
    /// its disks, and an agent died after that, its requests wait for an export that is not there any more: it is
    /// killed, which is said here.
    fn unstall(&mut self, number: usize, host: usize) -> Result<bool, String> {
        self.counts.add("QEMUs at a source that had to be told to end twice", 1);
        let mut removed = false;
        for nth in 0..self.vms[number].disks.len() {
            let file = self.vms[number].disks[nth].file.clone();
            match self.world.image(host, &file)?.is_null() {
                true => removed = true,
                false => drop(self.ask(host, &["unstall", &file, "--fail"])?),
            }
        }
        if removed {
            self.counts.add("QEMUs at a source that waited for disks that were removed", 1);
        }
        Ok(removed)
    }

    fn stayed(&mut self, number: usize, after: Aftermath) -> Result<(), String> {
        self.counts.add("VMs that stayed", 1);
        self.vms[number].waiting = None;
        after.overlay.map_or(Ok(()), |overlay| self.merge(number, overlay))?;
        self.bring_home(number)
    }

    /// An agent that died when it had taken a disk for a migration, which had not begun by then, leaves the disk on
    /// dray: its user releases it.
    fn bring_home(&mut self, number: usize) -> Result<(), String> {
        let running = self.vms[number].running()?;
        let (host, qmp) = (running.host, running.qmp());
        for disk in self.vms[number].disks.iter().filter(|disk| disk.home == Home::File) {
            if self.world.image(host, &disk.file)?["state"] != "owner" {
                continue;
            }
            self.counts.add("disks that a migration which never began left on dray", 1);
            self.ask(host, &["release", "--qmp", &qmp])?;
            return Ok(());
        }
        Ok(())
    }

    /// The guest is gone with its QEMU: it is booted where its disks are.
    fn died(&mut self, number: usize) -> Result<(), String> {
        self.counts.add("guests that died in a move", 1);
        self.vms[number].waiting = None;
        let host = self.await_owner(number)?;
        if host != self.vms[number].host() {
            return Err(format!("vm{number} was killed where it had left, and runs nowhere"));
        }
        self.boot(number, host)
    }

    /// The same once every disk has its name: a chain gets it back some seconds after its VM has ended.
    fn await_owner(&self, number: usize) -> Result<usize, String> {
        let deadline = Instant::now() + judge::NAMED;
        loop {
            match self.owner(number) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(POLL),
                found => return found,
            }
        }
    }

    /// The host where all disks of a VM open under their names.
    fn owner(&self, number: usize) -> Result<usize, String> {
        let disks = &self.vms[number].disks;
        let all =
            |host: usize| disks.iter().all(|disk| tools::opens(&self.world.file(host, &disk.file)));
        match (all(0), all(1)) {
            (true, false) => Ok(0),
            (false, true) => Ok(1),
            both => Err(format!("hosts that have all disks of vm{number}: {both:?}")),
        }
    }
}
