//! A hook for crash tests: the process aborts right before a chosen effect of a migration.
//!
//! `DRAY_ABORT_BEFORE=NAME` or `NAME:N` names the effect as the engine does (`Retire`,
//! `Journal-HandedOver`, `Send-Commit`) and, with `N`, how many of them run before. Nothing but a
//! test sets it; when it is unset an effect costs one load.

use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The variable that names the effect.
const VARIABLE: &str = "DRAY_ABORT_BEFORE";

struct Point {
    name: String,
    left: AtomicU64,
}

fn point() -> Option<&'static Point> {
    static POINT: OnceLock<Option<Point>> = OnceLock::new();
    POINT.get_or_init(|| parse(&std::env::var(VARIABLE).ok()?)).as_ref()
}

fn parse(text: &str) -> Option<Point> {
    let (name, count) = text.split_once(':').unwrap_or((text, "0"));
    Some(Point { name: name.to_owned(), left: AtomicU64::new(count.parse().ok()?) })
}

/// Called before an effect is run; `names` says how it may be called.
pub fn before(names: impl FnOnce() -> Vec<String>) {
    let Some(point) = point() else { return };
    if names().contains(&point.name) && point.left.fetch_sub(1, Ordering::SeqCst) == 0 {
        // As abrupt as `kill -9`: nothing is flushed, nobody is told.
        std::process::abort();
    }
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
    }
}
