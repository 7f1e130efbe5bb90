//! Takes a running VM's disk from its chain: the guest stops for a moment, and continues over an
//! overlay.
//!
//! It is durable before the guest stops that it is to run again; whoever finds that after a crash
//! ([`Agent::end_exchanges`]) lets it go on where its disk is by then.

use super::recover::turn_of;
use crate::agent::Agent;
use crate::ops::splice::adopted_name;
use dray_api::{ApiResult, ErrorKind, Refusal, SplicedDisk};
use dray_host::abort;
use dray_host::flat::{Flat, open_overlay};
use dray_host::record::chain::{FlatRecord, Turn};
use dray_host::record::{ImageRecord, NameKind};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_host::{refusals::random_id, registry::real_path};
use dray_image::{Quiesced, names};
use dray_qemu::flatten::{self, On};
use dray_qemu::{AdoptOptions, LayerPlan, Qmp, Stopped, status};
use dray_types::ImageId;
use dray_vm::flat::barred::chain_error;
use dray_vm::flat::{QUIET, chain_of, held_back, layers_of, names_of};
use dray_vm::look::process_of;
use dray_vm::picture::{LayerPicture, Picture};
use dray_vm::released::note_made;
use dray_vm::released::taking::export;
use dray_vm::{own, own_files, qemu_error};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::task::block_in_place;

/// Where QEMU has the active image of a flattened image's chain.
fn chain_path(record: &ImageRecord) -> Option<PathBuf> {
    let active = record.flat.as_ref().and_then(|flat| flat.layers.first());
    active.map(|layer| layer.path.clone())
}

/// Refuses a chain of which a file has another name by now than QEMU knows it by: the daemon has opened what lies
/// there.
async fn check_chain(what: &str, qmp: &Qmp, layers: &[LayerPlan]) -> ApiResult<()> {
    let Some(vm) = process_of(qmp) else { return Ok(()) };
    for layer in layers {
        own_files::check_layer(what, &vm, qmp, layer, None).await?;
    }
    Ok(())
}

impl Agent {
    /// Flattens one disk; on failure the guest is on its own chain and nothing is left behind.
    pub(crate) async fn freeze_disk(
        &self,
        picture: &Picture,
        layer: &LayerPicture,
        drop_bitmaps: bool,
        id: Option<ImageId>,
    ) -> ApiResult<SplicedDisk> {
        let what = format!("cannot flatten disk {}", layer.plan.qdev);
        let (qmp, options) = (picture.qmp(), AdoptOptions { drop_bitmaps });
        let failed = |why: dray_qemu::Error| qemu_error(what.clone(), &why);
        self.activate_stopped(&what, picture).await?;
        flatten::check(qmp, &layer.chain, options).await.map_err(failed)?;
        check_chain(&what, qmp, &layer.chain).await?;
        let running = status::status(qmp).await.map_err(failed)?.running;
        let path = real_path(&layer.plan.path()).map_err(|why| io_error(&what, why))?;
        let _operation = self.operate(&what, &adopted_name(&path), "adopt")?;
        let entry = self.register_flat(&what, picture, layer, id, running)?;
        let began = Instant::now();
        let frozen = self.freeze(&what, qmp, &entry, running).await;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        let record = entry.record();
        frozen?;
        tracing::info!(image = record.name, ms, "flattened");
        Ok(SplicedDisk {
            device: layer.plan.qdev.clone(),
            node: layer.plan.nbd_node(),
            image: record.name,
            path: record.path,
            ms,
        })
    }

    /// Registers a chain with an empty overlay. The guest is on the chain itself, as before.
    fn register_flat(
        &self,
        what: &str,
        picture: &Picture,
        layer: &LayerPicture,
        id: Option<ImageId>,
        running: bool,
    ) -> ApiResult<Arc<Entry>> {
        let failed = |why: &dyn std::fmt::Display| io_error(what, why);
        let plan = &layer.plan;
        self.check_file(what, &plan.path(), false)?;
        let path = real_path(&plan.path()).map_err(|why| failed(&why))?;
        let layers =
            chain_of(&layer.chain).map_err(|why| Refusal::new(ErrorKind::Conflict, what, why))?;
        let id = match id {
            Some(id) => id,
            None => ImageId(random_id()?),
        };
        let record = ImageRecord {
            mode: names::file_mode(&path).map_err(|why| failed(&why))?,
            format: Some("raw".to_owned()),
            adopted: Some(self.adopted_by(what, picture, plan, &layer.chain)?),
            flat: Some(FlatRecord {
                layers,
                turn: Some(Turn { home: false, running, done: false }),
                overlay: None,
            }),
            ..ImageRecord::owned(adopted_name(&path), id, path, plan.size)
        };
        let added = self.add_flat(what, record)?;
        block_in_place(|| self.hold_peeks(&added));
        Ok(added)
    }

