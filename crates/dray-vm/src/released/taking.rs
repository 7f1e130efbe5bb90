//! A disk that QEMU has on its file comes under dray: what is left to be done when it is on the export, and
//! how one comes back whose guest is still to be told of a loss.

use super::settle::end_adoption;
use super::watch::{self, Doubt, Watch};
use super::{NotReleased, check_opened};
use crate::RECONNECT_DELAY;
use crate::leaving::refuse_untold;
use dray_config::Config;
use dray_host::abort;
use dray_host::registry::{Entry, Registry};
use dray_host::released::Released;
use dray_qemu::{AdoptOptions, LayerPlan, NbdExport, OldFile, Qmp};
use std::io;

/// How QEMU reaches an image of this host.
pub fn export(config: &Config, name: String) -> NbdExport {
    NbdExport { socket: config.nbd_socket(), name, reconnect_delay: RECONNECT_DELAY }
}

/// The disk is on the export: dray locks its file, of which QEMU has just let go, what QEMU wrote to it before
/// counts as changed, and QEMU closes it. The `watch` has been there since before QEMU let go of it.
///
/// # Errors
/// What QEMU reports.
pub async fn end(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
    (note, old, watch): (Option<Released>, OldFile, Option<Watch>),
) -> dray_qemu::Result<()> {
    // The node has no user any more, and no locks therefore. Until dray has its own, nothing keeps other programs
    // away.
    entry.succeed_locks();
    if let Some(note) = note {
        let alone = watch::look(watch.as_ref());
        take_again(registry, config, qmp, plan, (&note, alone), entry).await;
    }
    abort::step("AdoptClose");
    old.close(qmp, plan).await?;
    entry.regain_locks();
    if let Err(why) = registry.end_adoption(entry) {
        // The next look at the VM says it again.
        tracing::warn!(image = entry.record().name, %why, "cannot note that a disk is on dray");
    }
    Ok(())
}

/// The disk was released before: what QEMU has written to it counts as changed. Without knowing it
/// everything does, which costs a full copy and nothing else.
async fn take_again(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    (note, alone): (&Released, Result<(), Doubt>),
    entry: &Entry,
) {
    let image = &note.image.name;
    match end_adoption(registry, qmp, plan, (note, alone), entry, &config.run_dir).await {
        // Said in the log by then, with the reason.
        Ok(_) => {}
        Err(why) => tracing::warn!(image, %why, "dray treats the whole disk as changed"),
    }
}

/// The disk of an image that is registered here is on its file, and the image may be forgotten, unless its
/// guest is still to be told of a loss: then the disk comes back, where it can be told.
///
/// # Errors
/// What the guest is still to be told; where the disk is.
pub async fn unless_told(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> Result<(), NotReleased> {
    let Err(loss) = refuse_untold(entry) else { return Ok(()) };
    let image = entry.record().name;
    tracing::warn!(image, %loss, "dray takes a released disk back, because its guest must be told \
                                  of lost writes");
    match take_back(registry, config, qmp, plan, entry).await {
        Ok(()) => Err(NotReleased::Untold(loss)),
        Err(why) => {
            tracing::error!(image, %loss, %why,
                "a released disk cannot be taken back: its guest is not told of lost writes");
            Err(NotReleased::Left(loss, why))
        }
    }
}

/// The length of the file of a disk that is taken over. Somebody may resize it until it is on its export.
pub struct Length<'a> {
    entry: &'a Entry,
    len: u64,
}

impl<'a> Length<'a> {
    /// As it is now; to be asked before QEMU is asked how long it takes the file to be.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn of(entry: &'a Entry) -> dray_qemu::Result<Self> {
        let path = entry.record().current_path().map_err(io::Error::other);
        let meta = path.and_then(std::fs::metadata).map_err(|why| {
            let what = "cannot read the length of its file";
            dray_qemu::Error::with_source(dray_qemu::ErrorKind::Failed, what, why)
        })?;
        Ok(Self { entry, len: meta.len() })
    }

    /// Refuses a file that has another length by now, unless it may grow on dray.
    ///
    /// # Errors
    /// That somebody has resized it, or that its length cannot be read.
    pub fn check(&self) -> dray_qemu::Result<()> {
        let (now, was) = (Self::of(self.entry)?.len, self.len);
        if now == was || self.entry.record().growable {
            return Ok(());
        }
        let why = format!("somebody resized it meanwhile: its file has {now} bytes, and had {was}");
        Err(dray_qemu::Error::new(dray_qemu::ErrorKind::Mismatch, why))
    }
}

async fn take_back(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
) -> dray_qemu::Result<()> {
    let record = entry.record();
    // An agent that has died may have put it there.
    check_opened("the disk stays on its file", qmp, plan, entry).await?;
    entry.drop_locks();
    entry.disk.unpark();
    let note = registry.released.of(record.id).map(|note| Released { done: true, ..note });
    if let Some(note) = &note {
        // The file was QEMU's beyond doubt: an agent that dies behind the pivot must not take the release for one
        // that has not been.
        registry.released.put(note).map_err(|why| {
            let what = "cannot note that the disk was on its file";
            dray_qemu::Error::with_source(dray_qemu::ErrorKind::Failed, what, why)
        })?;
    }
    let (export, options) = (export(config, record.name), AdoptOptions::default());
    let length = Length::of(entry)?;
    let watch = note.as_ref().and_then(|note| Watch::begin(entry, note.qemu.pid));
    abort::step("AdoptPivot");
    let (_, old) =
        dray_qemu::adopt_keeping(qmp, plan, &export, options, &|| length.check()).await?;
    end(registry, config, qmp, plan, entry, (note, old, watch)).await
}
