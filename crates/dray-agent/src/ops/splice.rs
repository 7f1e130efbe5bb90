//! `dray adopt` and `release`: running VMs' disks under dray and back.

use super::released::not_released;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    Adopt, ApiResult, ErrorKind, MigrationState, Phase, Refusal, Release, Spliced, SplicedDisk,
};
use dray_engine::lineage::Lineage;
use dray_host::abort;
use dray_host::folder::intent::SourceVm;
use dray_host::process::QemuProcess;
use dray_host::record::{Adopted, CopyState, ImageRecord};
use dray_host::refusals::random_id;
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::real_path;
use dray_host::registry::{Entry, Operation, is_device};
use dray_host::released::Released;
use dray_host::settle::Rule;
use dray_image::{FileImage, growable_len, names};
use dray_migrate::source::SourceSlot;
use dray_qemu::plan::grows;
use dray_qemu::{AdoptOptions, LayerPlan, Pivot, Qmp};
use dray_types::{BlockSet, Epoch, ImageId, MigrationId};
use dray_vm::hypervisor::Vm;
use dray_vm::look::process_of;
use dray_vm::picture::{LayerLocation, LayerPicture, Picture, on_local};
use dray_vm::qemu_error;
use dray_vm::released::taking::{self, Length};
use dray_vm::released::watch::Watch;
use dray_vm::released::{plan_of, release};
use dray_vm::{own, own_files};
use serde::Serialize;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A QEMU that has left an export has closed its connection by then.
const LEAVING: Duration = Duration::from_secs(2);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(50);
impl Answers<Adopt> for Arc<Agent> {
    async fn answer(&self, command: Adopt, _: Events) -> ApiResult<Spliced> {
        let what = format!("cannot adopt the disks of the vm behind {}", command.qmp.display());
        self.refuse_moving(&what, &command.qmp)?;
        let picture = self.picture(&command.qmp).await?;
        picture.refuse_in_transit(&what)?;
        picture.refuse_unknown(&what, &command.disks)?;
        picture.refuse_unfit(&command.disks)?;
        let wanted = |layer: &&LayerPicture| {
            command.disks.is_empty() || command.disks.contains(&layer.plan.qdev)
        };
        let layers: Vec<_> = picture
            .disks
            .iter()
            .filter_map(|layers| layers.first())
            .filter(wanted)
            .filter(|layer| !layer.plan.read_only && matches!(layer.place, LayerLocation::Local(_)))
            .collect();
        if layers.is_empty() {
            let why = "the vm has no writable local disk that is not under dray already";
            return Err(Refusal::new(ErrorKind::NotFound, "nothing to adopt", why));
        }
        let mut disks = Vec::new();
        for layer in layers {
            disks.push(self.adopt_layer(&picture, layer, command.drop_bitmaps, None).await?);
        }
        Ok(Spliced { disks })
    }
}

impl Answers<Release> for Arc<Agent> {
    async fn answer(&self, command: Release, _: Events) -> ApiResult<Spliced> {
        let what = format!("cannot release the disks of the vm behind {}", command.qmp.display());
        self.refuse_moving(&what, &command.qmp)?;
        let picture = self.picture(&command.qmp).await?;
        picture.refuse_unknown(&what, &command.disks)?;
        picture.refuse_covered(&command.disks)?;
        let mut disks = Vec::new();
        for layer in picture.layers() {
            let LayerLocation::Resident(name) = &layer.place else { continue };
            if !command.disks.is_empty() && !command.disks.contains(&layer.plan.qdev) {
                continue;
            }
            disks.push(self.release_layer(picture.qmp(), &layer.plan, name).await?);
        }
        if disks.is_empty() {
            let why = "no disk of the vm is on this agent's socket";
            return Err(Refusal::new(ErrorKind::NotFound, "nothing to release", why));
        }
        Ok(Spliced { disks })
    }
}

impl Agent {
    /// Refuses a VM that is being moved away from here: its migration has the QMP socket.
    fn refuse_moving(&self, what: &str, qmp: &Path) -> ApiResult<()> {
        let moves = |slot: &Arc<SourceSlot>| {
            let shown = slot.board.read();
            shown.state == MigrationState::Running
                && shown.progress.phase < Phase::Backfill
                && slot.intent().vm.is_some_and(|vm| vm.qmp == qmp)
        };
        let Some(slot) = self.sources.all().into_iter().find(moves) else { return Ok(()) };
        let why = format!("it takes part in migration {}", slot.board.migration);
        Err(Refusal::new(ErrorKind::Conflict, what, why)
            .hint("wait until the migration has ended, or cancel it"))
    }

