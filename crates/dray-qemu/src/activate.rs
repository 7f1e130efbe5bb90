//! Disks that QEMU holds back.
//!
//! A guest that arrives stopped leaves its disks *inactive*: its QEMU has them open, but neither it
//! nor its devices write to them, and what it knows of a qcow2 is older than the file. `cont` makes
//! them active. Until then QEMU must not be made to send the guest on: up to version 9.2 it would
//! fail an assertion and end (`bdrv_inactivate_recurse`). So they are made active without `cont`,
//! which the operator has to say.
//!
//! No command of QEMU 7.2 does only that. Every block export does it to its node first, for servers
//! of a target that has not started its guest, before it looks whether it can be made. So one is
//! asked for that cannot: QEMU refuses it, for it runs no NBD server, and the node is active. Where
//! somebody has such a server running it is made, and removed at once.

use serde_json::json;

use crate::error::{Error, ErrorKind, Result};
use crate::graph::Graph;
use crate::qmp::Qmp;
use crate::status::status;

/// The name of the export that shall not be; a number follows.
const EXPORT: &str = "dray-activate";
/// What QEMU says of an export when it runs no NBD server.
const NO_SERVER: &str = "NBD server not running";

/// Whether QEMU holds disks of a stopped guest back. It has no lock on their files then.
///
/// # Errors
/// When QEMU does not answer.
pub async fn is_inactive(qmp: &Qmp) -> Result<bool> {
    Ok(Graph::read(qmp).await?.held_back().is_some())
}

/// Makes the disks of a stopped guest active, if QEMU holds them back; the guest stays stopped. From
/// then on QEMU may write to them: they must be this host's.
///
/// # Errors
/// When QEMU does not answer, or holds them back still.
pub async fn activate(qmp: &Qmp) -> Result<()> {
    let graph = Graph::read(qmp).await?;
    if graph.held_back().is_none() {
        return Ok(());
    }
    for (nth, node) in graph.tops().into_iter().enumerate() {
        touch(qmp, node, nth).await?;
    }
    match Graph::read(qmp).await?.held_back() {
        None => Ok(()),
        Some(qdev) => {
            let why = format!("qemu does not make disk {qdev} active");
            Err(Error::new(ErrorKind::Failed, why))
        }
    }
}

/// Whether a guest that has arrived was started, by whomever, and perhaps stopped again: until then QEMU holds its
/// disks back. Of one without a writable disk only whether it runs.
///
/// # Errors
/// When QEMU does not answer, or waits for a guest still.
pub async fn was_started(qmp: &Qmp) -> Result<bool> {
    let now = status(qmp).await?;
    if now.state == "inmigrate" {
        let why = "the target's QEMU has not received the guest's memory";
        return Err(Error::new(ErrorKind::Refused, why));
    }
    Ok(now.running || Graph::read(qmp).await?.are_used())
}

/// Asks for an export of the node, and removes it if there is one.
async fn touch(qmp: &Qmp, node: &str, nth: usize) -> Result<()> {
    let id = format!("{EXPORT}-{nth}");
    let export = json!({
        "type": "nbd", "id": id, "name": id, "node-name": node, "writable": false,
    });
    match qmp.execute("block-export-add", export).await {
        Ok(_) => qmp.execute("block-export-del", json!({ "id": id })).await.map(|_| ()),
        Err(why) if why.to_string().contains(NO_SERVER) => Ok(()),
        Err(why) => Err(why.during(format!("could not make node {node} active"))),
    }
}