    /// Makes the empty overlay of a chain, and registers both as an image.
    fn add_flat(&self, what: &str, record: ImageRecord) -> ApiResult<Arc<Entry>> {
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

    /// Nobody else has the chain open while its disk is exchanged.
    pub(super) fn hold_peeks(&self, entry: &Entry) {
        if let Some(path) = chain_path(&entry.record()) {
            self.registry.peeks.hold(&path);
        }
    }

    async fn freeze(&self, what: &str, qmp: &Qmp, entry: &Entry, running: bool) -> ApiResult<()> {
        let failed = |why: dray_qemu::Error| qemu_error(what, &why);
        let layers = layers_of(&entry.record()).map_err(|why| io_error(what, why))?;
        let _taking = entry.flat.as_ref().map(Flat::take);
        let stopped = Stopped::begin(qmp, running).await.map_err(failed);
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
        drop(held);
        if matches!(on, Ok(On::Export)) {
            entry.disk.unpark();
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
        let export = export(&self.config, entry.record().name);
        // What the guest writes after the daemon has opened the chain, and before the mirror, is in neither.
        let pivots = AtomicBool::new(false);
        let may_pivot = || stopped.check().map(|()| pivots.store(true, Ordering::SeqCst));
        let flattened = flatten::flatten(qmp, layers, &export, &may_pivot);
        let may_open = || match pivots.load(Ordering::SeqCst) {
            true => block_in_place(|| self.hide_chain(entry)).is_ok(),
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

    /// Ends an exchange whose guest runs again, where the disk is.
    pub(super) fn end_on(&self, qmp: &Qmp, entry: &Entry, on: io::Result<On>) -> io::Result<()> {
        let ended = match on {
            Ok(On::Export) => self.end_turn(entry),
            Ok(On::Chain) => self.forget_home(qmp, entry),
            Err(unknown) => Err(unknown),
        };
        self.ended_or_goes_on(entry, ended)
    }

    /// An exchange whose guest runs again has ended, unless `ended` is an error: then its end is tried again. Its
    /// guest is not let go on once more then, which its user may have stopped by that time.
    fn ended_or_goes_on(&self, entry: &Entry, ended: io::Result<()>) -> io::Result<()> {
        let Err(why) = &ended else { return Ok(()) };
        let record = entry.record();
        let image = &record.name;
        tracing::error!(image, %why, "the exchange of a disk has not ended; the agent tries again");
        let turn = turn_of(&record).map(|turn| Turn { running: false, ..turn });
        if let Err(why) = self.set_turn(entry, record.place, turn) {
            tracing::warn!(image, %why, "cannot record that a guest runs again");
        }
        ended
    }

    /// An exchange is over and its guest runs again. Until then the turn is durable, so that whoever
    /// finds it lets the guest go on. One whose QEMU has ended needs nobody; a connection that has closed says
    /// nothing of that.
    pub(super) async fn let_go_on(
        &self,
        what: &str,
        qmp: &Qmp,
        entry: &Entry,
        running: bool,
    ) -> ApiResult<()> {
        if !running {
            return Ok(());
        }
        let adopted = entry.record().adopted;
        let ended = || adopted.is_some_and(|vm| own::has_ended(&vm.qmp, vm.qemu.as_ref()));
        match status::cont(qmp).await {
            Err(_) if ended() => Ok(()),
            ran => ran.map_err(|why| qemu_error(what, &why)),
        }
    }

    /// The disk is on its overlay and its guest runs as before.
    pub(super) fn end_turn(&self, entry: &Entry) -> io::Result<()> {
        self.set_turn(entry, NameKind::Chain, None)?;
        let record = entry.record();
        if let Some(path) = chain_path(&record) {
            self.registry.peeks.go_on(&path, &names_of(&record)?.chain());
        }
        Ok(())
    }

    /// The guest is on the overlay: the chain's active file loses its name. Can be repeated.
    pub(super) fn hide_chain(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let names = names_of(&record)?;
        names.freeze_chain().map_err(io::Error::other)?;
        if let Some(flat) = &entry.flat {
            flat.chain.moved(&names.chain());
        }
        self.set_turn(entry, NameKind::Chain, record.flat.and_then(|flat| flat.turn))
    }

    pub(super) fn set_turn(
        &self,
        entry: &Entry,
        place: NameKind,
        turn: Option<Turn>,
    ) -> io::Result<()> {
        self.registry.update(entry, |record| {
            record.place = place;
            if let Some(flat) = &mut record.flat {
                flat.turn = turn;
            }
        })
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
            let hides = || block_in_place(|| self.hide_chain(entry)).is_ok();
            let may_open = || !pivots.load(Ordering::SeqCst) && hides();
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

    /// QEMU has the disk on its chain again: what was made for it goes. Where QEMU's command line does
    /// not tell how the chain's nodes are made, a note does, as before the disk was flattened.
    pub(super) fn forget_home(&self, qmp: &Qmp, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if record.adopted.as_ref().is_some_and(|adopted| adopted.noted) {
            let layers = layers_of(&record)?;
            let (id, format) = (random_id().map_err(io::Error::other)?, &layers[0].format);
            let (id, format) = (ImageId(id), Some(format.clone()));
            let (adopted, flat, migration, place) = (None, None, None, NameKind::Named);
            let image = ImageRecord { id, format, adopted, flat, migration, place, ..record };
            note_made(&self.registry, qmp, &layers[0], image)?;
        }
        self.forget_flat(entry)
    }

    /// The disk is on its chain, which has everything: what was made for it goes.
    pub(super) fn forget_flat(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        // The record last: as long as it is there a restart does this again.
        names_of(&record)?.remove_overlay(record.overlay_id()).map_err(io::Error::other)?;
        self.registry.forget(&record.name)?;
        if let Some(path) = chain_path(&record) {
            self.registry.peeks.go_on(&path, &path);
        }
        Ok(())
    }
}
