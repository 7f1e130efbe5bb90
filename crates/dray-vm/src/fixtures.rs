//! Disks of VMs, made up for tests.

use dray_qemu::graph::Cache;
use dray_qemu::{Layer, LayerPlan, Node, Pivot};

/// Where the agent serves its images.
pub const SOCKET: &str = "/run/dray/nbd.sock";

/// A layer without a format driver on a file, or on an export as [`on`] writes it.
pub fn layer(file: &str) -> Layer {
    let protocol = Node {
        name: "node".into(),
        driver: if file.starts_with("nbd") { "nbd" } else { "file" }.into(),
        file: file.into(),
        size: 1,
        read_only: false,
        detect_zeroes: "off".into(),
        cache: Cache { direct: false, no_flush: false },
        bitmaps: Vec::new(),
        format_specific: serde_json::Value::Null,
        snapshots: Vec::new(),
        encrypted: false,
    };
    Layer { format: None, protocol }
}

/// An export of the agent, as QEMU calls it.
pub fn on(export: &str) -> String {
    format!("nbd+unix:///{export}?socket={SOCKET}")
}

/// The plan of a raw layer.
pub fn plan(qdev: &str, depth: usize) -> LayerPlan {
    LayerPlan {
        qdev: qdev.into(),
        named_for: None,
        depth,
        format: "raw".into(),
        size: 1,
        file_size: 1,
        read_only: false,
        pivot: Pivot::Mirror,
        local: serde_json::Map::new(),
    }
}
