//! The periodic checks of a running agent: whether pools and other directories exist, whether the
//! certificates are valid, and whether damaged records are still there. Each problem is a trouble
//! of its own, and does not affect other parts.

use super::SHUTDOWN_GRACE;
use crate::agent::Agent;
use dray_config::Problem;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pause between two looks: how long a renewed certificate is not used.
const PAUSE: Duration = Duration::from_secs(5);

/// What is looked at.
#[derive(Clone, Copy)]
enum Look {
    /// What is this host's own: certificates, records, open files.
    Own,
    /// Directories: on a server that does not answer a look may take for ever, and only that.
    Directories,
}

impl Agent {
    /// Looks now and then, for as long as the agent lives.
    pub(super) fn keep_looking(self: &Arc<Self>) {
        for look in [Look::Own, Look::Directories] {
            tokio::spawn(go_on(Arc::downgrade(self), look));
        }
    }

    fn look(&self, look: Look) {
        match look {
            Look::Own => {
                self.look_at_certificates();
                self.look_at_damaged_records();
                self.reuse.close_idle();
            }
            Look::Directories => {
                self.look_at_directories();
                self.offer.iter().for_each(|offer| offer.sweep());
            }
        }
    }

    pub(super) fn look_at_certificates(&self) {
        let faults = self.identity.look_again(&self.config.tls_dir, &self.config.name);
        let said = faults.iter().map(|fault| format!("{}: {}", fault.path.display(), fault.why));
        let said: Vec<_> = said.collect();
        let found = Some(said.join("; ")).filter(|_| !said.is_empty());
        let hint = faults.first().map_or("", |fault| fault.hint.as_str());
        let what = "connections to and from other agents do not work without this host's \
                    certificates";
        self.troubles.settle("certificates", what, found, hint);
        // Of those whose certificates were revoked.
        self.front_ends.look_again(SHUTDOWN_GRACE);
    }

    fn look_at_directories(&self) {
        for (pool, problem) in self.config.pool_problems() {
            let what = format!("pool '{}' cannot be used", pool.name);
            self.settle_directory(&format!("pool.{}", pool.name), &what, problem);
        }
        for (dir, problem) in self.config.qmp_dir_problems() {
            let key = format!("qmp_dirs.{}", dir.display());
            let what = format!("QMP sockets in {} cannot be used", dir.display());
            self.settle_directory(&key, &what, problem);
        }
    }

    fn settle_directory(&self, key: &str, what: &str, problem: Option<Problem>) {
        let (why, hint) = problem.map(|problem| (problem.what, problem.hint)).unzip();
        self.troubles.settle(key, what, why, &hint.flatten().unwrap_or_default());
    }
}

async fn go_on(agent: Weak<Agent>, look: Look) {
    while let Some(strong) = agent.upgrade() {
        // On a thread where it may wait for a disk.
        if tokio::task::spawn_blocking(move || strong.look(look)).await.is_err() {
            tracing::error!("checking the host has failed");
        }
        tokio::time::sleep(PAUSE).await;
    }
}
