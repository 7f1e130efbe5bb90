//! Flatten: put dray *above* a disk's format driver, and back. What the guest sees is then the
//! export; the chain of images below is left as it is, for whoever reads it from then on.
//!
//! The guest has to be stopped: a stopping QEMU flushes all that its format drivers hold back, and
//! nothing is written while the nodes are exchanged. [`flatten`] takes the chain's active image out
//! of QEMU, [`unflatten`] opens it again with the options it had. Both can be broken off at any
//! point; [`settle`] then says where the disk is and removes what is left of the other side.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::adopt::{AdoptOptions, NbdExport, check_size, local_layer};
use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph::{Graph, Layer, VmDisk};
use crate::nodes::{add_node, after_exchange, delete_node, undo_add};
use crate::options::Options;
use crate::pivot::{MayPivot, abandon_pivot, delete_rest, is_pivoting, mirror};
use crate::plan::{LayerPlan, Pivot, check_unused, raw_node};
use crate::qmp::Qmp;

/// What a disk is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    /// dray's export.
    Export,
    /// Its own chain.
    Chain,
}

impl LayerPlan {
    /// The disk of this active layer as its guest sees it: raw, as long as the virtual disk, under
    /// the name of the format node. Its path stays that of the active image.
    #[must_use]
    pub fn flattened(&self) -> Self {
        let mut plan = self.clone();
        if let Pivot::Reopen { options } = &self.pivot {
            for key in ["node-name", "discard", "detect-zeroes", "cache"] {
                if let Some(value) = options.get(key) {
                    plan.local.insert(key.into(), value.clone());
                }
            }
        }
        plan.local.insert("driver".into(), "file".into());
        plan.format = "raw".into();
        plan.file_size = self.size;
        plan.pivot = Pivot::Mirror;
        plan
    }

    /// The raw disk of this [flattened](Self::flattened) layer in the file at `path`, on the export or
    /// on the file itself, as at the source: without a node of its own between it and the device.
    #[must_use]
    pub fn directly_on(&self, path: &Path) -> Self {
        let mut plan = self.clone();
        plan.local.insert("driver".into(), "file".into());
        plan.local.insert("filename".into(), path.to_string_lossy().into());
        plan
    }

    /// The raw disk of this [flattened](Self::flattened) layer in a qcow2 without a backing file at
    /// `path`, whose node has the name and treats requests as the disk's at the source.
    #[must_use]
    pub fn in_qcow2(&self, path: &Path) -> Self {
        let mut options = raw_node(self.local_node(), &self.local);
        options.insert("driver".into(), "qcow2".into());
        let mut plan = self.directly_on(path);
        plan.local.remove("detect-zeroes");
        plan.local.insert("node-name".into(), self.node("file").into());
        plan.local.insert("discard".into(), "unmap".into());
        plan.format = "qcow2".into();
        plan.pivot = Pivot::Reopen { options };
        plan
    }

    /// Whether QEMU opened the layer by itself, because the one above names it.
    fn is_implied(&self) -> bool {
        self.format_node() == Some(&self.node("format"))
    }

    fn format_options(&self) -> Result<(&Options, &str)> {
        match (&self.pivot, self.format_node()) {
            (Pivot::Reopen { options }, Some(name)) => Ok((options, name)),
            _ => {
                let why = format!("disk {} has no format driver", self.qdev);
                Err(Error::new(ErrorKind::Refused, why))
            }
        }
    }
}

fn active(layers: &[LayerPlan]) -> Result<&LayerPlan> {
    layers.first().ok_or_else(|| Error::new(ErrorKind::Refused, "a disk without layers"))
}

/// Checks without touching anything that [`flatten`] would not refuse: what a flattened copy cannot
/// have is told of.
pub async fn check(qmp: &Qmp, layers: &[LayerPlan], options: AdoptOptions) -> Result<()> {
    let graph = Graph::read(qmp).await?;
    let plan = active(layers)?;
    let layer = local_layer(&graph, plan)?;
    let qdev = &plan.qdev;
    let refuse = |why: String| Err(Error::new(ErrorKind::Refused, format!("disk {qdev}: {why}")));
    let Some(format) = &layer.format else {
        return refuse("it has no format driver, so there is nothing to flatten".into());
    };
    if let Some(name) = format.snapshots.first() {
        return refuse(format!(
            "its image has the internal snapshot {name}, which a flattened copy cannot have: \
             delete it, or move the chain as it is (--chain keep)"
        ));
    }
    if format.encrypted || layers.iter().any(|layer| layer.format == "luks") {
        return refuse("an encrypted image cannot be flattened: use --chain keep".into());
    }
    let bitmaps = check_unused(&graph, &plan.flattened(), &layer, true)?;
    if let (Some((_, bitmap)), false) = (bitmaps.first(), options.drop_bitmaps) {
        return refuse(format!(
            "its image has the dirty bitmap {bitmap}, which the target would not have: allow it \
             (--drop-bitmaps), or move the chain as it is (--chain keep)"
        ));
    }
    Ok(())
}

