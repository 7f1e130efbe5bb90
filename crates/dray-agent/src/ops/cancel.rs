//! `dray cancel`: ends a migration, at whichever side that can be done.

use super::pick::is_running;
use crate::agent::Agent;
use crate::agent::fates::Asks;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, Cancel, Cancelled, ErrorKind, MigrationState, Phase, Refusal, text};
use dray_engine::SourceEvent;
use dray_files::unix_ms;
use dray_host::folder::standing::Unserved;
use dray_host::migration::waiting::LetGo;
use dray_host::refusals::io_error;
use dray_migrate::receiver::{self, TargetSlot};
use dray_migrate::source::{Input, SourceSlot};
use dray_types::MigrationId;
use dray_wire::request::Fate;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

/// How long a cancel may take before the answer says so.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

impl Answers<Cancel> for Arc<Agent> {
    async fn answer(&self, command: Cancel, _: Events) -> ApiResult<Cancelled> {
        self.cancel(&command).await
    }
}

impl Agent {
    pub(crate) async fn cancel(self: &Arc<Self>, command: &Cancel) -> ApiResult<Cancelled> {
        if let Some(migration) = named_in(command, self.unrevived.here())
            && let Some(cancelled) = self.take_back_waiting(migration).await?
        {
            return Ok(cancelled);
        }
        if let Some(migration) = named_in(command, self.unrevived.away())
            && let Some(cancelled) = self.let_go_waiting(migration).await?
        {
            return Ok(cancelled);
        }
        if let Some(slot) = self.named_here(command)? {
            return self.take_back(&slot).await;
        }
        let slot = self.pick_source(command.migration.as_ref())?;
        let shown = slot.board.read();
        if shown.state == MigrationState::Prepared {
            return self.forget_prepared(&slot).await;
        }
        if !is_running(shown.state) {
            return Err(ended_before(&slot, &what_of(&slot)));
        }
        let done = shown.progress.phase == Phase::Release;
        if slot.is_refused() || done && !shown.progress.link_up {
            return self.let_go(&slot).await;
        }
        if shown.progress.phase >= Phase::Backfill {
            let why = "the images are already handed over, and only the target can continue";
            return Err(Refusal::new(ErrorKind::Conflict, what_of(&slot), why)
                .hint("wait for its end with `dray watch`, then migrate back from the target"));
        }
        stop_before_handover(&slot, command.discard).await
    }

