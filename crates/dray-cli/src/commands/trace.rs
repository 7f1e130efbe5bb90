//! `dray trace`: what a trace holds, and traces of guests and of generated loads.

use super::record;
use super::sim::trace_failed;
use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, fields, table};
use crate::show::units::{bytes, count, seconds};
use clap::Subcommand;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_trace::analyse::{Analysis, Locality, Totals, Volume, Windows, analyse};
use dray_trace::generate::Load;
use dray_trace::{Reader, Writer};
use dray_types::ByteSize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray trace analyse vm1.csv.zst --disk 32GiB
  dray trace generate file-server --seconds 7200 -o fs.csv.zst
  dray trace record vm1-root -o vm1.csv.zst --duration 2h

dray reads CSV `time_s,op,offset,length`, the text of blkparse, and fio iologs; each may be
compressed with zstd. Only `record` needs the agent. `docs/how-to/simulate.md` explains the
numbers.";

/// Arguments of `dray trace`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Measure rates, locality and popularity of a trace
    Analyse(AnalyseArgs),
    /// Write the trace of a server's load
    Generate(GenerateArgs),
    /// Record the guests' accesses to an image that the agent serves
    Record(record::Args),
}

/// Arguments of `dray trace analyse`.
#[derive(clap::Args, Debug)]
struct AnalyseArgs {
    /// The trace
    file: PathBuf,
    /// Size of the disk [default: as far as the trace goes]
    #[arg(long, value_name = "SIZE")]
    disk: Option<ByteSize>,
    /// Memory of the guest, for the length of a migration
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    memory: ByteSize,
    /// Number of random starts
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    starts: u32,
    /// Seed of the starts
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Arguments of `dray trace generate`.
#[derive(clap::Args, Debug)]
struct GenerateArgs {
    /// file-server, mail, java, web or database
    load: Load,
    /// Length of the trace in seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    seconds: u64,
    /// The file to write; compressed if its name ends in .zst
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Seed: equal seeds give equal traces
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Mean bytes written a second instead of the load's own
    #[arg(long, value_name = "SIZE")]
    write_rate: Option<ByteSize>,
    /// Mean bytes read a second instead of the load's own
    #[arg(long, value_name = "SIZE")]
    read_rate: Option<ByteSize>,
    /// Bytes written a second to new places instead of the load's own: less means more temporal locality
    #[arg(long, value_name = "SIZE")]
    fresh: Option<ByteSize>,
    /// Zipf exponent of popularity instead of the load's own: 0 makes all places equal
    #[arg(long, value_name = "S")]
    skew: Option<f64>,
}

/// Records, analyses, converts or generates a trace.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    match &args.what {
        Action::Analyse(args) => run_analyse(args, output),
        Action::Generate(args) => run_generate(args, output),
        Action::Record(args) => record::run(args, client, output).await,
    }
}

fn run_analyse(args: &AnalyseArgs, output: &Output) -> ApiResult<ExitCode> {
    let failed = |error| trace_failed("cannot analyse the trace", &error);
    let open = || Reader::open(&args.file);
    let totals = open().and_then(Totals::of).map_err(failed)?;
    let disk = args.disk.map_or(totals.end, |size| size.0).max(totals.end);
    let mut windows = Windows::fitting(totals.duration, disk, args.memory.0);
    windows.count = args.starts;
    windows.seed = args.seed;
    let found = analyse(open, totals, windows, disk).map_err(failed)?;
    output.result(&as_json(&found), |_, style| text(&found, style));
    Ok(ExitCode::SUCCESS)
}

fn run_generate(args: &GenerateArgs, output: &Output) -> ApiResult<ExitCode> {
    let mut spec = args.load.spec();
    let rate = |size: Option<ByteSize>, own: f64| size.map_or(own, |size| size.0 as f64);
    spec.writes.rate = rate(args.write_rate, spec.writes.rate);
    spec.reads.rate = rate(args.read_rate, spec.reads.rate);
    spec.writes.fresh = rate(args.fresh, spec.writes.fresh);
    if let Some(skew) = args.skew {
        if !(0.0..=10.0).contains(&skew) {
            let why = format!("{skew} is not a Zipf exponent");
            return Err(Refusal::new(ErrorKind::Invalid, "cannot generate a trace", why)
                .hint("give --skew between 0 and 10"));
        }
        spec.writes.skew = skew;
        spec.reads.skew = skew;
    }
    let failed = |error| trace_failed("cannot write the trace", &error);
    let mut writer = Writer::create(&args.output).map_err(failed)?;
    let mut totals = Totals::default();
    let end = args.seconds * 1_000_000_000;
    for record in spec.records(args.seed).take_while(|record| record.time_ns < end) {
        writer.write(&record).map_err(failed)?;
        totals.add(&record);
    }
    writer.finish().map_err(failed)?;
    let records = totals.reads.operations + totals.writes.operations;
    let result = json!({
        "result": "written",
        "file": args.output,
        "load": args.load.name(),
        "seed": args.seed,
        "records": records,
        "disk": spec.layout.disk,
        "memory": spec.memory,
    });
    output.result(&result, |_, _| {
        let file = args.output.display();
        let disk = bytes(spec.layout.disk);
        format!("{} records of a {} on a disk of {disk} in {file}\n", count(records), args.load)
    });
    Ok(ExitCode::SUCCESS)
}

