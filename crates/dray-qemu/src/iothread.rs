//! Disks whose device runs in a thread of its own (`iothread=` of the device, or of its controller).
//!
//! QEMU before 9.0 guards what such a thread works on by a lock, and ends itself where one of its own commands
//! lets a lock go that it does not hold. `blockdev-reopen` does so in two cases:
//!
//! * The reopen fails, for example because another program has the new file locked, and the new file's node was
//!   worked on in another thread than the disk: QEMU moves it there, and ends when it moves it back.
//! * The old file's node goes with the reopen, because it was made together with the format node and nobody else
//!   holds it.
//!
//! `guarded` makes both impossible: it moves the new node first, and holds the old one until the reopen is over.
//! The thread must be the one that works on the disk now. A device with a thread of its own has its disk in QEMU's
//! main thread while the guest stands still; one whose controller has it (virtio-scsi) keeps its disk in there.
//! QEMU does not tell, but it refuses to move a node of a disk in use to any thread but the one that it is in.
//!
//! 9.0 has no such lock any more (QEMU's commit b49f4755c7). It is also the first that knows
//! `iothread-vq-mapping`, so that this is not looked for.

use crate::error::{Result, not_undone};
use crate::graph::{device_id, object_path};
use crate::nodes::{add_node, after_exchange, delete_node};
use crate::options::Options;
use crate::qmp::{Qmp, Version};
use serde_json::{Value, json};

/// The first QEMU whose threads need no lock of the block layer.
const UNLOCKED: Version = Version(9, 0, 0);
/// A disk is a few buses away from the machine.
const MAX_BUSES: usize = 16;
/// Where QEMU keeps its threads among its objects.
const OBJECTS: &str = "/objects/";

/// Whether this QEMU guards the nodes of such disks by a lock.
fn is_locking(qmp: &Qmp) -> bool {
    qmp.version() < UNLOCKED
}

/// The name of the thread that the device of a disk has, or a controller above it; none for QEMU's main thread.
///
/// # Errors
/// What QEMU reports.
pub async fn of(qmp: &Qmp, qdev: &str) -> Result<Option<String>> {
    let threads = qmp.execute("query-iothreads", Value::Null).await?;
    if threads.as_array().is_some_and(Vec::is_empty) {
        return Ok(None);
    }
    let mut device = path_of(qmp, qdev).await?;
    for _ in 0..MAX_BUSES {
        let properties = qmp.execute("qom-list", json!({ "path": device })).await?;
        let thread = link(qmp, &device, &properties, "iothread").await?;
        if !thread.is_empty() {
            return Ok(Some(thread.strip_prefix(OBJECTS).unwrap_or(&thread).to_owned()));
        }
        let bus = link(qmp, &device, &properties, "parent_bus").await?;
        let Some((above, _)) = bus.rsplit_once('/') else { return Ok(None) };
        device = if above.is_empty() { "/".to_owned() } else { above.to_owned() };
    }
    Ok(None)
}

/// Runs `reopen`, which puts a format node of a disk from the file's node `from` on the node `to`, so that QEMU
/// survives it. `holder` is the name of a node that holds `from` meanwhile; none where `from` was made by itself.
///
/// # Errors
/// That of the reopen, or what QEMU reports.
pub(crate) async fn guarded<F: Future<Output = Result<()>>>(
    qmp: &Qmp,
    qdev: &str,
    (from, to, holder): (&str, &str, Option<&str>),
    reopen: impl FnOnce() -> F,
) -> Result<()> {
    let thread = if is_locking(qmp) { of(qmp, qdev).await? } else { None };
    let Some(thread) = thread else { return reopen().await };
    if let Some(holder) = holder {
        hold(qmp, from, holder).await?;
    }
    let done = match join(qmp, &thread, from, to).await {
        Ok(()) => reopen().await,
        Err(why) => Err(why),
    };
    let Some(holder) = holder else { return done };
    match (done, delete_node(qmp, holder).await) {
        (done, Ok(())) => done,
        (Ok(()), Err(why)) => Err(after_exchange(why)),
        (Err(error), Err(undo)) => {
            Err(not_undone(error, &format!("block node {holder} could not be removed"), undo))
        }
    }
}

/// Adds a node that does nothing but use another one. Drivers that ask for the length of what is below them when
/// they are opened, such as `raw`, would end QEMU while the guest does I/O; this one does not.
async fn hold(qmp: &Qmp, node: &str, holder: &str) -> Result<()> {
    let mut options = Options::new();
    options.insert("driver".into(), "blkdebug".into());
    options.insert("node-name".into(), holder.into());
    options.insert("read-only".into(), true.into());
    options.insert("image".into(), node.into());
    add_node(qmp, &options).await
}

/// Moves the node `new` to the thread that works on `used`, if that is not QEMU's main thread.
async fn join(qmp: &Qmp, thread: &str, used: &str, new: &str) -> Result<()> {
    match enter(qmp, used, thread).await {
        Ok(()) => enter(qmp, new, thread).await,
        Err(why) if why.kind().is_unknown() => Err(why),
        // The disk is in the main thread now, and so is the new node.
        Err(_) => Ok(()),
    }
}

/// Moves a node, with everything that it is connected to, to a thread.
async fn enter(qmp: &Qmp, node: &str, thread: &str) -> Result<()> {
    let to = json!({ "node-name": node, "iothread": thread });
    qmp.execute("x-blockdev-set-iothread", to).await.map(|_| ())
}

/// Where a disk's device is in QEMU's object tree.
async fn path_of(qmp: &Qmp, qdev: &str) -> Result<String> {
    let blocks = qmp.execute("query-block", Value::Null).await?;
    let devices = blocks.as_array().into_iter().flatten().filter_map(|b| b["qdev"].as_str());
    let known = devices.into_iter().find(|device| device_id(device) == qdev).unwrap_or(qdev);
    Ok(object_path(known))
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
