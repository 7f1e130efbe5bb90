//! The disks of a VM as QEMU reports them, the images under them, and the plan by which each layer
//! comes under dray and goes back.

use crate::hypervisor::{Hypervisor, Vm};
use crate::look::Look;
use crate::released::plans_of;
use crate::{own_files, qemu_error};
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_files::unix_ms;
use dray_host::process::{QemuProcess, has_walls};
use dray_host::registry::{Process, Registry};
use dray_qemu::{Layer, LayerPlan, NodeOptions, Pivot, Qmp, VmDisk, options_of_part, status};
use dray_types::text::name_of_socket;
use serde_json::{Map, Value, json};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::slice;

/// What to do about an overlay that another program has put over a disk.
pub const MERGE: &str = "merge the overlay into the image below it (`virsh blockcommit VM DISK \
                         --active --pivot`, or `block-commit` and `job-complete` in QMP), then \
                         try again";

/// Where a layer's bytes are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LayerLocation {
    /// On this agent's socket, as the image of this name.
    Resident(String),
    /// In a local file or block device.
    Local(PathBuf),
}

/// One layer of a disk.
#[derive(Clone, Debug)]
pub struct LayerPicture {
    /// How it gets under dray and back.
    pub plan: LayerPlan,
    /// Where its bytes are.
    pub place: LayerLocation,
    /// The chain that it stands for, the active image first, when the disk is to be flattened.
    pub chain: Vec<LayerPlan>,
    /// On this agent's socket: QEMU connects again when it is cut off, and asks again.
    pub reconnects: bool,
}

impl LayerPicture {
    /// Whether it is the image of this name, or the file at this path.
    pub fn is_of(&self, name: &str, path: &Path) -> bool {
        match &self.place {
            LayerLocation::Resident(image) => image == name,
            LayerLocation::Local(file) => {
                file.canonicalize().is_ok_and(|file| file == path) || file == path
            }
        }
    }

    /// The layers of QEMU's that it is made of.
    pub fn plans(&self) -> &[LayerPlan] {
        match self.chain.is_empty() {
            true => slice::from_ref(&self.plan),
            false => &self.chain,
        }
    }

    fn local(plan: LayerPlan) -> Self {
        let place = LayerLocation::Local(plan.path());
        Self { plan, place, chain: Vec::new(), reconnects: false }
    }
}

/// A running VM.
pub struct Picture {
    /// The VM.
    pub vm: Box<dyn Vm>,
    /// Its name: QEMU's `-name`, or the name of its socket's file without what follows the last dot.
    pub name: Option<String>,
    /// What it is and does.
    pub look: Look,
    /// Its disks' layers, the active one of each disk first. Of disks that dray cannot get under, none.
    pub disks: Vec<Vec<LayerPicture>>,
    unfit: Vec<Unfit>,
    /// Images on this agent's socket that are not the active one of their disk, and the disk's id.
    below: Vec<(String, String)>,
}

/// A disk that could not be put back as it is.
struct Unfit {
    qdev: String,
    /// Something of it is on this agent's socket.
    resident: bool,
    why: Refusal,
}

impl Picture {
    /// Looks at the VM behind a QMP socket.
    ///
    /// # Errors
    /// When there is none, or it does not answer.
    pub async fn take(
        hypervisor: &dyn Hypervisor,
        socket: &Path,
        nbd_socket: PathBuf,
        registry: &Registry,
    ) -> ApiResult<Self> {
        let what = || format!("cannot look at the vm behind {}", socket.display());
        let failed = |why: dray_qemu::Error| qemu_error(what(), &why);
        let vm = hypervisor.vm(socket).await.map_err(failed)?;
        let name = status::name(vm.monitor()).await.map_err(failed)?;
        let name = name.or_else(|| name_of_socket(socket));
        let look = vm.look().await.map_err(failed)?;
        if look.process.as_ref().is_some_and(|qemu| registry.has_left(qemu)) {
            let why = "its vm has left this host: this QEMU is of the past, whatever it is told";
            return Err(Refusal::new(ErrorKind::Conflict, what(), why)
                .hint("end it with `quit` at its QMP socket; the vm is where it moved to"));
        }
        if look.process.is_none() && vm.monitor().user().is_some_and(has_walls) {
            let why = "it is not known which process answers for it: who made the socket has ended, or \
                       cannot be seen from here";
            return Err(Refusal::new(ErrorKind::Denied, what(), why)
                .hint("start the vm so that its QEMU makes the socket itself"));
        }
        let mut known = match vm.monitor().pid() {
            Some(pid) => NodeOptions::of_process(pid).map_err(failed)?,
            None => NodeOptions::default(),
        };
        if let Some(process) = &look.process {
            plans_of(registry, process).iter().for_each(|plan| known.add_released(plan));
        }
        let (mut fit, mut unfit) = (Vec::new(), Vec::new());
        for disk in &look.disks {
            let found = layers(disk, &known, &nbd_socket).map_err(failed);
            let found = match found {
                Ok(layers) => {
                    check(disk, &layers, look.process.as_ref(), registry).await.map(|()| layers)
                }
                Err(why) => Err(why),
            };
            match found {
                Ok(layers) => fit.push(layers),
                Err(why) => unfit.push(unfit_disk(disk, &nbd_socket, why)),
            }
        }
        let below = look.disks.iter().flat_map(|disk| below(disk, &nbd_socket)).collect();
        Ok(Self { vm, name, look, disks: fit, unfit, below })
    }

