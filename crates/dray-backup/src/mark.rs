//! Marks: what a collector has condemned. Nobody begins to rely on a condemned pack.

use crate::envelope::{Content, unwrap, wrap};
use crate::error::{Error, Kind, Result};
use crate::place::PackId;
use crate::repository::Core;
use crate::session::Seen;
use crate::store::MAX_OBJECT;
use dray_types::list;
use serde::Deserialize;
use std::collections::HashSet;
use std::time::Duration;

pub(crate) const FOLDER: &str = "gc/";
/// Most packs that one mark condemns, so that it stays well below [`MAX_OBJECT`].
pub(crate) const MAX_CONDEMNED: usize = 200_000;

/// The names of one round of collection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Round(pub(crate) u128);

/// Most sessions that a round waits for: a host has a handful of them.
const MAX_SESSIONS: usize = 1 << 16;

/// The names of these sessions, as somebody has written them.
#[derive(Deserialize)]
struct Names(#[serde(deserialize_with = "list::at_most::<_, _, MAX_SESSIONS>")] Vec<String>);

impl Round {
    /// The object that names the condemned packs.
    pub(crate) fn mark(self) -> String {
        format!("{FOLDER}{:032x}/mark", self.0)
    }

    /// The object that names the sessions to wait for.
    pub(crate) fn waits(self) -> String {
        format!("{FOLDER}{:032x}/waits", self.0)
    }

    pub(crate) fn condemn(self, core: &Core, packs: &[PackId]) -> Result<()> {
        let bytes = wrap(Content::Mark, &packs, &core.keys, &*core.world)?;
        // The id is random: if it existed, a request of ours was repeated on the way.
        core.store.put_new(&self.mark(), &bytes).map(|_| ())
    }

    pub(crate) fn condemned(self, core: &Core) -> Result<Vec<PackId>> {
        let name = self.mark();
        unwrap(Content::Mark, &name, &core.store.get(&name, MAX_OBJECT)?, &core.keys)
    }

    /// Notes the sessions to wait for; the first one to note them counts.
    pub(crate) fn wait_for(self, core: &Core, sessions: &[Seen]) -> Result<()> {
        let names: Vec<String> = sessions.iter().map(Seen::begin).collect();
        let bytes = wrap(Content::Waits, &names, &core.keys, &*core.world)?;
        core.store.put_new(&self.waits(), &bytes).map(|_| ())
    }

    pub(crate) fn waited_for(self, core: &Core) -> Result<Vec<Seen>> {
        let name = self.waits();
        let bytes = core.store.get(&name, MAX_OBJECT)?;
        let Names(names) = unwrap(Content::Waits, &name, &bytes, &core.keys)?;
        let seen = names.iter().map(|name| Seen::parse(name));
        seen.collect::<Option<_>>().ok_or_else(|| Error::damaged(format!("{name} is damaged")))
    }
}

/// The rounds that are not finished: their id, whether there is a mark, and its age.
pub(crate) fn list(core: &Core) -> Result<Vec<(Round, Option<Duration>)>> {
    let mut rounds: Vec<(Round, Option<Duration>)> = Vec::new();
    let mut objects = core.store.list(FOLDER)?;
    objects.sort_by(|a, b| a.name.cmp(&b.name));
    for object in objects {
        let rest = object.name.strip_prefix(FOLDER).and_then(|rest| rest.split_once('/'));
        let Some((id, kind)) = rest else { continue };
        let Some(round) = u128::from_str_radix(id, 16).ok().map(Round) else { continue };
        let age = (kind == "mark").then_some(object.age);
        match rounds.last_mut() {
            Some((last, known)) if *last == round => *known = known.or(age),
            _ => rounds.push((round, age)),
        }
    }
    Ok(rounds)
}

/// Every pack that is condemned at this moment.
pub(crate) fn all_condemned(core: &Core) -> Result<HashSet<PackId>> {
    let mut all = HashSet::new();
    for (round, mark) in list(core)? {
        if mark.is_none() {
            continue;
        }
        match round.condemned(core) {
            Ok(packs) => all.extend(packs),
            // The round is finished: what it left is no longer condemned.
            Err(e) if e.kind() == Kind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}
