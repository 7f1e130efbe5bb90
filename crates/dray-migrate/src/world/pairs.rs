//! Faults at every call that changes something durable or looks at it, then a restart, then another fault at
//! every such call of the restart.

use super::operator::Mission;
use super::starts::{self, Start, StartPlan};
use super::{ENOUGH, World};
use dray_files::files::sim::{Fault, SimDisk};
use dray_types::Strategy;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What happens at a call that changes something, or that only looks. A death after a call is one before
/// the next.
const FAULTS: [Fault; 6] = [
    Fault::KillBefore,
    Fault::CutBefore,
    Fault::NoSpace,
    Fault::Broken,
    Fault::Unread,
    Fault::Unreadable,
];
const STRATEGIES: [Strategy; 3] = [Strategy::PreCopy, Strategy::PostCopy, Strategy::Hybrid];
/// Steps that an agent gets to meet the consequences of a fault that it lives on with.
const ON: usize = 4;
/// There are so many times fewer starts than pairs: of them, more are run.
const STARTS: usize = 10;

/// A fault, and what comes after the restart that follows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub strategy: Strategy,
    pub mission: Mission,
    pub host: usize,
    pub call: u64,
    pub fault: Fault,
    pub second: Option<(u64, Fault)>,
}

/// Calls that a restart took: those that change something, and those that only look.
#[derive(Clone, Copy, Debug)]
struct Restart {
    calls: u64,
    looks: u64,
}

impl Restart {
    /// Calls at which this fault may come.
    fn calls_of(self, fault: Fault) -> u64 {
        if fault.is_of_looks() { self.looks } else { self.calls }
    }

    fn so_far(disk: &SimDisk) -> Self {
        Self { calls: disk.calls(), looks: disk.looks() }
    }
}

impl Plan {
    /// A world in which the first fault has come and the agent has died. None when all was over before.
    pub fn begin(self, seed: u64) -> Option<World> {
        let mut world = World::new(self.strategy, self.mission, seed);
        world.is_told = std::env::var_os("DRAY_PLAN").is_some();
        let disk = Arc::clone(&world.hosts[self.host].disk);
        disk.plan(Restart::so_far(&disk).calls_of(self.fault) + self.call, self.fault);
        let mut steps = 0;
        while disk.met() == 0 && world.settled().is_none() && steps < ENOUGH {
            world.step();
            steps += 1;
        }
        if disk.met() == 0 {
            world.finish(&format!("{self:?}"));
            return None;
        }
        if !self.fault.ends() {
            (0..ON).for_each(|_| world.step());
            world.hosts[self.host].kill();
        }
        Some(world)
    }

    /// Runs it. Tells what the restart took; none when there was no first fault.
    fn run(self, seed: u64) -> Option<Restart> {
        let mut world = self.begin(seed)?;
        let disk = Arc::clone(&world.hosts[self.host].disk);
        let before = Restart::so_far(&disk);
        if let Some((call, fault)) = self.second {
            disk.plan(before.calls_of(fault) + call, fault);
        }
        world.step();
        let now = Restart::so_far(&disk);
        let restart = Restart { calls: now.calls - before.calls, looks: now.looks - before.looks };
        (0..ON).for_each(|_| world.step());
        if self.fault == Fault::Unreadable {
            // It lasts until the restart after the next.
            world.hosts[self.host].kill();
        }
        world.finish(&format!("{self:?}"));
        Some(restart)
    }

    fn try_run(self, seed: u64) -> Result<Option<Restart>, String> {
        caught(&self, || self.run(seed))
    }
}

/// What `run` gives, or what went wrong in it, with the plan.
pub(super) fn caught<T>(plan: &impl Debug, run: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|why| {
        let text = why.downcast_ref::<String>().cloned();
        let text = text.or_else(|| why.downcast_ref::<&str>().map(|&text| text.to_owned()));
        let failed = format!("{plan:?}: {}", text.unwrap_or_default());
        // All of them take hours.
        println!("failed: {failed}");
        failed
    })
}

#[test]
fn a_migration_without_faults_ends_at_its_target() {
    for strategy in STRATEGIES {
        for seed in 0..5 {
            let mut world = World::new(strategy, Mission::Move, seed);
            assert_eq!(world.finish(&format!("{strategy:?}, seed {seed}")), 1);
        }
    }
}

/// A plan that was run: what its restart took, or what went wrong.
type Run = (Plan, Result<Restart, String>);

