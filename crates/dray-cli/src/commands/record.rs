//! `dray trace record`: a trace of what guests do to an image that the agent serves.

use super::migrate::duration;
use super::sim::trace_failed;
use crate::client::{Call, Client, Reply};
use crate::output::Output;
use crate::show::units::{bytes, count, seconds};
use dray_api::{
    AccessBatch, AccessKind, AccessLine, ApiResult, ErrorKind, Event, RecordEnd, Recorded, Refusal,
};
use dray_trace::record::MAX_LENGTH;
use dray_trace::{Op, Record, Writer};
use dray_types::Why;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// After Ctrl-C the agent is given so long to tell the last accesses.
const LAST_WORDS: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
Examples:
  dray trace record vm1-root -o vm1.csv.zst --duration 2h
  dray trace record vm1-root -o vm1.csv            until Ctrl-C
  dray sim vm1.csv.zst --disk 32GiB

The recording contains the guests' accesses, not the data. The guest does not wait for it. The
command counts accesses that come too fast to be recorded, and reports their number.";

/// Arguments of `dray trace record`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The image, by its name on this host
    image: String,
    /// The file to write; compressed if its name ends in .zst
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Length of the recording, as 90s, 10m or 2h [default: until Ctrl-C, or until this host stops serving the image]
    #[arg(long, value_name = "TIME", value_parser = long_duration)]
    duration: Option<Duration>,
}

/// A time that may be hours.
fn long_duration(text: &str) -> Result<Duration, Why> {
    match text.strip_suffix('h').map(str::parse::<f64>) {
        Some(Ok(hours)) if (0.001..=10_000.0).contains(&hours) => {
            Ok(Duration::from_secs_f64(hours * 3600.0))
        }
        Some(_) => Err("write it as 90s, 10m or 2h".into()),
        None => duration(text),
    }
}

/// The file, as far as it was written.
struct Recorder<'a> {
    args: &'a Args,
    began: Instant,
    writer: Option<Writer>,
    written: u64,
    until_ns: u64,
    missed: u64,
}

/// Why it ended.
enum End {
    Stopped,
    ByItself(Recorded),
}

/// Records the accesses to an image until the time is over or the user ends it.
pub async fn run(args: &Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let mut recorder =
        Recorder { args, began: Instant::now(), writer: None, written: 0, until_ns: 0, missed: 0 };
    let duration_ms = args.duration.map(|time| (time.as_millis() as u64).max(1));
    let command = dray_api::Record { image: args.image.clone(), duration_ms };
    let mut call = client.start(command).await?;
    output.note(&format!("recording '{}'; Ctrl-C ends it", args.image));
    let end = recorder.listen(&mut call).await;
    // Whatever happened, what was recorded until then is a whole trace.
    let finished = recorder.writer.take().map_or(Ok(()), Writer::finish);
    let end = end?;
    finished.map_err(|error| trace_failed("cannot write the trace", &error))?;
    recorder.show(end, output);
    Ok(ExitCode::SUCCESS)
}

impl Recorder<'_> {
    async fn listen(&mut self, call: &mut Call<Recorded>) -> ApiResult<End> {
        let cannot = |why| Refusal::new(ErrorKind::Internal, "cannot wait for signals", why);
        let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
        loop {
            tokio::select! {
                reply = call.next() => if let Some(end) = self.take(reply?)? {
                    return Ok(end);
                },
                _ = terminate.recv() => return self.last_words(call).await,
                _ = interrupt.recv() => return self.last_words(call).await,
            }
        }
    }

    /// Takes what the guest did until now. The clock here began before the agent's.
    async fn last_words(&mut self, call: &mut Call<Recorded>) -> ApiResult<End> {
        let now = self.began.elapsed();
        let told = async {
            while u128::from(self.until_ns) < now.as_nanos() {
                if let Some(end) = self.take(call.next().await?)? {
                    return Ok(end);
                }
            }
            Ok(End::Stopped)
        };
        tokio::time::timeout(LAST_WORDS, told).await.unwrap_or(Ok(End::Stopped))
    }

    fn take(&mut self, reply: Reply<Recorded>) -> ApiResult<Option<End>> {
        match reply {
            Reply::Continue(Event::Accesses(batch)) => {
                self.write(&batch)
                    .map_err(|error| trace_failed("cannot write the trace", &error))?;
                Ok(None)
            }
            Reply::Continue(_) => Ok(None),
            Reply::Break(end) => Ok(Some(End::ByItself(end))),
        }
    }

    fn write(&mut self, batch: &AccessBatch) -> Result<(), dray_trace::TraceError> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            // Not before the agent has agreed: an old file is not emptied in vain.
            None => self.writer.insert(Writer::create(&self.args.output)?),
        };
        for &AccessLine(time_ns, kind, offset, length) in &batch.accesses {
            let op = if kind == AccessKind::R { Op::Read } else { Op::Write };
            for record in pieces(Record { time_ns, op, offset, length }) {
                writer.write(&record)?;
            }
        }
        self.written += batch.accesses.len() as u64;
        (self.until_ns, self.missed) = (batch.until_ns, batch.missed);
        Ok(())
    }

    fn show(&self, end: End, output: &Output) {
        let Self { args, written, missed, .. } = self;
        let (end, disk) = match end {
            End::Stopped => ("stopped", None),
            End::ByItself(Recorded { end: RecordEnd::Duration, bytes, .. }) => {
                ("duration", Some(bytes))
            }
            End::ByItself(Recorded { end: RecordEnd::Gone, bytes, .. }) => ("gone", Some(bytes)),
        };
        let time = self.until_ns as f64 / 1e9;
        let result = json!({
            "result": "recorded", "image": args.image, "file": args.output, "accesses": written,
            "missed": missed, "seconds": time, "end": end, "disk": disk,
        });
        output.result(&result, |_, style| {
            let file = args.output.display();
            let mut text =
                format!("{} accesses in {} are in {file}\n", count(*written), seconds(time));
            if let Some(disk) = disk {
                text += &format!("the image has {}\n", bytes(disk));
            }
            if end == "gone" {
                text += "the recording ended because this host does not serve the image any more\n";
            }
            if *missed > 0 {
                let why = "they came faster than they could be recorded";
                let missed = format!("{} accesses were missed: {why}", count(*missed));
                text += &format!("{}\n", style.warn(&missed));
            }
            text
        });
    }
}

/// The same access in pieces that a trace may have: a discard can be longer.
fn pieces(record: Record) -> impl Iterator<Item = Record> {
    let Record { offset, length, .. } = record;
    (0..length).step_by(MAX_LENGTH as usize).map(move |from| Record {
        offset: offset + from,
        length: (length - from).min(MAX_LENGTH),
        ..record
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_may_be_hours() {
        assert_eq!(long_duration("2h"), Ok(Duration::from_secs(7200)));
        assert_eq!(long_duration("90s"), Ok(Duration::from_secs(90)));
        for wrong in ["h", "-1h", "NaNh", "1e300h", "0h", "soon"] {
            assert!(long_duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_access_that_no_trace_may_have_is_several() {
        let record = |offset, length| Record { time_ns: 5, op: Op::Write, offset, length };
        let long = record(4096, 2 * MAX_LENGTH + 1);
        let wanted = [
            record(4096, MAX_LENGTH),
            record(4096 + MAX_LENGTH, MAX_LENGTH),
            record(4096 + 2 * MAX_LENGTH, 1),
        ];
        assert_eq!(pieces(long).collect::<Vec<_>>(), wanted);
        assert_eq!(pieces(record(0, 512)).collect::<Vec<_>>(), [record(0, 512)]);
    }
}