    /// The images were handed over, and their target knows nothing of the migration any more: it has nothing
    /// to end there. Or it has all of them, and hears that this is known when it asks.
    async fn let_go(&self, slot: &Arc<SourceSlot>) -> ApiResult<Cancelled> {
        let migration = slot.board.migration;
        let (answer, gone) = oneshot::channel();
        slot.send(Input::LetGo(answer));
        let what = format!("cannot cancel migration {migration}");
        match tokio::time::timeout(CANCEL_TIMEOUT, gone).await {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(why))) => return Err(io_error(what, why)),
            Ok(Err(_)) | Err(_) => {
                let why = "it does not end at the moment";
                return Err(Refusal::new(ErrorKind::Conflict, what, why)
                    .hint("see `dray status`, then try again"));
            }
        }
        let why = "the operator asked for it; the images were handed over, and the copies on this \
                   host stay";
        let error = Refusal::new(ErrorKind::Cancelled, "the migration was ended", why);
        slot.board.change(|shown| {
            (shown.state, shown.error) = (MigrationState::Cancelled, Some(error));
        });
        self.sources.remove(migration);
        Ok(Cancelled { replicas_stay: true, ..Cancelled::of(migration) })
    }

    /// A prepared migration leaves nothing at either side.
    pub(super) async fn forget_prepared(
        self: &Arc<Self>,
        slot: &Arc<SourceSlot>,
    ) -> ApiResult<Cancelled> {
        let migration = slot.board.migration;
        let peer = slot.intent().peer;
        let request = dray_wire::request::Request::Forget { migration };
        let what = format!("cannot cancel migration {migration}");
        // From here on nobody can begin it: the target may drop even a promise.
        slot.board.take(MigrationState::Cancelled).ok_or_else(|| {
            Refusal::new(ErrorKind::Conflict, &what, "it has just begun")
                .hint("try again: the migration is running now, and can be cancelled")
        })?;
        let told = self.ask(&peer, &request).await;
        let target_was_away = told.is_err();
        match told {
            Ok(_) => slot.send(Input::Forget),
            Err(why) => {
                tracing::info!(%migration, peer, %why, "the target learns of the cancel later");
                // It is not taken back before that is certain: the target may ask at any moment.
                slot.set_cancelled().map_err(|why| {
                    slot.board.change(|shown| shown.state = MigrationState::Prepared);
                    io_error(&what, why)
                })?;
                slot.send(Input::Cancelled);
                self.tell_later(peer, migration);
            }
        }
        self.tasks.take(migration);
        self.sources.remove(migration);
        Ok(Cancelled { target_was_away, ..Cancelled::of(migration) })
    }

    /// Takes back a migration to here that cannot be brought back, under the same conditions as one that was. None
    /// when there is none that owns nothing.
    async fn take_back_waiting(
        self: &Arc<Self>,
        migration: MigrationId,
    ) -> ApiResult<Option<Cancelled>> {
        let Some(asked) = self.ask_about_waiting(migration, Asks::Operator).await else {
            return Ok(None);
        };
        let what = format!("cannot cancel migration {migration}");
        let conflict = |why: &str| Refusal::new(ErrorKind::Conflict, &what, why);
        if matches!(asked.told, Ok(Fate::Live | Fate::HandedOver)) {
            let why = "this host is its target; the command belongs to its source";
            return Err(conflict(why).hint(format!("run it on {}", asked.peer)));
        }
        if asked.served && !asked.given_up {
            let why = "this host has served its images, and what was written here is nowhere else";
            return Err(conflict(why).hint(format!(
                "put its journal back; without what was written here: `dray claim` at {}, then try again",
                asked.peer
            )));
        }
        if asked.done != Unserved::Received && !asked.given_up {
            return Err(waits_for_source(&what, &asked.peer, asked.done));
        }
        if !asked.given_up && !self.give_up_waiting(migration, None).await {
            let why = "it cannot be removed at the moment";
            return Err(conflict(why).hint("see `dray images`, then try again"));
        }
        Ok(Some(Cancelled { at_target: true, ..Cancelled::of(migration) }))
    }

    /// Lets a migration away go that cannot be brought back, as [`let_go`](Self::let_go) does one that was: on the
    /// operator's word, as its target may still want what is lost here. None when there is none any more.
    async fn let_go_waiting(
        self: &Arc<Self>,
        migration: MigrationId,
    ) -> ApiResult<Option<Cancelled>> {
        let what = format!("cannot cancel migration {migration}");
        let agent = Arc::clone(self);
        let gone = spawn_blocking(move || {
            let gone = agent.unrevived.let_go(&agent.registry, migration, unix_ms())?;
            // What its record alone decides about is as after a restart.
            if gone == Some(LetGo::Gone) {
                agent.registry.open_absent();
            }
            Ok(gone)
        });
        let gone = gone.await.map_err(std::io::Error::other).flatten();
        match gone.map_err(|why| io_error(&what, why))? {
            Some(LetGo::Gone) => {
                Ok(Some(Cancelled { replicas_stay: true, ..Cancelled::of(migration) }))
            }
            Some(LetGo::Kept { why, hint }) => {
                let why = format!("it cannot be brought back, and has not handed over: {why}");
                Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
            }
            None => Ok(None),
        }
    }

    /// The migration that was named, if this host is its target.
    fn named_here(&self, command: &Cancel) -> ApiResult<Option<Arc<TargetSlot>>> {
        let Some(named) = &command.migration else { return Ok(None) };
        let migration = self.pick(Some(named))?.migration;
        let away = self.sources.get(migration).is_some();
        Ok(self.targets.get(migration).filter(|_| !away))
    }

    /// At its target a migration is taken back only while its source cannot be asked, and only if nothing
    /// was promised: the source can go on by itself then, whatever it has recorded. What was handed back stays, as
    /// the source may be lost, unless an image of it was claimed there.
    async fn take_back(&self, slot: &Arc<TargetSlot>) -> ApiResult<Cancelled> {
        let migration = slot.board.migration;
        let (what, peer) = (format!("cannot cancel migration {migration}"), slot.intent().peer);
        let conflict = |why: String| Refusal::new(ErrorKind::Conflict, &what, why);
        let owns = slot.question().is_some_and(|question| question.complete);
        let told = if owns { None } else { self.ask_source(slot).await };
        if let Some(Refusal { why, hint: Some(hint), .. }) = slot.left_by_source() {
            return Err(conflict(format!("this host serves its images; {why}")).hint(hint));
        }
        if !slot.is_forgotten() {
            if slot.is_exposed() || matches!(told, None | Some(Ok(Fate::Live | Fate::HandedOver))) {
                let why = "this host is its target; the command belongs to its source".to_owned();
                return Err(conflict(why).hint(format!("run it on {peer}")));
            }
            let (answer, gone) = oneshot::channel();
            let claimed = matches!(told, Some(Ok(Fate::Claimed)));
            slot.send(receiver::Input::TakeBack { claimed, answer });
            match tokio::time::timeout(CANCEL_TIMEOUT, gone).await {
                Ok(Ok(Ok(()))) => {}
                Ok(Ok(Err(done @ (Unserved::Promised | Unserved::HandedBack)))) => {
                    return Err(not_ours_to_end(&what, slot, done));
                }
                Ok(Ok(Err(Unserved::Received)) | Err(_)) | Err(_) => {
                    let why = "it cannot be removed at the moment".to_owned();
                    return Err(conflict(why).hint("see `dray status`, then try again"));
                }
            }
        }
        self.targets.remove(migration);
        Ok(Cancelled { at_target: true, ..Cancelled::of(migration) })
    }
}

