//! A test that goes from seed to seed for as long as it is told, and says how to repeat what failed.

use crate::counts::Counts;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// After so many failures there is enough to look at.
const MAX_FAILURES: usize = 10;

/// Such a test.
pub struct Seeds {
    /// What its counts are told under, and the folder of what is kept of failures.
    pub name: &'static str,
    /// What the names of its environment variables begin with, `DRAY_WALK`.
    pub variables: &'static str,
    /// The target of `make` that runs it.
    pub target: &'static str,
}

impl Seeds {
    fn number(&self, what: &str) -> Option<u64> {
        std::env::var(format!("{}_{what}", self.variables)).ok()?.parse().ok()
    }

    /// For how many minutes it was asked to run; none, after saying so, when it was not.
    pub fn minutes(&self) -> Option<u64> {
        let minutes = self.number("MINUTES");
        if minutes.is_none() {
            let Self { variables, target, .. } = self;
            println!("SKIP: it runs for {variables}_MINUTES (make {target} MINUTES=…)");
        }
        minutes
    }

    /// Where what is left of a seed that failed is kept; `workspace` is the folder of all crates.
    pub fn kept(&self, workspace: &str, seed: u64) -> PathBuf {
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let target = target.unwrap_or_else(|| PathBuf::from(workspace).join("target"));
        target.join(self.name).join(seed.to_string())
    }

    /// Runs `one` seed after the other until `minutes` are over, each until the moment that it is told or
    /// until it has done enough. Returns how many have failed. `SEED` in the environment says which is first.
    pub fn run(
        &self,
        minutes: u64,
        workspace: &str,
        mut one: impl FnMut(u64, Instant, &mut Counts) -> Result<(), String>,
    ) -> usize {
        let end = Instant::now() + Duration::from_secs(60 * minutes);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
        let first = self.number("SEED").unwrap_or(since.as_secs() % 1_000_000 * 1000);
        let (mut counts, mut failed) = (Counts::default(), Vec::new());
        for seed in first.. {
            if Instant::now() >= end || failed.len() == MAX_FAILURES {
                break;
            }
            println!("seed {seed}");
            if let Err(why) = one(seed, end, &mut counts) {
                let Self { variables, target, .. } = self;
                let kept = self.kept(workspace, seed);
                println!("FAILED: {why}");
                println!("  repeat: {variables}_SEED={seed} make {target} MINUTES=1");
                println!("  logs: {}", kept.display());
                failed.push(seed);
            }
        }
        println!("{}: {counts}, {} failed {failed:?}", self.name, failed.len());
        failed.len()
    }
}
