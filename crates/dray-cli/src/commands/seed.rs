//! `dray seed`, and the same before a migration.

use super::pair;
use super::subject::MoveArgs;
use crate::client::{Client, Reply};
use crate::output::Output;
use crate::show::units::bytes;
use dray_api::{ApiResult, ErrorKind, Event, Seed, SeedProgress, Seeded, SeededImage};
use indicatif::{ProgressBar, ProgressStyle};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray seed --image db --to hostb
  dray seed --qmp /run/vm1.qmp --to hostb --pool fast

The target reads the newest backup of each image that it can use from the repositories in its
own configuration ([[backup]]), or the replica that one of its peers has kept, and keeps it as a
replica. The source and its disks are not
asked for anything. A migration that follows, whenever that is, sends what was written since.
`dray migrate` and `dray prepare` do this themselves unless they are told --no-backups.

Ctrl-C stops it; what was read is used when it is asked for again within a day.";

/// Arguments of `dray seed`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: MoveArgs,
    /// Pool at the target; its default one if not given
    #[arg(long)]
    pool: Option<String>,
    /// Name at the target of an image or device (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
}

/// Has the target read images from its backups and follows that to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Seed {
        subject: args.what.subject.resolve()?,
        to: args.what.to,
        pool: args.pool,
        prefix: None,
        names: args.names.into_iter().collect(),
    };
    let seeded = ask(command, client, output).await?;
    output.result(&seeded, |seeded, _| {
        if seeded.images.iter().all(|image| image.generation.is_none() && image.notes.is_empty()) {
            return format!("{} has no backup or replica that it could begin with\n", seeded.to);
        }
        words(seeded).into_iter().map(|line| line + "\n").collect()
    });
    Ok(ExitCode::SUCCESS)
}

/// Before a migration: what stands in the way of it is said, and the migration goes its way.
pub async fn first(command: Seed, client: &Client, output: &Output) {
    match ask(command, client, output).await {
        Ok(seeded) => words(&seeded).iter().for_each(|line| output.note(line)),
        // An agent of an earlier release, or the failure that the migration itself will tell.
        Err(why) if why.kind == ErrorKind::Invalid || why.kind == ErrorKind::NotFound => {}
        Err(why) => output.note(&format!("no backup or replica is used: {why}")),
    }
}

/// Asks and shows how far it is.
async fn ask(command: Seed, client: &Client, output: &Output) -> ApiResult<Seeded> {
    let mut call = client.start(command).await?;
    let mut bar = None;
    let outcome = loop {
        match call.next().await {
            Ok(Reply::Continue(Event::Comparing(progress))) => {
                show("comparing", progress, &mut bar, output);
            }
            Ok(Reply::Continue(Event::Seeding(progress))) => {
                show("backups", progress, &mut bar, output);
            }
            Ok(Reply::Continue(_)) => {}
            Ok(Reply::Break(seeded)) => break Ok(seeded),
            Err(why) => break Err(why),
        }
    };
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    outcome
}

fn show(
    what: &'static str,
    progress: SeedProgress,
    bar: &mut Option<ProgressBar>,
    output: &Output,
) {
    if output.json || output.quiet || !output.live || progress.bytes_total == 0 {
        return;
    }
    let bar = bar.get_or_insert_with(|| {
        let look = "{spinner:.cyan} {prefix:<10.bold} {bar:28.cyan/dim} {percent:>3} %  {wide_msg}";
        let look = ProgressStyle::with_template(look)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("━╸─");
        ProgressBar::new(1).with_style(look)
    });
    bar.set_prefix(what);
    bar.set_length(progress.bytes_total);
    bar.set_position(progress.bytes_done);
    let (done, total) = (bytes(progress.bytes_done), bytes(progress.bytes_total));
    bar.set_message(format!("{done} of {total}"));
}

/// What came of it, a line for each thing worth telling.
fn words(seeded: &Seeded) -> Vec<String> {
    seeded.images.iter().flat_map(|image| of_image(image, &seeded.to)).collect()
}

fn of_image(seeded: &SeededImage, to: &str) -> Vec<String> {
    let SeededImage { image, generation, given, missing_bytes, notes } = seeded;
    let mut lines = Vec::new();
    if let Some(generation) = generation {
        let given: Vec<String> =
            given.iter().map(|(from, given)| format!("{} from {from}", bytes(*given))).collect();
        let given = if given.is_empty() { "nothing to read".to_owned() } else { given.join(", ") };
        lines.push(format!("{to} has generation {generation} of {image} now: {given}"));
    }
    if *missing_bytes > 0 {
        lines.push(format!("  {} of it nobody could give", bytes(*missing_bytes)));
    }
    let prefix = if generation.is_some() { "  " } else { "" };
    let unused = |note: &String| match generation {
        Some(_) => format!("{prefix}{note}"),
        None => format!("no backup or replica of {image} is used: {note}"),
    };
    lines.extend(notes.iter().map(unused));
    lines
}
