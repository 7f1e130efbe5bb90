//! Progress where there is no terminal: a line when the phase changes, and about one a second.

use super::{Display, End};
use crate::output::Output;
use crate::show::units::seconds;
use crate::show::words;
use dray_api::{Event, Phase, Progress};
use std::time::{Duration, Instant};

/// Time between lines; a little less than a second, so that an agent that reports each second
/// gets every report shown.
const PERIOD: Duration = Duration::from_millis(900);

/// Prints lines to standard error.
pub struct Lines {
    output: Output,
    phase: Option<Phase>,
    printed: Option<Instant>,
}

impl Lines {
    /// Nothing shown yet.
    pub fn new(output: Output) -> Self {
        Self { output, phase: None, printed: None }
    }

    /// True when a line is due: a new phase, or time has passed.
    fn due(&mut self, progress: &Progress, now: Instant) -> bool {
        let changed = self.phase != Some(progress.phase);
        let waited = self.printed.is_none_or(|last| now.duration_since(last) >= PERIOD);
        if changed || waited {
            self.phase = Some(progress.phase);
            self.printed = Some(now);
        }
        changed || waited
    }
}

/// One line about a migration under way.
fn line(progress: &Progress) -> String {
    let mut parts = Vec::new();
    if progress.total.bytes_total > 0 {
        parts.push(words::share(&progress.total));
        parts.push(words::amount(&progress.total));
        parts.push(words::speed(progress));
    }
    parts.extend(words::details(progress));
    let (elapsed, phase) = (seconds(progress.elapsed_seconds), words::phase(progress));
    let colon = if parts.is_empty() { "" } else { ": " };
    format!("[{elapsed:>7}] {phase}{colon}{}", parts.join(", "))
}

impl Display for Lines {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Started(started) => {
                self.output.note(&format!("migration {}", started.migration));
            }
            Event::Progress(progress) => {
                if self.due(progress, Instant::now()) {
                    self.output.note(&line(progress));
                }
            }
            Event::Notice { text } => self.output.note(text),
            // Those of other commands, which are not followed here.
            Event::Accesses(_)
            | Event::Seeding(_)
            | Event::Comparing(_)
            | Event::Seeded(_)
            | Event::Backup(_)
            | Event::Batch(_) => {}
        }
    }

    fn end(&mut self, _: End) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::{Amounts, Step, Strategy};
    use dray_types::MigrationId;

    #[test]
    fn a_line_holds_what_matters_in_its_phase() {
        let mut progress = Progress::new(MigrationId(1), Strategy::Hybrid);
        progress.phase = Phase::Sync;
        progress.step = Some(Step::Memory);
        progress.elapsed_seconds = 18.25;
        progress.total = Amounts {
            bytes_total: 2 << 30,
            bytes_done: 2 << 30,
            bytes_missing: 0,
            dirty_blocks: 12288,
        };
        progress.rate = 118 << 20;
        progress.dirty_rate = 40 << 20;
        progress.memory_bytes = 64 << 20;
        progress.memory_left = 16 << 20;
        progress.seconds_left = Some(1.5);
        progress.downtime_ms = Some(38.0);
        assert_eq!(
            line(&progress),
            "[ 18.3 s] sync (memory): 100 %, 2 GiB of 2 GiB, 118 MiB/s, dirty 48 MiB (+40 MiB/s), \
             memory 64 MiB (16 MiB left), about 2 s left, downtime ~38.0 ms"
        );
    }

    #[test]
    fn what_has_ended_is_busy_with_nothing() {
        let mut progress = Progress::new(MigrationId(1), Strategy::Hybrid);
        (progress.phase, progress.step) = (Phase::Ended, Some(Step::Verify));
        assert_eq!(line(&progress), "[  0.0 s] ended");
    }

    #[test]
    fn lines_come_once_a_second_and_at_every_new_phase() {
        let global =
            crate::global::Global { socket: "/x".into(), json: false, quiet: true, verbose: 0 };
        let mut lines = Lines::new(Output::new(&global));
        let mut progress = Progress::new(MigrationId(1), Strategy::Hybrid);
        let start = Instant::now();
        assert!(lines.due(&progress, start));
        assert!(!lines.due(&progress, start + Duration::from_millis(200)));
        assert!(lines.due(&progress, start + Duration::from_millis(1000)));
        progress.phase = Phase::Copy;
        assert!(lines.due(&progress, start + Duration::from_millis(1001)));
    }
}
