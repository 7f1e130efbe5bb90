//! Exchanging the node under a disk while the guest runs: the two ways QEMU has, and what has to
//! be true after each. Used in both directions, by [`crate::adopt()`] and [`crate::release()`].

use std::fs::File;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result, not_undone};
use crate::graph::{Graph, Layer};
use crate::iothread;
use crate::nodes::{after_exchange, delete_node};
use crate::options::Options;
use crate::plan::{LayerPlan, Pivot};
use crate::qmp::{Event, Events, Qmp};
use crate::sign;

/// Deletes what a pivot has left of a layer, uppermost first; the node that was kept stays.
pub(crate) async fn delete_rest(qmp: &Qmp, plan: &LayerPlan, old: &Layer) -> Result<()> {
    for node in [old.format.as_ref(), Some(&old.protocol)].into_iter().flatten() {
        if Some(node.name.as_str()) != plan.format_node() {
            delete_node(qmp, &node.name).await?;
        }
    }
    Ok(())
}

/// Asked once, as late as an exchange can still be broken off: an error breaks it off.
pub type MayPivot<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// An exchange that nobody wants to break off.
pub(crate) fn unasked() -> Result<()> {
    Ok(())
}

/// Puts the layer on node `to` instead of `from`. On failure it is still on `from`.
pub(crate) async fn exchange(
    qmp: &Qmp,
    plan: &LayerPlan,
    from: &str,
    to: &str,
    may_pivot: MayPivot<'_>,
) -> Result<()> {
    match &plan.pivot {
        Pivot::Reopen { options } => reopen(qmp, plan, options, to, may_pivot).await,
        Pivot::Mirror => {
            let path = plan.path();
            mirror(qmp, plan, (from, to), Some(&path), may_pivot).await
        }
    }
}

/// Reopens a format node on another file node, with all its options.
async fn reopen(
    qmp: &Qmp,
    plan: &LayerPlan,
    options: &Options,
    file: &str,
    may_pivot: MayPivot<'_>,
) -> Result<()> {
    let name = options.get("node-name").and_then(Value::as_str).unwrap_or_default();
    let graph = Graph::read(qmp).await?;
    let mut options = options.clone();
    options.insert("file".into(), file.into());
    if let Some(backing) = graph.child(name, "backing") {
        options.insert("backing".into(), backing.into());
    } else if supports_backing(&options) {
        options.insert("backing".into(), Value::Null);
    }
    let reopened = async || {
        may_pivot()?;
        qmp.execute("blockdev-reopen", json!({ "options": [options] })).await.map(|_| ())
    };
    let done = match graph.child(name, "file") {
        Some(old) => {
            iothread::guarded(qmp, &plan.qdev, (old, file, &plan.holder()), reopened).await
        }
        None => reopened().await,
    };
    done.map_err(|e| e.during(format!("could not put node {name} on {file}")))
}

fn supports_backing(options: &Options) -> bool {
    options.get("driver").and_then(Value::as_str) == Some("qcow2")
}

/// Moves the device from one node to the other by a mirror that copies nothing and writes to both
/// until it is completed. (A background mirror would write old data over the same file.)
///
/// QEMU answers a flush of the guest without asking anybody when nothing was written to the node since the last
/// one, and to the new node nothing was but what the mirror has written, which QEMU flushes at its end. What the
/// guest wrote before, and has not flushed, is in `same_file`, the one that both nodes lead to: it is made durable
/// while the mirror runs.
pub(crate) async fn mirror(
    qmp: &Qmp,
    plan: &LayerPlan,
    (from, to): (&str, &str),
    same_file: Option<&Path>,
    may_pivot: MayPivot<'_>,
) -> Result<()> {
    let job = job_name(plan);
    let mut events = qmp.events();
    let arguments = json!({
        "job-id": job, "device": from, "target": to, "sync": "none",
        "copy-mode": "write-blocking",
    });
    let what = || format!("could not put disk {} on node {to}", plan.qdev);
    qmp.execute("blockdev-mirror", arguments).await.map_err(|e| e.during(what()))?;
    match drive_job(qmp, &job, &mut events, same_file, may_pivot).await {
        // QEMU tells the end before it has dropped the job's locks on the file, and answers after.
        Ok(()) => has_job(qmp, &job).await.map(drop).map_err(|e| after_exchange(e).during(what())),
        Err(error) => {
            if let Err(undo) = abandon_job(qmp, &job, &mut events).await {
                return Err(not_undone(error, "the mirror job did not end", undo).during(what()));
            }
            // The job may have been completed just before it was given up.
            match is_on(qmp, plan, to).await {
                Ok(true) => Ok(()),
                Ok(false) => Err(error.during(what())),
                Err(why) => {
                    Err(not_undone(error, "it is not known where it is", why).during(what()))
                }
            }
        }
    }
}