    /// Splices one disk; on failure the guest is on its own file and nothing is left behind, unless QEMU has
    /// not said where the disk is: the image stays then.
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
        self.activate_stopped(&what, picture).await?;
        dray_qemu::adopt::check(picture.qmp(), &layer.plan, options).await.map_err(failed)?;
        let noted = self.noted(picture, &layer.plan);
        let (entry, note, _operation) = self.register(&what, picture, &layer.plan, id).await?;
        let record = entry.record();
        let export = taking::export(&self.config, record.name.clone());
        let watch = note.as_ref().and_then(|note| Watch::begin(&entry, note.qemu.pid));
        abort::step("AdoptPivot");
        let adopted = match Length::of(&entry) {
            Ok(length) => {
                let (qmp, is_whole) = (picture.qmp(), || length.check());
                dray_qemu::adopt_keeping(qmp, &layer.plan, &export, options, &is_whole).await
            }
            Err(why) => Err(why),
        };
        match adopted {
            Ok((adopted, old)) => {
                let (registry, config) = (&self.registry, &self.config);
                let (qmp, plan) = (picture.qmp(), &layer.plan);
                let ended =
                    taking::end(registry, config, qmp, plan, &entry, (note, old, watch)).await;
                ended.map_err(failed)?;
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
                again.map_err(|why| io_error(&what, why))?;
                if self.may_be_on_dray(&why, &record.name).await {
                    entry.regain_locks();
                    return Err(failed(why).hint(unknown_hint(&record.name)));
                }
                self.registry.forget(&record.name).map_err(|why| io_error(&what, why))?;
                Err(failed(why))
            }
        }
    }

    /// Makes the disks of a stopped guest active, which may have come here with it. While they were not QEMU had no
    /// lock on their files: what it has recorded of those that it has taken back is not believed any more.
    pub(crate) async fn activate_stopped(&self, what: &str, picture: &Picture) -> ApiResult<()> {
        let failed = |why| qemu_error(what, &why);
        let qmp = picture.qmp();
        if picture.look.status.running || !dray_qemu::is_inactive(qmp).await.map_err(failed)? {
            return Ok(());
        }
        let released =
            picture.look.process.as_ref().map(|of| self.registry.released.of_process(of));
        for note in released.into_iter().flatten() {
            let note = Released { bitmap: None, ..note };
            self.registry.released.put(&note).map_err(|why| io_error(what, why))?;
        }
        dray_qemu::activate(qmp).await.map_err(failed)
    }

    /// Whether QEMU may have a disk on its export although adopting it has failed with `why`: it has not said,
    /// and stays attached. Its guest would be cut off if the image were forgotten.
    async fn may_be_on_dray(&self, why: &dray_qemu::Error, image: &str) -> bool {
        why.kind().is_unknown() && !self.is_left(image).await
    }

    /// Whether nobody is at the export of an image, when a QEMU that leaves it has had the time to close its
    /// connection.
    pub(super) async fn is_left(&self, image: &str) -> bool {
        let deadline = Instant::now() + LEAVING;
        while self.attachments.count(image) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(LOOK).await;
        }
        true
    }

    /// The note by which it is known how the nodes of a disk are made.
    pub(crate) fn noted(&self, picture: &Picture, plan: &LayerPlan) -> Option<Released> {
        let process = process_of(picture.qmp())?;
        let path = real_path(&plan.path()).ok()?;
        self.registry.released.of_file(&process, &path)
    }

    /// Registers the file of a disk that QEMU still has open: no lock is taken, QEMU holds its own. Nobody
    /// else does anything with the image until the operation is dropped.
    async fn register(
        &self,
        what: &str,
        picture: &Picture,
        plan: &LayerPlan,
        id: Option<ImageId>,
    ) -> ApiResult<(Arc<Entry>, Option<Released>, Operation)> {
        let path = plan.path();
        self.check_file(what, &path, false)?;
        let path = real_path(&path).map_err(|why| io_error(what, why))?;
        self.check_writable(what, &path)?;
        let known = self.known_before(what, picture, plan, (&path, id))?;
        // As others know it, if it was an image before.
        let name = match &known {
            Some((note, ..)) => note.image.name.clone(),
            None => self.adopted_name(&path, |_| false),
        };
        let operation = self.operate(what, &name, "adopt")?;
        let id = match (id, &known) {
            (Some(id), _) => id,
            (None, Some((note, ..))) => note.image.id,
            (None, None) => ImageId(random_id()?),
        };
        let mut record = ImageRecord {
            epoch: known.as_ref().map_or(Epoch(1), |(note, ..)| note.image.epoch),
            adopted: Some(self.adopted_by(what, picture, plan, plan)?),
            ..record_of_file(what, plan, (name.clone(), id, path))?
        };
        let file = self.registry.open_file(&record).map_err(|why| io_error(what, why))?;
        record.len = file.geometry().len;
        // By now dray has opened the path: it is the file that counts.
        let opened = file.as_file().and_then(FileImage::id);
        if let (Some(vm), Some(opened)) = (&picture.look.process, opened) {
            own_files::check_layer(what, vm, picture.qmp(), plan, Some(opened)).await?;
        }
        let failed = |why| Refusal::new(ErrorKind::Conflict, what, why);
        match known {
            Some((note, lineage, changed)) => {
                let again = self.registry.add_again(record, file, (lineage, changed));
                Ok((again.map_err(failed)?, Some(note), operation))
            }
            None => {
                let added = self.registry.add(record, file);
                let added = added.map_err(|why| match self.registry.closed(&name) {
                    Some(closed) => failed(why).hint(closed.reason.hint),
                    None => failed(why),
                });
                Ok((added?, None, operation))
            }
        }
    }

    /// What is known of a file that was an image before, unless another image than `id` is meant.
    fn known_before(
        &self,
        what: &str,
        picture: &Picture,
        plan: &LayerPlan,
        (path, id): (&Path, Option<ImageId>),
    ) -> ApiResult<Option<(Released, Lineage, BlockSet)>> {
        let known = self.registry.known_at(path);
        let mut known = known.filter(|(note, ..)| id.is_none_or(|id| id == note.image.id));
        if let Some((note, ..)) = &mut known {
            self.trust_if_on_its_node(what, picture, plan, note)?;
        }
        Ok(known)
    }

    /// From whom a disk is adopted, and how it gets back: by what `splice` says.
    pub(crate) fn adopted_by(
        &self,
        what: &str,
        picture: &Picture,
        plan: &LayerPlan,
        splice: &impl Serialize,
    ) -> ApiResult<Adopted> {
        Ok(Adopted {
            qmp: picture.qmp().socket().to_owned(),
            qemu: picture.look.process.clone(),
            device: plan.qdev.clone(),
            splice: serde_json::to_value(splice).map_err(|why| io_error(what, why))?,
            noted: self.noted(picture, plan).is_some(),
            done: false,
        })
    }

    /// The bitmap of a disk that was released knows of writes through its own node. One that comes back on another
    /// one, as when its device was unplugged or mirrored meanwhile, was written unseen: what the bitmap tells
    /// counts for nothing, durably.
    fn trust_if_on_its_node(
        &self,
        what: &str,
        picture: &Picture,
        plan: &LayerPlan,
        note: &mut Released,
    ) -> ApiResult<()> {
        let disk = picture.look.disks.iter().find(|disk| disk.qdev == plan.qdev);
        let now =
            disk.and_then(|disk| disk.layers.get(plan.depth)).map(|layer| &layer.protocol.name);
        let then = plan_of(note).map_err(|why| io_error(what, why))?;
        if now.is_some_and(|name| name == then.local_node()) {
            return Ok(());
        }
        let image = &note.image.name;
        tracing::info!(
            image,
            node = now,
            "the disk is on another node than the one to which it was released"
        );
        note.bitmap = None;
        self.registry.released.put(note).map_err(|why| io_error(what, why))
    }

    async fn release_layer(
        &self,
        qmp: &Qmp,
        seen: &LayerPlan,
        name: &str,
    ) -> ApiResult<SplicedDisk> {
        self.image(name)?;
        let what = format!("cannot release disk {}", seen.qdev);
        let _operation = self.operate(&what, name, "release")?;
        self.release_taken(qmp, seen, name).await
    }

    /// The same for an image with which nobody else does anything.
    async fn release_taken(
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
            let why = format!("{missing} of its blocks are still at the source");
            return Err(Refusal::new(ErrorKind::Conflict, what, why)
                .hint("wait until the migration has ended; `dray status` shows it"));
        }
        if record.migration.is_some() {
            return Err(Refusal::new(ErrorKind::Conflict, what, "it takes part in a migration"));
        }
        self.refuse_during_backup(&what, name)?;
        if entry.flat.is_some() {
            return self.flat_disks().bring_home(qmp, &entry).await;
        }
        refuse_untold_length(&what, &record, seen, qmp)?;
        let plan = release_plan(&record, process_of(qmp).as_ref(), seen)
            .map_err(|why| Refusal::new(ErrorKind::Conflict, what.clone(), why))?;
        let released = release(&self.registry, &self.config, qmp, &plan, &entry).await;
        let released = released.map_err(|why| not_released(&what, why))?;
        self.registry.forget(name).map_err(|why| io_error(what, why))?;
        Ok(SplicedDisk {
            device: plan.qdev.clone(),
            node: plan.local_node().to_owned(),
            image: name.to_owned(),
            path: record.path,
            ms: released.pivot.as_secs_f64() * 1e3,
        })
    }

    /// After a migration that left the guest here: disks that were adopted for it go back to QEMU. `through` is the
    /// way to its VM, where there is one: a monitor talks to one at a time.
    pub async fn unadopt(&self, slot: &SourceSlot, through: Option<&dyn Vm>) {
        let intent = slot.intent();
        let Some(vm) = &intent.vm else { return };
        for name in &intent.adopted {
            let Some(entry) = self.registry.get(name) else { continue };
            let undone = self.unadopt_disk(slot.board.migration, vm, through, &entry).await;
            if let Err(why) = undone {
                tracing::warn!(image = name, %why, "a disk stays under dray");
                let hint = why.hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
                slot.board.notice(format!("disk {name} stays under dray: {why}{hint}"));
            }
        }
    }

    /// One disk after a migration, `own`, that left its guest here.
    async fn unadopt_disk(
        &self,
        own: MigrationId,
        vm: &SourceVm,
        through: Option<&dyn Vm>,
        entry: &Entry,
    ) -> ApiResult<()> {
        // One that takes part in another migration by now is that one's.
        let _operation = self
            .registry
            .operate_for(&entry.record().name, "release", own)
            .map_err(|why| not_taken("cannot release", why))?;
        let record = entry.record();
        self.registry
            .update(entry, |record| record.migration = None)
            .map_err(|why| io_error("cannot forget an image", why))?;
        if entry.flat.is_none()
            && let Some(qemu) = self.registry.ended_vm(&record)
        {
            return self.give_back(entry, &qemu);
        }
        if let Some(vm) = through {
            return self.unadopt_from(vm, entry).await;
        }
        let vm = own::connect(&*self.hypervisor, vm).await;
        let vm = vm.map_err(|why| qemu_error("cannot release", &why))?;
        self.unadopt_from(&*vm, entry).await
    }

    /// Gives a disk back to its VM, which is where the disk is now, unless another program has moved the disk away.
    async fn unadopt_from(&self, vm: &dyn Vm, entry: &Entry) -> ApiResult<()> {
        let qmp = vm.monitor();
        let look = vm.look().await.map_err(|why| qemu_error("cannot release", &why))?;
        self.note_device(&look, entry).map_err(|why| io_error("cannot release", why))?;
        if entry.flat.is_some() {
            return self.flat_disks().bring_home(qmp, entry).await.map(drop);
        }
        let record = entry.record();
        let plan = adopted_plan(&record)?;
        if self.rule_by(&look, entry) == Some(Rule::MovedAway)
            && self.let_go_of_moved(qmp, &plan, entry).await?
        {
            return Ok(());
        }
        self.release_taken(qmp, &plan, &record.name).await.map(drop)
    }
}

