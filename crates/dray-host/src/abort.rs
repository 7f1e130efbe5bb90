//! A hook for crash tests: the process aborts, or stops, right before a chosen effect of a
//! migration.
//!
//! `DRAY_ABORT_BEFORE=NAME` or `NAME:N` names the effect as the engine does (`Retire`,
//! `Journal-HandedOver`, `Send-Commit`) and, with `N`, how many of them run before.
//! `DRAY_STOP_BEFORE` names one in the same way: there the process stops as by `kill -STOP`, so that
//! a test can do something to others at that moment and send `SIGCONT`. Nothing but a test sets
//! them; when they are unset an effect costs two loads.

use rustix::process::{Signal, getpid, kill_process};
use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The variable that names the effect before which the process aborts.
const ABORT: &str = "DRAY_ABORT_BEFORE";
/// The variable that names the effect before which it stops.
const STOP: &str = "DRAY_STOP_BEFORE";

/// How long a stop may take until it has reached every thread.
const STOPPING: Duration = Duration::from_millis(100);

struct Point {
    name: String,
    left: AtomicU64,
}

impl Point {
    /// Whether the effect with these names is the chosen one.
    fn is_at(&self, names: &[String]) -> bool {
        names.contains(&self.name) && self.left.fetch_sub(1, Ordering::SeqCst) == 0
    }
}

fn chosen(variable: &str, known: &'static OnceLock<Option<Point>>) -> Option<&'static Point> {
    known.get_or_init(|| parse(&std::env::var(variable).ok()?)).as_ref()
}

fn parse(text: &str) -> Option<Point> {
    let (name, count) = text.split_once(':').unwrap_or((text, "0"));
    Some(Point { name: name.to_owned(), left: AtomicU64::new(count.parse().ok()?) })
}

/// Called before an effect is run; `names` says how it may be called.
pub fn before(names: impl FnOnce() -> Vec<String>) {
    static ABORTS: OnceLock<Option<Point>> = OnceLock::new();
    static STOPS: OnceLock<Option<Point>> = OnceLock::new();
    let (aborts, stops) = (chosen(ABORT, &ABORTS), chosen(STOP, &STOPS));
    if aborts.is_none() && stops.is_none() {
        return;
    }
    let names = names();
    if stops.is_some_and(|point| point.is_at(&names)) {
        // Another thread may take the signal: this one must not run on before it has stopped all.
        let _ = kill_process(getpid(), Signal::STOP);
        std::thread::sleep(STOPPING);
    }
    if aborts.is_some_and(|point| point.is_at(&names)) {
        // As abrupt as `kill -9`: nothing is flushed, nobody is told.
        std::process::abort();
    }
}

/// Called before a step that is no effect of an engine.
pub fn step(name: &str) {
    before(|| vec![name.to_owned()]);
}

/// The name of a value's variant.
pub fn variant(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    text.chars().take_while(char::is_ascii_alphanumeric).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_engine::{SourceEffect, SourceRecord};

    #[test]
    fn effects_are_called_by_their_variants() {
        assert_eq!(variant(&SourceEffect::Retire), "Retire");
        assert_eq!(variant(&SourceRecord::Done), "Done");
        let point = parse("Send-Commit:3").unwrap();
        assert_eq!((point.name.as_str(), point.left.into_inner()), ("Send-Commit", 3));
        assert_eq!(parse("Retire").unwrap().left.into_inner(), 0);
        assert!(parse("Retire:x").is_none());
        let names = ["Retire".to_owned()];
        let point = parse("Retire:1").unwrap();
        assert_eq!([(); 3].map(|()| point.is_at(&names)), [false, true, false]);
        assert!(!parse("Restore").unwrap().is_at(&names));
    }
}
