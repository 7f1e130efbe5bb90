//! A running VM's disk leaves its chain: the guest stops for a moment, and continues over an overlay.

use super::FlatDisks;
use crate::flat::barred::chain_error;
use crate::flat::{QUIET, held_back, layers_of, names_of, others};
use crate::look::process_of;
use crate::released::taking::export;
use crate::{own_files, qemu_error};
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_host::abort;
use dray_host::flat::{Flat, open_overlay};
use dray_host::record::ImageRecord;
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_image::Quiesced;
use dray_qemu::flatten::{self, On};
use dray_qemu::{LayerPlan, Qmp, Stopped, Watched};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::block_in_place;

/// Refuses a chain of which a file has another name by now than QEMU knows it by: the daemon has opened what lies
/// there.
///
/// # Errors
/// Which file, or what QEMU reports.
pub async fn check_chain(what: &str, qmp: &Qmp, layers: &[LayerPlan]) -> ApiResult<()> {
    let Some(vm) = process_of(qmp) else { return Ok(()) };
    for layer in layers {
        own_files::check_layer(what, &vm, qmp, layer, None).await?;
    }
    Ok(())
}

impl FlatDisks<'_> {
    /// Makes the empty overlay of a chain, and registers both as an image.
    ///
    /// # Errors
    /// What the file system or the store reports, or that the name is taken. No overlay is left behind.
    pub fn add_flat(&self, what: &str, record: ImageRecord) -> ApiResult<Arc<Entry>> {
        let id = record.id;
        let names = names_of(&record).map_err(|why| io_error(what, why))?;
        names.create_overlay(id, record.len).map_err(|why| io_error(what, why))?;
        let direct = self.registry.is_direct(&record.path);
        let added = open_overlay(&record, direct)
            .map_err(io::Error::other)
            .and_then(|file| self.registry.add(record, Arc::new(file)));
        added.map_err(|why| {
            let taken = why.kind() == io::ErrorKind::AlreadyExists;
            if let Err(why) = names.remove_overlay(id) {
                tracing::warn!(%why, "cannot remove an overlay");
            }
            let kind = if taken { ErrorKind::Conflict } else { ErrorKind::Io };
            Refusal::new(kind, what, why)
        })
    }

    /// Puts a disk of a chain that is [added](Self::add_flat) on its overlay. `guest`: what the record of the chain says
    /// of whether it runs. On failure the guest is on its chain, and
    /// nothing is left behind, unless the chain cannot be put back: then the disk stays with dray.
    ///
    /// # Errors
    /// What QEMU, the file system or the store reports.
    pub async fn freeze(
        &self,
        what: &str,
        qmp: &Qmp,
        entry: &Entry,
        guest: Watched,
    ) -> ApiResult<()> {
        let failed = |why: dray_qemu::Error| qemu_error(what, &why);
        let ran = guest.running();
        let layers = layers_of(&entry.record()).map_err(|why| io_error(what, why))?;
        let _taking = entry.flat.as_ref().map(Flat::take);
        // What somebody else writes before its disk is there is lost if that comes to nothing.
        others::hold_all_back(entry);
        abort::before(|| vec!["FlattenStops".to_owned()]);
        let stopped = guest.stop(qmp).await.map_err(failed);
        let running = stopped.as_ref().map_or(ran, Stopped::was_running);
        let mut held = None;
        let turned = match &stopped {
            Ok(stopped) => self.turn_away(what, qmp, entry, &layers, (stopped, &mut held)).await,
            Err(why) => Err(why.clone()),
        };
        let on = match turned {
            Ok(()) => Ok(On::Export),
            Err(_) => {
                let held = (stopped.as_ref().ok(), &mut held);
                self.undo_freeze(qmp, entry, &layers, held).await
            }
        };
        if on.is_err() {
            // What is written to the overlay alone, or to the chain alone, would be lost if it is the other one.
            held.take().map_or_else(|| entry.disk.park_now(), |held| entry.disk.park(held));
        }
        if matches!(on, Ok(On::Chain)) {
            // Whoever waits would write to what goes.
            entry.disk.park_now();
            entry.disk.fail_parked();
        }
        drop(held);
        if matches!(on, Ok(On::Export)) {
            entry.disk.unpark();
            others::let_go_on(entry);
        }
        self.let_go_on(what, qmp, entry, running).await?;
        let ended = self.end_on(qmp, entry, on);
        turned.and(ended.map_err(|why| io_error(what, why)))
    }

    /// Puts the disk of a stopped guest on its export. Nothing is written there before the chain is hidden,
    /// durably: what is left in `held` holds it back.
    async fn turn_away(
        &self,
        what: &str,
        qmp: &Qmp,
        entry: &Entry,
        layers: &[LayerPlan],
        (stopped, held): (&Stopped, &mut Option<Quiesced>),
    ) -> ApiResult<()> {
        abort::before(|| vec!["FlattenStopped".to_owned()]);
        // The chain is at rest now: what the daemon reads is all there is.
        let opened = entry.flat.as_ref().map_or(Ok(()), |f| block_in_place(|| f.chain.open()));
        opened.map_err(|why| chain_error(what, &why))?;
        check_chain(what, qmp, layers).await?;
        let quiet = block_in_place(|| entry.disk.quiesce(QUIET));
        *held = Some(quiet.map_err(|why| io_error(what, why))?);
        let export = export(self.config, entry.record().name);
        // What the guest writes after the daemon has opened the chain, and before the mirror, is in neither.
        let pivots = AtomicBool::new(false);
        let may_pivot = || stopped.check().map(|()| pivots.store(true, Ordering::SeqCst));
        let flattened = flatten::flatten(qmp, layers, &export, &may_pivot);
        let may_open = || match pivots.load(Ordering::SeqCst) {
            true => self.open_to_vm(entry),
            // The mirror fails with its writes here, and the guest goes on with the chain alone.
            false => {
                entry.disk.park_now();
                entry.disk.fail_parked();
                false
            }
        };
        let flattened = held_back(flattened, stopped, held, may_open).await;
        flattened.map_err(|why| qemu_error(what, &why))?;
        abort::before(|| vec!["FlattenPivoted".to_owned()]);
        self.hide_chain(entry).map_err(|why| io_error(what, why))?;
        abort::before(|| vec!["FlattenHidden".to_owned()]);
        Ok(())
    }

    /// The guest goes on: once the chain is hidden, its QEMU may write to the overlay. Whether it may.
    fn open_to_vm(&self, entry: &Entry) -> bool {
        let opened = block_in_place(|| {
            self.hide_chain(entry)?;
            let record = entry.record();
            let monitor = record.adopted.as_ref().and_then(|adopted| adopted.qemu.as_ref());
            others::hold_back(self.registry, entry, &names_of(&record)?, monitor)
        });
        opened.is_ok()
    }

    /// Back on the chain, while the overlay is empty. A disk that cannot be put back stays where it
    /// is, which serves it as well. Says where it is.
    ///
    /// # Errors
    /// When that is not known, or cannot be written down.
    async fn undo_freeze(
        &self,
        qmp: &Qmp,
        entry: &Entry,
        layers: &[LayerPlan],
        (stopped, held): (Option<&Stopped>, &mut Option<Quiesced>),
    ) -> io::Result<On> {
        let settle = || async { flatten::settle(qmp, layers).await.map_err(io::Error::other) };
        // It may have been hidden for a guest that was let go on.
        let on_chain =
            || names_of(&entry.record())?.thaw_chain(entry.record().mode).map_err(io::Error::other);
        if settle().await? == On::Chain {
            on_chain()?;
            return Ok(On::Chain);
        }
        let undone = async {
            let Some(stopped) = stopped else { return Err(io::Error::other("its guest runs")) };
            if let Some(flat) = &entry.flat {
                block_in_place(|| flat.chain.finish())?;
            }
            on_chain()?;
            let pivots = AtomicBool::new(false);
            let may_pivot = || stopped.check().map(|()| pivots.store(true, Ordering::SeqCst));
            let may_open = || !pivots.load(Ordering::SeqCst) && self.open_to_vm(entry);
            let home = flatten::unflatten(qmp, layers, &may_pivot);
            held_back(home, stopped, held, may_open).await.map_err(io::Error::other)
        };
        let Err(why) = undone.await else { return Ok(On::Chain) };
        if settle().await? == On::Chain {
            on_chain()?;
            return Ok(On::Chain);
        }
        tracing::error!(%why, "a disk that could not be flattened stays with dray");
        self.hide_chain(entry)?;
        if let Some(flat) = &entry.flat {
            self.read_again(flat);
        }
        Ok(On::Export)
    }
}
