//! Follows a migration: shows its events while it runs and its summary at the end.
//!
//! Ctrl-C ends the display, not the migration: whoever presses it in a panic must not be left
//! with a half-moved guest, and `dray cancel` is one line away.

pub mod backup;
mod bars;
pub mod batch;
mod json;
mod lines;
pub mod seeding;

use crate::client::{Call, Client, Reply};
use crate::exit::DETACHED;
use crate::output::Output;
use crate::show::status::short;
use crate::show::summary::summary;
use dray_api::{ApiResult, Ask, ErrorKind, Event, Refusal, Summary};
use dray_types::MigrationId;
use serde::de::DeserializeOwned;
use std::process::ExitCode;

/// One way of showing events.
trait Display {
    /// Shows an event.
    fn event(&mut self, event: &Event);
    /// Leaves the terminal tidy; nothing is shown after this.
    fn end(&mut self, how: End);
}

/// Why the display ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The migration is complete.
    Complete,
    /// It failed or was cancelled.
    Failed,
    /// Nobody watches any more; it goes on.
    Left,
}

/// How following has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Followed {
    /// The migration is complete, and its summary was shown.
    Completed,
    /// The operator watches no more.
    Left,
}

impl From<Followed> for ExitCode {
    fn from(followed: Followed) -> Self {
        match followed {
            Followed::Completed => Self::SUCCESS,
            Followed::Left => Self::from(DETACHED),
        }
    }
}

/// Shows nothing.
struct Silent;

impl Display for Silent {
    fn event(&mut self, _: &Event) {}
    fn end(&mut self, _: End) {}
}

fn display(output: &Output) -> Box<dyn Display> {
    if output.json {
        Box::new(json::Json::new(*output))
    } else if output.quiet {
        Box::new(Silent)
    } else if output.live {
        Box::new(bars::Bars::new(output.style_err()))
    } else {
        Box::new(lines::Lines::new(*output))
    }
}

/// Sends `command` and shows what happens until it ends or Ctrl-C. `ended` is the summary in its answer.
pub async fn follow<C: Ask>(
    client: &Client,
    command: C,
    ended: fn(C::Answer) -> ApiResult<Summary>,
    output: &Output,
) -> ApiResult<Followed> {
    let mut call = client.start(command).await?;
    let mut display = display(output);
    let mut migration = None;
    let outcome = tokio::select! {
        outcome = listen(&mut call, &mut *display, &mut migration, output) => outcome,
        pressed = tokio::signal::ctrl_c() => {
            display.end(End::Left);
            pressed.map_err(|why| Refusal::new(ErrorKind::Internal, "cannot wait for Ctrl-C", why))?;
            say_detached(migration, output);
            return Ok(Followed::Left);
        }
    };
    let outcome = outcome.and_then(ended);
    display.end(if outcome.is_ok() { End::Complete } else { End::Failed });
    let done = outcome?;
    output.result(&done, |done, style| summary(done, output.verbose > 0, style));
    Ok(Followed::Completed)
}

async fn listen<A: DeserializeOwned>(
    call: &mut Call<A>,
    display: &mut dyn Display,
    migration: &mut Option<MigrationId>,
    output: &Output,
) -> ApiResult<A> {
    let mut seeding = seeding::Seeding::new(*output);
    loop {
        match call.next().await? {
            Reply::Continue(event) => {
                match &event {
                    Event::Started(started) => *migration = Some(started.migration),
                    Event::Progress(progress) => *migration = Some(progress.migration),
                    Event::Notice { .. }
                    | Event::Accesses(_)
                    | Event::Seeding(_)
                    | Event::Comparing(_)
                    | Event::Seeded(_)
                    | Event::Backup(_)
                    | Event::Batch(_) => {}
                }
                // What came of it is said to people beside the JSON, too.
                let is_of_seeding = seeding.event(&event);
                if output.json || !is_of_seeding {
                    display.event(&event);
                }
            }
            Reply::Break(answer) => return Ok(answer),
        }
    }
}

fn say_detached(migration: Option<MigrationId>, output: &Output) {
    let style = output.style_err();
    let (text, id) = match migration {
        Some(id) => (format!("stopped watching; migration {} continues", short(id)), short(id)),
        None => ("stopped watching; the migration may still start".to_owned(), "ID".to_owned()),
    };
    output.note(&format!("{} {text}", style.warn("dray:")));
    let hint = format!("`dray watch {id}` shows it again, `dray cancel {id}` cancels it");
    output.note(&format!("{} {hint}", style.good("hint:")));
}
