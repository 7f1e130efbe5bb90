//! Release: give an image back to QEMU. Node names and options are as before the adoption (what
//! QEMU named itself gets a name of dray's). Whoever served the image must have dropped all its
//! locks before, and stops writing after.

use std::time::{Duration, Instant};

use crate::bitmap::{self, NewBitmap};
use crate::error::{Error, ErrorKind, Result};
use crate::graph::{Graph, Layer, Node, VmDisk};
use crate::nodes::{add_node, after_exchange, delete_node, undo_add};
use crate::pivot::{MayPivot, abandon_pivot, delete_rest, exchange, unasked};
use crate::plan::LayerPlan;
use crate::qmp::Qmp;
use crate::shrunk;

/// What the release took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released {
    /// The exchange of the nodes: requests may have waited for this long.
    pub pivot: Duration,
    /// Everything.
    pub total: Duration,
    /// The bitmap that was asked for records since before the pivot.
    pub tracked: bool,
}

/// Puts the layer back on its local file. On success QEMU has left the export; on failure the
/// guest still uses it. A layer that is on its file already is released. A file that is written has to be as
/// long as its export by then, also one that grows.
pub async fn release(qmp: &Qmp, plan: &LayerPlan) -> Result<Released> {
    release_tracked(qmp, plan, None, async || Ok(()), &unasked).await
}

/// [`release()`], with a dirty bitmap on the file's node from before the pivot: no write escapes it. A
/// bitmap that QEMU does not make, or has lost by the time that this is repeated, costs the tracking
/// only. `opened` is asked as soon as QEMU has the file open, and `may_pivot` at last; a layer that is on its file
/// needs not to be asked for. An error of either leaves the disk on dray.
pub async fn release_tracked(
    qmp: &Qmp,
    plan: &LayerPlan,
    bitmap: Option<&NewBitmap>,
    opened: impl AsyncFnOnce() -> Result<()>,
    may_pivot: MayPivot<'_>,
) -> Result<Released> {
    let start = Instant::now();
    let what = || format!("could not release disk {}", plan.qdev);
    abandon_pivot(qmp, plan).await.map_err(|e| e.during(what()))?;
    let graph = Graph::read(qmp).await.map_err(|e| e.during(what()))?;
    let nbd = plan.nbd_node();
    let Some(layer) = adopted_layer(&graph, plan).map_err(|e| e.during(what()))? else {
        let left = delete_node(qmp, &nbd).await;
        left.map_err(|e| after_exchange(e).during(what()))?;
        let bitmaps = &plan.layer_in(&graph).map_err(|e| e.during(what()))?.protocol.bitmaps;
        let tracked = bitmap.is_some_and(|new| bitmap::recording(bitmaps, &new.name).is_some());
        return Ok(Released { pivot: Duration::ZERO, total: start.elapsed(), tracked });
    };
    // Left behind by a release that was interrupted before its pivot.
    delete_node(qmp, plan.local_node()).await.map_err(|e| e.during(what()))?;
    add_node(qmp, &plan.local).await.map_err(|e| e.during(what()))?;
    let fits = match check_whole(qmp, plan, &layer.protocol).await {
        Ok(()) => opened().await,
        short => short,
    };
    if let Err(error) = fits {
        return Err(undo_add(qmp, plan.local_node(), error).await.during(what()));
    }
    let tracked = match bitmap {
        Some(bitmap) => track(qmp, plan, bitmap).await,
        None => false,
    };
    let pivot_start = Instant::now();
    let pivoted = exchange(qmp, plan, &layer.top().name, plan.local_node(), may_pivot).await;
    if let Err(error) = pivoted {
        return Err(undo_add(qmp, plan.local_node(), error).await.during(what()));
    }
    let pivot = pivot_start.elapsed();
    delete_rest(qmp, plan, &layer).await.map_err(|e| after_exchange(e).during(what()))?;
    Ok(Released { pivot, total: start.elapsed(), tracked })
}

/// Has QEMU leave the export of a layer that is on its file already: the node may have stayed when a release
/// was cut short after its pivot.
///
/// # Errors
/// That something still uses it.
pub async fn leave_export(qmp: &Qmp, plan: &LayerPlan) -> Result<()> {
    abandon_pivot(qmp, plan).await?;
    delete_node(qmp, &plan.nbd_node()).await
}

