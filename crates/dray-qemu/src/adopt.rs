//! Adopt: splice a running VM's image under dray. Paused never; on failure the guest is on its own
//! file, as before.
//!
//! Locks: QEMU holds byte-range locks on the image until the local node is gone, and a mirror that
//! meets somebody else's lock on byte 101 or 201 *aborts QEMU*. So whoever serves the image may
//! only probe (`F_OFD_GETLK`) before [`adopt`] has returned, and takes its locks after it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph::{Graph, Layer};
use crate::nodes::{add_node, after_exchange, delete_node, undo_add};
use crate::options::Options;
use crate::pivot::{MayPivot, abandon_pivot, delete_rest, exchange, unasked};
use crate::plan::{LayerPlan, Pivot, check_unused, grows};
use crate::qmp::Qmp;
use crate::release::release;

/// An export of an NBD server on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdExport {
    /// The server's socket.
    pub socket: PathBuf,
    /// The export's name.
    pub name: String,
    /// For how many seconds QEMU holds requests back while the server is away, before it fails
    /// them; 0 fails them at once.
    pub reconnect_delay: u32,
}

impl NbdExport {
    /// Checks that a disk's layer is on this export now, and shows of it what the plan says: others may have changed
    /// that since it was looked at last.
    ///
    /// # Errors
    /// `Mismatch`, with where it is, or what QEMU reports.
    pub async fn check(&self, qmp: &Qmp, plan: &LayerPlan) -> Result<()> {
        let layer = plan.layer_in(&Graph::read(qmp).await?)?;
        self.check_layer(&layer)?;
        plan.check_shown(&layer)
    }

    /// Checks that a layer is on this export.
    pub(crate) fn check_layer(&self, layer: &Layer) -> Result<()> {
        if layer.export_at(&self.socket).as_deref() != Some(&self.name) {
            let (now, name) = (&layer.protocol.file, &self.name);
            let why = format!("it is on {now}, and not on the export of image '{name}'");
            return Err(Error::new(ErrorKind::Mismatch, why));
        }
        Ok(())
    }

    /// The options of an NBD node that stands for the layer's local node.
    pub(crate) fn node(&self, plan: &LayerPlan) -> Options {
        self.named_node(plan, &plan.nbd_node())
    }

    pub(crate) fn named_node(&self, plan: &LayerPlan, name: &str) -> Options {
        let mut options = Options::new();
        options.insert("driver".into(), "nbd".into());
        options.insert("node-name".into(), name.into());
        let path = self.socket.to_string_lossy();
        options.insert("server".into(), json!({ "type": "unix", "path": path }));
        options.insert("export".into(), self.name.clone().into());
        options.insert("reconnect-delay".into(), self.reconnect_delay.into());
        options.insert("read-only".into(), plan.read_only.into());
        // Without it QEMU drops trims silently.
        options.insert("discard".into(), "unmap".into());
        // A device directly on the node keeps what its file node did.
        if let Some(detect) = plan.local.get("detect-zeroes").filter(|_| !plan.read_only) {
            options.insert("detect-zeroes".into(), detect.clone());
        }
        options
    }
}

/// What the adoption took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The exchange of the nodes: requests may have waited for this long.
    pub pivot: Duration,
    /// Everything.
    pub total: Duration,
}

/// What may be given up for the adoption.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdoptOptions {
    /// Remove dirty bitmaps of nodes that the adoption replaces.
    pub drop_bitmaps: bool,
}

/// Checks without touching anything that [`adopt`] would not refuse.
pub async fn check(qmp: &Qmp, plan: &LayerPlan, options: AdoptOptions) -> Result<()> {
    let graph = Graph::read(qmp).await?;
    let layer = local_layer(&graph, plan)?;
    check_unused(&graph, plan, &layer, options.drop_bitmaps).map(|_| ())
}

/// The node of the file that an adopted layer was on: nothing uses it, and QEMU has it still open.
#[derive(Debug)]
#[must_use = "QEMU has the file open until it is closed"]
pub struct OldFile(Layer);

impl OldFile {
    /// QEMU closes the file; the node's name is free for the release.
    pub async fn close(&self, qmp: &Qmp, plan: &LayerPlan) -> Result<()> {
        delete_rest(qmp, plan, &self.0).await
    }
}

/// Puts the layer on the export of the same file. On success the guest's I/O goes to the export
/// and QEMU has closed the file; on failure the guest is on its own file.
pub async fn adopt(
    qmp: &Qmp,
    plan: &LayerPlan,
    export: &NbdExport,
    options: AdoptOptions,
) -> Result<Adopted> {
    let start = Instant::now();
    let (adopted, old) = adopt_keeping(qmp, plan, export, options, &unasked).await?;
    let closed = old.close(qmp, plan).await.map_err(after_exchange);
    closed.map_err(|e| e.during(format!("could not adopt disk {}", plan.qdev)))?;
    Ok(Adopted { total: start.elapsed(), ..adopted })
}

