//! Ends interrupted exchanges of disks, and lets their guests continue: exchanges in which the
//! agent before this one was killed, and those of which this agent does not know the end.
//!
//! Where the disk is decides, and only its VM can say that. A VM whose process has ended says nothing any more:
//! then the names of the files decide. One that runs and does not answer is asked again until it does; until
//! then nothing of the exchange is undone, and no command touches the disk.

use crate::agent::Agent;
use dray_host::record::chain::Turn;
use dray_host::record::{ImageRecord, Swap};
use dray_host::registry::Entry;
use dray_qemu::Qmp;
use dray_qemu::flatten::{self, On};
use dray_vm::flat::swap::settle_swap;
use dray_vm::flat::{layers_of, names_of};
use dray_vm::leaving::Leaving;
use dray_vm::own;
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
                Ok(_operation) => self.end_exchange(&entry).await,
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
            let ended = self.end_exchange(&entry).await;
            self.tell_exchange(&entry, ended.as_ref().err());
        }
    }

    async fn end_exchange(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if !is_under_way(&record) {
            return Ok(());
        }
        if let Some(swap) = record.swap {
            let vm = own::find(&*self.hypervisor, &swap.qmp, swap.qemu.as_ref()).await;
            let vm = vm.map_err(io::Error::other)?;
            let qmp = vm.as_ref().map(|vm| vm.monitor());
            return settle_swap(&self.registry, entry, swap, qmp).await;
        }
        let (Some(turn), Some(adopted)) = (turn_of(&record), &record.adopted) else {
            return Ok(());
        };
        let vm = own::find(&*self.hypervisor, &adopted.qmp, adopted.qemu.as_ref()).await;
        match vm.map_err(io::Error::other)? {
            Some(vm) => self.end_turn_of(vm.monitor(), entry, turn).await,
            None => self.end_found(entry, &record),
        }
    }

    async fn end_turn_of(&self, qmp: &Qmp, entry: &Entry, turn: Turn) -> io::Result<()> {
        let record = entry.record();
        let on = flatten::settle(qmp, &layers_of(&record)?).await.map_err(io::Error::other)?;
        match on {
            // It never left, or it is back: either way nothing is in the overlay alone.
            On::Chain => {
                names_of(&record)?.thaw_chain(record.mode).map_err(io::Error::other)?;
                entry.disk.fail_parked();
            }
            On::Export => {
                self.hide_chain(entry)?;
                if let Some(flat) = entry.flat.as_ref().filter(|_| turn.home) {
                    self.read_again(flat);
                }
                entry.disk.unpark();
            }
        }
        let goes_on = self.let_go_on("cannot let a guest continue", qmp, entry, turn.running).await;
        goes_on.map_err(io::Error::other)?;
        self.end_on(qmp, entry, Ok(on))
    }

    /// Nobody has the disk. The chain has everything, or waits under its hidden name to be merged: `keep_flat`
    /// brings home what the guest wrote.
    fn end_found(&self, entry: &Entry, record: &ImageRecord) -> io::Result<()> {
        let empty = entry.flat.as_ref().is_some_and(|flat| flat.overlay.here_count() == 0);
        if record.may_be_home() || empty {
            names_of(record)?.thaw_chain(record.mode).map_err(io::Error::other)?;
            return self.forget_flat(entry);
        }
        self.hide_chain(entry)?;
        entry.disk.unpark();
        self.end_turn(entry)
    }
}

/// Whether an exchange of the disk has not come to its end, or its guest may be stopped since.
fn is_under_way(record: &ImageRecord) -> bool {
    record.swap.as_ref().is_some_and(Swap::is_under_way) || turn_of(record).is_some()
}

/// The exchange that a flattened disk is in.
pub(super) fn turn_of(record: &ImageRecord) -> Option<Turn> {
    record.flat.as_ref().and_then(|flat| flat.turn)
}
