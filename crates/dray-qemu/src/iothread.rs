//! Disks whose device runs in a thread of its own (`iothread=` of the device, or of its controller).
//!
//! QEMU before 9.0 guards what such a thread works on by a lock, and ends itself where one of its own commands
//! lets a lock go that it does not hold. `blockdev-reopen` does so when the old file node goes with the reopen:
//! when the format node was made together with it, and nobody else holds it. A device with a thread of its own has
//! its disk in QEMU's main thread while the guest stands still, and then the same command is safe; one whose
//! controller has it (virtio-scsi) keeps its disk in there. 9.0 has no such lock any more (QEMU's commit
//! b49f4755c7). It is also the first that knows `iothread-vq-mapping`, so that this is not looked for.

use crate::error::Result;
use crate::graph::device_id;
use crate::qmp::{Qmp, Version};
use serde_json::{Value, json};

/// The first QEMU whose threads need no lock of the block layer.
pub const UNLOCKED: Version = Version(9, 0, 0);
/// A disk is a few buses away from the machine.
const MAX_BUSES: usize = 16;

/// Where the nodes of a disk are worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// In QEMU's main thread.
    Main,
    /// In a thread of the device, while the guest runs.
    Device,
    /// In a thread of its controller, also while the guest stands still.
    Controller,
}

/// Whether this QEMU guards the nodes of such disks by a lock.
pub fn is_locking(qmp: &Qmp) -> bool {
    qmp.version() < UNLOCKED
}

/// Whether the device of a disk, or a controller above it, has a thread of its own.
///
/// # Errors
/// What QEMU reports.
pub async fn of(qmp: &Qmp, qdev: &str) -> Result<Thread> {
    let threads = qmp.execute("query-iothreads", Value::Null).await?;
    if threads.as_array().is_some_and(Vec::is_empty) {
        return Ok(Thread::Main);
    }
    let mut device = path_of(qmp, qdev).await?;
    let mut found = Thread::Device;
    for _ in 0..MAX_BUSES {
        let properties = qmp.execute("qom-list", json!({ "path": device })).await?;
        if !link(qmp, &device, &properties, "iothread").await?.is_empty() {
            return Ok(found);
        }
        let bus = link(qmp, &device, &properties, "parent_bus").await?;
        let Some((above, _)) = bus.rsplit_once('/') else { return Ok(Thread::Main) };
        device = if above.is_empty() { "/".to_owned() } else { above.to_owned() };
        found = Thread::Controller;
    }
    Ok(Thread::Main)
}

/// Where a disk's device is in QEMU's object tree.
async fn path_of(qmp: &Qmp, qdev: &str) -> Result<String> {
    let blocks = qmp.execute("query-block", Value::Null).await?;
    let devices = blocks.as_array().into_iter().flatten().filter_map(|b| b["qdev"].as_str());
    let known = devices.into_iter().find(|device| device_id(device) == qdev).unwrap_or(qdev);
    match known.starts_with('/') {
        true => Ok(known.to_owned()),
        false => Ok(format!("/machine/peripheral/{known}")),
    }
}

/// What a link of an object leads to; nothing for one that it has not, or that leads nowhere.
async fn link(qmp: &Qmp, object: &str, properties: &Value, name: &str) -> Result<String> {
    let mut names = properties.as_array().into_iter().flatten().map(|known| &known["name"]);
    if !names.any(|known| known == name) {
        return Ok(String::new());
    }
    let to = qmp.execute("qom-get", json!({ "path": object, "property": name })).await?;
    Ok(to.as_str().unwrap_or_default().to_owned())
}

/// Brings a node that nothing uses into QEMU's main thread. It stays in the thread of the device that it was
/// under otherwise, and QEMU before 9.0 (8.2.3 of its line) ends itself when that thread is the one that sees a
/// client of its NBD server leave (QEMU's commit f816310d0c).
///
/// # Errors
/// What QEMU reports, also when something uses it.
pub(crate) async fn leave(qmp: &Qmp, node: &str) -> Result<()> {
    if !is_locking(qmp) {
        return Ok(());
    }
    let main = json!({ "node-name": node, "iothread": null });
    qmp.execute("x-blockdev-set-iothread", main).await.map(|_| ())
}
