//! `dray plan`.

use super::migrate::duration;
use super::pair;
use super::subject::{ChainArg, MoveArgs};
use crate::output::Output;
use crate::show::planned::planned;
use dray_agent::api::{ApiResult, Client, Command, Plan, Planned};
use dray_types::BitRate;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  dray plan --qmp /run/vm1.qmp --to hostb --bandwidth 800Mbit
  dray plan --image data --to hostb --deadline 10m

The prediction is made of what the agent has counted of the guest so far, and of what the target
has or would be given by its backups and peers before the source sends the rest. What it will
find by its content elsewhere in its pools is not known before. Nothing moves.";

/// Arguments of `dray plan`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: MoveArgs,
    /// What becomes of a disk that is a chain of images (qcow2 with backing files)
    #[arg(long, value_enum, default_value_t)]
    chain: ChainArg,
    /// What the migration may send: 500Mbit, 100MiB/s [default: what the link has carried last]
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Longest stop of the guest to aim for, in milliseconds or as 300ms, 1.5s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_downtime: Option<Duration>,
    /// Slow the guest's requests by no more than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_added_latency: Option<Duration>,
    /// Be done by then, as 90s or 10m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
    /// As the migration would go with --no-backups
    #[arg(long)]
    no_backups: bool,
    /// Pool at the target; its default one if not given
    #[arg(long)]
    pool: Option<String>,
    /// Name at the target of an image or device (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
}

/// Does it.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let millis = |time: Duration| (time.as_millis() as u64).max(1);
    let command = Plan {
        subject: args.what.subject.resolve()?,
        to: args.what.to,
        chain: args.chain.into(),
        bandwidth: args.bandwidth,
        max_downtime_ms: args.max_downtime.map(millis),
        deadline_ms: args.deadline.map(millis),
        max_added_latency_ms: args.max_added_latency.map(|time| time.as_secs_f64() * 1e3),
        no_backups: args.no_backups,
        pool: args.pool,
        names: args.names.into_iter().collect(),
    };
    let plan: Planned = client.call(Command::Plan(command)).await?;
    output.result(&plan, planned);
    Ok(ExitCode::SUCCESS)
}
