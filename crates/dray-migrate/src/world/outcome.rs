//! Whether all is decided, and right.

use super::host::{Host, SimAgent};
use super::operator::{Mission, Script};
use super::{ENOUGH, NAMES, World};
use dray_files::files::Files;
use dray_image::Disk;
use std::sync::Arc;

impl World {
    /// At most one host takes writes (I1).
    pub(super) fn look(&mut self) {
        let taken = |host: &Host| {
            host.disks(&NAMES).into_iter().map(|disk| disk.is_some_and(|d| d.takes_changes()))
        };
        let [a, b] = &self.hosts;
        let both: Vec<_> = taken(a).zip(taken(b)).collect();
        let shown = || format!("step {}: {}", self.steps, self.describe());
        assert!(!both.contains(&(true, true)), "two hosts own an image at {}", shown());
    }

    /// The host that serves both images and has all of them, when nothing goes on any more.
    pub(super) fn settled(&self) -> Option<(usize, Vec<Arc<Disk>>)> {
        let found = self.whole().filter(|_| self.script == Script::Over)?;
        // What has arrived is to go back.
        let arrived = self.from == 0 && found.0 == 1;
        let waits = match self.mission {
            Mission::Return => arrived,
            Mission::Remove => arrived && !self.is_removed(),
            _ => false,
        };
        (!waits).then_some(found)
    }

    /// Whether nothing is left of the images at the host that they were moved away from.
    fn is_removed(&self) -> bool {
        let host = &self.hosts[self.from];
        let Some(agent) = &host.agent else { return false };
        let files = host.disk.files().list(&host.pool()).unwrap_or_default();
        agent.registry.all_records().is_empty() && files.is_empty()
    }

    /// The host that serves both images and has all of them, when no migration is under way.
    pub(super) fn whole(&self) -> Option<(usize, Vec<Arc<Disk>>)> {
        let busy = |at: usize| {
            let agent = self.hosts[at].agent.as_ref();
            self.gone != Some(at) && agent.is_none_or(SimAgent::is_busy)
        };
        if busy(self.from) {
            return None;
        }
        // What was only prepared at the target waits for a day.
        (0..2).filter(|&at| at == self.from || !busy(at)).find_map(|at| {
            let disks: Vec<_> = self.hosts[at].disks(&NAMES).into_iter().collect::<Option<_>>()?;
            let whole = disks.iter().all(|disk| disk.is_open() && disk.missing_count() == 0);
            whole.then_some((at, disks))
        })
    }

    /// Goes on until all is decided; agents that get nowhere are restarted, as their messages advise.
    fn settle(&mut self, what: &str) -> usize {
        let mut left = String::new();
        for _ in 0..4 {
            for _ in 0..ENOUGH {
                if let Some((at, disks)) = self.settled() {
                    self.guest.come(at, what);
                    self.guest.look_below();
                    let guest = &mut self.guest;
                    let ok = self.hosts[at].within(|_| guest.settle(&disks, what));
                    if ok == Some(true) {
                        return at;
                    }
                }
                self.step();
            }
            left = self.describe();
            self.hosts.iter_mut().for_each(Host::kill);
        }
        panic!("{what}: nothing is decided: {left}");
    }

    /// All is decided, and what the guest was told is so, also when both hosts lose power then.
    pub fn finish(&mut self, what: &str) -> usize {
        self.hosts.iter().for_each(|host| host.disk.plan_nothing());
        self.settle(what);
        self.hosts.iter_mut().for_each(Host::cut);
        self.settle(&format!("{what}, then without power"))
    }

    pub(super) fn describe(&self) -> String {
        let one = |host: &Host| {
            let Some(agent) = &host.agent else { return "no agent".to_owned() };
            let disks = host.disks(&NAMES);
            let disks: Vec<_> = disks
                .iter()
                .map(|d| d.as_ref().map(|d| (d.is_open(), d.takes_changes(), d.missing_count())))
                .collect();
            let records: Vec<_> = agent
                .registry
                .all_records()
                .into_iter()
                .map(|r| (r.state, r.place, r.migration.is_some()))
                .collect();
            let shown = |board: &crate::slots::Board| {
                let shown = board.read();
                (shown.state, shown.progress.phase, shown.error)
            };
            let away = agent.away().as_ref().map(|a| (a.owner.is_some(), shown(&a.slot.board)));
            let here = agent.here().as_ref().map(|h| (h.owner.is_some(), shown(&h.slot.board)));
            let closed: Vec<_> =
                agent.registry.all_closed().into_iter().map(|(n, c)| (n, c.reason.why)).collect();
            format!(
                "disks {disks:?}, records {records:?} away {away:?}, here {here:?}, closed {closed:?}"
            )
        };
        format!("A: {}; B: {}", one(&self.hosts[0]), one(&self.hosts[1]))
    }
}
