//! What a VM is doing, and the small commands that change it.

use dray_types::text::harmless;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::graph;
use crate::plan::LayerPlan;
use crate::qmp::Qmp;

/// A stopping guest waits for its requests; a disk that holds them back holds back `stop` too. So it may take
/// so many times as long as another command.
const STOP_PATIENCE: u32 = 2;

/// What a VM is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmStatus {
    /// Whether the guest runs.
    pub running: bool,
    /// QEMU's word for its state: `running`, `paused`, `inmigrate`, `postmigrate` …
    pub state: String,
}

impl VmStatus {
    /// Whether the guest goes on wherever it is, unless its user has paused it. One that sleeps (ACPI S3) does: QEMU before
    /// 9.0 wakes it up to move it, and a later one moves it as it is.
    pub fn goes_on(&self) -> bool {
        self.running || self.state == "suspended"
    }
}

/// A block job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockJob {
    /// Its name.
    pub id: String,
    /// QEMU's word for what it does: `mirror`, `backup`, `stream`, `commit`.
    pub kind: String,
}

/// The block jobs that have not ended, of whichever disk.
pub async fn block_jobs(qmp: &Qmp) -> Result<Vec<BlockJob>> {
    let jobs = qmp.execute("query-block-jobs", Value::Null).await?;
    let word = |job: &Value, key: &str| harmless(job[key].as_str().unwrap_or_default());
    let jobs = jobs.as_array().into_iter().flatten();
    let at_work = jobs.filter(|job| !matches!(job["status"].as_str(), Some("concluded" | "null")));
    Ok(at_work.map(|job| BlockJob { id: word(job, "device"), kind: word(job, "type") }).collect())
}

/// What the VM is doing.
pub async fn status(qmp: &Qmp) -> Result<VmStatus> {
    let status = qmp.execute("query-status", Value::Null).await?;
    let state = status["status"]
        .as_str()
        .ok_or_else(|| Error::new(ErrorKind::Protocol, "query-status: answer not understood"))?;
    Ok(VmStatus { running: status["running"].as_bool().unwrap_or(false), state: harmless(state) })
}

/// Stops the guest; waits for its requests in flight.
pub async fn stop(qmp: &Qmp) -> Result<()> {
    qmp.execute_within("stop", Value::Null, qmp.patience() * STOP_PATIENCE).await.map(|_| ())
}

/// Makes QEMU measure how fast the guest writes its memory, in the background, for a second.
pub async fn measure_memory(qmp: &Qmp) -> Result<()> {
    qmp.execute("calc-dirty-rate", json!({ "calc-time": 1 })).await.map(|_| ())
}

/// Bytes of memory that the guest writes in a second, as QEMU has measured it last, by sampling
/// pages. If it never has, it is made to, and waited for as long as `patience`. None when it cannot
/// (QEMU before 5.2) or is not done by then.
pub async fn memory_dirty_rate(qmp: &Qmp, patience: Duration) -> Option<u64> {
    const LOOK: Duration = Duration::from_millis(100);
    let deadline = tokio::time::Instant::now() + patience;
    let mut asked = false;
    loop {
        let told = qmp.execute("query-dirty-rate", Value::Null).await.ok()?;
        match told["status"].as_str()? {
            "measured" => {
                let mib = told["dirty-rate"].as_u64()?;
                return Some(mib.saturating_mul(1 << 20));
            }
            "unstarted" if !asked && !patience.is_zero() => {
                measure_memory(qmp).await.ok()?;
                asked = true;
            }
            _ => {}
        }
        if tokio::time::Instant::now() + LOOK >= deadline {
            return None;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Lets the guest run.
pub async fn cont(qmp: &Qmp) -> Result<()> {
    qmp.execute("cont", Value::Null).await.map(|_| ())
}

/// Ends QEMU. The connection may be gone before the answer; while a read of one of its disks waits,
/// there is none.
pub async fn quit(qmp: &Qmp) -> Result<()> {
    match qmp.execute("quit", Value::Null).await {
        Err(error) if error.kind() == ErrorKind::Closed => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Tells the guest that a disk has another size.
pub async fn resize(qmp: &Qmp, qdev: &str, size: u64) -> Result<()> {
    let disk = graph::disk(qmp, qdev).await?;
    let node = &disk.active().top().name;
    let resized = qmp.execute("block_resize", json!({ "node-name": node, "size": size })).await;
    resized.map(|_| ()).map_err(|e| e.during(format!("could not resize disk {qdev}")))
}

/// A VM's name, if it was given one.
pub async fn name(qmp: &Qmp) -> Result<Option<String>> {
    let answer = qmp.execute("query-name", Value::Null).await?;
    Ok(answer["name"].as_str().map(harmless))
}

/// Checks that a VM's disks are those of the plans: same ids, same sizes, none missing or more.
pub fn check_disks(found: &[graph::VmDisk], expected: &[LayerPlan]) -> Result<()> {
    let mismatch = |why: String| Err(Error::new(ErrorKind::Mismatch, why));
    let expected: Vec<&LayerPlan> = expected.iter().filter(|p| p.depth == 0).collect();
    for plan in &expected {
        let Some(disk) = found.iter().find(|d| d.qdev == plan.qdev) else {
            return mismatch(format!("the target vm has no disk with the id {}", plan.qdev));
        };
        if disk.size() != plan.size {
            let (qdev, here, there) = (&plan.qdev, disk.size(), plan.size);
            return mismatch(format!(
                "disk {qdev} has {here} bytes at the target and {there} bytes at the source"
            ));
        }
    }
    match found.iter().find(|d| expected.iter().all(|p| p.qdev != d.qdev)) {
        Some(disk) => mismatch(format!("the target vm has a disk {} more", disk.qdev)),
        None => Ok(()),
    }
}