/// The file of a disk as an image. It is as long as its export, which grows with the disk if its format does.
fn record_of_file(
    what: &str,
    plan: &LayerPlan,
    (name, id, path): (String, ImageId, PathBuf),
) -> ApiResult<ImageRecord> {
    let growable = grows(&plan.format);
    let len = if growable { growable_len(plan.file_size, plan.size) } else { plan.file_size };
    Ok(ImageRecord {
        mode: names::file_mode(&path).map_err(|why| io_error(what, why))?,
        device: is_device(&path),
        growable,
        format: Some(plan.format.clone()),
        ..ImageRecord::owned(name, id, path, len)
    })
}

/// How an adopted disk gets back.
fn adopted_plan(record: &ImageRecord) -> ApiResult<LayerPlan> {
    let adopted = record
        .adopted
        .as_ref()
        .ok_or_else(|| Refusal::new(ErrorKind::Internal, "cannot release", "it was not adopted"))?;
    serde_json::from_value(adopted.splice.clone())
        .map_err(|why| io_error("cannot read how a disk was adopted", why))
}

/// What to do when QEMU has not said where a disk is: it may take it later, too.
fn unknown_hint(image: &str) -> String {
    format!(
        "the disk may be on dray, so the image stays: `dray release` gives the disk back; if \
         `query-block` in QEMU shows the disk on its file, give `dray images remove {image}`, \
         then adopt the disk again"
    )
}

