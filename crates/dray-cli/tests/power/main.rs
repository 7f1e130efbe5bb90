//! Power cuts of real disks: two agents in one machine move images that a client uses; from the log of
//! all that its disk was asked to do, the disk is made as a cut may have left it at any moment; the
//! machine is booted on that, and the images must hold what their client was told is flushed.
//!
//! * [`recording`]: the machine that is cut. [`cuts`]: when, and what is lost.
//! * [`aftermath`]: the machine that is booted then, and what must be on its disk.
//!
//! `DRAY_POWER_COUNT` says how many disks are made (6), `DRAY_POWER_SEED` where everything random
//! comes from (1); `DRAY_POWER_STRATEGY` and `DRAY_POWER_PHASE` keep to one of either. What goes wrong keeps its
//! disk and its log, and says how to boot it again.

mod aftermath;
mod cuts;
mod recording;

use cuts::Case;
use dray_testkit::guest::initramfs::Boot;
use dray_testkit::guest::tools;
use dray_testkit::numbered::next;
use dray_testkit::power::machine;
use recording::{Recording, Way};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Cuts of one recording at most.
const EACH: u64 = 25;
/// How images move; the first is the one that `make test` has time for.
const WAYS: [Way; 8] = [
    Way { strategy: "post-copy", restart: Some("b:backfill:3:400") },
    Way { strategy: "hybrid", restart: None },
    Way { strategy: "pre-copy", restart: Some("a:copy:2:500") },
    Way { strategy: "hybrid", restart: Some("b:copy:2:500") },
    Way { strategy: "mirror", restart: None },
    Way { strategy: "post-copy", restart: Some("a:backfill:2:400") },
    Way { strategy: "hot-set", restart: None },
    Way { strategy: "auto", restart: Some("b:backfill:2:200") },
];

