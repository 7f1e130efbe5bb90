//! The state of the VM behind a monitor at one moment (I9), independent of any record. A look is
//! valid for one step; the next step needs a new look.

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