    /// Refuses names of disks that the VM does not have.
    ///
    /// # Errors
    /// What cannot be done, `what`, and the disks that there are.
    pub fn refuse_unknown(&self, what: &str, wanted: &[String]) -> ApiResult<()> {
        let known: Vec<_> = self.look.disks.iter().map(|disk| disk.qdev.as_str()).collect();
        let Some(unknown) = wanted.iter().find(|name| !known.contains(&name.as_str())) else {
            return Ok(());
        };
        let why = format!("the vm has no disk '{unknown}'");
        let hint = format!("its disks are {}", known.join(", "));
        Err(Refusal::new(ErrorKind::NotFound, what, why).hint(hint))
    }

    /// Refuses disks that could not be put back as they were. `wanted`: all of the VM's when it names none.
    ///
    /// # Errors
    /// Why one of them could not.
    pub fn refuse_unfit(&self, wanted: &[String]) -> ApiResult<()> {
        self.refuse(wanted, |_| true)
    }

    /// The same as [`refuse_unfit`](Self::refuse_unfit), of those that are on this agent's socket, below something
    /// else.
    ///
    /// # Errors
    /// Why one of them could not.
    pub fn refuse_covered(&self, wanted: &[String]) -> ApiResult<()> {
        self.refuse(wanted, |disk| disk.resident)
    }

    /// Refuses an image that is below another one of its disk: another program has put an overlay over it, and
    /// its guest writes there.
    ///
    /// # Errors
    /// That it is.
    pub fn refuse_overlaid(&self, image: &str) -> ApiResult<()> {
        let is_it = |(name, _): &&(String, String)| name == image;
        let Some((_, disk)) = self.below.iter().find(is_it) else { return Ok(()) };
        let what = format!("cannot use disk {disk}");
        let why = format!("another program has put an overlay over image '{image}'");
        Err(Refusal::new(ErrorKind::Conflict, what, why).hint(MERGE))
    }

    fn refuse(&self, wanted: &[String], which: impl Fn(&Unfit) -> bool) -> ApiResult<()> {
        let is_wanted = |disk: &Unfit| wanted.is_empty() || wanted.contains(&disk.qdev);
        match self.unfit.iter().find(|disk| is_wanted(disk) && which(disk)) {
            Some(disk) => Err(disk.why.clone()),
            None => Ok(()),
        }
    }

    /// Refuses a QEMU that has no guest to take anything from, or sends it somewhere.
    ///
    /// # Errors
    /// What cannot be done, `what`, and why.
    pub fn refuse_in_transit(&self, what: &str) -> ApiResult<()> {
        let (why, hint) = match self.look.status.state.as_str() {
            "inmigrate" => {
                ("its QEMU waits for a guest", "name the QMP socket of the QEMU that has the guest")
            }
            "finish-migrate" => (
                "its QEMU is sending the guest to another host",
                "wait until that migration has ended",
            ),
            "postmigrate" => (
                "its QEMU has sent the guest to another host, or has tried to, and does not send \
                 it again before the guest has run",
                "if the guest is to run in this QEMU: give `cont`, and `stop` if it is to be \
                 paused, then try again; if it runs on another host, end this QEMU",
            ),
            _ => return Ok(()),
        };
        Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
    }

    /// From here on a disk with a format driver is one raw image: what its guest sees.
    ///
    /// # Errors
    /// When a disk is such that its chain could not be frozen.
    pub fn flatten(&mut self) -> ApiResult<()> {
        for layers in &mut self.disks {
            let Some(active) = layers.first() else { continue };
            if active.plan.format == "raw" || active.plan.read_only {
                continue;
            }
            let refuse = |why: &str, hint: &str| {
                let what = format!("cannot flatten disk {}", active.plan.qdev);
                Err(Refusal::new(ErrorKind::Conflict, what, why).hint(hint))
            };
            if layers.iter().any(|layer| matches!(layer.place, LayerLocation::Resident(_))) {
                let why = "an image of its chain is on dray's socket, below the format driver";
                return refuse(why, "`dray release` it first, or use --chain keep");
            }
            if dray_host::registry::is_device(&active.plan.path()) {
                let why = "its active image is on a block device, which has no room for an overlay";
                return refuse(why, "use --chain keep");
            }
            let chain: Vec<_> = layers.iter().map(|layer| layer.plan.clone()).collect();
            let (plan, place) = (chain[0].flattened(), active.place.clone());
            *layers = vec![LayerPicture { plan, place, chain, reconnects: false }];
        }
        Ok(())
    }

