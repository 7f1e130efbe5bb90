//! After a fault the agent starts while something is wrong that lasts: it is started twice so, and then all is
//! well again, while it runs or when it starts once more.

use super::World;
use super::pairs::{Plan, caught, in_threads};
use dray_files::files::sim::Mount;

/// Steps that each of the two starts gets.
const WRONG: usize = 45;

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    /// The other host is away.
    PeerAway,
    /// The pool is not mounted.
    PoolAway,
    /// It is mounted for reading only.
    PoolReadOnly,
    /// There is no room, neither for what the agent keeps nor for the guest.
    Full,
}

impl Start {
    pub const ALL: [Self; 4] = [Self::PeerAway, Self::PoolAway, Self::PoolReadOnly, Self::Full];

    /// From now on, for the agent of `host`.
    fn begin(self, world: &mut World, host: usize) {
        let (disk, pool) = (&world.hosts[host].disk, world.hosts[host].pool());
        match self {
            Self::PeerAway if world.gone.is_none() => {
                world.hosts[1 - host].kill();
                world.gone = Some(1 - host);
            }
            Self::PeerAway => {}
            Self::PoolAway => disk.mount(&pool, Some(Mount::Away)),
            Self::PoolReadOnly => disk.mount(&pool, Some(Mount::ReadOnly)),
            Self::Full => disk.fill(true),
        }
    }

    /// No longer. `gone` is the host that was gone before, for good. One that has gone for good since then
    /// stays away as well.
    fn end(self, world: &mut World, host: usize, gone: Option<usize>) {
        let (disk, pool) = (&world.hosts[host].disk, world.hosts[host].pool());
        disk.mount(&pool, None);
        disk.fill(false);
        if self == Self::PeerAway {
            world.gone = gone;
        }
    }
}

/// A fault, and what is wrong at the two starts that follow.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartPlan {
    pub plan: Plan,
    pub start: Start,
    /// All is well again while it runs.
    pub runs: bool,
}

impl StartPlan {
    /// Runs it, if the fault comes.
    pub fn run(self) {
        let Some(mut world) = self.plan.begin(self.plan.call) else { return };
        let (host, gone) = (self.plan.host, world.gone);
        self.start.begin(&mut world, host);
        for nth in 0..2 {
            (0..WRONG).for_each(|_| world.step());
            if nth == 0 || !self.runs {
                world.hosts[host].kill();
            }
        }
        self.start.end(&mut world, host, gone);
        world.finish(&format!("{self:?}"));
    }
}

/// Runs one of so many of every fault that has `ended` with every start: how many, of how many, and what
/// went wrong.
pub(super) fn run_some(ended: &[Plan], every: usize) -> (usize, usize, Vec<String>) {
    let starts = Start::ALL.into_iter().flat_map(|start| [true, false].map(|runs| (start, runs)));
    let with_all =
        |&plan: &Plan| starts.clone().map(move |(start, runs)| StartPlan { plan, start, runs });
    let plans = ended.iter().flat_map(with_all);
    let plans: Vec<_> = plans.collect();
    let some: Vec<_> = plans.iter().skip(every / 2 % every).step_by(every).copied().collect();
    let run = |plan: &StartPlan| caught(plan, || plan.run()).err().into_iter().collect();
    (some.len(), plans.len(), in_threads(&some, run))
}