/// Plans of one fault: at one of so many calls.
fn singles(missions: &[(Strategy, Mission)], one_of: usize) -> Vec<Run> {
    let hosts = [0, 1].iter().flat_map(|&host| FAULTS.map(|fault| (host, fault)));
    let all: Vec<_> = hosts.flat_map(|of| missions.iter().map(move |is| (of, *is))).collect();
    let all: Vec<_> = all.into_iter().enumerate().collect();
    in_threads(&all, |&(nth, ((host, fault), (strategy, mission)))| {
        let mut found = Vec::new();
        for call in (1 + nth as u64 % one_of as u64..).step_by(one_of) {
            let plan = Plan { strategy, mission, host, call, fault, second: None };
            match plan.try_run(call) {
                Ok(None) => break,
                Ok(Some(restart)) => found.push((plan, Ok(restart))),
                Err(why) => found.push((plan, Err(why))),
            }
        }
        found
    })
}

/// What `run` gives for each of `all`, in their order, with as many threads as there are processors. The
/// order matters: which pairs are picked depends on it, and every machine is to pick the same.
pub(super) fn in_threads<T: Sync, R: Send>(all: &[T], run: impl Fn(&T) -> Vec<R> + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(one) = all.get(at) else { return found };
            found.push((at, run(one)));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut found: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    found.sort_by_key(|(at, _)| *at);
    found.into_iter().flat_map(|(_, found)| found).collect()
}