/// Puts the disk of a stopped guest on the export, and closes the chain's active image in QEMU. On
/// failure it is on its chain. What the guest writes from the moment `may_pivot` was asked on is on both.
/// Returns how long the exchange took.
pub async fn flatten(
    qmp: &Qmp,
    layers: &[LayerPlan],
    export: &NbdExport,
    may_pivot: MayPivot<'_>,
) -> Result<Duration> {
    let flat = active(layers)?.flattened();
    let what = || format!("could not flatten disk {}", flat.qdev);
    let graph = Graph::read(qmp).await.map_err(|e| e.during(what()))?;
    let layer = local_layer(&graph, active(layers)?).map_err(|e| e.during(what()))?;
    let start = Instant::now();
    let nbd = flat.nbd_node();
    add_node(qmp, &export.node(&flat)).await.map_err(|e| e.during(what()))?;
    if let Err(error) = onto_export(qmp, &flat, &layer, may_pivot).await {
        return Err(undo_add(qmp, &nbd, error).await.during(what()));
    }
    delete_rest(qmp, &flat, &layer).await.map_err(|e| after_exchange(e).during(what()))?;
    Ok(start.elapsed())
}

async fn onto_export(
    qmp: &Qmp,
    flat: &LayerPlan,
    layer: &Layer,
    may_pivot: MayPivot<'_>,
) -> Result<()> {
    let nbd = flat.nbd_node();
    check_size(qmp, flat, &nbd).await?;
    mirror(qmp, flat, (&layer.top().name, &nbd), None, may_pivot).await
}

/// Puts the disk of a stopped guest back on its chain, whose active image holds everything, under
/// the node names and with the options it had. On failure it is on the export. What the guest writes from the
/// moment `may_pivot` was asked on is on both.
pub async fn unflatten(
    qmp: &Qmp,
    layers: &[LayerPlan],
    may_pivot: MayPivot<'_>,
) -> Result<Duration> {
    let plan = active(layers)?;
    let flat = plan.flattened();
    let what = || format!("could not put disk {} back on its image", plan.qdev);
    let start = Instant::now();
    let opened = open_chain(qmp, layers).await;
    let back = match opened {
        Ok(top) => mirror(qmp, &flat, (&flat.nbd_node(), &top), None, may_pivot).await,
        Err(error) => Err(error),
    };
    if let Err(error) = back {
        return Err(undo_open(qmp, plan, error).await.during(what()));
    }
    let left = delete_node(qmp, &flat.nbd_node()).await;
    left.map_err(|e| after_exchange(e).during(what()))?;
    Ok(start.elapsed())
}

/// Opens the chain as it was; returns the name of its top node.
async fn open_chain(qmp: &Qmp, layers: &[LayerPlan]) -> Result<String> {
    let plan = active(layers)?;
    // Left behind by an earlier try.
    close_chain(qmp, plan).await?;
    let below = &layers[1..];
    // What QEMU opened by itself it will open again.
    let named = below.iter().position(LayerPlan::is_implied).unwrap_or(below.len());
    let mut backing = (named == below.len()).then_some(Value::Null);
    for layer in below[..named].iter().rev() {
        backing = Some(add_layer(qmp, layer, backing).await?.into());
    }
    add_layer(qmp, plan, backing).await
}

/// Adds the nodes of a layer that are not there. Without `backing` QEMU follows the image itself.
async fn add_layer(qmp: &Qmp, plan: &LayerPlan, backing: Option<Value>) -> Result<String> {
    let graph = Graph::read(qmp).await?;
    let name = plan.format_node().unwrap_or_else(|| plan.local_node()).to_owned();
    if graph.has_node(&name) {
        return Ok(name);
    }
    if !graph.has_node(plan.local_node()) {
        add_node(qmp, &plan.local).await?;
    }
    let Pivot::Reopen { options } = &plan.pivot else { return Ok(name) };
    let mut options = options.clone();
    options.insert("file".into(), plan.local_node().into());
    if let Some(backing) = backing.filter(|_| plan.format == "qcow2") {
        options.insert("backing".into(), backing);
    }
    add_node(qmp, &options).await?;
    Ok(name)
}

/// Closes the active image that was opened for a step that failed with `error`; returns what to report.
async fn undo_open(qmp: &Qmp, plan: &LayerPlan, error: Error) -> Error {
    match close_chain(qmp, plan).await {
        Ok(()) => error,
        Err(undo) => not_undone(error, "its image could not be closed", undo),
    }
}

