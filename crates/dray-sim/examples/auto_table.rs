//! `auto` against the presets: `auto_table [STARTS] [PRESET…] [NAME…]`, a table in Markdown.
//!
//! Every preset (or those that are named) and `auto` migrate the same disk from the same starts, in
//! the agent's order, over the generated loads and the traces of the folder that `DRAY_TRACES` names
//! (a NAME picks some).
//! The *cost* of a migration is what the planner weighs: seconds of the link for what is sent twice,
//! and seconds that guests' reads wait for missing blocks. The best preset is the one of least cost
//! among those that end. `docs/simulation.md` has the result, and says how to read it.

use dray_engine::SECOND;
use dray_sim::replay::study::{Mean, Starts, runs};
use dray_sim::replay::{Order, Settings, Strategy};
use dray_trace::analyse::{PAPER_BANDWIDTH, PAPER_STARTS, Totals};
use dray_trace::generate::Load;
use dray_trace::{Reader, Record, TraceError};
use std::error::Error;
use std::path::{Path, PathBuf};

const GIB: u64 = 1 << 30;
/// Disk of a trace that does not say how large it was, and its guest's memory.
const DISK: u64 = 32 * GIB;
const MEMORY: u64 = GIB;
/// A trace for which so much would need a faster link than 1 Gbit/s has the disk it needs.
const FAST: f64 = 125e6;
/// A generated load goes on for this many times the shortest migration.
const TIMES: u64 = 6;
const PRESETS: [Strategy; 5] =
    [Strategy::PreCopy, Strategy::Hybrid, Strategy::PostCopy, Strategy::Mirror, Strategy::HotSet];

/// What is replayed.
struct Case {
    name: String,
    from: From,
    disk: u64,
    memory: u64,
    delay: u64,
    starts: Starts,
}

enum From {
    Load(Load),
    File(PathBuf),
}

type Records = Box<dyn Iterator<Item = Result<Record, TraceError>>>;

impl Case {
    fn load(load: Load, starts: u32) -> Self {
        let spec = load.spec();
        let (from, to) = PAPER_STARTS;
        Self {
            name: load.name().to_owned(),
            from: From::Load(load),
            disk: spec.layout.disk,
            memory: spec.memory,
            delay: dray_sim::replay::settings::PAPER_DELAY,
            starts: Starts::between(from, to, PAPER_BANDWIDTH, starts, 1),
        }
    }

    fn file(path: &Path, starts: u32) -> Result<Self, Box<dyn Error>> {
        let totals = Reader::open(path).and_then(Totals::of)?;
        let own = totals.end.next_multiple_of(GIB);
        let short = DISK as f64 > FAST * totals.duration as f64 / 2e9;
        let disk = if short { own } else { DISK.max(own) };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // A trace of seconds needs a link that the engine's windows do not fill at 50 ms.
        let delays = [50, 10, 1].map(|ms| ms * SECOND / 1000);
        let chosen = delays.into_iter().find_map(|delay| {
            let starts = Starts::choose(totals.duration, disk + MEMORY, None, delay, starts, 1)?;
            Some((delay, starts))
        });
        let (delay, starts) = chosen.ok_or("the trace is too short")?;
        Ok(Self {
            name: name.split('.').next().unwrap_or_default().to_owned(),
            from: From::File(path.to_owned()),
            disk,
            memory: MEMORY,
            delay,
            starts,
        })
    }

    fn open(&self) -> Result<Records, TraceError> {
        match &self.from {
            From::File(path) => Ok(Box::new(Reader::open(path)?)),
            From::Load(load) => {
                let seconds = (self.disk + self.memory) / self.starts.bandwidth + 1;
                let last = self.starts.at.last().copied().unwrap_or(0);
                let end = last.saturating_add(seconds * TIMES * SECOND);
                let records = load.spec().records(1).take_while(move |record| record.time_ns < end);
                Ok(Box::new(records.map(Ok)))
            }
        }
    }

