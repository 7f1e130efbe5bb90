//! `dray adopt` and `release`: running VMs' disks under dray and back.

use super::images::{growable_len, random_id, real_path};
use super::io_error;
use super::released::not_released;
use crate::agent::Agent;
use crate::api::{Adopt, ApiError, ApiResult, ErrorKind, Release, Spliced, SplicedDisk};
use crate::migration::abort;
use crate::migration::source::SourceSlot;
use crate::registry::{Adopted, CopyState, Entry, ImageRecord, is_device};
use crate::released::{NotReleased, QemuProcess, Released};
use crate::vm::picture::{LayerPicture, Picture, Place as Where, on_local};
use crate::vm::{RECONNECT_DELAY, qemu_error};
use dray_image::{Image, names};
use dray_qemu::{AdoptOptions, LayerPlan, NbdExport, Qmp};
use dray_types::{Epoch, ImageId};
use std::path::Path;
use std::sync::Arc;

impl Agent {
    pub(super) async fn adopt(&self, command: &Adopt) -> ApiResult<Spliced> {
        let picture = self.picture(&command.qmp).await?;
        let what = format!("cannot adopt the disks of the vm behind {}", command.qmp.display());
        picture.refuse_in_transit(&what)?;
        let wanted = |layer: &&LayerPicture| {
            command.disks.is_empty() || command.disks.contains(&layer.plan.qdev)
        };
        let layers: Vec<_> = picture
            .disks
            .iter()
            .filter_map(|layers| layers.first())
            .filter(wanted)
            .filter(|layer| !layer.plan.read_only && matches!(layer.place, Where::Local(_)))
            .collect();
        if layers.is_empty() {
            let why = "the vm has no writable local disk that is not under dray already";
            return Err(ApiError::new(ErrorKind::NotFound, "nothing to adopt", why));
        }
        let mut disks = Vec::new();
        for layer in layers {
            disks.push(self.adopt_layer(&picture, layer, command.drop_bitmaps, None).await?);
        }
        Ok(Spliced { disks })
    }

    /// Splices one disk; on failure the guest is on its own file and nothing is left behind.
    pub(super) async fn adopt_layer(
        &self,
        picture: &Picture,
        layer: &LayerPicture,
        drop_bitmaps: bool,
        id: Option<ImageId>,
    ) -> ApiResult<SplicedDisk> {
        let what = format!("cannot adopt disk {}", layer.plan.qdev);
        let options = AdoptOptions { drop_bitmaps };
        let failed = |why: dray_qemu::Error| qemu_error(what.clone(), &why);
        activate_stopped(&what, picture).await?;
        dray_qemu::adopt::check(&picture.qmp, &layer.plan, options).await.map_err(failed)?;
        let noted = self.noted(picture, &layer.plan);
        let (entry, note) = self.register(&what, picture, &layer.plan, id)?;
        let record = entry.record();
        let export = NbdExport {
            socket: self.nbd_socket(),
            name: record.name.clone(),
            reconnect_delay: RECONNECT_DELAY,
        };
        abort::step("AdoptPivot");
        let adopted = dray_qemu::adopt_keeping(&picture.qmp, &layer.plan, &export, options).await;
        match adopted {
            Ok((adopted, old)) => {
                if let Some(note) = note {
                    self.take_again(&picture.qmp, &layer.plan, &note, &entry).await;
                }
                abort::step("AdoptClose");
                old.close(&picture.qmp, &layer.plan).await.map_err(failed)?;
                // QEMU has closed the file, and with it its own locks.
                entry.take_locks();
                Ok(SplicedDisk {
                    device: layer.plan.qdev.clone(),
                    node: layer.plan.nbd_node(),
                    image: record.name,
                    path: record.path,
                    ms: adopted.pivot.as_secs_f64() * 1e3,
                })
            }
            Err(why) => {
                // QEMU's command line still does not tell how the disk's nodes are made.
                let again = noted.map_or(Ok(()), |note| self.registry.released.put(&note));
                let undone = again.and_then(|()| self.registry.forget(&record.name));
                undone.map_err(|why| io_error(&what, why))?;
                Err(failed(why))
            }
        }
    }

