//! Being told to end: SIGTERM or Ctrl-C; and to read the configuration again: SIGHUP.
//!
//! Once guests are served the agent ends in order. Before that there is nothing to be ended in order, and
//! whatever the start waits for must not hold the end up: it ends at once, as it does when it is told a
//! second time. Everything that it must know afterwards is in its journals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};

/// Tells when the agent is to end.
pub(super) struct Signals {
    told: watch::Receiver<bool>,
    serves: Arc<AtomicBool>,
    hang_ups: Arc<Notify>,
}

impl Signals {
    /// From now on signals do not end the process by themselves.
    pub(super) fn catch() -> Self {
        let (tell, told) = watch::channel(false);
        let serves = Arc::new(AtomicBool::new(false));
        let hang_ups = Arc::new(Notify::new());
        match signal(SignalKind::hangup()) {
            Ok(hangup) => drop(tokio::spawn(pass_on(hangup, Arc::clone(&hang_ups)))),
            Err(why) => tracing::warn!(%why, "cannot catch SIGHUP"),
        }
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => {
                tokio::spawn(heed([terminate, interrupt], tell, Arc::clone(&serves)));
            }
            // They end it as they end any process: journals are made for that.
            (Err(why), _) | (_, Err(why)) => tracing::warn!(%why, "cannot catch signals"),
        }
        Self { told, serves, hang_ups }
    }

    /// Is notified at each SIGHUP, also of one that came before.
    pub(super) fn hang_ups(&self) -> Arc<Notify> {
        Arc::clone(&self.hang_ups)
    }

    /// Guests are served: from now on the first signal is waited for with [`told`](Self::told).
    pub(super) fn serves(&self) {
        self.serves.store(true, Ordering::Release);
    }

    /// Waits until the agent is to end.
    pub(super) async fn told(&mut self) {
        if self.told.wait_for(|told| *told).await.is_err() {
            std::future::pending().await
        }
    }
}

async fn pass_on(mut hangup: Signal, hang_ups: Arc<Notify>) {
    while hangup.recv().await.is_some() {
        hang_ups.notify_one();
    }
}

async fn heed(
    [mut terminate, mut interrupt]: [Signal; 2],
    tell: watch::Sender<bool>,
    serves: Arc<AtomicBool>,
) {
    loop {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        if *tell.borrow() || !serves.load(Ordering::Acquire) {
            tracing::info!("told to end: the agent ends without waiting");
            std::process::exit(0);
        }
        tell.send_replace(true);
    }
}
