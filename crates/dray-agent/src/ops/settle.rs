//! Compares the records of a VM's disks with the answers of the VM: at each query of the VM, and
//! after a start for disks that were going to dray or back to QEMU when an agent was killed.

use super::released::not_released;
use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_host::process::QemuProcess;
use dray_host::record::{Adopted, ImageRecord};
use dray_host::refusals::{io_error, not_taken};
use dray_host::registry::Entry;
use dray_host::registry::real_path;
use dray_host::settle::{Disk, Rule, rule};
use dray_qemu::{Layer, LayerPlan, Qmp};
use dray_vm::look::Look;
use dray_vm::picture::Picture;
use dray_vm::qemu_error;
use dray_vm::released::settle::{settle_on_dray, settle_on_file};
use serde_json::Value;
use std::io;
use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

/// How often is asked for a VM that has not answered since the start.
const AGAIN: Duration = Duration::from_secs(5);

impl Agent {
    /// What the VM behind a QMP socket looks like, after what was half done with its disks was settled.
    ///
    /// # Errors
    /// When it cannot be looked at, or has no disks.
    pub(super) async fn picture(&self, socket: &Path) -> ApiResult<Picture> {
        let picture = self.settled(socket).await?;
        if picture.look.disks.is_empty() {
            let what = format!("cannot look at the vm behind {}", socket.display());
            return Err(Refusal::new(ErrorKind::NotFound, what, "it has no disks"));
        }
        Ok(picture)
    }

    async fn settled(&self, socket: &Path) -> ApiResult<Picture> {
        let look = || Picture::take(&*self.hypervisor, socket, self.nbd_socket(), &self.registry);
        let picture = look().await?;
        let mut settled = false;
        for entry in self.registry.all() {
            settled |= self.settle(&picture, &entry).await?;
        }
        // What was released by then is known by its note.
        if !settled {
            return Ok(picture);
        }
        drop(picture);
        look().await
    }

    /// The rule that decides about an image when this VM has been looked at; none when the VM has nothing to do
    /// with it.
    pub(super) fn rule_by(&self, look: &Look, entry: &Entry) -> Option<Rule> {
        let record = entry.record();
        let disk = match self.where_is(look, &record) {
            Some(disk) => disk,
            None => {
                let own = self.registry.vm_of(&record)?;
                // One process may carry the monitors of several VMs.
                let is_own = look
                    .process
                    .as_ref()
                    .is_some_and(|now| now.is_process(&own) && now.socket == own.socket);
                is_own.then_some(Disk::Elsewhere)?
            }
        };
        Some(rule(self.registry.seen_by(entry, look.process.as_ref(), disk)))
    }

    /// Where a VM has the disk of an image; none when it has nothing of it.
    fn where_is(&self, look: &Look, record: &ImageRecord) -> Option<Disk> {
        let nbd_socket = self.nbd_socket();
        let layers = || look.disks.iter().flat_map(|disk| &disk.layers);
        if layers().any(|layer| layer.export_at(&nbd_socket).as_ref() == Some(&record.name)) {
            return Some(Disk::OnExport);
        }
        // What is only read may have several users.
        let is_its = |path: &Path| real_path(path).is_ok_and(|path| path == record.path);
        let on_file = || layers().any(|layer| layer.protocol.path().is_some_and(is_its));
        (!record.read_only && on_file()).then_some(Disk::OnFile)
    }

