//! Targets that hear nothing of their sources: they ask what became of the migration, and answer the same
//! question. What is said, and when, is in [`fate`]; what a target does about it
//! is up to its loop.

use super::Agent;
use crate::migration::target::{Input, TargetSlot};
use dray_host::migration::fate;
use dray_types::{ImageId, MigrationId};
use dray_wire::request::{Fate, Reply, Request};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

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
pub(crate) type Told = Result<Fate, String>;

impl Agent {
    /// What becomes of a migration away that `peer` asks about.
    pub(super) fn fate_for(
        &self,
        peer: &str,
        migration: MigrationId,
        images: &[ImageId],
    ) -> Result<Fate, String> {
        if self.preparing.contains(migration) {
            return Ok(Fate::Live);
        }
        // It is nobody's to go on with. A target that has promised to serve does not drop that for it.
        if self.claimed_from(peer, migration).is_some() {
            return Ok(Fate::Claimed);
        }
        fate::of(&self.store, &self.registry, peer, migration, images)
            .map_err(|why| why.to_string())
    }

    async fn ask_fate(&self, peer: &str, migration: MigrationId, images: Vec<ImageId>) -> Told {
        let request = Request::Fate { migration, images };
        match self.ask_within(ANSWER, peer, &request).await {
            Ok(Reply::Fate { fate }) => Ok(fate),
            Ok(_) => Err("the peer answered something else".to_owned()),
            Err(why) => Err(why.to_string()),
        }
    }

    /// Asks the source of a migration to here what becomes of it, if there is no session with it, and has
    /// the loop do what follows from that.
    ///
    /// At most one question about a migration is under way. Whoever wanted to know before it was asked gets
    /// its answer too; whoever comes later has it asked again.
    pub(crate) async fn ask_source(&self, slot: &TargetSlot) -> Option<Told> {
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

    /// Asks, for as long as the agent runs, for all migrations to here whose sources are away.
    pub(super) async fn keep_asking(self: Arc<Self>) {
        let mut pauses: BTreeMap<MigrationId, (Instant, Duration)> = BTreeMap::new();
        loop {
            tokio::time::sleep(LOOK).await;
            let alone: Vec<_> = self.targets.all().into_iter().collect();
            let alone: Vec<_> = alone
                .into_iter()
                .filter(|slot| slot.any_question().is_some_and(|q| q.since.elapsed() >= GRACE))
                .collect();
            pauses.retain(|id, _| alone.iter().any(|slot| slot.board.migration == *id));
            for slot in alone {
                let now = Instant::now();
                let pause = pauses.entry(slot.board.migration).or_insert((now, FIRST_PAUSE));
                if pause.0 > now {
                    continue;
                }
                *pause = (now + pause.1, (pause.1 * 2).min(LONGEST_PAUSE));
                let agent = Arc::clone(&self);
                // One that does not answer holds up no other.
                tokio::spawn(async move { agent.ask_source(&slot).await });
            }
        }
    }
}
