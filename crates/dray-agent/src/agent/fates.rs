//! Targets that hear nothing of their sources: they ask what became of the migration, and answer the same
//! question. What is said, and when, is in [`fate`]; what a target does about it
//! is up to its loop.

use super::Agent;
use dray_host::folder::standing::Unserved;
use dray_host::migration::fate;
use dray_host::refusals::{Answer, failed};
use dray_migrate::receiver::{Input, TargetSlot};
use dray_net::{NetError, NetErrorKind};
use dray_types::{ImageId, MigrationId};
use dray_wire::request::{Fate, Reply, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

/// A source that is away for less is about to make a session.
const GRACE: Duration = Duration::from_secs(2);
/// How often is looked who has to ask.
const LOOK: Duration = Duration::from_secs(1);
/// First pause between two questions about one migration; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(4);
/// Longest pause: a source that has something to tell tells it by itself when it starts.
const LONGEST_PAUSE: Duration = Duration::from_secs(64);
/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(5);

/// What a source says, or why it does not.
pub(crate) type FateAnswer = Result<Fate, NetError>;

/// What came of asking about a migration to here that waits.
pub(crate) struct Asked {
    /// Its source.
    pub peer: String,
    pub told: FateAnswer,
    /// What this host has done with its images.
    pub done: Unserved,
    /// It has served one of them, and the record of that is lost.
    pub served: bool,
    /// Nobody wants it, and it is given up.
    pub given_up: bool,
}

/// Who wants to know what becomes of a migration that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asks {
    /// The operator, who wants to end it.
    Operator,
    /// This host itself, now and then.
    Itself,
}

impl Agent {
    /// What becomes of a migration away that `peer` asks about.
    pub(super) fn fate_for(
        &self,
        peer: &str,
        migration: MigrationId,
        images: &[ImageId],
    ) -> Answer<Fate> {
        if self.preparing.contains(migration) {
            return Ok(Fate::Live);
        }
        // It is nobody's to go on with. A target that has promised to serve does not drop that for it.
        if self.claimed_from(peer, migration).is_some() {
            return Ok(Fate::Claimed);
        }
        fate::of(&self.store, &self.registry, peer, migration, images).map_err(failed)
    }

    async fn ask_fate(
        &self,
        peer: &str,
        migration: MigrationId,
        images: Vec<ImageId>,
    ) -> FateAnswer {
        let request = Request::Fate { migration, images };
        match self.ask_within(ANSWER, peer, &request).await? {
            Reply::Fate { fate } => Ok(fate),
            _ => {
                let why = "the peer's answer does not fit the question";
                Err(NetError::new(NetErrorKind::Protocol, why))
            }
        }
    }

    /// Asks the source of a migration to here what becomes of it, if there is no session with it, and has
    /// the loop do what follows from that.
    ///
    /// At most one question about a migration is under way. Whoever wanted to know before it was asked gets
    /// its answer too; whoever comes later has it asked again.
    pub(crate) async fn ask_source(&self, slot: &TargetSlot) -> Option<FateAnswer> {
        let came = Instant::now();
        let mut last = slot.asked.lock().await;
        if let Some((_, told)) = last.as_ref().filter(|(asked, _)| *asked >= came) {
            return Some(told.clone());
        }
        let (asked, question) = (Instant::now(), slot.any_question()?);
        let told = self.ask_fate(&slot.intent().peer, slot.board.migration, question.images).await;
        let (heard, done) = oneshot::channel();
        let (sessions, answer) = (question.sessions, told.clone());
        slot.send(Input::Fate { sessions, answer, heard });
        // A loop that has ended has nothing left to do.
        let _ = tokio::time::timeout(ANSWER, done).await;
        *last = Some((asked, told.clone()));
        Some(told)
    }

    /// Asks the source of a migration to here that cannot be brought back, and owns nothing, whether it is still
    /// wanted, and gives it up if not: what is left of it goes when it is looked at next. Whether it is given up, or
    /// why not; none when there is no such migration.
    pub(crate) async fn ask_about_waiting(
        self: &Arc<Self>,
        migration: MigrationId,
        asks: Asks,
    ) -> Option<Asked> {
        let agent = Arc::clone(self);
        let look = move || agent.unrevived.unowned(&agent.registry, migration);
        let waits = match spawn_blocking(look).await.map_err(io::Error::other).flatten() {
            Ok(waits) => waits?,
            Err(why) => {
                tracing::debug!(%migration, %why, "cannot find out why a migration waits");
                return None;
            }
        };
        let told = self.ask_fate(&waits.peer, migration, waits.images.clone()).await;
        let unwanted = told.as_ref().is_ok_and(|fate| waits.is_unwanted(*fate));
        // What a guest has written here is nowhere else.
        let unwanted = unwanted && (asks == Asks::Operator || !waits.served);
        let says = told.as_ref().ok().copied();
        let given_up = unwanted && self.give_up_waiting(migration, says).await;
        Some(Asked { peer: waits.peer, told, done: waits.done, served: waits.served, given_up })
    }

    /// Gives a migration up that waits, and owns nothing; one that has promised only as its source `says`. Whether it is
    /// given up.
    pub(crate) async fn give_up_waiting(
        self: &Arc<Self>,
        migration: MigrationId,
        says: Option<Fate>,
    ) -> bool {
        let agent = Arc::clone(self);
        let give_up = move || agent.unrevived.give_up(&agent.registry, migration, says);
        match spawn_blocking(give_up).await.map_err(io::Error::other).flatten() {
            Ok(given_up) => given_up,
            Err(why) => {
                tracing::warn!(%migration, %why,
                    "cannot forget a migration that its source has given up");
                false
            }
        }
    }

    /// Asks, for as long as the agent runs, for all migrations to here whose sources are away, and for those that
    /// cannot be brought back.
    pub(crate) async fn keep_asking(self: Arc<Self>) {
        let mut pauses: BTreeMap<MigrationId, (Instant, Duration)> = BTreeMap::new();
        loop {
            tokio::time::sleep(LOOK).await;
            let waiting = self.unrevived.here();
            let alone: Vec<_> = self
                .targets
                .all()
                .into_iter()
                .filter(|slot| slot.any_question().is_some_and(|q| q.since.elapsed() >= GRACE))
                .collect();
            let ids = alone.iter().map(|slot| slot.board.migration);
            let ids: BTreeSet<_> = ids.chain(waiting.iter().copied()).collect();
            pauses.retain(|id, _| ids.contains(id));
            let mut is_due = |migration| {
                let now = Instant::now();
                let pause = pauses.entry(migration).or_insert((now, FIRST_PAUSE));
                let due = pause.0 <= now;
                if due {
                    *pause = (now + pause.1, (pause.1 * 2).min(LONGEST_PAUSE));
                }
                due
            };
            // One that does not answer holds up no other.
            for slot in alone.into_iter().filter(|slot| is_due(slot.board.migration)) {
                let agent = Arc::clone(&self);
                tokio::spawn(async move { agent.ask_source(&slot).await });
            }
            for migration in waiting.into_iter().filter(|id| is_due(*id)) {
                let agent = Arc::clone(&self);
                tokio::spawn(async move { agent.ask_about_waiting(migration, Asks::Itself).await });
            }
        }
    }
}
