//! Decides which images a migration moves, and their names at both hosts.

use super::bases::usual_name;
use super::flatten::{check_flat, refuse_flat_images, refuse_format, seen_bytes};
use crate::agent::Agent;
use dray_api::{
    ApiResult, Chain, ErrorKind, MigrationState, Prepare, Refusal, Subject, TargetFormat,
};
use dray_files::unix_ms;
use dray_host::folder::intent::{SourceImage, SourceIntent, SourceVm};
use dray_host::record::CopyState;
use dray_host::refusals::random_id;
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::Process;
use dray_host::released::Released;
use dray_host::stamp::unwritten;
use dray_image::{FileImage, FileOptions, ImageFile};
use dray_types::{Ancestor, Epoch, ImageId, MigrationId};
use dray_vm::flat::raw_name;
use dray_vm::picture::{LayerLocation, LayerPicture, Picture};
use dray_wire::ImageOffer;
use std::collections::BTreeMap;
use std::path::Path;

/// The images of a migration while it is being put together.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) images: Vec<SourceImage>,
    pub(super) allocated: Vec<u64>,
    /// Per disk and layer: which image.
    pub(super) disks: Vec<Vec<usize>>,
}

impl Agent {
    /// Works out which images move, under which names.
    pub(super) async fn plan(
        &self,
        command: &Prepare,
    ) -> ApiResult<(SourceIntent, Plan, Option<Picture>)> {
        self.session_settings(&command.to)?;
        refuse_format(command)?;
        let mut plan = Plan::default();
        let (vm, picture) = match &command.subject {
            Subject::Images { names } => {
                self.plan_images(command, names, &mut plan).await?;
                (None, None)
            }
            Subject::Vm { qmp } => {
                let picture = self.plan_vm(command, qmp, &mut plan).await?;
                let (qmp, name) = (qmp.clone(), picture.name.clone());
                let target_qmp = command.target_qmp.clone();
                let vm = SourceVm { qmp, name, qemu: None, target_qmp, facts: None };
                (Some(vm), Some(picture))
            }
        };
        if command.target_format == TargetFormat::Qcow2 {
            self.want_qcow2(&mut plan)?;
        }
        check_names(&plan)?;
        self.check_named(command, &plan)?;
        let intent = self.source_intent(command, &plan, vm)?;
        Ok((intent, plan, picture))
    }

    /// Images of this host that are not asked for with a VM.
    async fn plan_images(
        &self,
        command: &Prepare,
        names: &[String],
        plan: &mut Plan,
    ) -> ApiResult<()> {
        refuse_flat_images(command)?;
        for name in names {
            let usual = usual_name(self.registry.get(name), name);
            let target = name_there(command, name, None, &usual);
            self.plan_resident(plan, name, target, None, false)?;
        }
        self.ask_vms_of("cannot move images", names).await
    }

    /// All disks of a VM, and how it looks.
    async fn plan_vm(&self, command: &Prepare, qmp: &Path, plan: &mut Plan) -> ApiResult<Picture> {
        let mut picture = self.picture(qmp).await?;
        let what = format!("cannot move the vm behind {}", qmp.display());
        picture.refuse_in_transit(&what)?;
        picture.refuse_unfit(&[])?;
        self.plan_frozen(&mut picture);
        if command.chain == Chain::Flatten {
            picture.flatten()?;
            check_flat(&picture).await?;
        }
        picture.check_nodes(|_| true).await?;
        for layers in &picture.disks {
            let found = layers.iter().map(|layer| self.plan_layer(plan, layer, command));
            let found = found.collect::<ApiResult<_>>()?;
            plan.disks.push(found);
        }
        Ok(picture)
    }

    /// What is to be made durable of the plan: a new migration, or an earlier try once more.
    fn source_intent(
        &self,
        command: &Prepare,
        plan: &Plan,
        vm: Option<SourceVm>,
    ) -> ApiResult<SourceIntent> {
        let epoch = plan.images.iter().filter_map(|image| self.epoch_of(image)).max();
        Ok(SourceIntent {
            migration: match self.earlier_try(&command.to, plan) {
                Some(migration) => migration,
                None => MigrationId(random_id()?),
            },
            peer: command.to.clone(),
            images: plan.images.clone(),
            owner: command.owner.clone(),
            vm,
            options: None,
            epoch: epoch.unwrap_or(Epoch(1)),
            started_unix_ms: unix_ms(),
            adopted: Vec::new(),
        })
    }

