//! `dray prepare`.

use super::subject::{ChainArg, MoveArgs, TargetFormatArg};
use super::{pair, path_at_target};
use crate::client::Client;
use crate::output::Output;
use crate::progress;
use crate::show::prepared::{qemu_arguments, quoted};
use crate::show::script::script;
use dray_api::{ApiResult, Prepare, Subject};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray prepare --qmp /run/vm1.qmp --to hostb
  dray prepare --qmp /run/vm1.qmp --to hostb --script
  dray prepare --qmp /run/vm1.qmp --to hostb --pool fast --name disk0=vm1-root
  dray prepare --qmp /run/vm1.qmp --to hostb --chain flatten
  dray prepare --qmp /run/vm1.qmp --to hostb --chain flatten --target-format qcow2
  dray prepare --image data --to hostb

Standard output contains only the arguments for the waiting QEMU, ready to be pasted, or the
script. dray pairs the disks of both QEMUs by their device ids (qdev), so give the devices the
same ids there; the script does.";

/// Arguments of `dray prepare`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: MoveArgs,
    /// Pool at the target [default: the target's default for this host]
    #[arg(long)]
    pool: Option<String>,
    /// Put this before every name at the target
    #[arg(long, value_name = "TEXT")]
    prefix: Option<String>,
    /// Name at the target of an image or device (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
    /// How a disk moves that is a chain of images (qcow2 with backing files)
    #[arg(long, value_enum, default_value_t)]
    chain: ChainArg,
    /// Format of a flattened disk at the target
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    target_format: TargetFormatArg,
    /// Do not let the target begin with a backup or a replica of another host
    #[arg(long)]
    no_backups: bool,
    /// To whom the files belong at the target [default: as here, by name]
    #[arg(long, value_name = "USER[:GROUP]")]
    owner: Option<String>,
    /// Forget what was prepared before for this target, and prepare anew
    #[arg(long)]
    replace: bool,
    /// Print a shell script that starts the waiting QEMU, made from the command line of the running one
    #[arg(long, conflicts_with = "images")]
    script: bool,
    /// QMP socket of the QEMU that will wait at the target; `dray migrate` then knows it
    #[arg(long, value_name = "SOCKET", value_parser = path_at_target, conflicts_with = "images")]
    target_qmp: Option<PathBuf>,
}

/// Has the target make exports and prints the arguments of the QEMU that waits there.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Prepare {
        subject: args.what.subject.resolve()?,
        to: args.what.to,
        pool: args.pool,
        prefix: args.prefix,
        names: args.names.into_iter().collect(),
        target_qmp: args.target_qmp,
        chain: args.chain.into(),
        target_format: args.target_format.into(),
        no_backups: args.no_backups,
        owner: args.owner,
        replace: args.replace,
        command_line: args.script,
    };
    let mut next = Next {
        subject: command.subject.clone(),
        target_qmp: command.target_qmp.clone(),
        qmp: None,
    };
    let prepared = progress::seeding::call(client, command, output).await?;
    if output.json {
        output.json_line(&prepared);
        return Ok(ExitCode::SUCCESS);
    }
    let to = &prepared.to;
    let endpoint = &prepared.endpoint;
    output.note(&format!("migration {} is prepared at {to}", prepared.migration));
    for image in &prepared.images {
        let device = image.device.as_ref().map_or(String::new(), |id| format!(" (device {id})"));
        let lies = if image.in_place { ", a file that it has already" } else { "" };
        let (name, export) = (&image.image, &image.export);
        output.note(&format!("  {name}{device} → export {export} on {endpoint}{lies}"));
    }
    if let Some(command) = &prepared.command_line {
        output.note(&format!("the script starts the QEMU that waits; run it on {to}"));
        output.text(&script(&prepared, command));
        for left_out in &command.left_out {
            output.note(&format!("left out: {left_out}"));
        }
        next.qmp.clone_from(&command.qmp);
        output.note(&format!("when QEMU waits there, give on this host:\n  {}", next.line(to)));
        return Ok(ExitCode::SUCCESS);
    }
    let arguments = qemu_arguments(&prepared);
    if arguments.trim().is_empty() {
        output.note(&format!("then give:\n  {}", next.line(to)));
        return Ok(ExitCode::SUCCESS);
    }
    output.note(&format!("start QEMU at {to} with the same devices and these arguments:"));
    output.text(&arguments);
    output.note(&format!("when it waits there, give on this host:\n  {}", next.line(to)));
    Ok(ExitCode::SUCCESS)
}

/// The command that follows.
struct Next {
    subject: Subject,
    target_qmp: Option<PathBuf>,
    /// The QMP socket of the QEMU that waits, when the agent does not know it but this command does.
    qmp: Option<PathBuf>,
}

impl Next {
    fn line(&self, to: &str) -> String {
        let to = quoted(to);
        match &self.subject {
            Subject::Images { names } => {
                let images = names.iter().map(|name| format!(" --image {}", quoted(name)));
                format!("dray migrate{} --to {to}", images.collect::<String>())
            }
            Subject::Vm { qmp } => {
                let qmp = quoted(&qmp.to_string_lossy());
                let there = match (&self.target_qmp, &self.qmp) {
                    (Some(_), _) => String::new(),
                    (None, Some(qmp)) => {
                        format!(" --target-qmp {}", quoted(&qmp.to_string_lossy()))
                    }
                    (None, None) => {
                        " --target-qmp SOCKET   # of the QEMU that waits there".to_owned()
                    }
                };
                format!("dray migrate --qmp {qmp} --to {to}{there}")
            }
        }
    }
}
