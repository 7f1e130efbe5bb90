//! Sessions: how a writer tells the collectors that it relies on what is there.
//!
//! `sessions/SESSION/IMAGE-NUMBER` is created before the writer looks at anything that it may rely
//! on. Its name alone says under which name the session's manifest will appear, its *outcome*:
//! `manifests/IMAGE/NUMBER-SESSION`. Exactly one object can be created there, the manifest by the
//! writer or a tombstone by a collector, and that decides whether the session committed. No clock
//! is needed for that; clocks decide only when a collector loses patience.
//! `sessions/SESSION/renewed-N` show that the writer is alive.

use crate::envelope::{Content, wrap};
use crate::error::{Error, Kind, Result};
use crate::manifest;
use crate::repository::Core;
use crate::store::{Object, Put};
use crate::world::random_id;
use dray_types::ImageId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Where sessions and their signs of life are.
pub const FOLDER: &str = "sessions/";
/// A writer renews its session when the last sign of life is this old.
const RENEW_AFTER: Duration = Duration::from_secs(300);
const RENEWED: &str = "renewed-";

/// A session as others see it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Seen {
    pub(crate) session: u128,
    pub(crate) image: ImageId,
    pub(crate) number: u64,
}

impl Seen {
    /// The object that announces it.
    pub(crate) fn begin(&self) -> String {
        format!("{FOLDER}{:032x}/{}-{:08}", self.session, self.image, self.number)
    }

    /// The object that decides it.
    pub(crate) fn outcome(&self) -> String {
        manifest::object_name(self.image, self.number, self.session)
    }

    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (session, rest) = name.strip_prefix(FOLDER)?.split_once('/')?;
        let (image, number) = rest.split_once('-')?;
        let session = u128::from_str_radix(session, 16).ok()?;
        let seen = Self { session, image: image.parse().ok()?, number: number.parse().ok()? };
        (seen.begin() == name).then_some(seen)
    }

    /// True when nothing will ever be committed by it any more: it was decided, or given up.
    pub(crate) fn is_over(&self, core: &Core) -> Result<bool> {
        Ok(!core.store.exists(&self.begin())? || core.store.exists(&self.outcome())?)
    }

    /// Decides it against the writer, unless it is decided already.
    pub(crate) fn fence(&self, core: &Core) -> Result<Put> {
        core.store.put_new(&self.outcome(), &tombstone(core)?)
    }
}

/// One session in a listing, with the age of its last sign of life.
pub(crate) struct Listed {
    pub(crate) seen: Seen,
    pub(crate) silent: Duration,
    renewals: Vec<String>,
}

impl Listed {
    /// Removes what announces it; only when it is over.
    pub(crate) fn remove(&self, core: &Core) -> Result<()> {
        self.renewals.iter().try_for_each(|name| core.store.delete(name))?;
        core.store.delete(&self.seen.begin())
    }
}

/// All sessions that are announced, and signs of life of those that are not.
pub(crate) fn list(core: &Core) -> Result<(Vec<Listed>, Vec<String>)> {
    let objects = core.store.list(FOLDER)?;
    let mut listed = BTreeMap::new();
    for object in &objects {
        if let Some(seen) = Seen::parse(&object.name) {
            let session = seen.session;
            listed.insert(session, Listed { seen, silent: object.age, renewals: Vec::new() });
        }
    }
    let mut lost = Vec::new();
    for Object { name, age, .. } in objects {
        let session = name.strip_prefix(FOLDER).and_then(|rest| rest.split_once('/'));
        let Some((session, rest)) = session else { continue };
        if !rest.starts_with(RENEWED) {
            continue;
        }
        let session = u128::from_str_radix(session, 16).ok();
        match session.and_then(|session| listed.get_mut(&session)) {
            Some(listed) => {
                listed.silent = listed.silent.min(age);
                listed.renewals.push(name);
            }
            None => lost.push(name),
        }
    }
    Ok((listed.into_values().collect(), lost))
}

fn tombstone(core: &Core) -> Result<Vec<u8>> {
    wrap(Content::Tombstone, &(), &core.keys, &*core.world)
}

/// This program's own session.
pub(crate) struct Session {
    core: Arc<Core>,
    pub(crate) seen: Seen,
    renewed_ms: u64,
    renewals: u32,
    /// Set from the moment at which a commit may have been sent.
    undecided: bool,
    over: bool,
}

impl Session {
    /// Announces a session that will write backup `number` of `image`.
    pub(crate) fn begin(core: &Arc<Core>, image: ImageId, number: u64) -> Result<Self> {
        let seen = Seen { session: random_id(&*core.world)?, image, number };
        let renewed_ms = core.world.unix_ms();
        // The id is random: if it existed, a request of ours was repeated on the way.
        core.store.put_new(&seen.begin(), b"")?;
        let core = core.clone();
        Ok(Self { core, seen, renewed_ms, renewals: 0, undecided: false, over: false })
    }

    /// Shows that the writer is alive, when it is time again.
    pub(crate) fn renew(&mut self) -> Result<()> {
        let now = self.core.world.unix_ms();
        if now.abs_diff(self.renewed_ms) < RENEW_AFTER.as_millis() as u64 {
            return Ok(());
        }
        let name = |n: u32| format!("{FOLDER}{:032x}/{RENEWED}{n:08}", self.seen.session);
        self.core.store.put_new(&name(self.renewals), b"")?;
        if let Some(before) = self.renewals.checked_sub(1) {
            self.core.store.delete(&name(before))?;
        }
        self.renewals += 1;
        self.renewed_ms = now;
        Ok(())
    }

    /// Creates the manifest. Everything that it names must be durable.
    pub(crate) fn commit(&mut self, manifest: &[u8]) -> Result<()> {
        self.undecided = true;
        let put = self.core.store.put_new(&self.seen.outcome(), manifest);
        match put {
            Ok(Put::Created) => self.committed(),
            Ok(Put::Existed) => self.decided_by_another(manifest),
            // It may be there all the same, or arrive later: ask for the opposite.
            Err(error) => match self.seen.fence(&self.core) {
                Ok(Put::Existed) => self.decided_by_another(manifest),
                Ok(Put::Created) => {
                    self.undecided = false;
                    Err(error)
                }
                Err(_) => Err(error),
            },
        }
    }

    /// Something is there: our manifest, from a request that seemed to fail, or a tombstone.
    fn decided_by_another(&mut self, manifest: &[u8]) -> Result<()> {
        let there = self.core.store.get(&self.seen.outcome(), manifest.len().max(4096))?;
        if there == manifest {
            return self.committed();
        }
        self.undecided = false;
        let text = "the backup took too long without a sign of life and was given up";
        Err(Error::new(Kind::Fenced, text))
    }

    fn committed(&mut self) -> Result<()> {
        self.undecided = false;
        self.end();
        Ok(())
    }

    /// Removes the announcement. What cannot be removed a collector removes later.
    fn end(&mut self) {
        if self.over || self.undecided {
            return;
        }
        self.over = true;
        let last = self.renewals.checked_sub(1);
        let last = last.map(|n| format!("{FOLDER}{:032x}/{RENEWED}{n:08}", self.seen.session));
        for name in last.into_iter().chain([self.seen.begin()]) {
            if let Err(error) = self.core.store.delete(&name) {
                tracing::debug!(%error, name, "a session's object stays for a collector");
                return;
            }
        }
    }
}

impl Drop for Session {
    /// Without a commit the session is given up.
    fn drop(&mut self) {
        self.end();
    }
}