/// Runs half of the single faults of these, and some of the pairs. With `DRAY_PAIRS` every single fault, and one of so
/// many pairs: 1 runs all of them, which takes hours.
fn lose_nothing(missions: &[(Strategy, Mission)]) {
    let every: Option<usize> = std::env::var("DRAY_PAIRS").ok().and_then(|text| text.parse().ok());
    let singles = singles(missions, if every.is_some() { 1 } else { 2 });
    let every = every.unwrap_or(2500);
    let mut failed: Vec<_> = singles.iter().filter_map(|(_, run)| run.clone().err()).collect();
    let ended = singles.iter().filter_map(|(plan, run)| Some((plan, *run.as_ref().ok()?)));
    let pairs = ended.flat_map(|(plan, restart)| {
        let calls = move |fault| (1..=restart.calls_of(fault)).map(move |call| (call, fault));
        let seconds = FAULTS.into_iter().flat_map(calls);
        seconds.map(|second| Plan { second: Some(second), ..*plan })
    });
    let pairs: Vec<Plan> = pairs.collect();
    let offset = every / 2 % every;
    let some: Vec<Plan> = pairs.iter().skip(offset).step_by(every).copied().collect();
    failed.extend(in_threads(&some, |plan| plan.try_run(plan.call).err().into_iter().collect()));
    let ended: Vec<_> =
        singles.iter().filter(|(_, run)| run.is_ok()).map(|(plan, _)| *plan).collect();
    let (started, starts, wrong) = starts::run_some(&ended, every.div_ceil(STARTS));
    failed.extend(wrong);
    let pairs = pairs.len();
    println!(
        "{} single faults, {} of {pairs} pairs, {started} of {starts} starts while something is wrong",
        singles.len(),
        some.len(),
    );
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn two_faults_anywhere_in_a_migration_lose_nothing() {
    lose_nothing(&STRATEGIES.map(|strategy| (strategy, Mission::Move)));
}

/// Nobody knows then whether writes that the guest has not flushed are lost: it waits until that can be read. A
/// guest that is told too much loses what is there, and one that is told too little keeps what is not.
#[test]
fn what_a_guest_is_to_be_told_is_not_guessed() {
    for second in [15, 16].into_iter().flat_map(|call| Fault::LOOKS.map(|fault| (call, fault))) {
        let (strategy, mission, second) = (Strategy::Hybrid, Mission::Move, Some(second));
        let plan = Plan { strategy, mission, host: 1, call: 41, fault: Fault::Unreadable, second };
        assert!(plan.run(plan.call).is_some());
    }
}

#[test]
fn two_faults_anywhere_lose_nothing_that_a_claim_could_keep() {
    let missions = [Mission::ClaimAtSource, Mission::ClaimAtTarget];
    lose_nothing(&missions.map(|mission| (Strategy::PostCopy, mission)));
}

#[test]
fn two_faults_anywhere_lose_nothing_on_the_way_back_to_a_replica() {
    lose_nothing(&[(Strategy::Hybrid, Mission::Return)]);
}

#[test]
fn two_faults_anywhere_leave_nothing_of_copies_that_are_to_be_removed() {
    lose_nothing(&[(Strategy::PreCopy, Mission::Remove)]);
}

#[test]
fn two_faults_anywhere_lose_nothing_when_a_migration_is_cancelled_or_its_link_breaks() {
    lose_nothing(&[(Strategy::PreCopy, Mission::Cancel), (Strategy::PostCopy, Mission::Flaky)]);
}

#[test]
fn two_faults_anywhere_lose_nothing_when_a_cancelled_migration_begins_again() {
    lose_nothing(&STRATEGIES.map(|strategy| (strategy, Mission::CancelThenBegin)));
}

/// A cancel that has failed, perhaps behind its rename, is none: the migration begins, and ends at its target.
#[test]
fn a_migration_whose_cancel_has_failed_begins_again() {
    let ends = |(seed, call)| {
        let mut world = World::new(Strategy::PreCopy, Mission::CancelThenBegin, seed);
        let disk = Arc::clone(&world.hosts[0].disk);
        disk.plan(disk.calls() + call, Fault::Broken);
        while disk.met() == 0 && world.settled().is_none() {
            world.step();
        }
        (0..ON).for_each(|_| world.step());
        world.hosts[0].kill();
        world.finish(&format!("a failed cancel, seed {seed}, call {call}"))
    };
    // Around the cancel of each seed: how much the guest does before it differs.
    let all = (0..4).flat_map(|seed| (15..35).map(move |call| (seed, call)));
    let moved = all.map(ends).filter(|at| *at == 1).count();
    assert_eq!(moved, 8, "the rename fails, or the sync after it");
}

#[test]
fn without_faults_a_cancel_of_what_is_prepared_leaves_the_guest_where_it_is() {
    for strategy in STRATEGIES {
        let mut world = World::new(strategy, Mission::CancelThenBegin, 1);
        assert_eq!(world.finish(&format!("{strategy:?}, cancelled")), 0);
        let nothing = world.hosts[1].within(|agent| agent.registry.all_records().is_empty());
        assert_eq!(nothing, Some(true), "the target has heard of it");
    }
}

#[test]
fn claims_without_faults_keep_what_there_is() {
    for (mission, at) in [(Mission::ClaimAtSource, 0), (Mission::ClaimAtTarget, 1)] {
        for seed in 0..20 {
            let mut world = World::new(Strategy::PostCopy, mission, seed);
            assert_eq!(world.finish(&format!("{mission:?}, seed {seed}")), at);
            assert!(world.gone.is_some());
        }
    }
}

#[test]
fn without_faults_an_image_returns_onto_its_replica() {
    for strategy in STRATEGIES {
        for seed in 0..10 {
            let mut world = World::new(strategy, Mission::Return, seed);
            assert_eq!(world.finish(&format!("{strategy:?}, seed {seed}")), 0);
            assert_eq!((world.from, world.returned), (1, 2));
        }
    }
}

#[test]
fn without_faults_a_cancelled_migration_leaves_the_guest_where_it_is() {
    let ends = |seed| {
        let mut world = World::new(Strategy::PreCopy, Mission::Cancel, seed);
        world.finish(&format!("cancel, seed {seed}"))
    };
    let left = (0..20).map(ends).filter(|at| *at == 0).count();
    assert!(left >= 10, "{left} of 20 were cancelled in time");
}

#[test]
fn without_faults_a_link_that_breaks_delays_a_migration() {
    for strategy in STRATEGIES {
        for seed in 0..10 {
            let mut world = World::new(strategy, Mission::Flaky, seed);
            assert_eq!(world.finish(&format!("{strategy:?}, seed {seed}")), 1);
            assert!(world.sessions > 3);
        }
    }
}

#[test]
fn a_guest_gets_the_missing_blocks_that_it_waits_for() {
    let waited = |seed| {
        let mut world = World::new(Strategy::PostCopy, Mission::Move, seed);
        world.finish(&format!("seed {seed}"));
        world.guest.waited
    };
    assert!((0..20).map(waited).sum::<u64>() >= 20);
}

/// Runs one plan again, as it is shown when it fails, and tells what happens:
/// `DRAY_PLAN='PostCopy ClaimAtSource 0 159 CutBefore 3 NoSpace' cargo test -p dray-migrate --lib the_plan -- --nocapture`.
#[test]
fn the_plan_that_is_asked_for_loses_nothing() {
    let Ok(text) = std::env::var("DRAY_PLAN") else {
        return println!("skipped: DRAY_PLAN names no plan");
    };
    let mut words = text.split(' ');
    let mut word = || words.next().unwrap_or_default();
    fn named<T: Copy + Debug>(of: &[T], word: &str) -> T {
        *of.iter().find(|one| format!("{one:?}") == word).unwrap()
    }
    let (strategy, mission) = (named(&STRATEGIES, word()), named(&Mission::ALL, word()));
    let (host, call) = (word().parse().unwrap(), word().parse().unwrap());
    let fault = named(&FAULTS, word());
    let next = word();
    let second = next.parse().ok().map(|call| (call, named(&FAULTS, word())));
    let level = tracing_subscriber::filter::LevelFilter::DEBUG;
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stdout);
    log.without_time().with_ansi(false).init();
    let plan = Plan { strategy, mission, host, call, fault, second };
    match Start::ALL.into_iter().find(|start| format!("{start:?}") == next) {
        Some(start) => {
            StartPlan { plan, start, runs: std::env::var_os("DRAY_RUNS").is_some() }.run()
        }
        None => drop(plan.run(call)),
    }
}
