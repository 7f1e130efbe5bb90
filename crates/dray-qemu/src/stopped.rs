//! A guest that stands still while its disk goes over to something that has to be equal. Its user knows nothing of
//! that and may let it go on: QEMU tells that with an event.

use crate::error::{Error, ErrorKind, Result};
use crate::qmp::{Events, Qmp};
use crate::status::{status, stop};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The event of a guest that goes on.
const RESUME: &str = "RESUME";

/// A guest that was stopped, or was paused before.
pub struct Stopped {
    events: Mutex<Events>,
    /// For whoever waits for it.
    later: tokio::sync::Mutex<Events>,
    has_gone_on: AtomicBool,
}

impl Stopped {
    /// Stops the guest of a VM, if it is `running`.
    ///
    /// # Errors
    /// What QEMU reports.
    pub async fn begin(qmp: &Qmp, running: bool) -> Result<Self> {
        let (events, later) = (Mutex::new(qmp.events()), tokio::sync::Mutex::new(qmp.events()));
        if running {
            stop(qmp).await?;
        }
        Ok(Self { events, later, has_gone_on: AtomicBool::new(false) })
    }

    /// Checks that nobody has let it go on, up to the last answer or event of QEMU.
    ///
    /// # Errors
    /// That somebody has.
    pub fn check(&self) -> Result<()> {
        let mut events = self.events.lock();
        if events.has_come(RESUME) {
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
                Ok(event) if event.name == RESUME => return,
                Ok(_) => {}
                // QEMU has ended: it waits for nothing.
                Err(_) => return std::future::pending().await,
            }
        }
    }
}