    fn mean(&self, strategy: Strategy) -> Result<Mean, Box<dyn Error>> {
        let bandwidth = self.starts.bandwidth;
        let mut settings = Settings::new(strategy, Order::WorkloadAware, self.disk, bandwidth);
        (settings.memory, settings.delay) = (self.memory, self.delay);
        Ok(Mean::of(&runs(&settings, &self.starts, &|| self.open())?))
    }

    /// Seconds.
    fn cost(&self, mean: &Mean) -> f64 {
        let link = mean.extra_bytes / self.starts.bandwidth as f64;
        link + mean.remote_reads * mean.wait / SECOND as f64
    }

    fn show(&self, presets: &[Strategy]) -> Result<(), Box<dyn Error>> {
        let mut best: Option<(Strategy, Mean)> = None;
        for &strategy in presets {
            let mean = self.mean(strategy)?;
            self.line(&strategy.to_string(), &mean, "");
            let cost = self.cost(&mean);
            if mean.failed == 0 && best.is_none_or(|(_, best)| cost < self.cost(&best)) {
                best = Some((strategy, mean));
            }
        }
        let auto = self.mean(Strategy::Auto)?;
        let verdict = match &best {
            Some((strategy, best)) => {
                format!("{strategy}: {}", verdict(&auto, best, self.cost(&auto), self.cost(best)))
            }
            None => "no preset ends".to_owned(),
        };
        self.line("**auto**", &auto, &verdict);
        Ok(())
    }

    fn line(&self, strategy: &str, mean: &Mean, verdict: &str) {
        let mib = (1u64 << 20) as f64;
        let failed = if mean.failed > 0 {
            format!("{} of {} fail; ", mean.failed, mean.runs)
        } else {
            String::new()
        };
        println!(
            "| {} | {strategy} | {:.0} | {:.1} | {:.0} | {:.0} | {:.1} | {failed}{verdict} |",
            self.name,
            mean.total / 1e9,
            mean.extra_bytes / mib,
            mean.remote_reads,
            mean.downtime / 1e6,
            self.cost(mean),
        );
    }
}

/// Where `auto` is more than 5 % worse than the best preset, beyond what is no difference: 1 MiB, a
/// read, 10 ms of downtime.
fn verdict(auto: &Mean, best: &Mean, cost: f64, best_cost: f64) -> String {
    let more = |name: &str, auto: f64, best: f64, floor: f64| {
        (auto > best * 1.05 + floor).then(|| name.to_owned())
    };
    let worse: Vec<String> = [
        more("total", auto.total, best.total, 0.0),
        more("extra", auto.extra_bytes, best.extra_bytes, (1 << 20) as f64),
        more("reads", auto.remote_reads, best.remote_reads, 1.0),
        more("downtime", auto.downtime, best.downtime, 1e7),
    ]
    .into_iter()
    .flatten()
    .collect();
    match (worse.is_empty(), auto.failed) {
        (_, 1..) => "auto fails".to_owned(),
        (true, _) => "within 5 % in each".to_owned(),
        (false, _) if cost <= best_cost * 1.05 => {
            format!("more {} for less cost", worse.join(", "))
        }
        (false, _) => format!("**worse**: {}", worse.join(", ")),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let starts: u32 = args.next().map_or(Ok(3), |text| text.parse())?;
    let (presets, names): (Vec<String>, Vec<String>) =
        args.partition(|text| text.parse::<Strategy>().is_ok());
    let presets: Vec<Strategy> =
        presets.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let presets = if presets.is_empty() { PRESETS.to_vec() } else { presets };
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    println!(
        "| load | strategy | total s | extra MiB | remote reads | downtime ms | cost s | against the best preset |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for load in Load::ALL.into_iter().filter(|load| wanted(load.name())) {
        Case::load(load, starts).show(&presets)?;
    }
    let Some(folder) = std::env::var_os("DRAY_TRACES") else { return Ok(()) };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|path| path.to_string_lossy().contains(".csv") && wanted(&path.to_string_lossy()));
    files.sort();
    for path in files {
        Case::file(&path, starts)?.show(&presets)?;
    }
    Ok(())
}
