//! A flattened disk goes home: what is in its overlay is merged into the chain by QEMU's own daemon,
//! and the disk is put back on it.
//!
//! The guest writes meanwhile, into the overlay; it stops for the rest and the exchange. The overlay
//! is the truth until the chain has everything durably, so a death anywhere means doing it again.

use super::{FlatDisks, turn_of};
use crate::flat::merge::{merge_most, merge_rest};
use crate::flat::{QUIET, held_back, layers_of, names_of};
use crate::leaving::{Leaving, refuse_untold, take_note};
use crate::qemu_error;
use crate::released::taking::export;
use dray_api::{ApiResult, ErrorKind, Refusal, SplicedDisk};
use dray_host::abort;
use dray_host::flat::Flat;
use dray_host::record::chain::{ChainLayer, Turn};
use dray_host::record::{ImageRecord, NameKind};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_image::Quiesced;
use dray_qemu::flatten::{self, On};
use dray_qemu::{LayerPlan, Qmp, Watched};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::task::block_in_place;

/// Pause between two tries to write down where a disk is.
const AGAIN: Duration = Duration::from_secs(1);

/// Refuses a disk of which it is not known where it is.
fn refuse_turning(what: &str, record: &ImageRecord) -> ApiResult<()> {
    if turn_of(record).is_none() {
        return Ok(());
    }
    let why = "an exchange of its disk was interrupted, and its vm has not answered since";
    Err(Refusal::new(ErrorKind::Conflict, what, why)
        .hint("wait until its QEMU answers at its QMP socket, then try again"))
}

/// Refuses a chain of which a file below the active image is not as it was when the disk was flattened.
fn check_below(record: &ImageRecord) -> io::Result<()> {
    let layers = record.flat.iter().flat_map(|flat| &flat.layers);
    layers.into_iter().try_for_each(ChainLayer::check_unwritten)
}

fn changed_below(what: &str, why: io::Error) -> Refusal {
    Refusal::new(ErrorKind::Conflict, what, why).hint(
        "the guest goes on with what dray has open; put the file back that was there, then try again",
    )
}

/// Merges the rest; nobody writes.
fn merge_last(entry: &Entry) -> io::Result<()> {
    entry.flat.as_ref().map_or(Ok(()), |flat| merge_rest(&*flat.overlay, &*flat.chain))
}

