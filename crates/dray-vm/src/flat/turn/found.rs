//! Ends an exchange that was interrupted, where the disk is found to be, and lets its guest continue.
//!
//! Only its VM can say where the disk is. A VM whose process has ended says nothing any more: then the names of the
//! files decide. One that runs and does not answer is asked again until it does; until then nothing of the exchange is
//! undone.

use super::{FlatDisks, is_under_way, turn_of};
use crate::flat::swap::settle_swap;
use crate::flat::{layers_of, names_of, others};
use crate::hypervisor::Hypervisor;
use crate::own;
use dray_host::record::ImageRecord;
use dray_host::record::chain::Turn;
use dray_host::registry::Entry;
use dray_qemu::Qmp;
use dray_qemu::flatten::{self, On};
use std::io;

impl FlatDisks<'_> {
    /// Ends an exchange that an agent has not seen to its end, also one between a raw image and its qcow2. Nothing is
    /// done while its VM runs and does not answer.
    ///
    /// # Errors
    /// Why it has not ended: it is to be tried again.
    pub async fn end_exchange(&self, hypervisor: &dyn Hypervisor, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if !is_under_way(&record) {
            return Ok(());
        }
        if let Some(swap) = record.swap {
            let vm = own::find(hypervisor, &swap.qmp, swap.qemu.as_ref()).await;
            let vm = vm.map_err(io::Error::other)?;
            let qmp = vm.as_ref().map(|vm| vm.monitor());
            return settle_swap(self.registry, entry, swap, qmp).await;
        }
        let (Some(turn), Some(adopted)) = (turn_of(&record), &record.adopted) else {
            return Ok(());
        };
        let vm = own::find(hypervisor, &adopted.qmp, adopted.qemu.as_ref()).await;
        match vm.map_err(io::Error::other)? {
            Some(vm) => self.end_turn_of(vm.monitor(), entry, turn).await,
            None => self.end_found(entry, &record),
        }
    }

    /// Ends it with its VM, which says where it has the disk.
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
                others::let_go_on(entry);
            }
        }
        let goes_on = self.let_go_on("cannot let a guest continue", qmp, entry, turn.running).await;
        goes_on.map_err(io::Error::other)?;
        self.end_on(qmp, entry, Ok(on))
    }

    /// Ends it without a VM: nobody has the disk. The chain has everything, or waits under its hidden name to be merged: `keep_flat`
    /// brings home what the guest wrote.
    fn end_found(&self, entry: &Entry, record: &ImageRecord) -> io::Result<()> {
        let empty = entry.flat.as_ref().is_some_and(|flat| flat.overlay.here_count() == 0);
        if record.may_be_home() || empty {
            names_of(record)?.thaw_chain(record.mode).map_err(io::Error::other)?;
            return self.forget_flat(entry);
        }
        self.hide_chain(entry)?;
        entry.disk.unpark();
        others::let_go_on(entry);
        self.end_turn(entry)
    }
}