/// [`adopt()`], but the old node stays, with the bitmaps that dray has on it: the caller closes it. `is_whole` is asked
/// when the guest is on the export: somebody may have resized the disk at any moment before. Its error puts the disk back
/// on its file.
pub async fn adopt_keeping(
    qmp: &Qmp,
    plan: &LayerPlan,
    export: &NbdExport,
    options: AdoptOptions,
    is_whole: MayPivot<'_>,
) -> Result<(Adopted, OldFile)> {
    let start = Instant::now();
    let what = || format!("could not adopt disk {}", plan.qdev);
    abandon_pivot(qmp, plan).await.map_err(|e| e.during(what()))?;
    let graph = Graph::read(qmp).await.map_err(|e| e.during(what()))?;
    let layer = local_layer(&graph, plan).map_err(|e| e.during(what()))?;
    check_unresized(plan, &layer).map_err(|e| e.during(what()))?;
    plan.check_shown(&layer).map_err(|e| e.during(what()))?;
    let bitmaps =
        check_unused(&graph, plan, &layer, options.drop_bitmaps).map_err(|e| e.during(what()))?;
    // Left behind by an adoption that was interrupted before its pivot.
    delete_node(qmp, &plan.nbd_node()).await.map_err(|e| e.during(what()))?;
    add_node(qmp, &export.node(plan)).await.map_err(|e| e.during(what()))?;
    let spliced = match splice(qmp, plan, &layer, &bitmaps).await {
        Ok(pivot) => stay_or_go_back(qmp, plan, is_whole).await.map(|()| pivot),
        Err(error) => Err(error),
    };
    let pivot = match spliced {
        Ok(pivot) => pivot,
        Err(error) if error.kind().is_unknown() => return Err(error.during(what())),
        Err(error) => return Err(undo_add(qmp, &plan.nbd_node(), error).await.during(what())),
    };
    Ok((Adopted { pivot, total: start.elapsed() }, OldFile(layer)))
}

async fn splice(
    qmp: &Qmp,
    plan: &LayerPlan,
    layer: &Layer,
    bitmaps: &[(String, String)],
) -> Result<Duration> {
    let nbd = plan.nbd_node();
    check_size(qmp, plan, &nbd).await?;
    for (node, name) in bitmaps {
        let bitmap = json!({ "node": node, "name": name });
        qmp.execute("block-dirty-bitmap-remove", bitmap).await?;
    }
    let start = Instant::now();
    exchange(qmp, plan, &layer.top().name, &nbd, &unasked).await?;
    Ok(start.elapsed())
}

/// Puts the disk back on its file where `is_whole` finds that it cannot stay on the export: whatever the file has got
/// behind the export's end would be out of its guest's reach.
async fn stay_or_go_back(qmp: &Qmp, plan: &LayerPlan, is_whole: MayPivot<'_>) -> Result<()> {
    // A mirror begins only between nodes of one size, and keeps it.
    if matches!(plan.pivot, Pivot::Mirror) {
        return Ok(());
    }
    let Err(why) = is_whole() else { return Ok(()) };
    match release(qmp, plan).await {
        Ok(_) => Err(why),
        Err(undo) => Err(not_undone(why, "the disk could not be put back on its file", undo)),
    }
}

/// Refuses a disk that somebody has resized since it was planned.
fn check_unresized(plan: &LayerPlan, layer: &Layer) -> Result<()> {
    let (size, planned) = (layer.protocol.size, plan.file_size);
    if size == planned || grows(&plan.format) {
        return Ok(());
    }
    let why = format!("somebody resized it meanwhile: it has {size} bytes, and had {planned}");
    Err(Error::new(ErrorKind::Mismatch, why))
}

/// Refuses an export that is not as large as the file: a raw one exactly, a growing one at least.
pub(crate) async fn check_size(qmp: &Qmp, plan: &LayerPlan, nbd: &str) -> Result<()> {
    let size = Graph::read(qmp).await?.node(nbd)?.size;
    let fits = match grows(&plan.format) {
        true => size >= plan.file_size,
        false => size == plan.file_size,
    };
    if fits {
        return Ok(());
    }
    let why = format!("the export has {size} bytes, but the file has {}", plan.file_size);
    Err(Error::new(ErrorKind::Mismatch, why))
}

/// The name of the node that a layer has for its file now, as long as it is not on dray.
///
/// # Errors
/// That it is on dray, or on another file, or what QEMU reports.
pub async fn node_of(qmp: &Qmp, plan: &LayerPlan) -> Result<String> {
    Ok(local_layer(&Graph::read(qmp).await?, plan)?.protocol.name)
}

/// The layer as the plan expects it: on its local file.
pub(crate) fn local_layer(graph: &Graph, plan: &LayerPlan) -> Result<Layer> {
    let layer = plan.layer_in(graph)?;
    if layer.protocol.name == plan.nbd_node() {
        let why = "it is on dray's socket already: release it first";
        return Err(Error::new(ErrorKind::Refused, why));
    }
    if !layer.is_on_file(&plan.path()) {
        let (now, path) = (&layer.protocol.file, plan.path());
        let why = format!("its file is {now}, not {}", path.display());
        return Err(Error::new(ErrorKind::Mismatch, why));
    }
    Ok(layer)
}
