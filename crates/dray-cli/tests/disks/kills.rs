//! The kill matrix: the source's agent, the target's or both end abruptly before every effect of a
//! migration that matters, are started again, and nobody does anything else. The guest's verification
//! never fails, one host owns the image, the migration ends.
//!
//! `DRAY_KILL_ROUNDS=10` repeats everything with other strategies and other writes.
//! `DRAY_KILL_ONLY=Retire` keeps to the cases with that name.

use crate::case::{Case, names_agree};
use crate::lab::{Lab, wait_for};
use crate::nbd::seconds;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Cases that run at once: they wait more than they work.
const PARALLEL: usize = 4;
/// An effect that has not come by then never will.
const DEATH: Duration = Duration::from_secs(30);

const ANY: &[&str] = &["hybrid", "post-copy", "pre-copy"];
/// Strategies that copy before the handover.
const COPY: &[&str] = &["hybrid", "pre-copy"];
const POST: &[&str] = &["post-copy"];
const PRE: &[&str] = &["pre-copy"];

/// Where the source's agent dies: before which effect, and in which strategies it comes.
const SOURCE: &[(&str, &[&str])] = &[
    // Copy and Sync.
    ("Journal-Begun", ANY),
    ("StartTracking", ANY),
    ("Journal-Settled", ANY),
    ("Send-Open", ANY),
    ("SendRun:0", COPY),
    ("SendRun:25", COPY),
    ("TakeDirty:0", PRE),
    ("Notice-Ready", ANY),
    // Handover.
    ("Journal-Attempt", ANY),
    ("Quiesce", ANY),
    ("SyncImages:1", ANY),
    ("TakeDirty", ANY),
    ("Send-Prepare", ANY),
    ("Journal-HandedOver", ANY),
    ("Retire", ANY),
    ("Send-Commit", ANY),
    ("Notice-HandedOver", ANY),
    // Backfill and Release.
    ("Notice-TargetServing", ANY),
    ("SendRun:10", POST),
    ("Journal-Done", ANY),
    ("StopTracking", ANY),
    ("Notice-Done", ANY),
];

/// The same for the target's agent.
const TARGET: &[(&str, &[&str])] = &[
    ("Journal-Touched", ANY),
    ("Send-Opened", ANY),
    ("Send-Received:0", COPY),
    ("Send-Received:5", COPY),
    ("SyncImages", ANY),
    ("Journal-Prepared", ANY),
    ("Send-Prepared", ANY),
    ("Journal-Committed", ANY),
    ("Expose", ANY),
    ("SetLength", ANY),
    ("BeginPresent", ANY),
    ("ServeDisk", ANY),
    ("Send-Serving", ANY),
    ("Notice-Serving", ANY),
    ("ReachGuest", ANY),
    ("Journal-GuestStarting", ANY),
    ("LetChange", ANY),
    ("StartGuest", ANY),
    ("Journal-GuestStarted", ANY),
    ("AskMissing", POST),
    ("Send-Fetch:0", POST),
    ("Send-Fetch:20", POST),
    ("Checkpoint", ANY),
    ("Journal-Complete", ANY),
    ("Finish", ANY),
    ("Send-Complete", ANY),
    ("Notice-Complete", ANY),
];

/// Where the named agent dies, and the other one at once.
const BOTH: &[(&str, &str, &[&str])] = &[
    ("hosta", "SendRun:30", COPY),
    ("hosta", "Send-Prepare", ANY),
    ("hosta", "Journal-HandedOver", ANY),
    ("hosta", "Retire", ANY),
    ("hosta", "Send-Commit", ANY),
    ("hostb", "Send-Prepared", ANY),
    ("hostb", "Journal-Committed", ANY),
    ("hostb", "Expose", ANY),
    ("hostb", "StartGuest", ANY),
    ("hostb", "Send-Fetch:15", POST),
    ("hostb", "Finish", ANY),
];

#[derive(Clone, Debug)]
struct Death {
    host: &'static str,
    effect: &'static str,
    strategy: &'static str,
    both: bool,
    seed: u64,
}

fn deaths(rounds: u64) -> Vec<Death> {
    let mut all = Vec::new();
    for round in 0..rounds {
        let mut add = |host, effect, strategies: &[&'static str], both| {
            let nth = all.len() as u64 + round;
            let strategy = strategies[nth as usize % strategies.len()];
            all.push(Death { host, effect, strategy, both, seed: nth });
        };
        SOURCE.iter().for_each(|&(effect, strategies)| add("hosta", effect, strategies, false));
        TARGET.iter().for_each(|&(effect, strategies)| add("hostb", effect, strategies, false));
        BOTH.iter().for_each(|&(host, effect, strategies)| add(host, effect, strategies, true));
        // All is done, and the migration's folder is half removed.
        ["hosta", "hostb"].iter().for_each(|host| add(host, "RemoveFolder", ANY, false));
    }
    if let Ok(only) = std::env::var("DRAY_KILL_ONLY") {
        all.retain(|death| death.effect.contains(&only));
    }
    all
}

fn die(death: &Death) -> Result<(), String> {
    let variable = [("DRAY_ABORT_BEFORE", death.effect)];
    let (source, target): (&[_], &[_]) =
        if death.host == "hosta" { (&variable, &[]) } else { (&[], &variable) };
    let mut case = Case::begin(Lab::new(), death.seed, source, target);
    // The agent that is asked may be the one that dies.
    let _ = case.migrate(death.strategy, None);
    let died = wait_for("the death", DEATH, || {
        case.lab.host(death.host).has_died() || case.guest.complaint().is_some()
    });
    died.map_err(|why| format!("{why}: {}", case.picture()))?;
    if death.both {
        case.lab.a.kill();
        case.lab.b.kill();
        names_agree(&case.lab)?;
    }
    for host in [&mut case.lab.a, &mut case.lab.b] {
        if !host.is_up() {
            host.start();
        }
    }
    case.await_end()?;
    case.end().map(drop)
}

#[test]
fn any_agent_may_die_before_any_effect() {
    let rounds: Option<u64> =
        std::env::var("DRAY_KILL_ROUNDS").ok().map(|text| text.parse().unwrap());
    let mut deaths = deaths(rounds.unwrap_or(1));
    if rounds.is_none() {
        // `make long` has time for all of them.
        deaths = deaths.into_iter().step_by(3).collect();
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some(death) = deaths.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = Instant::now();
                    let result = die(death);
                    if let Err(why) = result {
                        eprintln!("{death:?} after {}: {why}", seconds(began));
                        failed.lock().unwrap().push(death.clone());
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    eprintln!("{} deaths in {}, {} failed", deaths.len(), seconds(began), failed.len());
    assert!(failed.is_empty(), "{failed:#?}");
}