fn locality_json(locality: &Locality) -> Value {
    let fresh = locality.fresh.as_ref().map(|fresh| {
        json!({
            "median_bytes": fresh.median,
            "p90_bytes": fresh.p90,
            "max_bytes": fresh.max,
            "p90_of_disk": fresh.normalised_p90,
            "random_p90_bytes": fresh.random_p90,
            "cdf_bytes": fresh.cdf,
        })
    });
    json!({
        "seen_512": locality.seen_sectors,
        "seen_4k": locality.seen_blocks,
        "seen_1m": locality.seen_chunks,
        "seen_thrice": locality.seen_thrice,
        "fresh": fresh,
        "rank_1m": locality.rank_1m,
        "rank_4m": locality.rank_4m,
    })
}

fn as_json(found: &Analysis) -> Value {
    let Analysis { totals, windows, disk, .. } = found;
    let volume = |volume: Volume| {
        let Volume { operations, bytes } = volume;
        json!({ "operations": operations, "bytes": bytes, "bytes_per_second": totals.rate(volume) })
    };
    json!({
        "duration_ns": totals.duration,
        "disk": disk,
        "starts": windows.count,
        "history_ns": windows.history,
        "migration_ns": windows.migration,
        "read_volume": volume(totals.reads),
        "write_volume": volume(totals.writes),
        "reads": locality_json(&found.reads),
        "writes": locality_json(&found.writes),
    })
}

fn text(found: &Analysis, style: Style) -> String {
    let Analysis { totals, windows, disk, reads, writes } = found;
    let volume = |volume: Volume| {
        let rate = totals.rate(volume) / 1e6;
        format!("{}, {} ({rate:.2} MB/s)", count(volume.operations), bytes(volume.bytes))
    };
    let time = |nanos: u64| seconds(nanos as f64 / 1e9);
    let about = [
        ("duration", time(totals.duration)),
        ("disk", bytes(*disk)),
        ("reads", volume(totals.reads)),
        ("writes", volume(totals.writes)),
        (
            "compared",
            format!(
                "{} before and {} after {} random starts",
                time(windows.history),
                time(windows.migration),
                windows.count
            ),
        ),
    ];
    let head =
        [("OF WHAT IS ACCESSED", Align::Left), ("READS", Align::Right), ("WRITES", Align::Right)];
    let percent =
        |value: Option<f64>| value.map_or("–".into(), |value| format!("{:.1} %", value * 100.0));
    let number = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.2}"));
    let row = |name: &str, show: &dyn Fn(&Locality) -> String| {
        [name.to_owned(), show(reads), show(writes)]
    };
    let distance = |value: fn(&dray_trace::analyse::Distances) -> f64| {
        move |l: &Locality| {
            l.fresh.as_ref().map_or("–".to_owned(), |fresh| bytes(value(fresh) as u64))
        }
    };
    let rows = [
        row("512-byte blocks seen before", &|l| percent(l.seen_sectors)),
        row("  of them three times or more", &|l| percent(l.seen_thrice)),
        row("4 KiB blocks seen before", &|l| percent(l.seen_blocks)),
        row("1 MiB chunks seen before", &|l| percent(l.seen_chunks)),
        row("fresh blocks: half within", &distance(|fresh| fresh.median)),
        row("  90 % within", &distance(|fresh| fresh.p90)),
        row("  all within", &distance(|fresh| fresh.max)),
        row("  90 % of random blocks within", &distance(|fresh| fresh.random_p90)),
        row("rank correlation, 1 MiB", &|l| number(l.rank_1m)),
        row("rank correlation, 4 MiB", &|l| number(l.rank_4m)),
    ];
    fields(&about, style) + &table(head, &rows, style)
}
