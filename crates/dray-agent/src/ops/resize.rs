//! `dray resize`: an image gets longer, also under a guest that uses it.
//!
//! A client of an export keeps the length that it was told when it connected. So the image gets a new disk:
//! whoever is attached to the old one is cut off without an answer, connects again, sends again what was not
//! answered, and finds the new length. QEMU tells its guest when it is asked to. The disk is dray's all the
//! time, with its locks; nothing is written meanwhile.
//!
//! The record decides: before it is written the image has its old length, after it the new one. A guest that
//! was not told then is told by the same command.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, ImageStatus, Refusal, Resize};
use dray_host::abort;
use dray_host::record::{Adopted, CopyState, ImageRecord};
use dray_host::refusals::io_error;
use dray_host::registry::Entry;
use dray_qemu::{LayerPlan, NbdExport, Qmp};
use dray_vm::leaving::refuse_untold;
use dray_vm::picture::{LayerLocation, LayerPicture, Picture};
use dray_vm::qemu_error;
use dray_vm::released::taking::export;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::block_in_place;

/// Longest wait for the writes that are in flight.
const QUIET_TIMEOUT: Duration = Duration::from_secs(5);

impl Answers<Resize> for Arc<Agent> {
    async fn answer(&self, command: Resize, _: Events) -> ApiResult<ImageStatus> {
        let what = format!("cannot resize image '{}'", command.image);
        self.image(&command.image)?;
        if let Some(qmp) = &command.qmp {
            // What is half done with its disk is settled before anybody else has the image.
            self.picture(qmp).await?;
        }
        let _operation = self.operate(&what, &command.image, "resize")?;
        let entry = self.image(&command.image)?;
        self.check_resizable(&what, &entry)?;
        let user = match &command.qmp {
            Some(qmp) => Some(self.user_of(&what, qmp, &command.image).await?),
            None => None,
        };
        let window = user.as_ref().map(|(_, layer)| layer.plan.window()).unwrap_or_default();
        let seen = user.as_ref().map(|(_, layer)| layer.plan.size.saturating_add(window.offset));
        check_size(&what, command.size.0, entry.record().len, seen)?;
        if user.is_none()
            && let Some(client) = self.user_of_image(&entry)
        {
            let why = format!("{client}, and would not learn the new length");
            return Err(Refusal::new(ErrorKind::Conflict, what, why)
                .hint("name the vm with --qmp, or end another client first"));
        }
        if command.size.0 > entry.record().len {
            block_in_place(|| self.grow(&what, &entry, command.size.0))?;
        }
        if let Some((picture, layer)) = &user {
            abort::step("ResizeTell");
            let export = export(&self.config, command.image.clone());
            let shown = window.shown_of(command.size.0);
            tell(&what, picture.qmp(), (&layer.plan, &export), shown).await?;
        }
        Ok(self.image_status(&*self.image(&command.image)?))
    }
}