/// Closes the active image.
async fn close_chain(qmp: &Qmp, plan: &LayerPlan) -> Result<()> {
    let (_, format) = plan.format_options()?;
    delete_node(qmp, format).await?;
    delete_node(qmp, plan.local_node()).await
}

/// Checks that the node under the disk of this active layer that has the name of dray's is on this export: others can have
/// made one of that name. A disk that is on its chain, or on something else, passes.
///
/// # Errors
/// `Mismatch`, with what it is on, or what QEMU reports.
pub async fn check_export(qmp: &Qmp, plan: &LayerPlan, export: &NbdExport) -> Result<()> {
    let nbd = plan.flattened().nbd_node();
    let disk = Graph::read(qmp).await?.disk_below_jobs(&plan.qdev)?;
    let mut ours = disk.layers.iter().filter(|layer| layer.protocol.name == nbd);
    ours.try_for_each(|layer| export.check_layer(layer))
}

/// Says what the disk is on, where that cannot change by itself any more; none while an exchange is under way in
/// QEMU. Only asks, so that QEMU answers also while it waits for requests of the guest.
pub async fn look(qmp: &Qmp, layers: &[LayerPlan]) -> Result<Option<On>> {
    let plan = active(layers)?;
    match is_pivoting(qmp, &plan.flattened()).await? {
        true => Ok(None),
        false => on_what(&Graph::read(qmp).await?.disk_below_jobs(&plan.qdev)?, plan).map(Some),
    }
}

/// Ends an exchange in either direction that was broken off, and says what the disk is on.
pub async fn settle(qmp: &Qmp, layers: &[LayerPlan]) -> Result<On> {
    let plan = active(layers)?;
    let flat = plan.flattened();
    abandon_pivot(qmp, &flat).await?;
    let on = on_what(&Graph::read(qmp).await?.disk_below_jobs(&plan.qdev)?, plan)?;
    match on {
        On::Export => close_chain(qmp, plan).await?,
        On::Chain => delete_node(qmp, &flat.nbd_node()).await?,
    }
    Ok(on)
}

/// What the disk of this active layer is on. Somebody may have put an overlay above it, which a snapshot does.
fn on_what(disk: &VmDisk, plan: &LayerPlan) -> Result<On> {
    let nbd = plan.flattened().nbd_node();
    for layer in &disk.layers {
        if layer.protocol.name == nbd {
            return Ok(On::Export);
        }
        if layer.is_on_file(&plan.path()) {
            return Ok(On::Chain);
        }
    }
    let (qdev, active) = (&plan.qdev, &disk.active().protocol);
    let (name, file) = (&active.name, &active.file);
    let why = format!("disk {qdev} is on node {name} ({file}): neither dray's nor its image");
    Err(Error::new(ErrorKind::Mismatch, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    fn plan(pivot: Pivot, local: Value) -> LayerPlan {
        let local = local.as_object().cloned().unwrap_or_default();
        let (qdev, format) = ("disk0".into(), "qcow2".into());
        let (size, file_size) = (1 << 20, 196_624);
        LayerPlan {
            qdev,
            named_for: None,
            depth: 0,
            format,
            size,
            file_size,
            read_only: false,
            pivot,
            local,
        }
    }

    #[test]
    fn a_flattened_disk_has_its_node_again_in_a_qcow2() {
        let mut options = Map::new();
        for (key, value) in [("driver", "qcow2"), ("node-name", "root"), ("discard", "unmap")] {
            options.insert(key.into(), value.into());
        }
        options.insert("detect-zeroes".into(), "unmap".into());
        options.insert("lazy-refcounts".into(), true.into());
        let local = json!({ "driver": "file", "node-name": "rootfile", "filename": "/a/vm.qcow2" });
        let flat = plan(Pivot::Reopen { options }, local).flattened();
        let made = flat.in_qcow2(Path::new("/b/vm.qcow2"));
        let Pivot::Reopen { options } = &made.pivot else { panic!("{made:?}") };
        let wanted = json!({
            "driver": "qcow2", "node-name": "root", "discard": "unmap", "detect-zeroes": "unmap",
        });
        assert_eq!(&Value::Object(options.clone()), &wanted);
        let file = json!({
            "driver": "file", "node-name": "dray-file-disk0-0", "filename": "/b/vm.qcow2",
            "discard": "unmap",
        });
        assert_eq!(Value::Object(made.local.clone()), file);
        assert_eq!((made.format.as_str(), made.nbd_node()), ("qcow2", flat.nbd_node()));
        let raw = flat.directly_on(Path::new("/b/vm.raw"));
        assert_eq!((raw.local_node(), &raw.pivot), ("root", &Pivot::Mirror));
        assert_eq!((raw.path(), raw.file_size), ("/b/vm.raw".into(), 1 << 20));
    }
}
