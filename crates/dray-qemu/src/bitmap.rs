//! Dirty bitmaps on file nodes: what QEMU itself writes to an image while nobody serves it.
//!
//! A bitmap sits on the *file* node, so it counts bytes of the file, whatever the format driver above
//! does with them, metadata included. QEMU keeps it in memory, sets its bits when a request ends
//! (also one that failed), and lets it grow with the file. It is gone with the node, with QEMU, and
//! where the file was cut shorter: who reads one has to know that none of this happened to it. The last is what
//! [`shrunk`](crate::shrunk) tells.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::Result;
use crate::graph::{Bitmap, Graph};
use crate::iothread;
use crate::qmp::Qmp;

/// How the names of dray's own bitmaps begin. Nobody needs one of them but the agent that made it.
pub const PREFIX: &str = "dray-released-";
/// The finest that is of use: dray's own block.
const FINEST: u64 = 4096;
/// Memory that one bitmap may take in QEMU: 2 TiB at the finest granularity.
const MAX_BYTES: u64 = 64 << 20;

/// A bitmap that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBitmap {
    /// Its name, which begins with [`PREFIX`].
    pub name: String,
    /// Bytes per bit, a power of two.
    pub granularity: u64,
}

impl NewBitmap {
    /// A bitmap for `len` bytes: of 4 KiB each, or coarser where that would take more than 64 MiB.
    pub fn new(name: impl Into<String>, len: u64) -> Self {
        let mut granularity = FINEST;
        while len.div_ceil(granularity).div_ceil(8) > MAX_BYTES {
            granularity *= 2;
        }
        Self { name: name.into(), granularity }
    }
}

/// Whether a bitmap of this name is one of dray's.
pub(crate) fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Makes a bitmap on a node; it records from now on.
pub(crate) async fn add(qmp: &Qmp, node: &str, bitmap: &NewBitmap) -> Result<()> {
    let arguments = json!({
        "node": node, "name": bitmap.name, "granularity": bitmap.granularity, "persistent": false,
    });
    let added = qmp.execute("block-dirty-bitmap-add", arguments).await;
    added.map(|_| ()).map_err(|e| e.during(format!("could not track writes to node {node}")))
}

/// The bitmap `name` of a node, if it has recorded every write up to now.
pub async fn recorded(qmp: &Qmp, node: &str, name: &str) -> Result<Option<Bitmap>> {
    let graph = Graph::read(qmp).await?;
    let Ok(node) = graph.node(node) else { return Ok(None) };
    Ok(recording(&node.bitmaps, name).cloned())
}

/// The bitmap `name`, if it records.
pub(crate) fn recording<'a>(bitmaps: &'a [Bitmap], name: &str) -> Option<&'a Bitmap> {
    bitmaps.iter().find(|bitmap| bitmap.name == name && bitmap.recording && !bitmap.inconsistent)
}

/// The name of the export under which a bitmap can be read.
pub const EXPORT: &str = "dray-released";

/// Opens QEMU's own NBD server on `socket`, with node and bitmap, read-only: as the metadata context
/// `qemu:dirty-bitmap:NAME` of export [`EXPORT`]. Nothing writes to the node any more: the bitmap stops
/// recording, which QEMU wants before it shows it. On failure there is no server.
pub async fn show(qmp: &Qmp, node: &str, name: &str, socket: &Path) -> Result<()> {
    let what = || format!("could not show dirty bitmap {name}");
    let go = async {
        if has_export(qmp).await? {
            // Of an agent that died while it read.
            hide(qmp).await?;
        }
        iothread::leave(qmp, node).await?;
        let bitmap = json!({ "node": node, "name": name });
        qmp.execute("block-dirty-bitmap-disable", bitmap).await?;
        let path = socket.to_string_lossy();
        let address = json!({ "type": "unix", "data": { "path": path } });
        qmp.execute("nbd-server-start", json!({ "addr": address, "max-connections": 1 })).await?;
        let export = json!({
            "type": "nbd", "id": EXPORT, "name": EXPORT, "node-name": node, "writable": false,
            "bitmaps": [name],
        });
        match qmp.execute("block-export-add", export).await {
            Ok(_) => Ok(()),
            Err(why) => {
                // It was started here, so nobody else uses it; the failure to tell is the first one.
                let _ = hide(qmp).await;
                Err(why)
            }
        }
    };
    go.await.map_err(|e| e.during(what()))
}

/// Ends what [`show`] began; the bitmap is free again on return.
pub async fn hide(qmp: &Qmp) -> Result<()> {
    qmp.execute("nbd-server-stop", Value::Null).await.map(|_| ())
}

async fn has_export(qmp: &Qmp) -> Result<bool> {
    let exports = qmp.execute("query-block-exports", Value::Null).await?;
    Ok(exports.as_array().into_iter().flatten().any(|export| export["id"] == EXPORT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granularity_is_fine_until_the_memory_is_too_much() {
        let of = |len| NewBitmap::new("b", len).granularity;
        assert_eq!([of(0), of(1), of(2 << 40), of((2 << 40) + 1)], [4096, 4096, 4096, 8192]);
        assert_eq!(of(64 << 40), 128 << 10);
    }

    #[test]
    fn a_bitmap_that_missed_something_is_none() {
        let bitmap = |recording, inconsistent| Bitmap {
            name: "b".into(),
            granularity: 4096,
            persistent: false,
            recording,
            busy: false,
            inconsistent,
            count: 0,
        };
        assert!(recording(&[bitmap(true, false)], "b").is_some());
        assert!(recording(&[bitmap(true, false)], "c").is_none());
        assert!(recording(&[bitmap(false, false)], "b").is_none());
        assert!(recording(&[bitmap(true, true)], "b").is_none());
    }
}