    /// Refuses layers on local files of which the node has another file than lies at its path now. Of layers that
    /// are `wanted` only.
    ///
    /// # Errors
    /// That one has, or that it cannot be found out.
    pub async fn check_nodes(&self, wanted: impl Fn(&LayerPicture) -> bool) -> ApiResult<()> {
        let Some(process) = &self.look.process else { return Ok(()) };
        for layer in self.layers().filter(|layer| wanted(layer)) {
            let LayerLocation::Local(_) = &layer.place else { continue };
            for plan in layer.plans() {
                let what = format!("cannot use disk {}", plan.qdev);
                own_files::check_layer(&what, process, self.qmp(), plan, None).await?;
            }
        }
        Ok(())
    }

    /// Its monitor.
    pub fn qmp(&self) -> &Qmp {
        self.vm.monitor()
    }

    /// All layers of all disks.
    pub fn layers(&self) -> impl Iterator<Item = &LayerPicture> {
        self.disks.iter().flatten()
    }
}

/// Refuses a disk that is not what the VM says it is.
async fn check(
    disk: &VmDisk,
    layers: &[LayerPicture],
    process: Option<&QemuProcess>,
    registry: &Registry,
) -> ApiResult<()> {
    check_files(disk, layers, process).await?;
    check_clients(disk, layers, process, registry)
}

/// Refuses a disk of which a layer's path leads to a file that QEMU does not have open. It is looked at only: which
/// node has it, [`Picture::check_nodes`] finds out.
async fn check_files(
    disk: &VmDisk,
    layers: &[LayerPicture],
    process: Option<&QemuProcess>,
) -> ApiResult<()> {
    let Some(process) = process else { return Ok(()) };
    let what = format!("cannot use disk {}", disk.qdev);
    for layer in layers {
        if let LayerLocation::Local(path) = &layer.place {
            own_files::check_path(&what, process, path).await?;
        }
    }
    Ok(())
}

/// Refuses a disk that is said to be on the export of an image which this VM does not have: whoever is behind the
/// monitor may name any. A manager's word counts.
fn check_clients(
    disk: &VmDisk,
    layers: &[LayerPicture],
    process: Option<&QemuProcess>,
    registry: &Registry,
) -> ApiResult<()> {
    let walled = |vm: &&QemuProcess| vm.user().is_none_or(has_walls);
    let Some(vm) = process.filter(walled) else { return Ok(()) };
    let client = u32::try_from(vm.pid).ok().map(|pid| Process { pid, started: vm.started });
    let has = |name: &str| {
        client.is_some_and(|client| {
            registry.was_attached(name, client)
                && registry.who_else_has(name, client, unix_ms()).is_none()
        })
    };
    let named = layers.iter().filter_map(|layer| match &layer.place {
        LayerLocation::Resident(name) => Some(name),
        LayerLocation::Local(_) => None,
    });
    match named.into_iter().find(|name| !has(name)) {
        None => Ok(()),
        Some(name) => {
            let what = format!("cannot use disk {}", disk.qdev);
            let why = format!(
                "its QEMU (process {}) says that it is on image '{name}', and is no client of it",
                vm.pid
            );
            Err(Refusal::new(ErrorKind::Denied, what, why)
                .hint("wait until QEMU is connected again, if the agent has just been restarted"))
        }
    }
}

fn unfit_disk(disk: &VmDisk, nbd_socket: &Path, why: Refusal) -> Unfit {
    let resident = disk.layers.iter().any(|layer| layer.export_at(nbd_socket).is_some());
    let why = if resident { why.hint(MERGE) } else { why };
    Unfit { qdev: disk.qdev.clone(), resident, why }
}

/// The images on this agent's socket that are below another layer of a disk, and the disk.
fn below(disk: &VmDisk, nbd_socket: &Path) -> impl Iterator<Item = (String, String)> {
    let names = disk.layers.iter().skip(1).filter_map(|layer| layer.export_at(nbd_socket));
    names.map(|name| (name, disk.qdev.clone()))
}