/// Refuses a disk whose image was made longer without its guest being told: QEMU exchanges disks of one length only.
fn refuse_untold_length(
    what: &str,
    record: &ImageRecord,
    seen: &LayerPlan,
    qmp: &Qmp,
) -> ApiResult<()> {
    // A raw node may show a part of its file only. One with an end of its own shows no more when that grows.
    let window = seen.window();
    let seen_len = seen.size.saturating_add(window.offset);
    let sees_all = window.size.is_some() || record.len <= seen_len;
    if record.growable || seen.format != "raw" || sees_all {
        return Ok(());
    }
    let (len, size, name) = (record.len, seen.size, &record.name);
    let why =
        format!("a resize was interrupted: the image has {len} bytes, and its guest sees {size}");
    let tell = format!(
        "give `dray resize {name} {len} --qmp {}` to tell the guest",
        qmp.socket().display()
    );
    Err(Refusal::new(ErrorKind::Conflict, what, why).hint(tell))
}

/// How a disk gets to its file: as it was adopted from this process, or for one that arrived here, as it looks
/// now.
fn release_plan(
    record: &ImageRecord,
    qemu: Option<&QemuProcess>,
    seen: &LayerPlan,
) -> io::Result<LayerPlan> {
    match plan_kept(record, qemu) {
        Some(plan) => Ok(plan),
        None => arrived_plan(seen, &record.path),
    }
}