    /// The epoch of an image that this host serves, or that QEMU has taken back.
    pub(super) fn epoch_of(&self, image: &SourceImage) -> Option<Epoch> {
        if let Some(entry) = self.registry.get(&image.name) {
            return Some(entry.record().epoch);
        }
        if self.base_generation(image).is_some() {
            return Some(Epoch(1));
        }
        self.released_at(image).map(|note| note.image.epoch)
    }

    /// What is known of an image that QEMU has taken back, and that will be adopted again.
    pub(super) fn released_at(&self, image: &SourceImage) -> Option<Released> {
        let known = self.registry.released.at(&image.path)?;
        (known.image.id == image.offer.id).then_some(known)
    }

    /// The generations of which the target may have a replica to begin with.
    pub(super) fn ancestors(&self, image: &SourceImage) -> Vec<Ancestor> {
        if image.offer.read_only {
            return self.base_generation(image).into_iter().collect();
        }
        let line = match self.registry.get(&image.name) {
            Some(entry) => entry.line().map(|line| line.lineage()),
            None => {
                self.released_at(image).and_then(|n| self.registry.released.lineage(n.image.id))
            }
        };
        line.map_or_else(Vec::new, |line| line.ancestors())
    }

    /// The generation of a base image whose content is known.
    fn base_generation(&self, image: &SourceImage) -> Option<Ancestor> {
        let known = self.digests.identity(&image.path).filter(|_| image.offer.read_only);
        known.filter(|(id, _)| *id == image.offer.id).map(|(_, generation)| generation)
    }

    /// A failed or cancelled migration of the same resident images to the same host: what its
    /// target still has is used again.
    fn earlier_try(&self, to: &str, plan: &Plan) -> Option<MigrationId> {
        let same = |intent: &SourceIntent| {
            intent.peer == to
                && intent.adopted.is_empty()
                && intent.images.len() == plan.images.len()
                && intent.images.iter().zip(&plan.images).all(|(old, new)| {
                    old.name == new.name
                        && old.offer.name == new.offer.name
                        && old.qcow2 == new.qcow2
                        && self.registry.get(&new.name).map(|entry| entry.record()).is_some_and(
                            |record| {
                                let same = record.id == old.offer.id && record.len == old.offer.len;
                                // One that has been away since is moved anew.
                                same && record.epoch <= intent.epoch
                            },
                        )
                })
        };
        let slot = self.sources.all().into_iter().find(|slot| {
            let ended = matches!(
                slot.board.read().state,
                MigrationState::Failed | MigrationState::Cancelled
            );
            ended && same(&slot.intent())
        })?;
        slot.is_kept().then_some(slot.board.migration)
    }

    fn plan_layer(
        &self,
        plan: &mut Plan,
        layer: &LayerPicture,
        command: &Prepare,
    ) -> ApiResult<usize> {
        let device = Some(layer.plan.qdev.clone());
        match &layer.place {
            LayerLocation::Resident(name) => {
                let entry = self.registry.get(name);
                let flat = entry.as_ref().is_some_and(|entry| entry.flat.is_some());
                let usual = if flat { raw_name(name) } else { usual_name(entry, name) };
                let target = name_there(command, name, device.as_deref(), &usual);
                let read_only = layer.plan.depth > 0;
                self.plan_resident(plan, name, target, device, read_only)
            }
            LayerLocation::Local(path) => self.plan_local(plan, layer, path, command),
        }
    }

    /// Images do not leave without the VM that uses them: it would have no disk any more.
    pub(super) fn refuse_without_vm(&self, subject: &Subject) -> ApiResult<()> {
        match subject {
            Subject::Images { names } => {
                names.iter().try_for_each(|name| self.refuse_under_vm(name))
            }
            Subject::Vm { .. } => Ok(()),
        }
    }

