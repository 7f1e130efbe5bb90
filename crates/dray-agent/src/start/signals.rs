//! Being told to end: SIGTERM or Ctrl-C. SIGHUP, by which other services read their configuration again, ends nothing.
//!
//! Once guests are served the agent ends in order. Before that there is nothing to be ended in order, and
//! whatever the start waits for must not hold the end up: it ends at once, as it does when it is told a
//! second time. Everything that it must know afterwards is in its journals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Tells when the agent is to end.
pub(super) struct Signals {
    told: watch::Receiver<bool>,
    serves: Arc<AtomicBool>,
}

impl Signals {
    /// From now on signals do not end the process by themselves.
    pub(super) fn catch() -> Self {
        let (tell, told) = watch::channel(false);
        let serves = Arc::new(AtomicBool::new(false));
        match signal(SignalKind::hangup()) {
            Ok(hangup) => drop(tokio::spawn(explain(hangup))),
            Err(why) => tracing::warn!(%why, "cannot catch SIGHUP"),
        }
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => {
                tokio::spawn(heed([terminate, interrupt], tell, Arc::clone(&serves)));
            }
            // They end it as they end any process: journals are made for that.
            (Err(why), _) | (_, Err(why)) => tracing::warn!(%why, "cannot catch signals"),
        }
        Self { told, serves }
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

/// Says what to do instead.
async fn explain(mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        tracing::info!(
            "SIGHUP changes nothing: restart the agent, and it reads its configuration; guests wait meanwhile and \
             continue"
        );
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
