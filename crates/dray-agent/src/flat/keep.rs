//! Looks after flattened disks that nobody else looks after: those whose VM has ended, and those that have left.

use crate::agent::Agent;
use dray_host::record::CopyState;
use dray_host::registry::Entry;
use dray_vm::own;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// How often is looked for flattened disks whose VM is gone.
const LOOK: Duration = Duration::from_secs(5);
/// A VM that was gone for so many looks is.
const GONE: u32 = 3;

impl Agent {
    /// Whether nobody can be using a flattened disk: no VM answers, and no client is attached
    /// or comes back.
    fn is_left_alone(&self, entry: &Entry) -> bool {
        let record = entry.record();
        let idle = record.state == CopyState::Owner
            && record.migration.is_none()
            && record.flat.as_ref().is_some_and(|flat| flat.turn.is_none())
            && self.user_of_image(entry).is_none();
        let Some(adopted) = record.adopted.filter(|_| idle) else { return false };
        own::has_ended(&adopted.qmp, adopted.qemu.as_ref())
    }

    /// The chains of images that have left are not read any more once they are verified: their
    /// daemons end when nobody has asked since the last look.
    fn rest_replicas(&self, asked: &mut BTreeMap<String, u64>) {
        for entry in self.registry.all() {
            let (record, Some(flat)) = (entry.record(), &entry.flat) else { continue };
            if record.state != CopyState::Replica || record.migration.is_some() {
                continue;
            }
            let now = flat.chain.asked();
            if asked.insert(record.name, now) == Some(now) {
                flat.chain.rest();
            }
        }
    }

    /// Looks now and then for flattened disks whose VM has ended, and brings them home; and for
    /// daemons that are of no more use.
    pub(crate) async fn keep_flat(self: Arc<Self>) {
        let mut looks: BTreeMap<String, u32> = BTreeMap::new();
        let mut asked = BTreeMap::new();
        loop {
            tokio::time::sleep(LOOK).await;
            block_in_place(|| self.rest_replicas(&mut asked));
            self.end_broken_off().await;
            let mut left = BTreeMap::new();
            for entry in self.registry.all().into_iter().filter(|entry| entry.flat.is_some()) {
                if !self.is_left_alone(&entry) {
                    continue;
                }
                let name = entry.record().name;
                let seen = looks.get(&name).copied().unwrap_or(0) + 1;
                if seen < GONE {
                    left.insert(name, seen);
                    continue;
                }
                match block_in_place(|| self.flat_disks().bring_home_alone(&entry)) {
                    Ok(()) => {
                        tracing::info!(image = name, "its vm has ended: merged into its chain")
                    }
                    Err(why) => {
                        tracing::error!(image = name, %why, "cannot merge an image into its chain");
                    }
                }
            }
            looks = left;
        }
    }
}