/// How a disk was adopted from this process, if it was.
pub(crate) fn plan_kept(record: &ImageRecord, qemu: Option<&QemuProcess>) -> Option<LayerPlan> {
    let adopted = record.adopted.as_ref().filter(|adopted| adopted.is_of(qemu))?;
    serde_json::from_value(adopted.splice.clone()).ok()
}

/// A device directly on dray's node has none that could be reopened.
fn arrived_plan(seen: &LayerPlan, path: &Path) -> io::Result<LayerPlan> {
    let plan = on_local(seen, path)?;
    let direct = seen.local_node() == seen.nbd_node();
    Ok(if direct { LayerPlan { pivot: Pivot::Mirror, ..plan } } else { plan })
}

/// What an image is called that is made of the file at `path`: as the file, with its folder before that where another
/// image is called so.
fn name_of_file(path: &Path, is_taken: impl Fn(&str) -> bool) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let text = |part: Option<&OsStr>| -> String {
        part.unwrap_or_default().to_string_lossy().chars().map(plain).collect()
    };
    let base = text(path.file_name());
    let long = format!("{}-{base}", text(path.parent().and_then(Path::file_name)));
    let numbered = (2..).map(|number| format!("{long}-{number}"));
    let names = [base, long.clone()].into_iter().chain(numbered);
    names.into_iter().find(|name| !is_taken(name)).unwrap_or_default()
}

impl Agent {
    /// What the image is called that is made of the file at `path`, where no other image of this host, or of the move
    /// that `also` knows, is called so.
    pub(crate) fn adopted_name(&self, path: &Path, also: impl Fn(&str) -> bool) -> String {
        name_of_file(path, |name| {
            let other = self.registry.get(name).is_some_and(|entry| entry.record().path != path);
            other || also(name)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_called_as_its_file_and_as_its_folder_where_that_name_is_taken() {
        let name = |path: &str, taken: &[&str]| {
            name_of_file(Path::new(path), |name| taken.contains(&name))
        };
        assert_eq!(name("/pool/vm1/disk.raw", &[]), "disk.raw");
        assert_eq!(name("/pool/web server/my disk.raw", &[]), "my-disk.raw");
        assert_eq!(name("/pool/web server/disk.raw", &["disk.raw"]), "web-server-disk.raw");
        let taken = ["disk.raw", "vm1-disk.raw", "vm1-disk.raw-2"];
        assert_eq!(name("/pool/vm1/disk.raw", &taken), "vm1-disk.raw-3");
    }
}
