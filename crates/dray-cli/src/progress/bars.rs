//! Progress on a terminal: finished phases stay as lines, the present one is a bar with its
//! numbers below it; images have bars of their own when there are several.

use super::{Display, End};
use crate::show::style::Style;
use crate::show::units::{bytes, millis, seconds};
use crate::show::words;
use dray_api::{Event, Phase, Progress};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Images with a bar of their own; a VM with more disks shows the total only.
const MAX_BARS: usize = 6;
/// How often the spinner turns.
pub(super) const TICK: Duration = Duration::from_millis(120);
/// Width of the column of phase and image names.
const NAME_WIDTH: usize = 10;

/// Draws on standard error.
pub struct Bars {
    style: Style,
    area: MultiProgress,
    total: ProgressBar,
    details: ProgressBar,
    images: Vec<ProgressBar>,
    last: Option<Progress>,
    /// When that came: the end of a migration has no progress of its own.
    heard: Instant,
    /// When the present phase began, in seconds since the migration's start.
    phase_began: f64,
    /// Bytes that had been sent when it began.
    sent_before: u64,
}

/// A style from a template that is part of this file; a wrong one shows as a plain bar.
pub(super) fn look(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─")
        .tick_chars("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ ")
}

fn total_look() -> ProgressStyle {
    look(&format!(
        "{{spinner:.cyan}} {{prefix:<{NAME_WIDTH}.bold}} {{bar:28.cyan/dim}} {{percent:>3}} %  {{wide_msg}}"
    ))
}

fn image_look() -> ProgressStyle {
    look(&format!(
        "  {{prefix:<{NAME_WIDTH}.dim}} {{bar:28.blue/dim}} {{percent:>3}} %  {{wide_msg:.dim}}"
    ))
}

impl Bars {
    /// An empty display.
    pub fn new(style: Style) -> Self {
        let area = MultiProgress::new();
        let total = area.add(ProgressBar::new(1).with_style(total_look()));
        let details = area.add(ProgressBar::new(1).with_style(look("  {wide_msg:.dim}")));
        total.set_prefix("starting");
        total.enable_steady_tick(TICK);
        Self {
            style,
            area,
            total,
            details,
            images: Vec::new(),
            last: None,
            heard: Instant::now(),
            phase_began: 0.0,
            sent_before: 0,
        }
    }

    fn above(&self, line: &str) {
        // The terminal has gone: the migration has not.
        let _ = self.area.println(line);
    }

    /// The present phase has ended, at `now`. By then so many bytes were sent.
    fn close_phase(&mut self, now: f64, sent: u64, mark: &str) {
        let Some(phase) = self.last.as_ref().map(|last| last.phase) else { return };
        // Nothing is done in it.
        if phase != Phase::Ended {
            self.say_ended(phase, now - self.phase_began, sent - self.sent_before.min(sent), mark);
        }
        (self.phase_began, self.sent_before) = (now, sent);
    }

    /// The line that a finished phase leaves behind.
    fn say_ended(&self, phase: Phase, took: f64, sent: u64, mark: &str) {
        let mut line = format!("{mark} {:<NAME_WIDTH$} {:>8}", phase.to_string(), seconds(took));
        if sent > 0 {
            line += &format!("  {}", self.style.dim(&format!("{} sent", bytes(sent))));
        }
        self.above(&line);
    }

    /// The phase before the present one has ended. The handover is too short to be seen: what was measured of it is
    /// known after it.
    fn enter(&mut self, before: Phase, progress: &Progress) {
        let (now, sent, good) =
            (progress.elapsed_seconds, progress.wire_bytes, self.style.good("✓"));
        let missed = before < Phase::Handover && progress.phase > Phase::Handover;
        let still = progress.downtime_ms.filter(|_| missed && progress.phase < Phase::Ended);
        let still = still.map_or(0.0, |ms| (ms / 1e3).min(now - self.phase_began));
        self.close_phase(now - still, sent, &good);
        if still > 0.0 {
            let line = format!("{good} {:<NAME_WIDTH$} {:>8}", "handover", millis(still * 1e3));
            self.above(&line);
            self.phase_began = now;
        }
    }

    fn show(&mut self, progress: &Progress) {
        let before = self.last.as_ref().map(|last| last.phase);
        if let Some(before) = before.filter(|&before| before != progress.phase) {
            self.enter(before, progress);
        }
        let total = &progress.total;
        self.total.set_prefix(progress.phase.to_string());
        self.total.set_length(total.bytes_total.max(1));
        self.total.set_position(total.bytes_done.min(total.bytes_total.max(1)));
        let step = progress.step.map(|step| step.to_string());
        let amounts = (total.bytes_total > 0).then(|| words::amount(total));
        let speed = (progress.rate > 0).then(|| words::speed(progress));
        let words: Vec<String> = [step, amounts, speed].into_iter().flatten().collect();
        self.total.set_message(words.join("  "));
        self.details.set_message(words::details(progress).join(" · "));
        self.show_images(progress);
        self.last = Some(progress.clone());
        self.heard = Instant::now();
    }

    fn show_images(&mut self, progress: &Progress) {
        if !(2..=MAX_BARS).contains(&progress.images.len()) {
            return;
        }
        while self.images.len() < progress.images.len() {
            let bar = ProgressBar::new(1).with_style(image_look());
            self.images.push(self.area.insert_before(&self.details, bar));
        }
        for (bar, image) in self.images.iter().zip(&progress.images) {
            bar.set_prefix(image.image.clone());
            bar.set_length(image.amounts.bytes_total.max(1));
            bar.set_position(image.amounts.bytes_done.min(image.amounts.bytes_total.max(1)));
            bar.set_message(words::amount(&image.amounts));
        }
    }
}

impl Display for Bars {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Started(started) => {
                self.above(&self.style.dim(&format!("migration {}", started.migration)));
            }
            Event::Progress(progress) => self.show(progress),
            Event::Notice { text } => self.above(&self.style.warn(&format!("! {text}"))),
            Event::Accesses(_)
            | Event::Seeding(_)
            | Event::Comparing(_)
            | Event::Seeded(_)
            | Event::Backup(_)
            | Event::Batch(_) => {}
        }
    }

    fn end(&mut self, how: End) {
        let since = self.heard.elapsed().as_secs_f64();
        let last = self.last.as_ref().map(|last| (last.elapsed_seconds, last.wire_bytes));
        let (now, sent) = last.map_or((0.0, 0), |(then, sent)| (then + since, sent));
        match how {
            End::Complete => self.close_phase(now, sent, &self.style.good("✓")),
            End::Failed => self.close_phase(now, sent, &self.style.bad("✗")),
            End::Left => {}
        }
        for bar in self.images.iter().chain([&self.total, &self.details]) {
            bar.finish_and_clear();
        }
        if how == End::Complete && self.last.is_some() {
            eprintln!();
        }
    }
}