/// Whether the layer is on its file already.
pub async fn is_released(qmp: &Qmp, plan: &LayerPlan) -> Result<bool> {
    Ok(adopted_layer(&Graph::read(qmp).await?, plan)?.is_none())
}

/// Refuses a file in which the guest may write behind the end that QEMU knows. QEMU asks for a file's length
/// once, when it opens it, and takes what is behind that for zeros: a format driver would lose what it has put
/// there through the export until the pivot, data and tables.
async fn check_whole(qmp: &Qmp, plan: &LayerPlan, export: &Node) -> Result<()> {
    if plan.read_only {
        return Ok(());
    }
    let file = Graph::read(qmp).await?.node(plan.local_node())?.size;
    if file >= export.size {
        return Ok(());
    }
    let why = format!(
        "its file has {file} bytes and its export {}: what the guest writes behind the file's end until it \
         is released would be lost",
        export.size
    );
    Err(Error::new(ErrorKind::Mismatch, why))
}

async fn track(qmp: &Qmp, plan: &LayerPlan, bitmap: &NewBitmap) -> bool {
    let added = match bitmap::add(qmp, plan.local_node(), bitmap).await {
        Ok(()) => shrunk::mark(qmp, plan.local_node(), bitmap).await,
        failed => failed,
    };
    if let Err(why) = &added {
        tracing::warn!(disk = plan.qdev, %why, "what is written to a released disk is not known");
    }
    added.is_ok()
}

/// The layer if it is on dray's socket; `None` if it is on its file.
fn adopted_layer(graph: &Graph, plan: &LayerPlan) -> Result<Option<Layer>> {
    let layer = plan.layer_in(graph)?;
    if layer.protocol.name == plan.nbd_node() {
        return Ok(Some(layer));
    }
    if layer.is_on_file(&plan.path()) {
        return Ok(None);
    }
    let (name, file) = (&layer.protocol.name, &layer.protocol.file);
    let why = format!("it is on node {name} ({file}), which is neither dray's nor its file");
    Err(Error::new(ErrorKind::Mismatch, why))
}

/// Every difference between a disk before and after, as lines; empty when it is as it was. Counts
/// that change by themselves are left out, and so are names that QEMU made up.
pub fn differences(before: &VmDisk, after: &VmDisk) -> Vec<String> {
    let mut found = Vec::new();
    if before.layers.len() != after.layers.len() {
        found.push(format!("{} layers, were {}", after.layers.len(), before.layers.len()));
    }
    for (depth, (old, new)) in before.layers.iter().zip(&after.layers).enumerate() {
        match (&old.format, &new.format) {
            (Some(old), Some(new)) => compare(depth, old, new, &mut found),
            (None, None) => {}
            (old, new) => {
                let name =
                    |n: &Option<Node>| n.as_ref().map_or("none".into(), |n| n.driver.clone());
                found.push(format!("layer {depth}: format {}, was {}", name(new), name(old)));
            }
        }
        compare(depth, &old.protocol, &new.protocol, &mut found);
    }
    found
}

fn compare(depth: usize, old: &Node, new: &Node, found: &mut Vec<String>) {
    let mut differ = |what: &str, old: String, new: String| {
        if old != new {
            found.push(format!("layer {depth}: {what} {new}, was {old}"));
        }
    };
    if !old.is_auto_named() {
        differ("node name", old.name.clone(), new.name.clone());
    }
    differ("driver", old.driver.clone(), new.driver.clone());
    differ("file", old.file.clone(), new.file.clone());
    differ("read-only", old.read_only.to_string(), new.read_only.to_string());
    differ("detect-zeroes", old.detect_zeroes.clone(), new.detect_zeroes.clone());
    differ("cache", format!("{:?}", old.cache), format!("{:?}", new.cache));
    let bitmaps = |node: &Node| -> Vec<String> {
        node.bitmaps.iter().map(|b| format!("{} {}", b.name, b.granularity)).collect()
    };
    differ("bitmaps", bitmaps(old).join(", "), bitmaps(new).join(", "));
    if old.driver != "file" {
        differ("size", old.size.to_string(), new.size.to_string());
        let specific = |node: &Node| node.format_specific.to_string();
        differ("format", specific(old), specific(new));
    }
}
