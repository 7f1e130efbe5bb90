//! What the VM behind a monitor is and does at one moment (I9). Records say what to look for; this is what is
//! so. A look is good for one step: whoever acts again looks again.

use dray_host::process::QemuProcess;
use dray_qemu::status::{self, BlockJob, VmStatus};
use dray_qemu::{Qmp, VmDisk, graph};

/// The QEMU behind a connection; none where the system does not tell.
pub fn process_of(qmp: &Qmp) -> Option<QemuProcess> {
    QemuProcess::find(qmp.socket(), qmp.pid()?)
}

/// A VM at the moment at which it was looked at.
pub struct Look {
    /// Its process; none where the system does not tell.
    pub process: Option<QemuProcess>,
    /// Whether it runs, and QEMU's word for what it does.
    pub status: VmStatus,
    /// Its disks.
    pub disks: Vec<VmDisk>,
    /// Its block jobs that have not ended.
    pub jobs: Vec<BlockJob>,
}

impl Look {
    /// Looks at the VM behind a monitor.
    ///
    /// # Errors
    /// What QEMU reports, or that a disk has a node that dray does not know, as a job's.
    pub async fn take(qmp: &Qmp) -> dray_qemu::Result<Self> {
        Ok(Self {
            process: process_of(qmp),
            status: status::status(qmp).await?,
            disks: graph::disks(qmp).await?,
            jobs: status::block_jobs(qmp).await?,
        })
    }
}
