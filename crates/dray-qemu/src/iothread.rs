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
//! `guarded` makes both impossible: until the reopen is over, a node of dray's has both file nodes as children. QEMU
//! moves connected nodes together. So both are in the same thread all the time, also when the guest is reset, stopped
//! or continued meanwhile, or the device is unplugged: that moves a disk from its thread to QEMU's main thread, or
//! back.
//!
//! The node is made with `blkverify`, which a QEMU may have been built without. There `guarded` moves the new node to
//! the thread that works on the disk now, and holds the old one. QEMU does not tell which thread that is, but it
//! refuses to move a node of a disk in use to any thread but the one that it is in. A QEMU of that kind ends when the
//! disk moves in the milliseconds before the reopen.
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

/// The names of the nodes that hold two file nodes together.
pub(crate) struct Holder {
    /// The one that the others are parts of: they go with it.
    pub top: String,
    /// The one on the old file node.
    pub from: String,
    /// The one on the new file node.
    pub to: String,
}

impl Holder {
    /// Whether a node is one of them.
    pub fn has(&self, node: &str) -> bool {
        [&self.top, &self.from, &self.to].into_iter().any(|own| own == node)
    }
}

/// Runs `reopen`, which puts a format node of a disk from the file's node `from` on the node `to`, so that QEMU
/// survives it.
///
/// # Errors
/// That of the reopen, or what QEMU reports.
pub(crate) async fn guarded<F: Future<Output = Result<()>>>(
    qmp: &Qmp,
    qdev: &str,
    (from, to, holder): (&str, &str, &Holder),
    reopen: impl FnOnce() -> F,
) -> Result<()> {
    let thread = if is_locking(qmp) { of(qmp, qdev).await? } else { None };
    let Some(thread) = thread else { return reopen().await };
    let ready = match tie(qmp, from, to, holder).await {
        Err(why) if !why.kind().is_unknown() => {
            tracing::debug!(%why, "the nodes of a disk in an iothread cannot be tied");
            follow(qmp, &thread, from, to, holder).await
        }
        tied => tied,
    };
    let done = match ready {
        Ok(()) => reopen().await,
        Err(why) => Err(why),
    };
    match (done, delete_node(qmp, &holder.top).await) {
        (done, Ok(())) => done,
        (Ok(()), Err(why)) => Err(after_exchange(why)),
        (Err(error), Err(undo)) => {
            let what = format!("block node {} could not be removed", holder.top);
            Err(not_undone(error, &what, undo))
        }
    }
}

/// Adds a node that does nothing but use both. The thread of the one that a device uses becomes the thread of both.
///
/// `blkverify` itself would let nobody resize what it uses. It is not on the nodes but on others with `force-share`,
/// of which QEMU asks nothing.
async fn tie(qmp: &Qmp, from: &str, to: &str, holder: &Holder) -> Result<()> {
    let part = |name: &str, node: &str| {
        let mut part = using(node, name);
        part.insert("force-share".into(), true.into());
        part
    };
    let options = json!({
        "driver": "blkverify", "node-name": holder.top, "read-only": true,
        "raw": part(&holder.from, from), "test": part(&holder.to, to),
    });
    let Value::Object(options) = options else { return Ok(()) };
    add_node(qmp, &options).await
}

/// The options of a node that does nothing but use another one. Drivers that ask for the length of what is below
/// them when they are opened, such as `raw`, would end QEMU while the guest does I/O; this one does not.
fn using(node: &str, name: &str) -> Options {
    let mut options = Options::new();
    options.insert("driver".into(), "blkdebug".into());
    options.insert("node-name".into(), name.into());
    options.insert("read-only".into(), true.into());
    options.insert("image".into(), node.into());
    options
}

/// Holds the old node, and moves the new one to it.
async fn follow(qmp: &Qmp, thread: &str, from: &str, to: &str, holder: &Holder) -> Result<()> {
    add_node(qmp, &using(from, &holder.top)).await?;
    join(qmp, thread, from, to).await
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
