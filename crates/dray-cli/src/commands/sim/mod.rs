//! `dray sim`: what a migration would cost, found by replaying a trace through the engine.

mod chunks;
mod compare;
mod goals;
mod hot_set;
mod input;
mod once;

use crate::output::Output;
use clap::Subcommand;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_sim::replay::settings::{PAPER_DELAY, PAPER_HISTORY, PAPER_SEEK};
use dray_sim::replay::{Order, ReplayError, Settings, Throttling};
use dray_trace::TraceError;
use dray_types::{BitRate, ByteSize, Strategy, Why};
use goals::GoalArgs;
use hot_set::SyncArgs;
use input::Input;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  One migration, and a picture of it:
    dray sim vm1.csv.zst --strategy hybrid --start 600 --bandwidth 100Mbit --svg vm1.svg
  The savings of the workload-aware order, over all models and two links:
    dray sim compare vm1.csv.zst mail --bandwidth 100Mbit --bandwidth 1Gbit
  The effect of the chunk size:
    dray sim chunks vm1.csv.zst file-server

A TRACE is a file (CSV `time_s,op,offset,length`, the text of blkparse, or a fio iolog; each
may be compressed with zstd) or the name of a generated load: file-server, mail, java, web,
database. This command needs no agent. `docs/how-to/simulate.md` is the manual.";

/// Arguments of `dray sim`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<Action>,
    #[command(flatten)]
    once: once::Args,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Compare the workload-aware order with address order, over models and links
    Compare(compare::Args),
    /// Compare the selected chunk size with the best and the worst one
    Chunks(chunks::Args),
}

/// What every simulation needs.
#[derive(clap::Args, Debug)]
pub struct Common {
    /// Traces: files, or names of generated loads
    #[arg(value_name = "TRACE", required = true)]
    traces: Vec<String>,
    /// Size of the disk [default: 32GiB, or as far as the trace goes; a load's own]
    #[arg(long, value_name = "SIZE")]
    disk: Option<ByteSize>,
    /// Memory of the guest [default: 1GiB; a load's own]
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// One-way delay of the link in milliseconds [default: 50; 10, 1 or 0 where the trace is too short
    /// for that]
    #[arg(long, value_name = "MS", value_parser = millis)]
    delay: Option<f64>,
    /// Number of known accesses before the start; hot-set counts them unless --observe is given
    #[arg(long, value_name = "N", default_value_t = PAPER_HISTORY)]
    history: usize,
    /// Cost of a jump in the workload-aware order, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = PAPER_SEEK as f64 / 1e6, value_parser = millis)]
    seek: f64,
    /// Whether the guest's writes are slowed during Sync: none, soft or aggressive
    #[arg(long, value_name = "MODE", default_value = "none", value_parser = throttling)]
    throttle: Throttling,
    #[command(flatten)]
    goals: GoalArgs,
    #[command(flatten)]
    sync: SyncArgs,
    /// Seed of random starts and of generated loads
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

fn millis(text: &str) -> Result<f64, Why> {
    let value: f64 = text.parse().map_err(|_| "write it as milliseconds: 50")?;
    if (0.0..=1e6).contains(&value) { Ok(value) } else { Err("from 0 to 1000000".into()) }
}

fn throttling(text: &str) -> Result<Throttling, Why> {
    match text {
        "none" => Ok(Throttling::None),
        "soft" => Ok(Throttling::Soft),
        "aggressive" => Ok(Throttling::Aggressive),
        _ => Err("use none, soft or aggressive".into()),
    }
}

impl Common {
    fn inputs(&self) -> ApiResult<Vec<Input>> {
        let input = |name: &String| Input::find(name, self.seed, self.disk, self.memory);
        self.traces.iter().map(input).collect()
    }

    fn settings(
        &self,
        input: &Input,
        delay: u64,
        strategy: Strategy,
        order: Order,
    ) -> ApiResult<Settings> {
        let mut settings = Settings::new(strategy, order, input.disk, 1);
        settings.memory = input.memory;
        settings.delay = delay;
        settings.history = self.history;
        settings.throttle = self.throttle;
        settings.seek = (self.seek * 1e6) as u64;
        self.goals.apply(&mut settings);
        self.sync.apply(&mut settings)?;
        Ok(settings)
    }
}

/// Runs the kind of simulation that was asked for.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    match &args.what {
        None => once::run(&args.once, output),
        Some(Action::Compare(args)) => compare::run(args, output),
        Some(Action::Chunks(args)) => chunks::run(args, output),
    }
}

/// A trace that cannot be used, as the command's error.
pub fn trace_failed(what: &str, error: &TraceError) -> Refusal {
    let kind = match &error.source {
        Some(why) if why.kind() == std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        Some(_) => ErrorKind::Io,
        None => ErrorKind::Invalid,
    };
    let failed = Refusal::new(kind, what, error);
    match error.hint {
        Some(hint) => failed.hint(hint),
        None => failed,
    }
}

/// A replay that came to nothing.
fn replay_failed(name: &str, error: ReplayError<TraceError>) -> Refusal {
    let what = format!("cannot replay {name}");
    match error {
        ReplayError::Trace(error) => trace_failed(&what, &error),
        ReplayError::DiskTooSmall { .. } => {
            Refusal::new(ErrorKind::Invalid, what, error).hint("give a larger --disk")
        }
        ReplayError::Broken(_) => Refusal::new(ErrorKind::Internal, what, error),
    }
}

/// A link for people: bits a second, and the delay where it is not the paper's.
fn link(bytes_per_second: u64, delay: u64) -> String {
    let rate = BitRate { bytes_per_second };
    if delay == PAPER_DELAY {
        rate.to_string()
    } else {
        format!("{rate}, {} ms", delay as f64 / 1e6)
    }
}

/// The chunks by which an order counts, for people; none where they have one size.
fn mixed(order: Order) -> Option<&'static str> {
    (order == Order::WorkloadAware).then_some("mixture")
}
