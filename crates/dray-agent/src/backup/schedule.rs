//! Backups that the configuration asks for: each destination's images, every so often.
//!
//! When a destination was last backed up to is durable, so that nothing is done twice, and what was
//! missed while no agent ran is made up for once. The first time, and every time after, is put off by
//! a part of the interval that host and destination decide, so that not all hosts come at once.

use super::run::Order;
use crate::agent::Agent;
use dray_api::{ApiResult, BackupDone};
use dray_config::BackupPlace;
use dray_files::StatePath;
use dray_files::unix_ms;
use dray_provider::destination::Destination;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::runtime::Handle;

/// How often is looked whether something is due.
const LOOK: Duration = Duration::from_secs(1);
/// What has failed is tried again after this time, or the interval if that is shorter.
const RETRY: Duration = Duration::from_secs(15 * 60);
/// Longest that a backup is put off so that hosts do not come at once.
const MOST_JITTER: Duration = Duration::from_secs(30 * 60);

/// What is durable about a destination.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// When it was last backed up to, in milliseconds since 1970.
    pub last_unix_ms: Option<u64>,
    /// When that was last tried.
    pub tried_unix_ms: Option<u64>,
    /// Why the last try failed, if it did.
    pub error: Option<String>,
}

/// Of each destination, by name.
pub type KeptAll = BTreeMap<String, Kept>;

fn path(agent: &Agent) -> StatePath {
    agent.store.backups().join(".schedule.json")
}

/// What is known of the destinations.
pub fn kept(agent: &Agent) -> KeptAll {
    path(agent).peek().unwrap_or_default()
}

/// How long this host puts its backups to a destination off: up to a tenth of the interval.
fn jitter(host: &str, place: &str, every: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    (host, place).hash(&mut hasher);
    let most = (every / 10).min(MOST_JITTER);
    most.mul_f64(hasher.finish() as f64 / u64::MAX as f64)
}

/// Whether a backup is due. A clock that went back makes it due no earlier than it would have been.
fn is_due(kept: &Kept, every: Duration, jitter: Duration, now_unix_ms: u64) -> bool {
    let since = |then: u64| Duration::from_millis(now_unix_ms.saturating_sub(then));
    if kept.error.is_some() {
        return kept.tried_unix_ms.is_none_or(|then| since(then) >= RETRY.min(every));
    }
    kept.last_unix_ms.is_none_or(|then| since(then) >= every + jitter)
}

/// Makes backups as configured, for as long as the agent lives. In a runtime.
///
/// # Errors
/// When no thread can be made.
pub fn keep(agent: &Arc<Agent>) -> io::Result<()> {
    if agent.config.backups.iter().all(|place| place.every.is_none()) {
        return Ok(());
    }
    let agent: Weak<Agent> = Arc::downgrade(agent);
    let runtime = Handle::current();
    let work = move || {
        // A backup asks VMs.
        let _in_runtime = runtime.enter();
        while let Some(agent) = agent.upgrade() {
            agent.config.backups.iter().for_each(|place| look(&agent, place));
            drop(agent);
            std::thread::sleep(LOOK);
        }
    };
    std::thread::Builder::new().name("dray-backups".to_owned()).spawn(work).map(drop)
}

/// Backs up to one destination if it is time.
fn look(agent: &Arc<Agent>, place: &BackupPlace) {
    let Some(every) = place.every else { return };
    let mut all = kept(agent);
    let one = all.entry(place.name.clone()).or_default();
    let jitter = jitter(&agent.config.name, &place.name, every);
    let now = unix_ms();
    if !is_due(one, every, jitter, now) {
        return;
    }
    one.tried_unix_ms = Some(now);
    match back_up(agent, place) {
        Ok(done) => {
            one.last_unix_ms = Some(done.taken_unix_ms);
            one.error = None;
        }
        Err(why) => {
            tracing::warn!(to = place.name, %why, "a backup failed and is tried again");
            one.error = Some(why.to_string());
        }
    }
    let folder = agent.store.backups();
    let saved = std::fs::create_dir_all(folder);
    if let Err(why) = saved.and_then(|()| path(agent).put(&all)) {
        tracing::warn!(%why, "cannot note when a backup was made");
    }
}

fn back_up(agent: &Arc<Agent>, place: &BackupPlace) -> ApiResult<BackupDone> {
    let destination = Destination::resolve(&agent.config, &place.name, None)?;
    let images = place.images.clone();
    let keep_last = place.keep_last;
    let order =
        Order { images, destination, fsfreeze: None, bandwidth: None, full: false, keep_last };
    let lease = agent.begin_backup(&order.images, &place.name)?;
    agent.back_up(&order, &lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn due_once_an_interval_and_soon_after_a_failure() {
        let ms = |time: Duration| time.as_millis() as u64;
        let jitter = Duration::from_secs(60);
        let due = |kept: &Kept, now: Duration| is_due(kept, DAY, jitter, ms(now));
        let mut kept = Kept::default();
        assert!(due(&kept, DAY), "what was never done is due");
        kept.last_unix_ms = Some(ms(10 * DAY));
        assert!(!due(&kept, 11 * DAY));
        assert!(due(&kept, 11 * DAY + jitter));
        assert!(due(&kept, 19 * DAY), "what was missed is made up for");
        assert!(!due(&kept, 5 * DAY), "a clock that went back");
        kept.tried_unix_ms = Some(ms(11 * DAY));
        kept.error = Some("no room".to_owned());
        assert!(!due(&kept, 11 * DAY + jitter));
        assert!(due(&kept, 11 * DAY + RETRY));
    }

    #[test]
    fn hosts_come_at_different_times_and_none_much_too_late() {
        let of = |host: &str| jitter(host, "nas", DAY);
        assert_ne!(of("hosta"), of("hostb"));
        assert_eq!(of("hosta"), of("hosta"));
        assert!(of("hosta") <= MOST_JITTER);
        assert!(jitter("hosta", "nas", Duration::from_secs(100)) <= Duration::from_secs(10));
    }
}
