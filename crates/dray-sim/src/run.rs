//! Runs: one seed, one seed with a crash at every effect, many seeds for a while.

use crate::faults::{Crash, CrashPoint, Setup, Side};
use crate::rng::Rng;
use crate::world::World;
use dray_types::StrategyTraits;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Lines of a failed run's trace that are printed.
const SHOWN: usize = 40;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// `done`, `taken back` or `abandoned`.
    pub ending: &'static str,
    /// Effects that the source carried out.
    pub source_effects: u64,
    /// Effects that the target carried out.
    pub target_effects: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Crashes and power cuts.
    pub crashes: u64,
    /// Times that the target had no room for what it had to write.
    pub full: u64,
    /// Files that another program changed while no agent had them open.
    pub edited: u64,
    /// Pieces that were described.
    pub described: u64,
    /// Those of them that the target had.
    pub found: u64,
    /// Pieces that Backfill asked about.
    pub asked: u64,
    /// Those of them that the target had.
    pub asked_found: u64,
    /// Blocks that it had of pieces that it lacked.
    pub blocks_found: u64,
}

fn world(
    seed: u64,
    small: Option<StrategyTraits>,
    crash: Option<CrashPoint>,
    trace: bool,
) -> World {
    let mut rng = Rng::new(seed);
    let setup = match small {
        Some(strategy) => Setup::small(strategy, &mut rng),
        None => Setup::draw(&mut rng),
    };
    World::new(setup, rng, crash, trace)
}

fn attempt(world: &mut World) -> Result<Outcome, String> {
    match catch_unwind(AssertUnwindSafe(|| world.run())) {
        Ok(Ok(())) => Ok(Outcome {
            ending: world.ending(),
            source_effects: world.source.effects_done,
            target_effects: world.target.effects_done,
            events: world.events,
            crashes: world.check.crashes,
            full: world.check.full,
            edited: world.check.edited,
            described: world.check.described,
            found: world.check.found,
            asked: world.check.asked,
            asked_found: world.check.asked_found,
            blocks_found: world.check.blocks_found,
        }),
        Ok(Err(why)) => Err(why),
        Err(_) => Err("the engine panicked; see above".into()),
    }
}

fn examine(
    seed: u64,
    small: Option<StrategyTraits>,
    crash: Option<CrashPoint>,
    repeat: &str,
) -> Result<Outcome, String> {
    let why = match attempt(&mut world(seed, small, crash, false)) {
        Ok(outcome) => return Ok(outcome),
        Err(why) => why,
    };
    // The same again, with a trace.
    let mut world = world(seed, small, crash, true);
    let _ = attempt(&mut world);
    let trace = world.trace();
    let last = trace[trace.len().saturating_sub(SHOWN)..].join("\n");
    Err(format!("seed {seed}: {why}\nsetup: {:?}\n{last}\nrepeat with: {repeat}\n", world.setup))
}

/// One run.
///
/// # Errors
/// What was violated, the last events, and the command that repeats the run.
pub fn run(seed: u64) -> Result<Outcome, String> {
    let repeat = format!("DRAY_SIM_SEED={seed} cargo test -p dray-sim --test seeds one_seed");
    examine(seed, None, None, &repeat)
}

/// A small run of the strategy, without chance faults but for a crash at the given place.
///
/// # Errors
/// As [`run`].
pub fn run_with_crash(
    seed: u64,
    strategy: impl Into<StrategyTraits>,
    crash: Option<CrashPoint>,
) -> Result<Outcome, String> {
    let strategy = strategy.into();
    let name = strategy.name;
    let at = crash.map_or(String::new(), |at| {
        format!("DRAY_SIM_CRASH={:?},{},{:?} ", at.side, at.effect, at.crash)
    });
    let repeat = format!(
        "DRAY_SIM_SEED={seed} DRAY_SIM_STRATEGY={name} {at}cargo test -p dray-sim --test seeds \
         one_seed"
    );
    examine(seed, Some(strategy), crash, &repeat)
}

/// Repeats a small run with a crash before every single effect of either side; returns the number
/// of runs.
///
/// # Errors
/// As [`run`], for the first run that fails.
pub fn crash_everywhere(
    seed: u64,
    strategy: impl Into<StrategyTraits>,
    crash: Crash,
) -> Result<u64, String> {
    let strategy = strategy.into();
    let calm = run_with_crash(seed, strategy, None)?;
    let mut runs = 1;
    for (side, effects) in
        [(Side::Source, calm.source_effects), (Side::Target, calm.target_effects)]
    {
        // Either side's records are another matter.
        let meant = match crash {
            Crash::Unrecorded | Crash::Unsure => side == Side::Source,
            Crash::Full => side == Side::Target,
            Crash::Kill | Crash::PowerCut => true,
        };
        for effect in (0..effects).filter(|_| meant) {
            run_with_crash(seed, strategy, Some(CrashPoint { side, effect, crash }))?;
            runs += 1;
        }
    }
    Ok(runs)
}

/// Runs seed after seed from `first` on until the time is over; returns how many.
///
/// # Errors
/// As [`run`], for the first run that fails.
pub fn soak(first: u64, time: Duration) -> Result<u64, String> {
    let began = Instant::now();
    let mut seed = first;
    while began.elapsed() < time {
        run(seed)?;
        seed += 1;
    }
    Ok(seed - first)
}
