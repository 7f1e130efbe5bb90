//! Follows a batch: what begins and ends, and how far those are that run.

use super::seeding::Seeding;
use crate::client::{Call, Client, Reply};
use crate::exit::{DETACHED, NOT_ALL};
use crate::output::Output;
use crate::show::batch::{ended, short, terms};
use crate::show::style::Style;
use crate::show::units::{about, bytes, millis, rate, seconds};
use crate::show::words;
use dray_api::{
    ApiResult, Ask, BatchStatus, ErrorKind, Event, MoveState, MoveStatus, Refusal, Subject,
};
use indicatif::{MultiProgress, ProgressBar};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time between lines; a little less than a second, as for one migration.
const PERIOD: Duration = Duration::from_millis(900);
/// Width of the column of names on a terminal.
const NAME_WIDTH: usize = 16;
/// Names of a line that lists who waits.
const MAX_NAMES: usize = 6;

/// Sends `command` and shows what happens until everything is over, or Ctrl-C.
pub async fn follow<C: Ask<Answer = BatchStatus>>(
    client: &Client,
    command: C,
    output: &Output,
) -> ApiResult<ExitCode> {
    let mut call = client.start(command).await?;
    let mut display = Display::new(output);
    let outcome = tokio::select! {
        outcome = listen(&mut call, &mut display) => outcome,
        pressed = tokio::signal::ctrl_c() => {
            display.end();
            pressed.map_err(|why| Refusal::new(ErrorKind::Internal, "cannot wait for Ctrl-C", why))?;
            say_detached(display.last.as_ref(), output);
            return Ok(ExitCode::from(DETACHED));
        }
    };
    if let Ok(status) = &outcome {
        display.changes(status);
    }
    display.end();
    let done = outcome?;
    output.result(&done, ended);
    let all = done.count(MoveState::Completed) == done.moves.len();
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(NOT_ALL) })
}

async fn listen(call: &mut Call<BatchStatus>, display: &mut Display) -> ApiResult<BatchStatus> {
    let mut seeding = Seeding::new(display.output);
    loop {
        match call.next().await? {
            Reply::Continue(Event::Batch(status)) => display.show(*status),
            Reply::Continue(Event::Notice { text }) => display.output.note(&text),
            Reply::Continue(event) => drop(seeding.event(&event)),
            Reply::Break(status) => return Ok(status),
        }
    }
}

fn say_detached(last: Option<&BatchStatus>, output: &Output) {
    let style = output.style_err();
    let (text, id) = match last.map(short) {
        Some(id) => (format!("stopped watching; batch {id} continues"), id),
        None => ("stopped watching; the batch may still start".to_owned(), "ID".to_owned()),
    };
    output.note(&format!("{} {text}", style.warn("dray:")));
    let hint =
        format!("`dray batch watch {id}` shows it again, `dray batch cancel {id}` cancels it");
    output.note(&format!("{} {hint}", style.good("hint:")));
}

/// Shows a batch as this run shows things.
struct Display {
    output: Output,
    style: Style,
    bars: Option<Bars>,
    /// What was shown last.
    last: Option<BatchStatus>,
    printed: Option<Instant>,
}

impl Display {
    fn new(output: &Output) -> Self {
        let bars = output.live.then(Bars::new);
        Self { output: *output, style: output.style_err(), bars, last: None, printed: None }
    }

    fn show(&mut self, status: BatchStatus) {
        if self.output.json {
            self.output.json_line(&Event::Batch(Box::new(status.clone())));
        } else {
            self.changes(&status);
            let waited = self.printed.is_none_or(|last| last.elapsed() >= PERIOD);
            if let Some(bars) = &mut self.bars {
                bars.show(&status);
            } else if waited {
                self.printed = Some(Instant::now());
                self.say(&line(&status));
            }
        }
        self.last = Some(status);
    }

    /// Says what has begun and what has ended since the last look.
    fn changes(&mut self, status: &BatchStatus) {
        if self.output.json {
            return;
        }
        if self.last.is_none() {
            let count = status.moves.len();
            let (id, terms) = (short(status), terms(status));
            let migrations = if count == 1 { "migration" } else { "migrations" };
            self.say(&self.style.dim(&format!("batch {id}: {count} {migrations}, {terms}")));
        }
        for one in &status.moves {
            let before = self.last.as_ref().and_then(|last| state(last, &one.subject));
            if before.unwrap_or(MoveState::Waiting) == one.state {
                continue;
            }
            // On a terminal one that begins has a bar to show for it.
            if self.bars.is_some() && one.state == MoveState::Running {
                continue;
            }
            self.say(&changed(one, status.elapsed_seconds, self.style));
        }
    }

    fn say(&self, line: &str) {
        match &self.bars {
            Some(bars) => bars.above(line),
            None => self.output.note(line),
        }
    }

    fn end(&mut self) {
        if let Some(bars) = self.bars.take() {
            bars.end();
        }
    }
}

fn state(status: &BatchStatus, subject: &Subject) -> Option<MoveState> {
    status.moves.iter().find(|one| one.subject == *subject).map(|one| one.state)
}