/// What is booted, if it can be here.
fn boot() -> Option<Boot> {
    let needed = [tools::QEMU, "qemu-img", "mke2fs", "debugfs", "strip", "ldd"];
    if !tools::available(&needed) {
        return None;
    }
    match machine::boot(env!("CARGO_BIN_EXE_dray").as_ref()) {
        Ok(boot) => Some(boot),
        Err(why) => {
            println!("SKIP: {why}");
            None
        }
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn what_was_flushed_survives_any_power_cut() {
    let Some(boot) = boot() else { return };
    let (count, seed) = (number("DRAY_POWER_COUNT", 6), number("DRAY_POWER_SEED", 1));
    let began = Instant::now();
    let only = std::env::var("DRAY_POWER_STRATEGY").ok();
    let wanted = |way: &Way| only.as_ref().is_none_or(|only| *only == way.strategy);
    let ways: Vec<Way> = WAYS.into_iter().filter(wanted).collect();
    let mut rig = Rig { boot, random: seed, disks: 0, failed: Vec::new() };
    for (nth, first) in (0..count).step_by(EACH as usize).enumerate() {
        rig.round(ways[nth % ways.len()], EACH.min(count - first));
    }
    let Rig { disks, failed, .. } = rig;
    let took = began.elapsed().as_secs_f32();
    println!("{disks} disks after power cuts, in {took:.0} s, {} failed", failed.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What goes through all rounds.
struct Rig {
    boot: Boot,
    random: u64,
    disks: u64,
    failed: Vec<String>,
}

impl Rig {
    /// One recording and so many disks; a third of them of a second one, which goes on where the power
    /// was cut in the first.
    fn round(&mut self, way: Way, count: u64) {
        let dir = tempfile::Builder::new().prefix("dray-power-").tempdir().unwrap();
        let dir = dir.path();
        let recording = match Recording::make(dir, &self.boot, way, next(&mut self.random)) {
            Ok(recording) => recording,
            Err(why) => {
                self.failed.push(format!("{way:?}: {why}{}", console(dir, "recorded")));
                return;
            }
        };
        println!("{way:?}: {recording}");
        let second = count / 3;
        self.look(&recording, count - second, dir);
        if second > 0 {
            let case = cuts::both(&recording, &mut self.random);
            let way = Way { restart: Some("b:again:1:600"), ..way };
            match recording.go_on(dir, &self.boot, &case, way) {
                Ok(recording) => {
                    println!(" going on after: {case}: {recording}");
                    self.look(&recording, second, dir);
                }
                Err(why) => {
                    self.failed.push(failed(&recording, &case, dir, &why.to_string(), "recorded"));
                }
            }
        }
    }

    /// Boots so many disks, several at a time: a machine uses one processor.
    fn look(&mut self, recording: &Recording, count: u64, dir: &Path) {
        let cases = cuts::choose(recording, count, &mut self.random);
        let (next, boot) = (AtomicUsize::new(0), &self.boot);
        let work = || {
            let nth = || next.fetch_add(1, Ordering::Relaxed);
            std::iter::from_fn(|| cases.get(nth()))
                .map(|case| look_at(recording, case, boot, dir))
                .collect::<Vec<_>>()
        };
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let failed: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            all.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        self.disks += cases.len() as u64;
        self.failed.extend(failed.into_iter().flatten());
    }
}

/// Boots one disk; what was wrong with it.
fn look_at(recording: &Recording, case: &Case, boot: &Boot, dir: &Path) -> Option<String> {
    let began = Instant::now();
    let own = tempfile::tempdir_in(dir).unwrap();
    match aftermath::check(recording, case, boot, own.path()) {
        Ok(promised) => {
            let took = began.elapsed().as_secs_f32();
            println!("  {case}: {promised} sectors promised, {took:.1} s");
            None
        }
        Err(why) => Some(failed(recording, case, own.path(), &why, "booted")),
    }
}

/// What went wrong and how to see it again, printed at once.
fn failed(recording: &Recording, case: &Case, dir: &Path, why: &str, said: &str) -> String {
    let kept = keep(dir, recording, case);
    println!("  {case}: {why}{}\n{}", console(dir, said), again(&kept));
    format!("{case}: {why}\n  {}", again(&kept))
}

/// Boots once more what has gone wrong: `DRAY_POWER_KEPT` says where it was kept.
#[test]
#[ignore = "only with DRAY_POWER_KEPT"]
fn again_what_went_wrong() {
    let Some(boot) = boot() else { return };
    let kept = PathBuf::from(std::env::var_os("DRAY_POWER_KEPT").expect("DRAY_POWER_KEPT"));
    let recording = Recording::open(&kept).unwrap();
    let case = Case::load(&kept.join("case.json")).unwrap();
    let dir = tempfile::Builder::new().prefix("dray-power-").tempdir().unwrap();
    let result = aftermath::check(&recording, &case, &boot, dir.path());
    println!("{case}: {result:?}{}", console(dir.path(), "booted"));
    result.unwrap();
}

/// Keeps what is needed to boot a disk again.
fn keep(dir: &Path, recording: &Recording, case: &Case) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let kept = tempfile::Builder::new().prefix("power-").tempdir_in(place).unwrap().keep();
    recording.keep(&kept).unwrap();
    case.save(&kept.join("case.json")).unwrap();
    for console in ["recorded", "booted"].iter().filter(|name| dir.join(name).exists()) {
        std::fs::copy(dir.join(console), kept.join(console)).unwrap();
    }
    kept
}

fn again(kept: &Path) -> String {
    format!(
        "again: DRAY_POWER_KEPT={} cargo test -p dray-cli --test power again -- --ignored --nocapture",
        kept.display()
    )
}

/// The end of what a machine's console said.
fn console(dir: &Path, name: &str) -> String {
    let said = std::fs::read(dir.join(name)).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).into_owned();
    let lines: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(20)..];
    last.iter().map(|line| format!("\n    | {line}")).collect()
}
