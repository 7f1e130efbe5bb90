//! Two hosts, a link between them and a guest, without threads, sockets and clocks. Registry, loops and
//! everything that they make durable are the real ones; the disks below are simulated and die when a test
//! says so. After each step the invariants are looked at by a bystander, who knows what the guest has
//! written and what it was told.

mod alone;
mod guest;
mod host;
mod images;
mod model;
mod operator;
mod outcome;
mod pairs;
mod prepare;
mod sessionless;
mod starts;
mod wire;

use crate::receiver;
use dray_types::Strategy;
use dray_types::{BlockRange, ImageIndex};
use guest::{Guest, draw};
use host::Host;
use images::{BLOCKS, NAMES, own};
use model::Model;
pub use operator::Mission;
use operator::Script;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use wire::Link;

/// Virtual time of a step.
const STEP: u64 = 50_000_000;
/// Steps after which a migration without faults is over, many times.
const ENOUGH: usize = 300;

/// Everything.
pub struct World {
    hosts: [Host; 2],
    /// The sessions that stand, by the host that is their source.
    links: [Option<Link>; 2],
    sessions: u64,
    guest: Guest,
    script: Script,
    mission: Mission,
    /// The host that the images are moved away from.
    from: usize,
    cancelled_at: usize,
    /// Images whose copies began as a replica.
    returned: usize,
    /// What the disks held at the handover.
    handed_over: Option<Vec<Model>>,
    /// Steps that the target has served.
    served: usize,
    gone: Option<usize>,
    strategy: Strategy,
    nanos: Arc<AtomicU64>,
    steps: usize,
    random: u64,
    cuts: [u64; 2],
    /// Each step is shown.
    pub is_told: bool,
}

impl World {
    /// Host 0 owns the images and nothing has begun.
    pub fn new(strategy: Strategy, mission: Mission, seed: u64) -> Self {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        // Nothing is shared with another world of this process.
        let root = PathBuf::from(format!("/world-{}", WORLDS.fetch_add(1, Ordering::SeqCst)));
        let nanos = Arc::new(AtomicU64::new(0));
        let host = |name: &str, seed| Host::new(root.join(name), seed, &nanos);
        let mut hosts = [host("a", seed), host("b", seed ^ 1)];
        let models = BLOCKS.iter().enumerate().map(|(ix, blocks)| own(&mut hosts[0], ix, *blocks));
        let models = models.collect();
        let guest = Guest::new(models, hosts.each_ref().map(|host| Arc::clone(&host.disk)));
        assert!(hosts[1].start());
        let mut random = seed;
        let cancelled_at = Self::when_cancelled(mission, &mut random);
        Self {
            hosts,
            links: [None, None],
            sessions: 0,
            guest,
            script: Script::Begin { from: 3, tries: 1 },
            mission,
            from: 0,
            cancelled_at,
            returned: 0,
            handed_over: None,
            served: 0,
            gone: None,
            strategy,
            nanos,
            steps: 0,
            random,
            cuts: [0; 2],
            is_told: false,
        }
    }

    /// One step of everything.
    pub fn step(&mut self) {
        self.steps += 1;
        self.nanos.fetch_add(STEP, Ordering::SeqCst);
        self.notice_deaths();
        let gone = self.gone;
        for (_, host) in self.hosts.iter_mut().enumerate().filter(|(at, _)| Some(*at) != gone) {
            if host.agent.is_none() {
                host.start();
            }
        }
        self.operate();
        if self.mission == Mission::Flaky {
            self.break_link();
        }
        self.connect();
        if self.mission == Mission::CancelThenBegin {
            self.ask_and_tell();
        }
        self.deliver();
        self.each(|agent| agent.pump());
        self.guest.look_below();
        self.act();
        self.carry();
        self.each(|agent| agent.pump());
        if self.steps.is_multiple_of(2) {
            self.each(|agent| agent.tick());
        }
        if self.steps.is_multiple_of(40) {
            self.each(|agent| agent.look_again());
        }
        self.guest.look_below();
        self.look();
        if self.is_told {
            println!("step {}, {:?}: {}", self.steps, self.script, self.describe());
        }
    }

    fn each(&mut self, work: impl Fn(&host::SimAgent)) {
        for host in &mut self.hosts {
            host.within(&work);
        }
    }

    /// What the end of a process means for the others.
    fn notice_deaths(&mut self) {
        for at in 0..2 {
            let cuts = self.hosts[at].disk.cuts();
            if cuts != std::mem::replace(&mut self.cuts[at], cuts) && self.guest.at == at {
                self.guest.disks.iter_mut().for_each(Model::cut);
            }
        }
        if self.hosts.iter().any(|host| host.agent.is_none()) {
            self.disconnect();
        }
    }

    /// The guest does something where it is let in.
    fn act(&mut self) {
        for at in 0..2 {
            let disks: Option<Vec<_>> = self.hosts[at].disks(&NAMES).into_iter().collect();
            let Some(disks) = disks.filter(|disks| disks.iter().all(|disk| disk.is_open())) else {
                continue;
            };
            let who = format!("step {}", self.steps);
            if let Some(held) = self.guest.come(at, &who) {
                self.handed_over.get_or_insert(held);
            }
            self.served += at;
            let (guest, random) = (&mut self.guest, &mut self.random);
            self.hosts[at].within(|_| guest.act(&disks, random));
            return self.demand(at);
        }
    }

    /// What the guest waits for is asked for.
    fn demand(&mut self, at: usize) {
        for (ix, block) in self.guest.waits_for.iter().enumerate() {
            let Some(block) = block else { continue };
            let range = BlockRange::new(*block, 1);
            self.hosts[at].within(|agent| {
                if let Some(here) = agent.here().as_ref() {
                    here.slot.send(receiver::Input::Demand(ImageIndex(ix as u16), range));
                }
            });
        }
    }
}
