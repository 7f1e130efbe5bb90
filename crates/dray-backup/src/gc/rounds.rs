//! Rounds: condemning (C1, C2) and carrying it out (C3 to C5); see the protocol above.

use super::GcReport;
use super::live::Live;
use crate::error::{Kind, Result};
use crate::mark::{self, MAX_CONDEMNED, Round, all_condemned};
use crate::place::PackId;
use crate::repository::Core;
use crate::session::{self, Seen};
use crate::world::random_id;
use crate::writer::packs;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Condemns what nothing names; false when there is nothing.
pub(super) fn condemn(core: &Core, report: &mut GcReport) -> Result<bool> {
    // In this order: whoever is over when the sessions are listed has its manifest read.
    let present = packs(core)?;
    let (sessions, _) = session::list(core)?;
    let running: HashSet<u128> = sessions.iter().map(|listed| listed.seen.session).collect();
    let live = Live::read(core)?;
    let already = all_condemned(core)?;
    let dead = |pack: &PackId| {
        !live.names(pack) && !running.contains(&pack.session) && !already.contains(pack)
    };
    let mut dead: Vec<PackId> = present.keys().filter(|pack| dead(pack)).copied().collect();
    dead.sort();
    for packs in dead.chunks(MAX_CONDEMNED) {
        let round = Round(random_id(&*core.world)?);
        round.condemn(core, packs)?;
        note_waits(core, round)?;
        report.condemned_packs += packs.len() as u64;
        report.condemned_bytes += packs.iter().map(|pack| present[pack]).sum::<u64>();
    }
    Ok(!dead.is_empty())
}

/// C2. The mark must be durable: a session that is not in the list begins after it.
fn note_waits(core: &Core, round: Round) -> Result<()> {
    let (sessions, _) = session::list(core)?;
    let seen: Vec<Seen> = sessions.into_iter().map(|listed| listed.seen).collect();
    round.wait_for(core, &seen)
}

/// Takes every round as far as it goes now.
pub(super) fn advance(core: &Core, grace: Duration, report: &mut GcReport) -> Result<()> {
    for (round, mark) in mark::list(core)? {
        let done = match mark {
            Some(age) => carry_out(core, round, age >= grace, report),
            // The mark is gone and the waits were left behind.
            None => core.store.delete(&round.waits()).map(|()| true),
        };
        match done {
            Ok(true) => {}
            Ok(false) => report.waiting_rounds += 1,
            // Somebody else has finished it.
            Err(e) if e.kind() == Kind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// C3 to C5; false while it has to wait.
fn carry_out(core: &Core, round: Round, grace_over: bool, report: &mut GcReport) -> Result<bool> {
    let condemned = match round.condemned(core) {
        Err(e) if e.kind() == Kind::Damaged => return finish(core, round).map(|()| true),
        condemned => condemned?,
    };
    if !grace_over || !waits_are_over(core, round)? {
        return Ok(false);
    }
    let live = Live::read(core)?;
    if !core.store.exists(&round.mark())? {
        return Ok(true);
    }
    let present = sizes(core, &condemned)?;
    for pack in condemned.iter().filter(|pack| !live.names(pack)) {
        core.store.delete(&pack.name())?;
        if let Some(bytes) = present.get(pack) {
            report.removed_packs += 1;
            report.removed_bytes += bytes;
        }
    }
    finish(core, round).map(|()| true)
}

fn waits_are_over(core: &Core, round: Round) -> Result<bool> {
    let waits = match round.waited_for(core) {
        Ok(waits) => waits,
        Err(e) if e.is_of_store() => return Err(e),
        // Never noted, or damaged: whoever is there now includes all that must be waited for.
        Err(_) => {
            core.store.delete(&round.waits())?;
            note_waits(core, round)?;
            round.waited_for(core)?
        }
    };
    for session in waits {
        if !session.is_over(core)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The waits go first: a mark alone is a round that can be taken up again.
fn finish(core: &Core, round: Round) -> Result<()> {
    core.store.delete(&round.waits())?;
    core.store.delete(&round.mark())
}

/// Length of those packs that are there.
fn sizes(core: &Core, condemned: &[PackId]) -> Result<HashMap<PackId, u64>> {
    let condemned: HashSet<&PackId> = condemned.iter().collect();
    Ok(packs(core)?.into_iter().filter(|(pack, _)| condemned.contains(pack)).collect())
}