fn layers(
    disk: &VmDisk,
    known: &NodeOptions,
    nbd_socket: &Path,
) -> dray_qemu::Result<Vec<LayerPicture>> {
    if disk.layers.iter().all(|layer| layer.protocol.driver != "nbd") {
        let plans = LayerPlan::of_disk(disk, known)?;
        return Ok(plans.into_iter().map(LayerPicture::local).collect());
    }
    let mut found = Vec::new();
    for (depth, layer) in disk.layers.iter().enumerate() {
        match layer.export_at(nbd_socket) {
            Some(name) => found.push(resident(disk, depth, layer, name, known)?),
            None => found.push(LayerPicture::local(LayerPlan::of_depth(disk, depth, known)?)),
        }
    }
    Ok(found)
}

/// How a layer that arrived here gets onto the file or block device at `path`.
///
/// # Errors
/// When the guest would see a disk of another size there.
pub fn on_local(plan: &LayerPlan, path: &Path) -> io::Result<LayerPlan> {
    let shown = path.display();
    let doing =
        |what: &str, why: io::Error| io::Error::new(why.kind(), format!("{what} {shown}: {why}"));
    let mut plan = plan.for_target(path);
    let file = std::fs::File::open(path).map_err(|why| doing("open", why))?;
    let meta = file.metadata().map_err(|why| doing("look at", why))?;
    let device = meta.file_type().is_block_device();
    plan.local.insert("driver".into(), if device { "host_device" } else { "file" }.into());
    if device && !dray_qemu::plan::grows(&plan.format) {
        let len = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
            .map_err(|why| doing("measure", why.into()))?;
        if len != plan.file_size {
            let size = plan.file_size;
            let why = format!("{shown} has {len} bytes and the disk {size}: it stays on dray");
            return Err(io::Error::other(why));
        }
    }
    Ok(plan)
}

fn resident(
    disk: &VmDisk,
    depth: usize,
    layer: &Layer,
    name: String,
    known: &NodeOptions,
) -> dray_qemu::Result<LayerPicture> {
    let options = match &layer.format {
        Some(format) if format.driver == "raw" => options_of_part(format, known)?,
        Some(format) if !format.is_auto_named() => Some(known.of_node(&format.name)?),
        _ => None,
    };
    let pivot = options.map_or(Pivot::Mirror, |options| Pivot::Reopen { options });
    // The format node keeps its name when it is reopened on the file; a mirrored node gives its own.
    let name_there = match &pivot {
        Pivot::Reopen { .. } => LayerPlan::file_node(&disk.qdev, depth),
        Pivot::Mirror => layer.top().name.clone(),
    };
    let mut local = Map::new();
    local.insert("driver".into(), "file".into());
    local.insert("node-name".into(), name_there.into());
    local.insert("discard".into(), "unmap".into());
    if layer.top().read_only {
        // Others may use the file: it is not even opened for writing.
        local.insert("read-only".into(), true.into());
    }
    let plan = LayerPlan {
        qdev: disk.qdev.clone(),
        named_for: None,
        depth,
        format: layer.format_name().to_owned(),
        size: layer.top().size,
        file_size: layer.protocol.size,
        read_only: layer.top().read_only,
        pivot,
        local,
    };
    let reconnects = reconnects(layer, &plan, known);
    Ok(LayerPicture { plan, place: LayerLocation::Resident(name), chain: Vec::new(), reconnects })
}

/// Whether a node was made to connect again: dray's are, of others the command line tells.
fn reconnects(layer: &Layer, plan: &LayerPlan, known: &NodeOptions) -> bool {
    let options = match &layer.format {
        Some(format) if !format.is_auto_named() => {
            known.of_file_child(&format.name).map(|(options, _)| options)
        }
        _ => known.of_node(&layer.protocol.name),
    };
    let delay = options.ok().and_then(|options| options.get("reconnect-delay").cloned());
    let is_none = |delay: &Value| delay == &json!(0) || delay == &json!("0");
    layer.protocol.name == plan.nbd_node() || delay.is_some_and(|delay| !is_none(&delay))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exports_of_this_agent_are_resident() {
        let layer = |file: &str| Layer {
            format: None,
            protocol: dray_qemu::Node {
                name: "n".into(),
                driver: "nbd".into(),
                file: file.into(),
                size: 1,
                read_only: false,
                detect_zeroes: "off".into(),
                cache: dray_qemu::graph::Cache { direct: false, no_flush: false },
                bitmaps: Vec::new(),
                format_specific: serde_json::Value::Null,
                snapshots: Vec::new(),
                encrypted: false,
            },
        };
        let ours = Path::new("/run/dray/nbd.sock");
        let found = |file| layer(file).export_at(ours);
        assert_eq!(found("nbd+unix:///vm1?socket=/run/dray/nbd.sock"), Some("vm1".to_owned()));
        assert_eq!(found("nbd+unix:///vm1?socket=/tmp/other"), None);
        assert_eq!(found("nbd://10.0.0.1/vm1"), None);
    }
}
