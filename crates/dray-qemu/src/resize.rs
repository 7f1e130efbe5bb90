//! Telling a guest that its disk has grown.
//!
//! QEMU's NBD client has the length that the server told it when it connected last. Whoever serves the disk
//! cuts it off; it connects again when something is asked of the disk, and only then knows the new length.

use std::time::Duration;

use serde_json::{Value, json};

use crate::adopt::NbdExport;
use crate::error::{Error, ErrorKind, Result};
use crate::graph;
use crate::plan::LayerPlan;
use crate::qmp::Qmp;

/// How often QEMU is asked.
const TRIES: u32 = 5;
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(200);

/// Tells the guest that its disk, on an `export` that has cut it off, has `size` bytes there. Of an idle
/// guest's disk something is read for it. A disk that somebody has put on something else is left alone: QEMU would make
/// that longer or shorter.
///
/// # Errors
/// What QEMU says when it has been asked often enough, or where the disk is: the guest has not been told.
pub async fn grown(qmp: &Qmp, plan: &LayerPlan, export: &NbdExport, size: u64) -> Result<()> {
    let qdev = &plan.qdev;
    let mut tries = 1;
    loop {
        export.check(qmp, plan).await?;
        match crate::status::resize(qmp, qdev, size).await {
            Err(error) if error.kind() == ErrorKind::Command && tries < TRIES => {
                tracing::debug!(%error, qdev, "qemu has not connected again yet");
            }
            told => return told,
        }
        tries += 1;
        read_something(qmp, qdev).await?;
        tokio::time::sleep(PAUSE).await;
    }
}

/// QMP has no command that reads, the human monitor has: it is as old as QEMU's block nodes.
async fn read_something(qmp: &Qmp, qdev: &str) -> Result<()> {
    let disk = graph::disk(qmp, qdev).await?;
    let node = &disk.active().top().name;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._#".contains(c);
    if !node.chars().all(plain) {
        let why = format!("disk {qdev} is on a node with an unusual name");
        return Err(Error::new(ErrorKind::Refused, why));
    }
    let line = format!("qemu-io {node} \"read -q 0 512\"");
    let read: Value = qmp.execute("human-monitor-command", json!({ "command-line": line })).await?;
    tracing::debug!(%read, qdev, "read for QEMU to connect again");
    Ok(())
}