    /// Refuses an image that the disk of a VM is on.
    pub(crate) fn refuse_under_vm(&self, name: &str) -> ApiResult<()> {
        let entry = self.image(name)?;
        let user = match self.attachments.count(name) {
            0 => self.registry.absent_client(&entry).filter(Process::is_emulator),
            _ => self.registry.emulator_at(name),
        };
        let Some(qemu) = user else { return Ok(()) };
        let why = format!("a vm uses it: its QEMU is process {}", qemu.pid);
        Err(Refusal::new(ErrorKind::Conflict, format!("cannot move image '{name}'"), why)
            .hint("move the vm with --qmp SOCKET, or shut it down first"))
    }

    fn plan_resident(
        &self,
        plan: &mut Plan,
        name: &str,
        target: String,
        device: Option<String>,
        backing: bool,
    ) -> ApiResult<usize> {
        let what = format!("cannot move image '{name}'");
        let conflict = |why: String| Err(Refusal::new(ErrorKind::Conflict, what.clone(), why));
        let entry = self.image(name)?;
        let record = entry.record();
        let missing = entry.disk.missing_count();
        if missing > 0 {
            return conflict(format!("{missing} of its blocks have not arrived yet"));
        }
        if record.state != CopyState::Owner {
            return conflict("this host does not own it".to_owned());
        }
        if let Some(migration) = record.migration {
            let why = format!("it takes part in migration {migration}");
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "wait until the migration has ended; if its other host is lost, see `dray claim`",
            ));
        }
        self.refuse_during_backup(&what, name)?;
        let free = self.registry.check_answered_for(&entry);
        free.map_err(|why| not_taken(what.clone(), why))?;
        let read_only = record.read_only || backing;
        let offer = ImageOffer { id: record.id, name: target, len: record.len, read_only };
        let seen = if read_only { unwritten(&record.path) } else { Ok(None) };
        let seen = seen.map_err(|why| io_error(&what, why))?;
        let image = SourceImage::new(name.to_owned(), offer, record.path, device);
        plan.images.push(SourceImage { seen, ..image });
        plan.allocated.push(match &entry.flat {
            Some(_) => seen_bytes(&what, entry.disk.backing().as_ref())?,
            None => entry.file.allocated_bytes().map_err(|why| io_error(&what, why))?,
        });
        Ok(plan.images.len() - 1)
    }

    fn plan_local(
        &self,
        plan: &mut Plan,
        layer: &LayerPicture,
        path: &Path,
        command: &Prepare,
    ) -> ApiResult<usize> {
        let what = format!("cannot move disk {}", layer.plan.qdev);
        self.check_file(&what, path, false)?;
        let path = dray_host::registry::real_path(path).map_err(|why| io_error(&what, why))?;
        // A base image under several disks moves once.
        if let Some(known) = plan.images.iter().position(|image| image.path == path) {
            return Ok(known);
        }
        if !layer.chain.is_empty() {
            return self.plan_flat(&what, plan, layer, path, command);
        }
        let options = FileOptions { write: false, direct: false, export_len: None };
        let file = FileImage::open(&path, options).map_err(|why| io_error(&what, why))?;
        let backing = layer.plan.depth > 0;
        let len = if backing || !dray_qemu::plan::grows(&layer.plan.format) {
            layer.plan.file_size
        } else {
            dray_image::growable_len(layer.plan.file_size, layer.plan.size)
        };
        let read_only = backing || layer.plan.read_only;
        let known = self.registry.known_at(&path).filter(|_| !read_only);
        let name = match &known {
            Some((note, ..)) => note.image.name.clone(),
            None => self.adopted_name(&path, |name| plan.images.iter().any(|of| of.name == name)),
        };
        if let Some(closed) = self.registry.closed(&name).filter(|_| !read_only) {
            let why = format!("image '{name}' is closed: {}", closed.reason.why);
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(closed.reason.hint));
        }
        let device = (!backing).then(|| layer.plan.qdev.clone());
        let target = name_there(command, &name, device.as_deref(), &name);
        let base = self.digests.identity(&path).filter(|_| read_only).map(|(id, _)| id);
        // A copy of the same content under another name is another image.
        let base = base.filter(|id| plan.images.iter().all(|image| image.offer.id != *id));
        let id = match (known, base) {
            (Some((note, ..)), _) => note.image.id,
            (None, Some(id)) => id,
            (None, None) => ImageId(random_id()?),
        };
        let offer = ImageOffer { id, name: target, len, read_only };
        plan.allocated.push(file.allocated_bytes().map_err(|why| io_error(&what, why))?);
        let seen = if read_only { unwritten(&path) } else { Ok(None) };
        let seen = seen.map_err(|why| io_error(&what, why))?;
        plan.images.push(SourceImage { seen, ..SourceImage::new(name, offer, path, device) });
        Ok(plan.images.len() - 1)
    }

    /// Refuses a name for something that does not move: mistyped, it would go under its usual name, perhaps
    /// onto what has that name already. Several VMs that move with one command share their names.
    fn check_named(&self, command: &Prepare, plan: &Plan) -> ApiResult<()> {
        let is_vm = matches!(command.subject, Subject::Vm { .. });
        let moves = |key: &str| {
            plan.images
                .iter()
                .any(|image| image.name == key || image.device.as_deref() == Some(key))
        };
        let known = |key: &str| moves(key) || is_vm && self.registry.get(key).is_some();
        let Some(unknown) = command.names.keys().find(|key| !known(key)) else { return Ok(()) };
        let shown = plan.images.iter().map(|image| match &image.device {
            Some(device) => format!("{} ({device})", image.name),
            None => image.name.clone(),
        });
        let shown = shown.collect::<Vec<_>>().join(", ");
        let why =
            format!("no image or disk of this move is called '{unknown}'; there are: {shown}");
        Err(Refusal::new(ErrorKind::Invalid, "cannot name the images", why)
            .hint("--name HERE=THERE takes the name of an image on this host, or the id of a disk"))
    }
}

