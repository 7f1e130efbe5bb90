//! The exchange of a running VM's disk between its chain and an overlay: away from the chain (`away`), home again
//! (`home`), and what becomes of a disk whose exchange an agent died in (`found`).
//!
//! It is durable before a guest stops that it is to run again (a [`Turn`] of the record); whoever finds that after a
//! crash lets it go on where its disk is by then.

mod away;
mod found;
mod home;

pub use away::check_chain;

use crate::flat::{layers_of, names_of};
use crate::own;
use crate::qemu_error;
use crate::released::note_made;
use dray_api::ApiResult;
use dray_config::Config;
use dray_host::flat::Flat;
use dray_host::record::chain::Turn;
use dray_host::record::{ImageRecord, NameKind, Swap};
use dray_host::refusals::random_id;
use dray_host::registry::{Entry, Registry};
use dray_qemu::flatten::On;
use dray_qemu::{Qmp, status};
use dray_types::ImageId;
use std::io;
use std::path::PathBuf;
use tokio::task::block_in_place;

/// Where QEMU has the active image of a flattened image's chain.
fn chain_path(record: &ImageRecord) -> Option<PathBuf> {
    let active = record.flat.as_ref().and_then(|flat| flat.layers.first());
    active.map(|layer| layer.path.clone())
}

/// Whether an exchange of the disk has not come to its end, or its guest may be stopped since.
pub fn is_under_way(record: &ImageRecord) -> bool {
    record.swap.as_ref().is_some_and(Swap::is_under_way) || turn_of(record).is_some()
}

/// The exchange that a flattened disk is in.
pub fn turn_of(record: &ImageRecord) -> Option<Turn> {
    record.flat.as_ref().and_then(|flat| flat.turn)
}

/// The flattened disks of this host. Whoever exchanges one sees to it that nobody else does anything with its image.
#[derive(Clone, Copy)]
pub struct FlatDisks<'a> {
    /// The images of this host.
    pub registry: &'a Registry,
    /// The configuration.
    pub config: &'a Config,
}

impl FlatDisks<'_> {
    /// Nobody else has the chain open while its disk is exchanged.
    pub fn hold_peeks(&self, entry: &Entry) {
        if let Some(path) = chain_path(&entry.record()) {
            self.registry.peeks.hold(&path);
        }
    }

    /// The guest is on the overlay: the chain's active file loses its name. Can be repeated.
    fn hide_chain(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let names = names_of(&record)?;
        names.freeze_chain().map_err(io::Error::other)?;
        if let Some(flat) = &entry.flat {
            flat.chain.moved(&names.chain());
        }
        self.set_turn(entry, NameKind::Chain, record.flat.and_then(|flat| flat.turn))
    }

    fn set_turn(&self, entry: &Entry, place: NameKind, turn: Option<Turn>) -> io::Result<()> {
        self.registry.update(entry, |record| {
            record.place = place;
            if let Some(flat) = &mut record.flat {
                flat.turn = turn;
            }
        })
    }

    /// The chain is only read from now on.
    fn read_again(&self, flat: &Flat) {
        flat.overlay.unmerge();
        if let Err(why) = block_in_place(|| flat.chain.set_writable(false)) {
            tracing::warn!(%why, "a chain's storage daemon ended with an error");
        }
    }

    /// An exchange is over and its guest runs again. Until then the turn is durable, so that whoever
    /// finds it lets the guest go on. One whose QEMU has ended needs nobody; a connection that has closed says
    /// nothing of that.
    async fn let_go_on(
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

    /// Ends an exchange whose guest runs again, where the disk is.
    fn end_on(&self, qmp: &Qmp, entry: &Entry, on: io::Result<On>) -> io::Result<()> {
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

    /// The disk is on its overlay and its guest runs as before.
    fn end_turn(&self, entry: &Entry) -> io::Result<()> {
        self.set_turn(entry, NameKind::Chain, None)?;
        let record = entry.record();
        if let Some(path) = chain_path(&record) {
            self.registry.peeks.go_on(&path, &names_of(&record)?.chain());
        }
        Ok(())
    }

    /// QEMU has the disk on its chain again: what was made for it goes. Where QEMU's command line does
    /// not tell how the chain's nodes are made, a note does, as before the disk was flattened.
    fn forget_home(&self, qmp: &Qmp, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if record.adopted.as_ref().is_some_and(|adopted| adopted.noted) {
            let layers = layers_of(&record)?;
            let (id, format) = (random_id().map_err(io::Error::other)?, &layers[0].format);
            let (id, format) = (ImageId(id), Some(format.clone()));
            let (adopted, flat, migration, place) = (None, None, None, NameKind::Named);
            let image = ImageRecord { id, format, adopted, flat, migration, place, ..record };
            note_made(self.registry, qmp, &layers[0], image)?;
        }
        self.forget_flat(entry)
    }

    /// The disk is on its chain, which has everything: what was made for it goes.
    fn forget_flat(&self, entry: &Entry) -> io::Result<()> {
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
