//! `dray migrate`.

use super::several::SeveralArgs;
use super::subject::{ChainArg, SubjectArgs};
use super::tuning::TuningArgs;
use super::{pair, path_at_target};
use crate::client::Client;
use crate::output::Output;
use crate::progress;
use crate::progress::Followed;
use crate::show::status::short;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Batch, Migrate, Migrated, Order, ReleaseAtEnd, Strategy, Subject};
use dray_types::{BitRate, Why};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  Move a running VM (its waiting QEMU has the arguments that `dray prepare` printed):
    dray migrate --qmp /run/vm1.qmp --to hostb --target-qmp /run/vm1.qmp
  With a bandwidth limit, a comparison at the end, and JSON for a program:
    dray --json migrate --qmp /run/vm1.qmp --to hostb --target-qmp /run/vm1.qmp \\
        --bandwidth 500Mbit --verify
  Move an image that no VM uses:
    dray migrate --image data --to hostb
  Move several VMs, two at a time, with 800 Mbit/s for all of them together:
    dray migrate --vm /run/vm1.qmp=/run/vm1.qmp --vm /run/vm2.qmp=/run/vm2.qmp \\
        --to hostb --bandwidth 800Mbit
  Move all VMs and images that `dray prepare` has prepared for a host:
    dray migrate --all --to hostb --jobs 4

Ctrl-C ends the display, not the migration: `dray watch` shows it again, and `dray cancel`
cancels it. After the handover a migration cannot be cancelled.";

/// Arguments of `dray migrate`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: WhatArgs,
    /// The target: a peer's name from the configuration
    #[arg(long, value_name = "HOST")]
    to: String,
    /// QMP socket, on the target, of the QEMU that waits for the VM
    #[arg(long, value_name = "SOCKET", value_parser = path_at_target,
        conflicts_with_all = ["images", "vms", "all"])]
    target_qmp: Option<PathBuf>,
    /// Id of the prepared migration, if `dray prepare` has made several
    #[arg(long, value_name = "MIGRATION", conflicts_with_all = ["pool", "names", "vms", "all", "each"])]
    prepared: Option<String>,
    /// Pool at the target, if the migration was not prepared
    #[arg(long)]
    pool: Option<String>,
    /// Name at the target of an image or device, if the migration was not prepared (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
    /// To whom the files belong at the target, if the migration was not prepared [default: as here, by name]
    #[arg(long, value_name = "USER[:GROUP]", conflicts_with_all = ["vms", "prepared"])]
    owner: Option<String>,
    /// The blocks that move before the guest, and those that move after it
    #[arg(long, value_parser = strategies(), default_value_t)]
    strategy: Strategy,
    /// The order in which blocks move
    #[arg(long, value_enum, default_value_t)]
    order: OrderArg,
    /// How a disk moves that is a chain of images [default: as it was prepared]
    #[arg(long, value_enum)]
    chain: Option<ChainArg>,
    /// Do not let the target begin with a backup or a replica of another host
    #[arg(long)]
    no_backups: bool,
    #[command(flatten)]
    tuning: TuningArgs,
    /// Limit for all migrations of the command together, as 500Mbit or 100MiB/s
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Longest stop of the guest to aim for, in milliseconds or as 300ms or 1.5s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    max_downtime: Option<Duration>,
    /// auto: longest duration of the migration to aim for, as 90s or 10m
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
    /// Re-read every block at the target at the end and compare it with the source
    #[arg(long)]
    verify: bool,
    /// Return when the migration has started
    #[arg(long)]
    detach: bool,
    /// Adopt disks with dirty bitmaps, which removes these bitmaps
    #[arg(long)]
    drop_bitmaps: bool,
    /// Also send content that the target has somewhere in its pools
    #[arg(long)]
    no_reuse: bool,
    /// Delete the source's copy at the end; otherwise it stays as a replica
    #[arg(long)]
    remove_replica: bool,
    /// Whether QEMU gets the disks at the end; as-before: if it had them before the migration
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    release: ReleaseArg,
    // Last: its heading is that of what follows.
    #[command(flatten)]
    several: SeveralArgs,
}

/// The VMs or images that the command moves.
#[derive(clap::Args, Debug)]
#[group(id = "what", required = true, multiple = true, args = ["qmp", "images", "vms", "all"])]
struct WhatArgs {
    /// QMP socket of the running VM on this host
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["images", "vms"])]
    qmp: Option<PathBuf>,
    /// Image to move without a VM, by its name (repeat for several)
    #[arg(long = "image", value_name = "NAME")]
    images: Vec<String>,
}

/// The strategies as they are typed.
pub fn strategies() -> impl TypedValueParser<Value = Strategy> {
    let named =
        |strategy: Strategy| PossibleValue::new(strategy.name()).help(strategy.traits().summary);
    PossibleValuesParser::new(Strategy::ALL.map(named)).try_map(|name| name.parse::<Strategy>())
}