impl FlatDisks<'_> {
    /// Puts a flattened disk back on its chain. On failure it stays where it is and is served.
    ///
    /// # Errors
    /// What QEMU, the file system or the store reports, or that the guest is to be told of a loss.
    pub async fn bring_home(&self, qmp: &Qmp, entry: &Entry) -> ApiResult<SplicedDisk> {
        let record = entry.record();
        let what = format!("cannot put image '{}' back on its chain", record.name);
        let Some(flat) = &entry.flat else {
            return Err(Refusal::new(ErrorKind::Internal, what, "it is not flattened"));
        };
        refuse_turning(&what, &record)?;
        let layers = layers_of(&record).map_err(|why| io_error(&what, why))?;
        block_in_place(|| check_below(&record)).map_err(|why| changed_below(&what, why))?;
        self.merge_ahead(&what, entry, flat)?;
        abort::before(|| vec!["HomeMerged".to_owned()]);
        let export = export(self.config, record.name.clone());
        let on_export = flatten::check_export(qmp, &layers[0], &export).await;
        on_export.map_err(|why| qemu_error(&what, &why))?;
        let guest = Watched::begin(qmp).await.map_err(|why| qemu_error(&what, &why))?;
        let mut running = guest.running();
        let began = Instant::now();
        // Until the guest goes on, wherever it is then.
        let leaving = Leaving::begin(entry).map_err(|loss| {
            self.read_again(flat);
            loss.refused(&what)
        })?;
        let mut quiet = None;
        let told = (&leaving, &mut running, &mut quiet);
        let home = self.turn_home(&what, qmp, entry, &layers, guest, told).await;
        let on = match &home {
            Ok(()) => Ok(On::Chain),
            Err(_) => self.stay(qmp, entry, &layers).await,
        };
        let is_home = matches!(on, Ok(On::Chain));
        self.close_overlay(entry, &on, running, quiet).await;
        self.let_go_on(&what, qmp, entry, running).await?;
        drop(leaving);
        abort::step("HomeForget");
        let ended = self.end_on(qmp, entry, on);
        if !is_home {
            home?;
        }
        ended.map_err(|why| io_error(&what, why))?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        tracing::info!(image = record.name, ms, "back on its chain");
        let active = &layers[0];
        let node = active.format_node().unwrap_or_else(|| active.local_node()).to_owned();
        let (device, image, path) = (active.qdev.clone(), record.name, record.path);
        Ok(SplicedDisk { device, node, image, path, ms })
    }

    /// Merges most of the overlay while the guest goes on, unless a loss is to be told first.
    fn merge_ahead(&self, what: &str, entry: &Entry, flat: &Flat) -> ApiResult<()> {
        refuse_untold(entry).map_err(|loss| loss.refused(what))?;
        block_in_place(|| merge_most(&*flat.overlay, &*flat.chain)).map_err(|why| {
            self.read_again(flat);
            io_error(what, why)
        })
    }

    /// Stops the guest, merges the rest and puts the disk on its chain. From the moment at which it may be there its
    /// writes are held back by what is left in `held`. `running`: whether it is to go on afterwards.
    async fn turn_home(
        &self,
        what: &str,
        qmp: &Qmp,
        entry: &Entry,
        layers: &[LayerPlan],
        guest: Watched,
        (leaving, running, held): (&Leaving, &mut bool, &mut Option<Quiesced>),
    ) -> ApiResult<()> {
        let failed = |why: dray_qemu::Error| qemu_error(what, &why);
        let turn = Some(Turn { home: true, running: *running, done: false });
        let io = |why| io_error(what, why);
        block_in_place(|| self.hold_peeks(entry));
        self.set_turn(entry, NameKind::Chain, turn).map_err(io)?;
        let stopped = guest.stop(qmp).await.map_err(failed)?;
        *running = stopped.was_running();
        abort::before(|| vec!["HomeStopped".to_owned()]);
        let quiet =
            block_in_place(|| entry.disk.quiesce(QUIET)).map_err(|why| io_error(what, why))?;
        block_in_place(|| merge_last(entry)).map_err(io)?;
        leaving.check_copied().map_err(|loss| loss.refused(what))?;
        *held = Some(quiet);
        block_in_place(|| self.show_chain(entry, turn)).map_err(io)?;
        abort::before(|| vec!["HomeNamed".to_owned()]);
        // A guest that is let go on before the pivot writes to the overlay, once the chain is hidden.
        let give_up = || block_in_place(|| self.hide_chain(entry)).is_ok();
        // Its reads would wait for the chain, and the exchange for them. QEMU may wait for its writes before it answers.
        let still = held_back(stopped.check_now(qmp), &stopped, held, give_up).await;
        if let Err(why) = still {
            held.take_if(|_| give_up());
            return Err(failed(why));
        }
        let pivots = AtomicBool::new(false);
        let may_pivot = || {
            abort::step("HomePivots");
            // QEMU has opened what lies below by its path.
            check_below(&entry.record()).map_err(|why| {
                dray_qemu::Error::new(dray_qemu::ErrorKind::Mismatch, why.to_string())
            })?;
            stopped.check().map(|()| pivots.store(true, Ordering::SeqCst))
        };
        let may_open = || !pivots.load(Ordering::SeqCst) && give_up();
        let home = flatten::unflatten(qmp, layers, &may_pivot);
        let home = held_back(home, &stopped, held, may_open).await;
        home.map_err(failed)?;
        abort::before(|| vec!["HomePivoted".to_owned()]);
        Ok(())
    }

    /// The chain's active file gets its name: it holds everything.
    fn show_chain(&self, entry: &Entry, turn: Option<Turn>) -> io::Result<()> {
        let Some(flat) = &entry.flat else { return Ok(()) };
        let record = entry.record();
        // Recorded first: somebody may start the VM on the chain as soon as it has its name, and what is then
        // written to it is newer than the overlay.
        self.set_turn(entry, NameKind::Named, turn)?;
        abort::step("HomeShows");
        names_of(&record)?.thaw_chain(record.mode).map_err(io::Error::other)?;
        flat.chain.moved(&record.path);
        Ok(())
    }

    /// It came to nothing: the disk stays on the overlay, unless it is home already.
    async fn stay(&self, qmp: &Qmp, entry: &Entry, layers: &[LayerPlan]) -> io::Result<On> {
        let on = flatten::settle(qmp, layers).await.map_err(io::Error::other)?;
        if on == On::Export {
            let hidden = self.hide_chain(entry);
            if let Some(flat) = &entry.flat {
                self.read_again(flat);
            }
            hidden?;
        }
        Ok(on)
    }

    /// Nothing is written to the overlay any more, unless the disk is on it: that would be lost, or would undo what
    /// the guest writes to the chain.
    async fn close_overlay(
        &self,
        entry: &Entry,
        on: &io::Result<On>,
        running: bool,
        quiet: Option<Quiesced>,
    ) {
        if matches!(on, Ok(On::Export)) {
            return;
        }
        quiet.into_iter().for_each(|quiet| entry.disk.park(quiet));
        if on.is_ok() {
            self.note_home(entry, running).await;
            entry.disk.fail_parked();
        }
    }

    /// Writes down that a disk is on its chain, before its guest writes there: merging the overlay once
    /// more would undo that. Where that cannot be written it is forgotten what the overlay holds, which
    /// needs no room; until one of them is durable the guest waits.
    async fn note_home(&self, entry: &Entry, running: bool) {
        loop {
            let turn = Some(Turn { home: true, running, done: true });
            let Err(why) = self.set_turn(entry, NameKind::Named, turn) else { return };
            let image = entry.record().name;
            tracing::error!(image, %why, "cannot record where a disk is");
            match self.registry.forget_overlay(&image) {
                Ok(()) => return,
                Err(why) => {
                    tracing::error!(image, %why, "its guest waits until the agent can record it")
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Merges the overlay of a disk whose VM is gone into its chain, which gets its name back. Not while a
    /// loss is untold: who looks after the VM has to know of it before it is started again.
    ///
    /// # Errors
    /// The same, or the loss. The overlay is the truth then as before.
    pub fn bring_home_alone(&self, entry: &Entry) -> io::Result<()> {
        let Some(flat) = &entry.flat else { return Ok(()) };
        let leaving = Leaving::begin(entry).map_err(|loss| {
            let hint = take_note(&entry.record().name, &self.config.nbd_socket());
            io::Error::other(format!("{loss}; {hint}"))
        })?;
        let quiet = entry.disk.quiesce(QUIET).map_err(io::Error::other)?;
        flat.overlay.unmerge();
        self.hold_peeks(entry);
        let home = flat.chain.set_writable(true).and_then(|()| {
            let turn = Some(Turn { home: true, running: false, done: false });
            self.set_turn(entry, NameKind::Chain, turn)?;
            merge_last(entry)?;
            leaving.check_copied()?;
            self.show_chain(entry, turn)
        });
        if let Err(why) = home {
            drop(quiet);
            self.hide_chain(entry)?;
            self.end_turn(entry)?;
            self.read_again(flat);
            return Err(why);
        }
        // A QEMU that comes back is told that there is no such export.
        entry.disk.park(quiet);
        entry.disk.fail_parked();
        self.forget_flat(entry)
    }
}