    /// The note by which it is known how the nodes of a disk are made.
    pub(crate) fn noted(&self, picture: &Picture, plan: &LayerPlan) -> Option<Released> {
        let process = QemuProcess::of(&picture.qmp)?;
        let path = real_path(&plan.path()).ok()?;
        self.registry.released.of_file(&process, &path)
    }

    /// The disk was released before: what QEMU has written to it counts as changed. Without knowing it
    /// everything does, which costs a full copy and nothing else.
    async fn take_again(&self, qmp: &Qmp, plan: &LayerPlan, note: &Released, entry: &Entry) {
        let run_dir = &self.config.run_dir;
        let image = &note.image.name;
        match self.registry.end_adoption(qmp, plan, note, entry, run_dir).await {
            // Said in the log by then, with the reason.
            Ok(_) => {}
            Err(why) => tracing::warn!(image, %why, "everything in it counts as changed"),
        }
    }

    /// Registers the file of a disk that QEMU still has open: no lock is taken, QEMU holds its own.
    fn register(
        &self,
        what: &str,
        picture: &Picture,
        plan: &LayerPlan,
        id: Option<ImageId>,
    ) -> ApiResult<(Arc<Entry>, Option<Released>)> {
        let path = plan.path();
        self.check_file(what, &path, false)?;
        let path = real_path(&path).map_err(|why| io_error(what, why))?;
        self.check_writable(what, &path)?;
        let growable = plan.format != "raw";
        let splice = serde_json::to_value(plan).map_err(|why| io_error(what, why))?;
        let known = self.registry.known_at(&path);
        let known = known.filter(|(note, ..)| id.is_none_or(|id| id == note.image.id));
        // As others know it, if it was an image before.
        let name = match &known {
            Some((note, ..)) => note.image.name.clone(),
            None => adopted_name(&path),
        };
        let id = match (id, &known) {
            (Some(id), _) => id,
            (None, Some((note, ..))) => note.image.id,
            (None, None) => ImageId(random_id()?),
        };
        let len = if growable { growable_len(plan.file_size, plan.size) } else { plan.file_size };
        let noted = self.noted(picture, plan).is_some();
        let mut record = ImageRecord {
            mode: names::file_mode(&path).map_err(|why| io_error(what, why))?,
            device: is_device(&path),
            growable,
            format: Some(plan.format.clone()),
            epoch: known.as_ref().map_or(Epoch(1), |(note, ..)| note.image.epoch),
            adopted: Some(Adopted {
                qmp: picture.qmp.socket().to_owned(),
                device: plan.qdev.clone(),
                splice,
                noted,
            }),
            ..ImageRecord::owned(name, id, path, len)
        };
        let file = self.registry.open_file(&record).map_err(|why| io_error(what, why))?;
        record.len = file.geometry().len;
        let (file, failed) = (Arc::new(file), |why| ApiError::new(ErrorKind::Conflict, what, why));
        match known {
            Some((note, lineage, changed)) => {
                let again = self.registry.add_again(record, file, (lineage, changed));
                Ok((again.map_err(failed)?, Some(note)))
            }
            None => Ok((self.registry.add(record, file).map_err(failed)?, None)),
        }
    }

    pub(super) async fn release(&self, command: &Release) -> ApiResult<Spliced> {
        let picture = self.picture(&command.qmp).await?;
        let mut disks = Vec::new();
        for layer in picture.layers() {
            let Where::Resident(name) = &layer.place else { continue };
            if !command.disks.is_empty() && !command.disks.contains(&layer.plan.qdev) {
                continue;
            }
            disks.push(self.release_layer(&picture.qmp, &layer.plan, name).await?);
        }
        if disks.is_empty() {
            let why = "no disk of the vm is on this agent's socket";
            return Err(ApiError::new(ErrorKind::NotFound, "nothing to release", why));
        }
        Ok(Spliced { disks })
    }