fn what_of(slot: &SourceSlot) -> String {
    format!("cannot cancel migration {}", slot.board.migration)
}

/// Has a migration's loop end it, and waits until it has.
async fn stop_before_handover(slot: &SourceSlot, discard: bool) -> ApiResult<Cancelled> {
    let before = slot.board.read().progress;
    let mut changes = slot.board.changes();
    let discard = discard || !slot.intent().adopted.is_empty();
    slot.send(Input::Engine(SourceEvent::Cancel { discard }));
    let ended = tokio::time::timeout(CANCEL_TIMEOUT, async {
        while is_running(slot.board.read().state) {
            if changes.changed().await.is_err() {
                break;
            }
        }
    });
    if ended.await.is_err() {
        return Err(not_ended(slot));
    }
    if slot.board.read().state == MigrationState::Completed {
        let why = "it had completed before the cancel";
        return Err(Refusal::new(ErrorKind::Conflict, what_of(slot), why));
    }
    let bytes_kept = if discard { 0 } else { before.total.bytes_done };
    let target_was_away = discard && !before.link_up;
    Ok(Cancelled { bytes_kept, target_was_away, ..Cancelled::of(slot.board.migration) })
}

/// What is told of a migration that still runs: it ends when what holds it is over.
fn not_ended(slot: &SourceSlot) -> Refusal {
    let seconds = CANCEL_TIMEOUT.as_secs();
    let late = |why: String| Refusal::new(ErrorKind::Conflict, what_of(slot), why);
    let Some(error) = slot.board.read().error else {
        return late(format!("it has not ended in {seconds} s"));
    };
    let refusal =
        late(format!("it has not ended in {seconds} s, and ends when this is over: {error}"));
    match error.hint {
        Some(hint) => refusal.hint(hint),
        None => refusal,
    }
}

/// The migration that was named, if it is one of these.
fn named_in(command: &Cancel, known: Vec<MigrationId>) -> Option<MigrationId> {
    text::pick(Some(command.migration.as_ref()?), known, Vec::new()).ok()
}

/// Why a target does not take back what it has promised, or handed back, and what an operator can do.
fn not_ours_to_end(what: &str, slot: &TargetSlot, done: Unserved) -> Refusal {
    let intent = slot.intent();
    let image = intent.images.iter().find(|image| !image.offer.read_only);
    let (peer, image) = (&intent.peer, image.map_or("IMAGE", |image| image.name_here()));
    Refusal::new(ErrorKind::Conflict, what, only_it_knows(peer, done))
        .hint(format!("start {peer} again; if it is lost: `dray claim {image} --source-is-fenced`"))
}

fn only_it_knows(peer: &str, done: Unserved) -> String {
    match done {
        Unserved::HandedBack => format!(
            "this host has handed its images back, and only {peer} knows whether it has taken them"
        ),
        _ => format!(
            "this host has promised to serve its images, and only {peer} knows whether they were \
             handed over"
        ),
    }
}

/// The same when it cannot be brought back.
fn waits_for_source(what: &str, peer: &str, done: Unserved) -> Refusal {
    Refusal::new(ErrorKind::Conflict, what, only_it_knows(peer, done)).hint(format!(
        "start {peer} again, and end the migration there: `dray status` on this host shows how"
    ))
}

/// Why a migration that is over cannot be cancelled, and where its guest is.
fn ended_before(slot: &SourceSlot, what: &str) -> Refusal {
    let shown = slot.board.read();
    if !slot.owns() {
        let why = "it has ended, and the images are at the target";
        return Refusal::new(ErrorKind::Conflict, what, why).hint("migrate back from the target");
    }
    let why = match (shown.state, shown.error) {
        (MigrationState::Failed, Some(error)) => format!("it has ended already: {error}"),
        (MigrationState::Failed, None) => "it has failed already".to_owned(),
        _ => "it was cancelled already".to_owned(),
    };
    let there = match slot.is_kept() {
        true => format!(
            "{} keeps the received blocks for the next attempt, and removes them when no source \
             has asked for them for 24 hours",
            shown.peer
        ),
        false => "the target keeps no blocks for another attempt".to_owned(),
    };
    Refusal::new(ErrorKind::Conflict, what, why)
        .hint(format!("the guest continues on this host; {there}"))
}