async fn is_on(qmp: &Qmp, plan: &LayerPlan, node: &str) -> Result<bool> {
    Ok(Graph::read(qmp).await?.disk(&plan.qdev)?.active().top().name == node)
}

fn job_name(plan: &LayerPlan) -> String {
    format!("dray-pivot-{}", plan.nbd_node())
}

/// Ends what is left of an exchange that was begun and is nobody's any more: its agent has died, or QEMU has not
/// said what became of it. The disk is on one of its two nodes then.
///
/// # Errors
/// That QEMU does not end it.
pub async fn abandon_pivot(qmp: &Qmp, plan: &LayerPlan) -> Result<()> {
    let mut events = qmp.events();
    abandon_job(qmp, &job_name(plan), &mut events).await?;
    sign::clear(qmp).await?;
    delete_node(qmp, &plan.holder().top).await
}

/// Whether the mirror of an exchange is there, whatever its state.
pub(crate) async fn is_pivoting(qmp: &Qmp, plan: &LayerPlan) -> Result<bool> {
    has_job(qmp, &job_name(plan)).await
}

async fn has_job(qmp: &Qmp, job: &str) -> Result<bool> {
    let jobs = qmp.execute("query-jobs", Value::Null).await?;
    Ok(jobs.as_array().into_iter().flatten().any(|known| known["id"] == job))
}

async fn drive_job(
    qmp: &Qmp,
    job: &str,
    events: &mut Events,
    same_file: Option<&Path>,
    may_pivot: MayPivot<'_>,
) -> Result<()> {
    let ready = job_event(qmp, events, job, &["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED"]).await?;
    if ready.name != "BLOCK_JOB_READY" {
        return Err(job_failed(&ready));
    }
    if let Some(file) = same_file {
        make_durable(file).await?;
    }
    may_pivot()?;
    qmp.execute("job-complete", json!({ "id": job })).await?;
    let ended = job_event(qmp, events, job, &["BLOCK_JOB_COMPLETED"]).await?;
    if ended.data["error"].is_string() { Err(job_failed(&ended)) } else { Ok(()) }
}

async fn make_durable(file: &Path) -> Result<()> {
    let opened = file.to_owned();
    let synced = tokio::task::spawn_blocking(move || File::open(opened)?.sync_data()).await;
    synced.unwrap_or_else(|why| Err(io::Error::other(why))).map_err(|why| {
        Error::with_source(ErrorKind::Failed, format!("could not sync {}", file.display()), why)
    })
}

fn job_failed(event: &Event) -> Error {
    let why = event.data["error"].as_str().unwrap_or("it ended early");
    Error::new(ErrorKind::Failed, format!("the mirror job failed: {why}"))
}

/// A mirror without copying is ready after the requests in flight; a slow disk needs seconds.
async fn job_event(qmp: &Qmp, events: &mut Events, job: &str, names: &[&str]) -> Result<Event> {
    let wanted = |e: &Event| e.data["device"] == job && names.contains(&e.name.as_str());
    events.wait_for(qmp.patience(), "mirror job", wanted).await
}

/// Ends a job whatever its state; the disk is then on one of its two nodes.
async fn abandon_job(qmp: &Qmp, job: &str, events: &mut Events) -> Result<()> {
    if !has_job(qmp, job).await? {
        return Ok(());
    }
    qmp.execute("block-job-cancel", json!({ "device": job, "force": true })).await?;
    let ends = ["BLOCK_JOB_CANCELLED", "BLOCK_JOB_COMPLETED"];
    job_event(qmp, events, job, &ends).await.map(|_| ())
}
