//! The present problems of this host that do not end by themselves. They are kept in one place, so
//! that the log, `dray status` and `dray images` report the same.
//!
//! A trouble concerns one thing: an image, a peer, a file. Whoever meets it notes it and goes on with
//! everything else; whoever finds it gone clears it.

use dray_api::Trouble;
use dray_files::unix_ms;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fmt::Display;

/// Troubles that are shown at most; the log has all of them.
const MOST: usize = 1024;

/// The troubles of an agent.
#[derive(Default)]
pub struct Troubles(Mutex<BTreeMap<String, Trouble>>);

impl Troubles {
    fn map(&self) -> MutexGuard<'_, BTreeMap<String, Trouble>> {
        self.0.lock()
    }

    /// `what` is wrong because of `why`; `hint` says what to do, if anything. A trouble with the same `key`
    /// is replaced. It is logged when it is new or has another cause.
    pub fn note(
        &self,
        key: impl Into<String>,
        what: impl Into<String>,
        why: impl Display,
        hint: impl Into<String>,
    ) {
        let (key, what, why) = (key.into(), what.into(), why.to_string());
        let hint = Some(hint.into()).filter(|hint| !hint.is_empty());
        let mut map = self.map();
        let known = map.get(&key);
        if known.is_some_and(|known| known.what == what && known.why == why) {
            return;
        }
        tracing::error!(key, what, why, hint, "trouble");
        if known.is_none() && map.len() >= MOST {
            return;
        }
        let since_unix_ms = known.map_or_else(unix_ms, |known| known.since_unix_ms);
        map.insert(key.clone(), Trouble { key, what, why, hint, since_unix_ms });
    }

    /// It is gone.
    pub fn clear(&self, key: &str) {
        if let Some(gone) = self.map().remove(key) {
            tracing::info!(key, what = gone.what, "a trouble is over");
        }
    }

    /// All those are gone whose keys begin so.
    pub fn clear_all(&self, begin: &str) {
        let keys: Vec<_> =
            self.map().keys().filter(|key| key.starts_with(begin)).cloned().collect();
        keys.iter().for_each(|key| self.clear(key));
    }

    /// It is as `found`: noted with `what` and `hint`, or cleared when nothing was found.
    pub fn settle(&self, key: &str, what: &str, found: Option<impl Display>, hint: &str) {
        match found {
            Some(why) => self.note(key, what, why, hint),
            None => self.clear(key),
        }
    }

    /// Whether there is a trouble with this key.
    pub fn has(&self, key: &str) -> bool {
        self.map().contains_key(key)
    }

    /// All of them, by key.
    pub fn all(&self) -> Vec<Trouble> {
        self.map().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trouble_is_there_until_it_is_cleared() {
        let troubles = Troubles::default();
        troubles.note("pool.ssd", "pool 'ssd' cannot be used", "it is not there", "mount it");
        let first = troubles.all();
        assert_eq!((first.len(), first[0].hint.as_deref()), (1, Some("mount it")));
        troubles.note("pool.ssd", "pool 'ssd' cannot be used", "permission denied", "");
        troubles.note("a", "b", "c", "");
        let now = troubles.all();
        assert_eq!((now.len(), now[1].why.as_str(), &now[1].hint), (2, "permission denied", &None));
        assert_eq!(now[1].since_unix_ms, first[0].since_unix_ms);
        troubles.clear("pool.ssd");
        troubles.clear("pool.ssd");
        troubles.settle("a", "b", None::<&str>, "");
        assert!(troubles.all().is_empty() && !troubles.has("a"));
    }

    #[test]
    fn more_than_anybody_reads_is_not_kept() {
        let troubles = Troubles::default();
        (0..MOST + 5).for_each(|nth| troubles.note(format!("{nth:05}"), "x", "y", ""));
        assert_eq!(troubles.all().len(), MOST);
        troubles.note("00000", "x", "z", "");
        assert_eq!(troubles.all()[0].why, "z");
    }
}