    async fn release_layer(
        &self,
        qmp: &Qmp,
        seen: &LayerPlan,
        name: &str,
    ) -> ApiResult<SplicedDisk> {
        let what = format!("cannot release disk {}", seen.qdev);
        let entry = self.image(name)?;
        let record = entry.record();
        let missing = entry.disk.missing_count();
        if missing > 0 || record.state != CopyState::Owner {
            let why = format!("{missing} of its blocks are not here yet");
            return Err(ApiError::new(ErrorKind::Conflict, what, why)
                .hint("wait until the migration has ended; `dray status` shows it"));
        }
        if record.migration.is_some() {
            return Err(ApiError::new(ErrorKind::Conflict, what, "it takes part in a migration"));
        }
        self.refuse_during_backup(&what, name)?;
        if entry.flat.is_some() {
            return self.bring_home(qmp, &entry).await;
        }
        let plan = release_plan(&record, seen)
            .map_err(|why| ApiError::new(ErrorKind::Conflict, what.clone(), why))?;
        entry.drop_locks();
        let released = self.registry.release(qmp, &plan, &entry).await;
        let released = released.map_err(|why| {
            if matches!(why, NotReleased::Qemu(_)) {
                entry.take_locks();
            }
            not_released(&what, why)
        })?;
        self.registry.forget(name).map_err(|why| io_error(what, why))?;
        Ok(SplicedDisk {
            device: plan.qdev.clone(),
            node: plan.local_node().to_owned(),
            image: name.to_owned(),
            path: record.path,
            ms: released.pivot.as_secs_f64() * 1e3,
        })
    }

    /// After a migration that left the guest here: disks that were adopted for it go back to QEMU.
    pub async fn unadopt(&self, slot: &SourceSlot) {
        let intent = slot.intent();
        let Some(vm) = &intent.vm else { return };
        for name in &intent.adopted {
            let Some(entry) = self.registry.get(name) else { continue };
            let undone = async {
                let record = entry.record();
                self.registry
                    .update(&entry, |record| record.migration = None)
                    .map_err(|why| io_error("cannot let go of an image", why))?;
                let adopted = record.adopted.as_ref().ok_or_else(|| {
                    ApiError::new(ErrorKind::Internal, "cannot release", "it was not adopted")
                })?;
                let qmp = Qmp::connect(&vm.qmp)
                    .await
                    .map_err(|why| qemu_error("cannot release", &why))?;
                if entry.flat.is_some() {
                    return self.bring_home(&qmp, &entry).await;
                }
                let plan: LayerPlan = serde_json::from_value(adopted.splice.clone())
                    .map_err(|why| io_error("cannot read how a disk was adopted", why))?;
                self.release_layer(&qmp, &plan, name).await
            };
            if let Err(why) = undone.await {
                tracing::warn!(image = name, %why, "a disk stays under dray");
                slot.board.notice(format!("disk {name} stays under dray: {why}"));
            }
        }
    }
}

/// The disks of a guest that arrived paused may be held back by QEMU: nothing else is done to them
/// before they are not.
pub(crate) async fn activate_stopped(what: &str, picture: &Picture) -> ApiResult<()> {
    if picture.running {
        return Ok(());
    }
    dray_qemu::activate(&picture.qmp).await.map_err(|why| qemu_error(what, &why))
}

/// How a disk gets to its file: as it was adopted, or for one that arrived here, as it looks now.
fn release_plan(record: &ImageRecord, seen: &LayerPlan) -> Result<LayerPlan, String> {
    let kept = record
        .adopted
        .as_ref()
        .and_then(|adopted| serde_json::from_value(adopted.splice.clone()).ok());
    match kept {
        Some(plan) => Ok(plan),
        None => on_local(seen, &record.path),
    }
}

/// An adopted image is called as its file.
pub(crate) fn adopted_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    name.chars().map(|c| if plain(c) { c } else { '-' }).collect()
}
