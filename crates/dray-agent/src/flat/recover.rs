//! Ends interrupted exchanges of disks, and lets their guests continue: exchanges in which the
//! agent before this one was killed, and those of which this agent does not know the end. What ends them is in
//! [`FlatDisks`](dray_vm::flat::turn::FlatDisks). What has not ended is tried again, and until then no command touches
//! the disk.

use crate::agent::Agent;
use dray_host::registry::Entry;
use dray_vm::flat::turn::{is_under_way, turn_of};
use dray_vm::leaving::Leaving;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two tries.
const AGAIN: Duration = Duration::from_secs(2);

impl Agent {
    /// Ends what was left half done. What cannot be ended now is tried again in the background; `stopped` are the
    /// disks whose guests may be stopped until then.
    pub(crate) async fn end_exchanges(self: &Arc<Self>, stopped: Vec<Leaving>) {
        let is_under_way = |entry: &Arc<Entry>| is_under_way(&entry.record());
        let left: Vec<_> = self.registry.all().into_iter().filter(is_under_way).collect();
        let mut left = self.not_ended(left).await;
        if left.is_empty() {
            return;
        }
        let agent = Arc::clone(self);
        tokio::spawn(async move {
            while !left.is_empty() {
                tokio::time::sleep(AGAIN).await;
                left = agent.not_ended(left).await;
            }
            drop(stopped);
        });
    }

    /// Tries to end exchanges; those that have not come to an end.
    async fn not_ended(&self, entries: Vec<Arc<Entry>>) -> Vec<Arc<Entry>> {
        let mut left = Vec::new();
        for entry in entries {
            // Its migration may be at it.
            let ended = match self.registry.operate_anyway(&entry.record().name, "release") {
                Ok(_operation) => self.flat_disks().end_exchange(&*self.hypervisor, &entry).await,
                Err(_) => Err(io::Error::other("another operation works on the image")),
            };
            self.tell_exchange(&entry, ended.as_ref().err());
            if ended.is_err() {
                left.push(entry);
            }
        }
        left
    }

    fn tell_exchange(&self, entry: &Entry, why: Option<&io::Error>) {
        let image = entry.record().name;
        let key = format!("exchange.{image}");
        let what = format!("the exchange of the disk of image '{image}' has not ended");
        let hint = format!(
            "the agent tries again until the vm's QEMU answers at its QMP socket or has ended; if \
             that QEMU itself waits for this disk, `dray unstall {image} --fail` lets it \
             continue, and fails the requests for which it waits"
        );
        self.troubles.settle(&key, &what, why, &hint);
    }

    /// Tries once more to end the exchanges that this agent has begun itself, and of which it does not know how they
    /// ended.
    pub(super) async fn end_broken_off(&self) {
        for entry in self.registry.all() {
            let record = entry.record();
            // Where somebody is at it, it is not broken off. A swap is a migration's, which waits for its end.
            let taken = match (turn_of(&record), &record.swap) {
                (Some(_), _) => self.registry.operate(&record.name, "release"),
                (None, Some(swap)) if swap.is_under_way() => {
                    self.registry.operate_anyway(&record.name, "release")
                }
                _ => continue,
            };
            let Ok(_operation) = taken else { continue };
            let ended = self.flat_disks().end_exchange(&*self.hypervisor, &entry).await;
            self.tell_exchange(&entry, ended.as_ref().err());
        }
    }
}