impl Agent {
    /// Whether the image can be made longer just now, whoever uses it.
    fn check_resizable(&self, what: &str, entry: &Entry) -> ApiResult<()> {
        let record = entry.record();
        let refuse =
            |why: &str, hint: &str| Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint));
        if record.migration.is_some() {
            let hint = "wait until the migration has ended, or cancel it";
            return refuse("it takes part in a migration", hint);
        }
        if record.state != CopyState::Owner {
            let why = "this host does not own it";
            return refuse(why, "resize it on the host that does");
        }
        self.refuse_during_backup(what, &record.name)?;
        if entry.flat.is_some() {
            let why = "it is a chain that was flattened for a migration";
            return refuse(why, "`dray release` its disk first");
        }
        // What is to be told would be forgotten with the old disk.
        refuse_untold(entry).map_err(|loss| loss.refused(what))
    }

    /// The QEMU that uses the image, and how.
    async fn user_of(
        &self,
        what: &str,
        socket: &Path,
        image: &str,
    ) -> ApiResult<(Picture, LayerPicture)> {
        let picture = self.picture(socket).await?;
        let place = LayerLocation::Resident(image.to_owned());
        let layer = picture.layers().find(|layer| layer.place == place);
        let Some(layer) = layer.cloned() else {
            let why = format!("the vm behind {} does not use it", socket.display());
            return Err(Refusal::new(ErrorKind::NotFound, what, why));
        };
        if layer.plan.format != "raw" {
            let why = format!("the vm sees a {} image in it", layer.plan.format);
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "make the guest's disk larger with QEMU's `block_resize`: the image has room for \
                 it",
            ));
        }
        if let Some(size) = layer.plan.window().size {
            let why = format!("the vm sees {size} bytes of it, as its raw node has a size");
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "shut the vm down, resize the image without --qmp, and change size= of the raw node",
            ));
        }
        if !layer.reconnects {
            let why = format!(
                "the vm's block node for it has no reconnect-delay: disk {} would fail when dray \
                 disconnects it",
                layer.plan.qdev
            );
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "shut the vm down, resize the image without --qmp, and add reconnect-delay=300",
            ));
        }
        Ok((picture, layer))
    }

    /// The image has `len` bytes from now on, and nobody is at its old disk.
    fn grow(&self, what: &str, entry: &Arc<Entry>, len: u64) -> ApiResult<()> {
        let record = entry.record();
        let adopted = adopted_at(&record, len).map_err(|why| io_error(what, why))?;
        // Before anything is changed, in whichever file.
        self.registry.check_same_file(entry).map_err(|why| {
            let hint = "give the file that is served its name again";
            Refusal::new(ErrorKind::Conflict, what, why).hint(hint)
        })?;
        lengthen(entry, len).map_err(|why| io_error(what, why))?;
        // What is in flight is in the old disk's sets; what comes waits, and is cut off with its client.
        let quiet = entry.disk.quiesce(QUIET_TIMEOUT);
        let _quiet = quiet.map_err(|why| io_error(what, why))?;
        entry.heat.drain(&entry.disk, Instant::now());
        self.registry.regrow(entry, len, adopted).map_err(|why| io_error(what, why))?;
        Ok(())
    }
}

/// Has QEMU tell its guest, which has `shown` bytes of the image; the image has its new length by then.
async fn tell(
    what: &str,
    qmp: &Qmp,
    (plan, export): (&LayerPlan, &NbdExport),
    shown: u64,
) -> ApiResult<()> {
    dray_qemu::resize::grown(qmp, plan, export, shown).await.map_err(|why| {
        let why = why.during("the image is longer now, and the guest was not told".to_owned());
        qemu_error(what, &why).hint("give the same command again when QEMU answers")
    })
}

/// How a longer image was adopted.
fn adopted_at(record: &ImageRecord, len: u64) -> serde_json::Result<Option<Adopted>> {
    let Some(adopted) = record.adopted.clone() else { return Ok(None) };
    let plan: LayerPlan = serde_json::from_value(adopted.splice)?;
    let size = plan.window().shown_of(len);
    let splice = serde_json::to_value(LayerPlan { size, file_size: len, ..plan })?;
    Ok(Some(Adopted { splice, ..adopted }))
}

/// Images only grow. `seen`: where the guest's disk ends in it, which may not have been told of the last time.
fn check_size(what: &str, size: u64, len: u64, seen: Option<u64>) -> ApiResult<()> {
    let refuse =
        |why: &str, hint: &str| Err(Refusal::new(ErrorKind::Invalid, what, why).hint(hint));
    if size < len || (size == len && seen.is_none_or(|seen| seen >= len)) {
        let why = format!("it has {len} bytes already, and dray does not make an image shorter");
        return refuse(&why, "give a larger size");
    }
    if !size.is_multiple_of(512) {
        return refuse("the size is not a multiple of 512 bytes", "give a multiple of 512 bytes");
    }
    Ok(())
}

/// The file that is served has at least `len` bytes from now on, durably. What is longer is not cut. A device is as
/// long as it is.
fn lengthen(entry: &Entry, len: u64) -> io::Result<()> {
    let Some(served) = entry.file.as_file() else { return Ok(()) };
    served.lengthen(len).map_err(io::Error::other)
}
