//! Growing an adopted raw image: an NBD export has one size for ever, so the disk moves to another
//! export of the same file, with a pivot like those of [`crate::adopt()`].
//!
//! A mirror insists on equal sizes. A device directly on an NBD node therefore moves to a raw node
//! that shows only the old size of the new export, and that node is then reopened without limit.

use crate::adopt::NbdExport;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::Graph;
use crate::options::Options;
use crate::pivot::{add_node, delete_node, mirror, reopen, unasked, undo_add};
use crate::plan::{LayerPlan, Pivot};
use crate::qmp::Qmp;
use crate::status::resize;

/// Puts an adopted layer on another export of the same file, as large or larger; the guest learns
/// its disk's new size. On failure the layer is on one of the two exports, of which the old one
/// must be kept as long as it has connections.
pub async fn move_to_export(qmp: &Qmp, plan: &LayerPlan, export: &NbdExport) -> Result<()> {
    let what = || format!("could not move disk {} to another export", plan.qdev);
    go(qmp, plan, export).await.map_err(|e| e.during(what()))
}

async fn go(qmp: &Qmp, plan: &LayerPlan, export: &NbdExport) -> Result<()> {
    let layer = plan.layer_in(&Graph::read(qmp).await?)?;
    let (nbd, passing) = (plan.nbd_node(), plan.passing_node());
    if layer.protocol.name != nbd {
        let why = format!("it is on node {}, not on dray's socket", layer.protocol.name);
        return Err(Error::new(ErrorKind::Refused, why));
    }
    let format = match &plan.pivot {
        Pivot::Reopen { options } => options.clone(),
        Pivot::Mirror => plan.wrapper(),
    };
    // A node keeps its name and its export: to a passing node, and back to one of the usual name.
    add_node(qmp, &export.named_node(plan, &passing)).await?;
    let moved = match layer.format {
        Some(_) => reopen(qmp, &format, &passing).await,
        None => wrap(qmp, plan, layer.protocol.size, &format).await,
    };
    if let Err(error) = moved {
        return Err(undo_add(qmp, &passing, error).await);
    }
    delete_node(qmp, &nbd).await?;
    add_node(qmp, &export.node(plan)).await?;
    if let Err(error) = reopen(qmp, &format, &nbd).await {
        return Err(undo_add(qmp, &nbd, error).await);
    }
    delete_node(qmp, &passing).await?;
    let size = Graph::read(qmp).await?.node(&nbd)?.size;
    resize(qmp, &plan.qdev, size).await
}

/// Moves a device from its NBD node to a raw node on the passing one, which shows the old size.
async fn wrap(qmp: &Qmp, plan: &LayerPlan, size: u64, format: &Options) -> Result<()> {
    let mut limited = format.clone();
    limited.insert("file".into(), plan.passing_node().into());
    limited.insert("size".into(), size.into());
    add_node(qmp, &limited).await?;
    let wrapper = plan.wrapper_node();
    if let Err(error) = mirror(qmp, plan, &plan.nbd_node(), &wrapper, &unasked).await {
        return Err(undo_add(qmp, &wrapper, error).await);
    }
    Ok(())
}
