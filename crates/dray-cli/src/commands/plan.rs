//! `dray plan`.

use super::migrate::duration;
use super::subject::{ChainArg, SubjectArgs};
use super::{absolute, pair};
use crate::client::Client;
use crate::output::Output;
use crate::show::planned::{PlannedMove, planned, planned_moves};
use dray_api::{ApiResult, ErrorKind, Plan, Refusal, Subject};
use dray_types::BitRate;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  dray plan --qmp /run/vm1.qmp --to hostb --bandwidth 800Mbit
  dray plan --image data --to hostb --deadline 10m
  dray plan --vm /run/vm1.qmp --vm /run/vm2.qmp --image data --each --to hostb

The prediction uses the agent's counts of the guest's accesses, the content that the target
has, and the content that backups and peers would give it before the source sends the rest. It
cannot include content that the target will find elsewhere in its pools. The command moves no
data.";

/// Arguments of `dray plan`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: WhatArgs,
    /// The target: a peer's name from the configuration
    #[arg(long, value_name = "HOST")]
    to: String,
    /// Each --image is a migration of its own
    #[arg(long, requires = "images", conflicts_with = "qmp")]
    each: bool,
    /// How a disk moves that is a chain of images (qcow2 with backing files)
    #[arg(long, value_enum, default_value_t)]
    chain: ChainArg,
    /// Limit of the migration, as 500Mbit or 100MiB/s [default: the last measured rate of the link]
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Longest stop of the guest to aim for, in milliseconds or as 300ms or 1.5s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_downtime: Option<Duration>,
    /// Slow the guest's requests down by no more than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_added_latency: Option<Duration>,
    /// Longest duration to aim for, as 90s or 10m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
    /// Predict a migration with --no-backups
    #[arg(long)]
    no_backups: bool,
    /// Pool at the target [default: the target's default for this host]
    #[arg(long)]
    pool: Option<String>,
    /// Name at the target of an image or device (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
}

/// What would be moved.
#[derive(clap::Args, Debug)]
#[group(id = "what", required = true, multiple = true, args = ["qmp", "images", "vms"])]
struct WhatArgs {
    /// QMP socket of the running VM on this host
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["images", "vms"])]
    qmp: Option<PathBuf>,
    /// Image to move without a VM, by its name (repeat for several)
    #[arg(long = "image", value_name = "NAME")]
    images: Vec<String>,
    /// One of several VMs, by its QMP socket (repeat for several)
    #[arg(long = "vm", value_name = "SOCKET")]
    vms: Vec<PathBuf>,
}

impl WhatArgs {
    /// What each migration would move.
    fn resolve(self, each: bool) -> ApiResult<Vec<Subject>> {
        let Self { qmp, images, vms } = self;
        if !images.is_empty() && !vms.is_empty() && !each {
            let why = "the images may be one migration, or one each";
            let error = Refusal::new(ErrorKind::Invalid, "cannot tell what to plan", why);
            return Err(error.hint("with --vm, images need --each"));
        }
        if !each && vms.is_empty() {
            return Ok(vec![SubjectArgs { qmp, images }.resolve()?]);
        }
        let vms = vms.iter().map(|qmp| Ok(Subject::Vm { qmp: absolute(qmp)? }));
        let images = images.into_iter().map(|name| Ok(Subject::Images { names: vec![name] }));
        vms.chain(images).collect()
    }
}

/// Asks what migrations would take with each strategy and prints the predictions.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let millis = |time: Duration| (time.as_millis() as u64).max(1);
    let mut subjects = args.what.resolve(args.each)?;
    let several = subjects.len() > 1;
    let command = Plan {
        subject: subjects.remove(0),
        to: args.to,
        chain: args.chain.into(),
        bandwidth: args.bandwidth,
        max_downtime_ms: args.max_downtime.map(millis),
        deadline_ms: args.deadline.map(millis),
        max_added_latency_ms: args.max_added_latency.map(|time| time.as_secs_f64() * 1e3),
        no_backups: args.no_backups,
        pool: args.pool,
        names: args.names.into_iter().collect(),
    };
    let plan = client.call(command.clone()).await?;
    if !several {
        output.result(&plan, planned);
        return Ok(ExitCode::SUCCESS);
    }
    let mut plans = vec![PlannedMove { subject: command.subject.clone(), plan }];
    for subject in subjects {
        let command = Plan { subject: subject.clone(), ..command.clone() };
        let plan = client.call(command).await?;
        plans.push(PlannedMove { subject, plan });
    }
    // As `dray migrate` would begin them.
    plans.sort_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    output.result(&plans, |plans, style| planned_moves(plans, style));
    Ok(ExitCode::SUCCESS)
}
