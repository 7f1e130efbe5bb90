//! One client's way to the exports: in, out, or held for a while.

use crate::client::Client;
use crate::export::{ExportError, ExportInfo, Exports};
use crate::limits::OPEN_AGAIN;
use dray_image::Image;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Says what a client may do with an export.
type Limit = Box<dyn Fn(&str) -> Access>;

/// Asks for exports in the name of one client.
pub struct Door<'a> {
    /// What there is behind it.
    pub exports: &'a dyn Exports,
    client: Client,
    /// Waits for at most that long; false when nobody waits any more.
    pause: &'a dyn Fn(Duration) -> bool,
    /// How long the client may be held in all.
    patience: Duration,
    /// Until when, once it is held.
    until: Option<Instant>,
    /// What the client may open; everything that there is where nobody has said.
    limit: Option<Limit>,
}

/// What a client may do with an export.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Access {
    /// Nothing: it does not learn whether there is such an export.
    Nothing,
    /// Read it.
    Read,
    /// Read and write it.
    Write,
}

/// Why a client does not get an export.
pub enum Closed {
    /// It is told this.
    Refused(ExportError),
    /// It is told nothing: it has left, or the server is leaving and the next one shall answer.
    Cut,
}

impl<'a> Door<'a> {
    /// The door for `client`, which is held for at most `patience` in all. `pause` waits; it says false
    /// when nobody waits any more.
    pub fn new(
        exports: &'a dyn Exports,
        client: Client,
        patience: Duration,
        pause: &'a dyn Fn(Duration) -> bool,
    ) -> Self {
        Self { exports, client, pause, patience, until: None, limit: None }
    }

    /// From now on the client may open only what `limit` says.
    pub fn limit(&mut self, limit: impl Fn(&str) -> Access + 'static) {
        self.limit = Some(Box::new(limit));
    }

    /// What the client may do with the export `name`, whether there is one or not.
    pub fn access(&self, name: &str) -> Access {
        self.limit.as_ref().map_or(Access::Write, |limit| limit(name))
    }

    /// The exports that the client may open.
    pub fn list(&self) -> Vec<ExportInfo> {
        let mut all = self.exports.list();
        let is_shown = |name: &str| {
            self.access(name) > Access::Nothing && self.exports.is_for(name, &self.client)
        };
        all.retain(|export| is_shown(&export.name));
        all
    }

    /// The image behind `name`. Holds the client while the cause against it may pass by itself.
    ///
    /// # Errors
    /// Why the client does not get it.
    pub fn open(&mut self, name: &str) -> Result<Arc<dyn Image>, Closed> {
        if self.access(name) == Access::Nothing {
            let why = format!("this certificate may not open '{name}'");
            return Err(Closed::Refused(ExportError::Refused(why)));
        }
        loop {
            let error = match self.exports.open(name, &self.client) {
                Err(error @ ExportError::NotYet(_)) => error,
                decided => return decided.map_err(Closed::Refused),
            };
            let now = Instant::now();
            let left = self.until.get_or_insert(now + self.patience).duration_since(now);
            if left.is_zero() {
                return Err(Closed::Refused(error));
            }
            if !(self.pause)(left.min(OPEN_AGAIN)) {
                return Err(Closed::Cut);
            }
        }
    }

    /// Until when the client may be held, if it was.
    pub fn held_until(&self) -> Option<Instant> {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Not there for the first `0` times.
    struct Late(AtomicUsize);

    impl Exports for Late {
        fn list(&self) -> Vec<ExportInfo> {
            vec![]
        }

        fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
            let left = self.0.load(Ordering::SeqCst);
            self.0.store(left.saturating_sub(1), Ordering::SeqCst);
            if left > 0 {
                Err(ExportError::NotYet("the pool is not mounted".to_owned()))
            } else {
                Err(ExportError::unknown(name))
            }
        }
    }

    fn text(closed: Result<Arc<dyn Image>, Closed>) -> Option<String> {
        match closed {
            Err(Closed::Refused(error)) => Some(error.to_string()),
            _ => None,
        }
    }

    #[test]
    fn a_client_is_held_until_the_cause_has_passed() {
        let (late, pauses) = (Late(AtomicUsize::new(3)), Cell::new(0));
        let pause = |_| {
            pauses.set(pauses.get() + 1);
            true
        };
        let mut door = Door::new(&late, Client::default(), Duration::from_secs(60), &pause);
        assert_eq!(text(door.open("a")).unwrap(), "no export named 'a'");
        assert_eq!(pauses.get(), 3);
        assert!(door.held_until().is_some());
    }

    #[test]
    fn patience_is_for_a_whole_negotiation_and_then_the_reason_is_told() {
        let late = Late(AtomicUsize::new(usize::MAX));
        let pause = |time| {
            std::thread::sleep(time);
            true
        };
        let patience = Duration::from_millis(20);
        let mut door = Door::new(&late, Client::default(), patience, &pause);
        let begin = Instant::now();
        let why = "export is not ready: the pool is not mounted";
        assert_eq!(text(door.open("a")).unwrap(), why);
        assert!(begin.elapsed() >= patience);
        door.pause = &|_| panic!("held again");
        assert_eq!(text(door.open("a")).unwrap(), why);
    }

    #[test]
    fn a_client_that_nobody_waits_for_is_told_nothing() {
        let late = Late(AtomicUsize::new(usize::MAX));
        let mut door = Door::new(&late, Client::default(), Duration::from_secs(60), &|_| false);
        assert!(matches!(door.open("a"), Err(Closed::Cut)));
    }
}
