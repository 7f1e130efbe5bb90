//! What was prepared before: who asks for the same again gets the same, and what differs is said. It stays until it is
//! used, cancelled or a day old.

use super::selection::Plan;
use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, MigrationState, Prepare, Refusal, Subject};
use dray_files::unix_ms;
use dray_host::folder::intent::{SourceImage, SourceIntent, SourceVm};
use dray_migrate::source::SourceSlot;
use dray_types::Endpoint;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How old a preparation becomes, in milliseconds: a day.
const KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// Pause between two looks for those that are older.
const LOOK_EVERY: Duration = Duration::from_secs(600);

/// Forgets what was prepared for longer than [`KEPT_MS`], for as long as there is the agent.
pub(crate) async fn forget_old(agent: Weak<Agent>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(agent) = agent.upgrade() else { return };
        // One may wait for its turn.
        if agent.batches.all().iter().any(|run| run.record().ended_unix_ms.is_none()) {
            continue;
        }
        for slot in agent.all_prepared() {
            let SourceIntent { migration, started_unix_ms, .. } = slot.intent();
            if is_old(started_unix_ms, unix_ms()) {
                tracing::info!(%migration, "it was prepared a day ago, and has not begun: it is forgotten");
                if let Err(why) = agent.forget_prepared(&slot).await {
                    tracing::warn!(%migration, %why, "what was prepared stays for now");
                }
            }
        }
    }
}

fn is_old(prepared_unix_ms: u64, now: u64) -> bool {
    now.saturating_sub(prepared_unix_ms) > KEPT_MS
}

impl Agent {
    /// The migrations that have not begun.
    pub(super) fn all_prepared(&self) -> Vec<Arc<SourceSlot>> {
        let waits = |slot: &Arc<SourceSlot>| slot.board.read().state == MigrationState::Prepared;
        self.sources.all().into_iter().filter(waits).collect()
    }

    /// The one of this VM, or of these images, to this host.
    pub(super) fn prepared_for(&self, subject: &Subject, to: &str) -> Option<Arc<SourceSlot>> {
        let meant = |slot: &Arc<SourceSlot>| {
            let intent = slot.intent();
            let same = match (subject, &intent.vm) {
                (Subject::Vm { qmp }, Some(vm)) => *qmp == vm.qmp,
                (Subject::Images { names }, None) => {
                    names.iter().eq(intent.images.iter().map(|image| &image.name))
                }
                _ => false,
            };
            same && intent.peer == to
        };
        self.all_prepared().into_iter().find(meant)
    }

    /// What was prepared before and stays; what the command replaces goes.
    pub(super) async fn kept_preparation(
        self: &Arc<Self>,
        command: &Prepare,
    ) -> ApiResult<Option<Arc<SourceSlot>>> {
        let before = self.prepared_for(&command.subject, &command.to);
        match before {
            Some(slot) if command.replace => {
                self.forget_prepared(&slot).await?;
                Ok(None)
            }
            before => Ok(before),
        }
    }

    /// The preparation that is there already, if it is what is asked for now. The target is asked again: it may have
    /// forgotten its part.
    pub(super) async fn as_prepared(
        self: &Arc<Self>,
        slot: Arc<SourceSlot>,
        now: &SourceIntent,
        plan: &Plan,
        pool_and_owner: (Option<&str>, Option<&str>),
    ) -> ApiResult<(Arc<SourceSlot>, Endpoint)> {
        let before = slot.intent();
        if let Some(difference) = difference(&before, now) {
            return Err(not_the_same(&before, &difference));
        }
        let (endpoint, bases) = self.room_for(&before, plan, pool_and_owner).await?;
        if !bases.iter().eq(before.images.iter().map(|image| &image.base)) {
            return Err(not_the_same(&before, "and its target has forgotten its part since"));
        }
        Ok((slot, endpoint))
    }
}

fn not_the_same(before: &SourceIntent, difference: &str) -> Refusal {
    let SourceIntent { migration, peer, .. } = before;
    let why = format!("migration {migration} is prepared for it, {difference}");
    Refusal::new(ErrorKind::Conflict, format!("cannot prepare on {peer}"), why)
        .hint("give it with --replace to forget what was prepared")
}