/// The line that tells of a beginning or an end.
fn changed(one: &MoveStatus, now: f64, style: Style) -> String {
    let name = &one.name;
    let what = match one.state {
        MoveState::Waiting => "waits".to_owned(),
        MoveState::Running => match one.predicted_seconds {
            Some(time) => format!("begins, {} predicted", about(time)),
            None => "begins".to_owned(),
        },
        MoveState::Completed => style.good(&moved(one)),
        MoveState::Cancelled => style.warn("cancelled"),
        MoveState::Failed => {
            let why = one.error.as_ref().map_or(String::new(), |error| format!(": {error}"));
            style.bad(&format!("failed{why}"))
        }
    };
    format!("[{:>7}] {name}: {what}", seconds(now))
}

fn moved(one: &MoveStatus) -> String {
    let Some(summary) = &one.summary else { return "moved".to_owned() };
    let mut text = format!("moved in {}", seconds(summary.total_seconds));
    text += &format!(", {} sent", bytes(summary.wire_bytes.total));
    if let (Some(_), Some(downtime)) = (&summary.vm, &summary.downtime_ms) {
        text += &format!(", downtime {}", millis(downtime.total));
    }
    text
}

/// Counts, the rate of all, and how far those are that run: one line.
fn line(status: &BatchStatus) -> String {
    let running = status.moves.iter().filter(|one| one.state == MoveState::Running);
    let running: Vec<String> = running
        .map(|one| match &one.progress {
            Some(progress) => {
                let share = words::share(&progress.total);
                format!("{} {} {share}", one.name, words::phase(progress))
            }
            None => format!("{} starting", one.name),
        })
        .collect();
    let doing =
        if running.is_empty() { String::new() } else { format!(": {}", running.join(", ")) };
    format!("[{:>7}] {}{doing}", seconds(status.elapsed_seconds), counts(status))
}

fn counts(status: &BatchStatus) -> String {
    let over = status.moves.iter().filter(|one| one.state.is_over()).count();
    let mut text = format!("{over} of {} over", status.moves.len());
    let waiting = status.count(MoveState::Waiting);
    if waiting > 0 {
        text += &format!(", {waiting} waiting");
    }
    text += &format!(", {}", rate(status.rate));
    if let Some(limit) = status.budget {
        text += &format!(" of {}", rate(limit.bytes_per_second));
    }
    text
}

/// Bars: one for all, one for each that runs, and a line of who waits.
struct Bars {
    area: MultiProgress,
    all: ProgressBar,
    waiting: ProgressBar,
    running: Vec<(Subject, ProgressBar)>,
}

impl Bars {
    fn new() -> Self {
        let area = MultiProgress::new();
        let look = super::bars::look;
        let all = format!("{{spinner:.cyan}} {{prefix:<{NAME_WIDTH}.bold}} {{wide_msg}}");
        let all = area.add(ProgressBar::new(1).with_style(look(&all)));
        let waiting = look("  {wide_msg:.dim}");
        let waiting = area.add(ProgressBar::new(1).with_style(waiting));
        all.set_prefix("predicting");
        all.enable_steady_tick(super::bars::TICK);
        Self { area, all, waiting, running: Vec::new() }
    }

    fn above(&self, line: &str) {
        // The terminal has gone: the batch has not.
        let _ = self.area.println(line);
    }

    fn show(&mut self, status: &BatchStatus) {
        self.all.set_prefix(format!("{:>7}", seconds(status.elapsed_seconds)));
        self.all.set_message(counts(status));
        let runs = |subject: &Subject| state(status, subject) == Some(MoveState::Running);
        self.running.retain(|(subject, bar)| {
            let keep = runs(subject);
            if !keep {
                bar.finish_and_clear();
                self.area.remove(bar);
            }
            keep
        });
        for one in status.moves.iter().filter(|one| one.state == MoveState::Running) {
            self.show_one(one);
        }
        let waiting = status.moves.iter().filter(|one| one.state == MoveState::Waiting);
        let names: Vec<_> = waiting.map(|one| one.name.as_str()).collect();
        let more = names.len().saturating_sub(MAX_NAMES);
        let mut text = names[..names.len() - more].join(", ");
        if more > 0 {
            text += &format!(" and {more} more");
        }
        let text = if text.is_empty() { text } else { format!("waiting: {text}") };
        self.waiting.set_message(text);
    }

    fn show_one(&mut self, one: &MoveStatus) {
        let known = self.running.iter().position(|(subject, _)| *subject == one.subject);
        let at = known.unwrap_or_else(|| {
            let template = format!(
                "  {{prefix:<{NAME_WIDTH}!}} {{bar:24.cyan/dim}} {{percent:>3}} %  {{wide_msg:.dim}}"
            );
            let bar = ProgressBar::new(1).with_style(super::bars::look(&template));
            let bar = self.area.insert_before(&self.waiting, bar);
            self.running.push((one.subject.clone(), bar));
            self.running.len() - 1
        });
        let bar = &self.running[at].1;
        bar.set_prefix(one.name.clone());
        let Some(progress) = &one.progress else { return bar.set_message("starting") };
        let total = &progress.total;
        bar.set_length(total.bytes_total.max(1));
        bar.set_position(total.bytes_done.min(total.bytes_total.max(1)));
        let mut parts = vec![words::phase(progress), rate(progress.rate)];
        parts.extend(progress.seconds_left.map(|left| format!("about {} left", about(left))));
        bar.set_message(parts.join("  "));
    }

    fn end(self) {
        for bar in self.running.iter().map(|(_, bar)| bar).chain([&self.all, &self.waiting]) {
            bar.finish_and_clear();
        }
    }
}
