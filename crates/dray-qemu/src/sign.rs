//! Which of its open files QEMU has under a node: QEMU tells only the path by which it has opened the node's file, and
//! the name may be another file's by now.
//!
//! For everything that it does with a file, and for everything that it allows no other program to do, QEMU locks one byte
//! of the file through the node's own descriptor. So dray puts a node of its own over the file's node, which forbids
//! something that no program does anyway. QEMU locks one more byte for as long as dray's node is there: that is the
//! *sign*. The file on which it is seen is the node's file.
//!
//! No request goes through dray's node, and nothing is written. The guest does not notice it.

use crate::error::{Result, not_undone};
use crate::nodes::{add_node, delete_node};
use crate::options::Options;
use crate::qmp::Qmp;
use serde_json::{Value, json};

/// The name of dray's node. One that an agent has left that died is [removed](clear) by the next one.
pub(crate) const NODE: &str = "dray-sign";
/// Bytes that QEMU locks while nobody may do so, or change the length.
const NO_WRITES_UNCHANGED: u64 = 202;
const NO_RESIZE: u64 = 203;

/// A lock that QEMU can be made to have on a node's file, and lets go again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sign {
    /// The byte that is locked.
    pub byte: u64,
    permission: &'static str,
}

/// What can be tried, one after the other: one may be in use on a node already, or be at odds with what somebody
/// does there. None of them takes the right to write: for that QEMU would open a file anew, by its name, that it has
/// opened read-only until somebody writes (`auto-read-only`).
pub const SIGNS: [Sign; 2] = [
    Sign { byte: NO_WRITES_UNCHANGED, permission: "write-unchanged" },
    Sign { byte: NO_RESIZE, permission: "resize" },
];

impl Sign {
    fn over(self, node: &str) -> Options {
        let mut options = Options::new();
        options.insert("driver".into(), "blkdebug".into());
        options.insert("node-name".into(), NODE.into());
        options.insert("image".into(), node.into());
        options.insert("unshare-child-perms".into(), json!([self.permission]));
        options
    }
}

/// Has QEMU give a sign on a file's node while `look` looks, which begins then. None where QEMU does not do it.
///
/// # Errors
/// That QEMU does not answer, or does not take the sign back.
pub async fn while_given<T>(
    qmp: &Qmp,
    node: &str,
    sign: Sign,
    look: impl Future<Output = T>,
) -> Result<Option<T>> {
    clear(qmp).await?;
    match add_node(qmp, &sign.over(node)).await {
        Ok(()) => {}
        Err(why) if why.kind().is_unknown() => return Err(why),
        Err(why) => {
            tracing::debug!(node, ?sign, %why, "qemu does not give a sign");
            return Ok(None);
        }
    }
    let seen = look.await;
    delete_node(qmp, NODE).await.map_err(|why| {
        let given = crate::Error::new(crate::ErrorKind::Failed, "its file was looked for");
        not_undone(given, &format!("block node {NODE} could not be removed"), why)
    })?;
    Ok(Some(seen))
}

/// Removes what an agent has left that died while it looked: the file's node could not be removed.
pub(crate) async fn clear(qmp: &Qmp) -> Result<()> {
    delete_node(qmp, NODE).await
}

/// The nodes of all files and block devices that QEMU has open.
///
/// # Errors
/// What QEMU reports.
pub async fn file_nodes(qmp: &Qmp) -> Result<Vec<String>> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    let is_file = |node: &Value| node["drv"] == "file" || node["drv"] == "host_device";
    let name = |node: &Value| Some(node["node-name"].as_str()?.to_owned());
    Ok(nodes.iter().filter(|node| is_file(node)).filter_map(name).collect())
}