    /// Does what is to be done with an image after a look at a VM; whether there was anything.
    async fn settle(&self, picture: &Picture, entry: &Arc<Entry>) -> ApiResult<bool> {
        let Some(rule) = self.rule_by(&picture.look, entry) else { return Ok(false) };
        let name = entry.record().name;
        let (qmp, plan) = (picture.qmp(), plan_of(picture, entry));
        // What is half done because somebody is doing it is not settled.
        let Ok(_operation) = self.registry.operate(&name, "release") else { return Ok(false) };
        let what = format!("cannot continue with the disk of image '{name}'");
        self.note_device(&picture.look, entry).map_err(|why| io_error(&what, why))?;
        match (rule, plan) {
            (Rule::CameUnderDray | Rule::StayedUnderDray, Some(plan)) => {
                // Its mirror may wait for an agent that has died.
                let ended = dray_qemu::abandon_pivot(qmp, &plan).await;
                ended.map_err(|why| qemu_error(&what, &why))?;
                let run_dir = &self.config.run_dir;
                let settled = settle_on_dray(&self.registry, qmp, &plan, entry, run_dir).await;
                settled.map_err(|why| io_error(&what, why))?;
                Ok(true)
            }
            (Rule::IsOnItsFile, Some(plan)) => {
                if !self.leaves(qmp, &plan, &name).await {
                    return Ok(false);
                }
                let (registry, config) = (&self.registry, &self.config);
                let settled = settle_on_file(registry, config, qmp, &plan, entry).await;
                settled.map_err(|why| not_released(&what, why))?;
                Ok(true)
            }
            (Rule::MovedAway, Some(plan)) => self.let_go_of_moved(qmp, &plan, entry).await,
            (Rule::ServedToItsVm, _) => {
                // QEMU may have had locks of its own when dray wanted its own back.
                entry.regain_locks();
                Ok(false)
            }
            (Rule::LeftToItsClients | Rule::TakenFromItsClients, _) => {
                self.registry.distrust(entry);
                entry.regain_locks();
                Ok(false)
            }
            (Rule::InUseElsewhere | Rule::Undecided, _) => {
                self.registry.distrust(entry);
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Writes down which device an adopted disk has by now, which may have been unplugged and plugged in under
    /// another id: it is the one on the export.
    pub(super) fn note_device(&self, look: &Look, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let own = |adopted: &Adopted| adopted.is_of(look.process.as_ref());
        let Some(adopted) = record.adopted.filter(own) else { return Ok(()) };
        let nbd_socket = self.nbd_socket();
        let is_its = |layer: &Layer| layer.export_at(&nbd_socket).as_ref() == Some(&record.name);
        let device = look.disks.iter().find(|disk| disk.layers.iter().any(is_its));
        let device = match device {
            Some(disk) if disk.qdev != adopted.device => disk.qdev.clone(),
            _ => return Ok(()),
        };
        let splice = plugged_in_as(&adopted.splice, &device)?;
        tracing::info!(image = record.name, device, was = adopted.device, "plugged in anew");
        let adopted = Adopted { device, splice, ..adopted };
        self.registry.update(entry, |record| record.adopted = Some(adopted))
    }

    /// Another program has put the disk of an image on something else: QEMU leaves the export, and nobody has the
    /// image any more. Whether that came to its end.
    pub(super) async fn let_go_of_moved(
        &self,
        qmp: &Qmp,
        plan: &LayerPlan,
        entry: &Entry,
    ) -> ApiResult<bool> {
        let record = entry.record();
        let Some(qemu) = self.registry.vm_of(&record) else { return Ok(false) };
        if !self.leaves(qmp, plan, &record.name).await {
            return Ok(false);
        }
        self.give_back(entry, &qemu)?;
        let (image, path) = (&record.name, record.path.display());
        tracing::warn!(image, %path, "another program has put the vm's disk on another file: the \
                                      image's file stays as it is");
        Ok(true)
    }

    /// Has QEMU leave the export of an image whose disk is not on it: a release that was cut short after its pivot
    /// has not done that, nor an adoption before its own, whose mirror waits for the export. Whether nobody is at
    /// the export then. QEMU is asked also when it is not connected: after a restart it comes back in its own time.
    async fn leaves(&self, qmp: &Qmp, plan: &LayerPlan, image: &str) -> bool {
        // What still uses it uses it.
        dray_qemu::leave_export(qmp, plan).await.is_ok() && self.is_left(image).await
    }

    /// Asks the VMs of images where they have them. What another program has put elsewhere is not what is backed
    /// up or moved as this host has it.
    ///
    /// # Errors
    /// When a VM has a disk elsewhere, or does not say.
    pub(crate) async fn ask_vms_of(&self, what: &str, images: &[String]) -> ApiResult<()> {
        let entries: Vec<_> = images.iter().filter_map(|name| self.registry.get(name)).collect();
        let mut vms: Vec<QemuProcess> = Vec::new();
        for vm in entries.iter().filter_map(|entry| self.asked_of(entry)) {
            if !vms.iter().any(|known| known.is_process(&vm) && known.socket == vm.socket) {
                vms.push(vm);
            }
        }
        for vm in vms {
            let why = match self.settled(&vm.socket).await {
                Ok(picture)
                    if picture.look.process.as_ref().is_none_or(|now| vm.is_process(now)) =>
                {
                    for entry in &entries {
                        check_disk(&picture, entry).await?;
                    }
                    continue;
                }
                // It knows nothing of the disks of the one that is meant, which runs.
                Ok(_) => format!(
                    "another vm answers at {}, and process {}, which has them, still runs",
                    vm.socket.display(),
                    vm.pid
                ),
                Err(why) => why.to_string(),
            };
            // It may have ended meanwhile, which settles it as well.
            let asks =
                |entry: &Arc<Entry>| self.asked_of(entry).is_some_and(|it| it.is_process(&vm));
            if entries.iter().any(asks) {
                let why = format!("the agent does not know where the vm has its disks: {why}");
                return Err(Refusal::new(ErrorKind::Hypervisor, what, why)
                    .hint("try again when its QEMU answers at its QMP socket"));
            }
        }
        entries.iter().try_for_each(|entry| self.check_stayed(what, entry))
    }

    /// The VM that may say where it has an image; none where a migration looks itself.
    fn asked_of(&self, entry: &Entry) -> Option<QemuProcess> {
        match self.registry.rule_of(entry) {
            Rule::OfItsMigration | Rule::NotOwned => None,
            _ => {
                let record = entry.record();
                let vm = self.registry.vm_of(&record).or(record.came_for);
                vm.filter(QemuProcess::runs)
            }
        }
    }

    fn check_stayed(&self, what: &str, entry: &Arc<Entry>) -> ApiResult<()> {
        let name = entry.record().name;
        if self.registry.get(&name).is_none_or(|now| !Arc::ptr_eq(&now, entry)) {
            let why = format!("the vm has the disk of image '{name}' on another file");
            return Err(Refusal::new(ErrorKind::Conflict, what, why).hint(
                "`dray images` shows the state of the image; adopt the disk from its present file",
            ));
        }
        self.registry.check_answered_for(entry).map_err(|why| not_taken(what, why))
    }

    /// Looks at the VMs whose disks were on their way when the agent before this one died, or when QEMU did not
    /// answer, for as long as the agent runs.
    pub(crate) async fn keep_settling(self: Arc<Self>) {
        loop {
            let free = |name: &str| self.registry.operate(name, "release").is_ok();
            let halfway = |entry: &Arc<Entry>| {
                let rule = self.registry.rule_of(entry);
                matches!(rule, Rule::Undecided | Rule::LeftToItsClients | Rule::TakenFromItsClients)
                    && free(&entry.record().name)
            };
            let undecided = self.registry.all().into_iter().filter(halfway);
            let vms = undecided.filter_map(|entry| self.registry.vm_of(&entry.record()));
            let mut sockets: Vec<_> = vms.map(|qemu| qemu.socket).collect();
            sockets.sort();
            sockets.dedup();
            for socket in sockets {
                if let Err(why) = self.picture(&socket).await {
                    tracing::debug!(%why, "a vm has not been checked yet");
                }
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// Refuses an image of which its VM has more, or something else, than this host knows.
async fn check_disk(picture: &Picture, entry: &Entry) -> ApiResult<()> {
    let record = entry.record();
    if !record.read_only {
        picture.refuse_overlaid(&record.name)?;
    }
    let Some(adopted) = &record.adopted else { return Ok(()) };
    if !adopted.is_of(picture.look.process.as_ref()) {
        return Ok(());
    }
    picture.refuse_unfit(slice::from_ref(&adopted.device))?;
    picture.check_nodes(|layer| layer.plan.qdev == adopted.device).await
}

/// How an adopted disk, or each layer of a flattened one, gets back from the device with this id.
fn plugged_in_as(splice: &Value, device: &str) -> serde_json::Result<Value> {
    if splice.is_array() {
        let layers: Vec<LayerPlan> = serde_json::from_value(splice.clone())?;
        let layers = layers.into_iter().map(|layer| layer.plugged_in_as(device));
        return serde_json::to_value(layers.collect::<Vec<_>>());
    }
    let plan: LayerPlan = serde_json::from_value(splice.clone())?;
    serde_json::to_value(plan.plugged_in_as(device))
}

/// How a disk gets under dray and back: as it looks now, or as it was adopted.
fn plan_of(picture: &Picture, entry: &Entry) -> Option<LayerPlan> {
    let record = entry.record();
    let seen = picture.layers().find(|layer| layer.is_of(&record.name, &record.path));
    let adopted = || serde_json::from_value(record.adopted.clone()?.splice).ok();
    seen.map(|layer| layer.plan.clone()).or_else(adopted)
}