/// What an image or disk of this host is called at the target: as the command names it, or as usual.
pub(super) fn name_there(
    command: &Prepare,
    here: &str,
    device: Option<&str>,
    usual: &str,
) -> String {
    let named = &command.names;
    let other = named.get(here).or_else(|| named.get(device?));
    let prefix = command.prefix.as_deref().unwrap_or_default();
    format!("{prefix}{}", other.map_or(usual, String::as_str))
}

fn check_names(plan: &Plan) -> ApiResult<()> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for image in &plan.images {
        if let Some(other) = seen.insert(&image.offer.name, &image.name) {
            let why =
                format!("'{other}' and '{}' would both be '{}'", image.name, image.offer.name);
            return Err(Refusal::new(ErrorKind::Invalid, "cannot name the images", why)
                .hint("give one of them another name at the target with --name HERE=THERE"));
        }
    }
    Ok(())
}

/// The layers of a VM with the number of the image that each is in.
pub(super) fn layer_plans(picture: &Picture, plan: &Plan) -> ApiResult<Vec<(u16, String)>> {
    let mut found = Vec::new();
    for (layers, images) in picture.disks.iter().zip(&plan.disks) {
        for (layer, &image) in layers.iter().zip(images) {
            let text = serde_json::to_string(&layer.plan)
                .map_err(|why| io_error("cannot describe the vm's disks", why))?;
            found.push((image as u16, text));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_image_is_called_as_the_command_names_it_or_its_disk() {
        let command = json!({
            "subject": {"vm": {"qmp": "/run/vm.sock"}},
            "to": "hostb",
            "prefix": "new-",
            "names": {"a.raw": "root.raw", "disk1": "data.raw"},
        });
        let command = serde_json::from_value(command).unwrap();
        let named = |here, device| name_there(&command, here, device, "usual.raw");
        assert_eq!(named("a.raw", None), "new-root.raw");
        assert_eq!(named("a.raw", Some("disk1")), "new-root.raw");
        assert_eq!(named("b.raw", Some("disk1")), "new-data.raw");
        assert_eq!(named("b.raw", Some("disk2")), "new-usual.raw");
        assert_eq!(named("b.raw", None), "new-usual.raw");
    }
}
