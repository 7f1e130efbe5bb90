//! Reports the agent's state to the program that has started it: systemd, if the unit is
//! `Type=notify`.
//!
//! Guests are started after it ([`Readiness::ready`]), so it is told when every image is decided: served, or
//! closed for a reason, and can be reached. An image that cannot be decided must not hold the others' guests up for ever: after
//! [`PATIENCE`] it is told anyway.

use parking_lot::Mutex;
use sd_notify::NotifyState;
use std::sync::Arc;
use std::time::Duration;

/// How long the start of guests waits.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct State {
    decided: bool,
    reachable: bool,
    told: bool,
}

/// How far the start is.
#[derive(Default)]
pub struct Readiness(Mutex<State>);

impl Readiness {
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.0.lock();
        change(&mut state);
        if state.decided && state.reachable && !state.told {
            state.told = true;
            tell(&[NotifyState::Ready]);
        }
    }

    /// Every image is decided. May be called again.
    pub fn ready(&self) {
        self.change(|state| state.decided = true);
    }

    /// The socket of this host's guests is there.
    pub(crate) fn guests_can_come(&self) {
        self.change(|state| state.reachable = true);
    }

    /// The agent ends.
    pub(crate) fn stopping(&self) {
        tell(&[NotifyState::Stopping]);
    }

    /// It is told after a while whatever happens. The start itself may be held up meanwhile.
    pub(crate) fn in_any_case(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            if let Some(this) = this.upgrade() {
                this.change(|state| (state.decided, state.reachable) = (true, true));
            }
        });
    }
}

/// Says it where somebody listens (`NOTIFY_SOCKET`).
fn tell(state: &[NotifyState<'_>]) {
    if let Err(why) = sd_notify::notify(state) {
        tracing::warn!(%why, "cannot tell the service manager how the agent is");
    }
}
