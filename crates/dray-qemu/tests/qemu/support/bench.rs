//! What one QEMU without a guest is tried with.

use super::NbdServer;
use dray_qemu::{Error, LayerPlan, NodeOptions, Qmp, graph};
use dray_testkit::guest::{GuestVm, GuestVmBuilder, tools};
use std::path::PathBuf;

/// Bytes of its image.
pub const SIZE: u64 = 16 << 20;

/// An image in a directory of its own, and QEMUs for it that run no guest.
pub struct Bench {
    pub dir: tempfile::TempDir,
    pub image: PathBuf,
}

impl Bench {
    /// `None`, after saying why, where QEMU is not installed.
    pub fn new() -> Option<Self> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("image.raw");
        std::fs::File::create(&image).expect("create").set_len(SIZE).expect("size");
        tools::available(&[tools::QEMU, "qemu-img"]).then_some(Self { dir, image })
    }

    pub fn builder(&self) -> GuestVmBuilder {
        GuestVm::builder(self.dir.path(), "vm").memory_mib(32).bare()
    }

    pub fn raw_vm(&self) -> GuestVm {
        let file = format!("driver=file,node-name=disk,filename={}", self.image.display());
        self.builder().blockdev(file).disk("disk0", "disk").start().expect("start")
    }

    pub fn qcow2_vm(&self) -> GuestVm {
        self.builder().blockdev(self.qcow2()).disk("disk0", "disk").start().expect("start")
    }

    /// A file of format qcow2 whose node was made together with that of its format, called `disk`.
    pub fn qcow2(&self) -> String {
        let path = self.image.to_string_lossy();
        tools::run("qemu-img", &["create", "-f", "qcow2", &path, "16M"]).expect("create");
        format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={path}")
    }

    pub fn serve(&self) -> NbdServer {
        NbdServer::start(&self.image, &self.dir.path().join("disk.nbd"))
    }
}

/// Its monitor.
pub async fn connect(vm: &GuestVm) -> Qmp {
    Qmp::connect(&vm.qmp_path()).await.expect("qmp")
}

/// The plan of `disk0`.
pub async fn plan(qmp: &Qmp) -> Result<LayerPlan, Error> {
    let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
    LayerPlan::of_active(&graph::disk(qmp, "disk0").await.expect("disk"), &known)
}