/// In what a preparation differs from the one that is asked for now.
fn difference(before: &SourceIntent, now: &SourceIntent) -> Option<String> {
    let paths = |intent: &SourceIntent| -> Vec<PathBuf> {
        intent.images.iter().map(|image| image.path.clone()).collect()
    };
    if paths(before) != paths(now) {
        return Some("and the vm has other disks now".to_owned());
    }
    let images = before.images.iter().zip(&now.images);
    if let Some(why) = images.map(|(before, now)| image_difference(before, now)).find_map(|it| it) {
        return Some(why);
    }
    if before.owner != now.owner {
        return Some(format!("{} --owner", with_or_without(before.owner.as_deref())));
    }
    let waits_at = |vm: &Option<SourceVm>| vm.as_ref().and_then(|vm| vm.target_qmp.clone());
    match (waits_at(&before.vm), waits_at(&now.vm)) {
        (before, Some(now)) if before.as_ref() != Some(&now) => {
            let before = before.map(|path| path.display().to_string());
            Some(format!("{} --target-qmp", with_or_without(before.as_deref())))
        }
        _ => None,
    }
}

fn image_difference(before: &SourceImage, now: &SourceImage) -> Option<String> {
    let (name, there, wanted) = (&before.name, &before.offer.name, &now.offer.name);
    if there != wanted {
        return Some(format!("with the name {there} for {name}, and not {wanted}"));
    }
    if before.offer.len != now.offer.len {
        let (before, now) = (before.offer.len, now.offer.len);
        return Some(format!("when {name} had {before} bytes; it has {now} now"));
    }
    if before.seen.is_some() && before.seen != now.seen && before.check_unwritten().is_err() {
        return Some(format!("before somebody wrote to {name}"));
    }
    if before.chain.is_empty() != now.chain.is_empty() {
        let chain = if before.chain.is_empty() { "keep" } else { "flatten" };
        return Some(format!("with --chain {chain}"));
    }
    if before.qcow2 != now.qcow2 {
        let format = if before.qcow2 { "qcow2" } else { "raw" };
        return Some(format!("with --target-format {format}"));
    }
    None
}

fn with_or_without(value: Option<&str>) -> String {
    value.map_or_else(|| "without".to_owned(), |value| format!("with '{value}' as"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Epoch, ImageId, MigrationId};
    use dray_wire::ImageOffer;

    fn image(there: &str, len: u64) -> SourceImage {
        let offer = ImageOffer { id: ImageId(1), name: there.into(), len, read_only: false };
        SourceImage::new("disk.raw".into(), offer, "/pool/disk.raw".into(), Some("disk0".into()))
    }

    fn prepared(
        images: Vec<SourceImage>,
        owner: Option<&str>,
        waits_at: Option<&str>,
    ) -> SourceIntent {
        let vm = SourceVm {
            qmp: "/run/vm.qmp".into(),
            name: None,
            qemu: None,
            target_qmp: waits_at.map(Into::into),
            facts: None,
        };
        SourceIntent {
            migration: MigrationId(1),
            peer: "hostb".into(),
            images,
            owner: owner.map(Into::into),
            vm: Some(vm),
            options: None,
            epoch: Epoch(1),
            started_unix_ms: 0,
            adopted: Vec::new(),
        }
    }

    #[test]
    fn a_preparation_stays_for_a_day_whatever_the_clock_does() {
        let day = 86_400_000;
        assert!(!is_old(5, 5 + day));
        assert!(is_old(5, 6 + day));
        assert!(!is_old(5 + day, 5));
    }

    #[test]
    fn what_differs_from_an_earlier_preparation_is_said() {
        let before = prepared(vec![image("disk.raw", 5)], None, Some("/run/new.qmp"));
        let says = |now: SourceIntent| difference(&before, &now);
        let same = vec![image("disk.raw", 5)];
        assert_eq!(says(before.clone()), None);
        // It knows the socket already.
        assert_eq!(says(prepared(same.clone(), None, None)), None);
        for (now, why) in [
            (prepared(Vec::new(), None, None), "and the vm has other disks now"),
            (
                prepared(vec![image("new.raw", 5)], None, None),
                "with the name disk.raw for disk.raw, and not new.raw",
            ),
            (
                prepared(vec![image("disk.raw", 6)], None, None),
                "when disk.raw had 5 bytes; it has 6 now",
            ),
            (
                prepared(vec![SourceImage { qcow2: true, ..image("disk.raw", 5) }], None, None),
                "with --target-format raw",
            ),
            (prepared(same.clone(), Some("qemu"), None), "without --owner"),
            (
                prepared(same.clone(), None, Some("/run/other.qmp")),
                "with '/run/new.qmp' as --target-qmp",
            ),
        ] {
            assert_eq!(says(now).as_deref(), Some(why));
        }
    }
}
