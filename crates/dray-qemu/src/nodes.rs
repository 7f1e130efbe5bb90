//! Adding and deleting block nodes, and what it means when that fails.

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph::Graph;
use crate::options::Options;
use crate::qmp::Qmp;

/// Adds a node.
pub(crate) async fn add_node(qmp: &Qmp, options: &Options) -> Result<()> {
    let name = options.get("node-name").and_then(Value::as_str).unwrap_or_default();
    let added = qmp.execute("blockdev-add", Value::Object(options.clone())).await;
    added.map(|_| ()).map_err(|e| e.during(format!("could not add block node {name}")))
}

/// Deletes a node; one that is not there is deleted.
pub(crate) async fn delete_node(qmp: &Qmp, name: &str) -> Result<()> {
    if !Graph::read(qmp).await?.has_node(name) {
        return Ok(());
    }
    let deleted = qmp.execute("blockdev-del", json!({ "node-name": name })).await;
    deleted.map(|_| ()).map_err(|e| e.during(format!("could not delete block node {name}")))
}

/// Removes a node that was added for a step that failed with `error`; returns what to report.
pub(crate) async fn undo_add(qmp: &Qmp, node: &str, error: Error) -> Error {
    match delete_node(qmp, node).await {
        Ok(()) => error,
        Err(undo) => not_undone(error, &format!("block node {node} could not be removed"), undo),
    }
}

/// What failed when a layer was exchanged already: nobody may take it for undone.
pub(crate) fn after_exchange(error: Error) -> Error {
    if error.kind().is_unknown() {
        return error;
    }
    Error::with_source(ErrorKind::NotUndone, "the disk was put there, and then", error)
}
