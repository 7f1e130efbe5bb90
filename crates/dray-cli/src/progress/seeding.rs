//! How far a target is that reads images from backups and replicas, and what came of it.

use crate::client::{Client, Reply};
use crate::output::Output;
use crate::show::units::bytes;
use dray_api::{ApiResult, Ask, Event, SeedProgress, Seeded, SeededImage};
use indicatif::{ProgressBar, ProgressStyle};

/// Sends `command` and waits for its answer. Shows how the target is given what it can begin with.
pub async fn call<C: Ask>(client: &Client, command: C, output: &Output) -> ApiResult<C::Answer> {
    let mut call = client.start(command).await?;
    let mut seeding = Seeding::new(*output);
    loop {
        match call.next().await? {
            Reply::Continue(Event::Notice { text }) => output.note(&text),
            Reply::Continue(event) => drop(seeding.event(&event)),
            Reply::Break(answer) => return Ok(answer),
        }
    }
}

/// Shows the events of a seeding.
pub struct Seeding {
    output: Output,
    bar: Option<ProgressBar>,
}

impl Seeding {
    /// Nothing is shown yet.
    pub fn new(output: Output) -> Self {
        Self { output, bar: None }
    }

    /// Shows an event, if it is of a seeding. Whether it is.
    pub fn event(&mut self, event: &Event) -> bool {
        match event {
            Event::Comparing(progress) => self.show("comparing", *progress),
            Event::Seeding(progress) => self.show("backups", *progress),
            Event::Seeded(seeded) => {
                self.end();
                words(seeded).iter().for_each(|line| self.output.note(line));
            }
            _ => {
                self.end();
                return false;
            }
        }
        true
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn show(&mut self, what: &'static str, progress: SeedProgress) {
        let output = &self.output;
        if output.json || output.quiet || !output.live || progress.bytes_total == 0 {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let look =
                "{spinner:.cyan} {prefix:<10.bold} {bar:28.cyan/dim} {percent:>3} %  {wide_msg}";
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
}

impl Drop for Seeding {
    fn drop(&mut self) {
        self.end();
    }
}

/// What came of a seeding, a line for each thing worth telling.
pub fn words(seeded: &Seeded) -> Vec<String> {
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
        lines.push(format!(
            "  {} of it come from the source: no repository or host has them",
            bytes(*missing_bytes)
        ));
    }
    let prefix = if generation.is_some() { "  " } else { "" };
    let unused = |note: &String| match generation {
        Some(_) => format!("{prefix}{note}"),
        None => format!("no backup or replica of {image} is used: {note}"),
    };
    lines.extend(notes.iter().map(unused));
    lines
}