/// The orders as they are typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
enum OrderArg {
    /// The blocks that the guest writes most are copied last; those that it reads most are fetched first
    #[default]
    WorkloadAware,
    /// By address
    Sequential,
}

/// What happens to the disks at the end, as it is typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
enum ReleaseArg {
    #[default]
    AsBefore,
    Always,
    Never,
}

/// A time with its unit; milliseconds when it has none.
pub fn duration(text: &str) -> Result<Duration, Why> {
    let wrong = || Why::from("write it as 300ms or 1.5s");
    let (number, scale) = if let Some(number) = text.strip_suffix("ms") {
        (number, 0.001)
    } else if let Some(number) = text.strip_suffix('m') {
        (number, 60.0)
    } else if let Some(number) = text.strip_suffix('s') {
        (number, 1.0)
    } else {
        (text, 0.001)
    };
    let value: f64 = number.trim().parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(value * scale).ok().filter(|time| !time.is_zero()).ok_or_else(wrong)
}

impl Args {
    /// One migration of what was named; of several, what they have in common.
    fn resolve(self) -> ApiResult<Migrate> {
        let WhatArgs { qmp, images } = self.what;
        Ok(Migrate {
            subject: SubjectArgs { qmp, images }.resolve()?,
            to: self.to,
            target_qmp: self.target_qmp,
            prepared: self.prepared.map(MigrationRef),
            pool: self.pool,
            names: self.names.into_iter().collect(),
            strategy: self.strategy,
            order: match self.order {
                OrderArg::WorkloadAware => Order::WorkloadAware,
                OrderArg::Sequential => Order::Sequential,
            },
            tuning: self.tuning.resolve(),
            bandwidth: self.bandwidth,
            max_downtime_ms: self.max_downtime.map(|time| (time.as_millis() as u64).max(1)),
            deadline_ms: self.deadline.map(|time| (time.as_millis() as u64).max(1)),
            verify: self.verify,
            detach: self.detach,
            drop_bitmaps: self.drop_bitmaps,
            remove_replica: self.remove_replica,
            no_reuse: self.no_reuse,
            no_backups: self.no_backups,
            owner: self.owner,
            chain: self.chain.map(Into::into),
            release: match self.release {
                ReleaseArg::AsBefore => ReleaseAtEnd::AsBefore,
                ReleaseArg::Always => ReleaseAtEnd::Always,
                ReleaseArg::Never => ReleaseAtEnd::Never,
            },
        })
    }
}

/// Begins a migration, or several, and follows it to its end.
pub async fn run(mut args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    if args.several.wanted() {
        let several = std::mem::take(&mut args.several);
        let images = std::mem::take(&mut args.what.images);
        let batch = several.batch(images, args.resolve()?, client).await?;
        return begin(batch, client, output).await;
    }
    args.several.refuse_leftovers()?;
    let command = args.resolve()?;
    if !command.detach {
        let next = what_next(&command);
        let followed = progress::follow(client, command, Migrated::ended, output).await?;
        if followed == Followed::Completed && !output.json && !next.is_empty() {
            output.note(&next);
        }
        return Ok(followed.into());
    }
    let started = progress::seeding::call(client, command, output).await?.started()?;
    output.result(&started, |started, _| {
        let id = short(started.migration);
        format!("migration {} has started\n`dray watch {id}` shows it\n", started.migration)
    });
    Ok(ExitCode::SUCCESS)
}

/// What is left to the operator when everything has moved.
fn what_next(command: &Migrate) -> String {
    let mut lines = Vec::new();
    if let Subject::Vm { qmp } = &command.subject {
        let qmp = qmp.display();
        lines.push(format!(
            "next: `dray quit --qmp {qmp}` ends the QEMU here, in which the guest never runs again"
        ));
    }
    if !command.remove_replica {
        lines.push(
            "the copies that stay on this host make a way back short; `dray images` lists them, and \
             `dray images remove NAME` frees their room"
                .to_owned(),
        );
    }
    lines.join("\n")
}

/// Begins several.
async fn begin(batch: Batch, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    if !batch.detach {
        return progress::batch::follow(client, batch, output).await;
    }
    let begun = progress::seeding::call(client, batch, output).await?;
    output.result(&begun, |begun, _| {
        let (id, count) = (crate::show::batch::short(begun), begun.moves.len());
        format!("batch {} of {count} has begun\n`dray batch watch {id}` shows it\n", begun.batch)
    });
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("300"), Ok(Duration::from_millis(300)));
        assert_eq!(duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("10m"), Ok(Duration::from_secs(600)));
        for wrong in ["", "0", "-1s", "soon", "1h", "infs", "NaN"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
