//! A guest that stands still while its disk goes over to something that has to be equal. Its user knows nothing of
//! that and may let it go on, or wake it up: QEMU tells that with an event. Its user may pause it as well, and then it is
//! not dray's to let go on.
//!
//! What its guest does is asked of QEMU when dray listens to its events already: whatever changes after the answer is an
//! event that dray gets.

use crate::error::{Error, ErrorKind, Result};
use crate::qmp::{Events, Qmp};
use crate::status::{status, stop};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The events of a guest that goes on: let go on, or woken up from its sleep (ACPI S3), which `stop` does not end.
const GOES_ON: [&str; 2] = ["RESUME", "WAKEUP"];

/// A guest whose events are listened to since before it was asked for its state.
pub struct Watched {
    events: Events,
    later: Events,
    running: bool,
}

impl Watched {
    /// Listens to the events of a VM, and asks whether its guest runs.
    ///
    /// # Errors
    /// What QEMU reports.
    pub async fn begin(qmp: &Qmp) -> Result<Self> {
        let (events, later) = (qmp.events(), qmp.events());
        let running = status(qmp).await?.running;
        Ok(Self { events, later, running })
    }

    /// Whether the guest ran when it was asked for that.
    pub fn running(&self) -> bool {
        self.running
    }

    /// Stops the guest, if it runs. One that its user has paused meanwhile stays paused afterwards.
    ///
    /// # Errors
    /// What QEMU reports.
    pub async fn stop(mut self, qmp: &Qmp) -> Result<Stopped> {
        if self.running {
            self.running = !self.is_paused_by_now();
            stop(qmp).await?;
        }
        let (events, later) = (Mutex::new(self.events), tokio::sync::Mutex::new(self.later));
        let has_gone_on = AtomicBool::new(false);
        Ok(Stopped { events, later, has_gone_on, was_running: self.running })
    }

    /// Whether the guest, which ran, has been paused since. What has come before it is stopped counts for nothing
    /// afterwards.
    fn is_paused_by_now(&mut self) -> bool {
        const CHANGES: [&str; 2] = ["STOP", "RESUME"];
        self.later.last_come(&CHANGES);
        self.events.last_come(&CHANGES).is_some_and(|last| last.name == "STOP")
    }
}

/// A guest that was stopped, or was paused before.
pub struct Stopped {
    events: Mutex<Events>,
    /// For whoever waits for it.
    later: tokio::sync::Mutex<Events>,
    has_gone_on: AtomicBool,
    was_running: bool,
}

impl Stopped {
    /// Whether it was stopped by dray, which has to let it go on.
    pub fn was_running(&self) -> bool {
        self.was_running
    }

    /// Checks that nobody has let it go on, up to the last answer or event of QEMU.
    ///
    /// # Errors
    /// That somebody has.
    pub fn check(&self) -> Result<()> {
        let mut events = self.events.lock();
        if events.has_come(&GOES_ON) {
            self.has_gone_on.store(true, Ordering::SeqCst);
        }
        if !self.has_gone_on.load(Ordering::SeqCst) {
            return Ok(());
        }
        let why = "somebody has let the guest go on while its disk was being exchanged";
        Err(Error::new(ErrorKind::Refused, why))
    }

    /// The same, up to now.
    ///
    /// # Errors
    /// That somebody has let it go on, or what QEMU reports.
    pub async fn check_now(&self, qmp: &Qmp) -> Result<()> {
        // What has happened before the answer is told before it.
        status(qmp).await?;
        self.check()
    }

    /// Returns when somebody has let it go on; not before.
    pub async fn goes_on(&self) {
        let mut later = self.later.lock().await;
        loop {
            match later.next().await {
                Ok(event) if GOES_ON.contains(&event.name.as_str()) => return,
                Ok(_) => {}
                // QEMU has ended: it waits for nothing.
                Err(_) => return std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::{Answer, Channel, Event, Monitored, OLDEST};
    use serde_json::{Value, json};
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::sync::broadcast;

    /// A guest, and what others do to it just after QEMU has answered the first question about it.
    struct Told {
        events: broadcast::Sender<Event>,
        others: Mutex<Vec<&'static str>>,
        running: bool,
        stopped: AtomicBool,
    }

    impl Channel for Arc<Told> {
        fn execute<'a>(&'a self, command: &'a str, _: Value) -> Answer<'a> {
            Box::pin(async move {
                self.stopped.fetch_or(command == "stop", Ordering::SeqCst);
                for name in self.others.lock().drain(..) {
                    let event = Event { name: name.into(), data: Value::Null, at: Duration::ZERO };
                    self.events.send(event).expect("somebody listens");
                }
                let state = if self.running { "running" } else { "paused" };
                Ok(json!({ "running": self.running, "status": state }))
            })
        }

        fn events(&self) -> Option<broadcast::Receiver<Event>> {
            Some(self.events.subscribe())
        }

        fn is_open(&self) -> bool {
            true
        }
    }

    /// Whether the guest was stopped by dray, whether it is to go on, and whether it stands still for all that is known.
    async fn stop_guest(running: bool, others: &[&'static str]) -> (bool, bool, bool) {
        let (events, _kept) = broadcast::channel(8);
        let (others, stopped) = (Mutex::new(others.to_vec()), AtomicBool::new(false));
        let told = Arc::new(Told { events, others, running, stopped });
        let monitored =
            Monitored { socket: "/run/vm".into(), pid: None, user: None, version: OLDEST };
        let qmp = Qmp::over(Box::new(Arc::clone(&told)), monitored, Duration::from_secs(1));
        let guest = Watched::begin(&qmp).await.unwrap();
        let still = guest.stop(&qmp).await.unwrap();
        (told.stopped.load(Ordering::SeqCst), still.was_running(), still.check().is_ok())
    }

    #[tokio::test]
    async fn a_guest_that_runs_is_stopped_and_goes_on() {
        assert_eq!(stop_guest(true, &[]).await, (true, true, true));
        // QEMU says so of `cont` where the guest runs.
        assert_eq!(stop_guest(true, &["STOP", "RESUME"]).await, (true, true, true));
    }

    #[tokio::test]
    async fn a_guest_that_its_user_pauses_meanwhile_does_not_go_on() {
        assert_eq!(stop_guest(true, &["STOP"]).await, (true, false, true));
        assert_eq!(stop_guest(false, &[]).await, (false, false, true));
    }

    #[tokio::test]
    async fn a_paused_guest_that_goes_on_after_it_was_asked_for_does_not_stand_still() {
        for event in ["RESUME", "WAKEUP"] {
            assert_eq!(stop_guest(false, &[event]).await, (false, false, false), "{event}");
        }
    }
}
