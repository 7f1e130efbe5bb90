//! A guest's read waits for a block that does not come (the source is lost): so do QMP `stop` and
//! `quit`, until the read is failed or served.

use std::sync::Arc;
use std::time::Duration;

use crate::support::NbdServer;
use dray_image::{Fetcher, Fill, PresentLog};
use dray_qemu::{ErrorKind, NbdExport, Qmp, status};
use dray_testkit::guest::{GuestVm, initramfs};
use dray_types::{BlockRange, BlockSet};
use serde_json::{Value, json};

const SIZE: u64 = 16 << 20;
const MISSING: BlockRange = BlockRange { start: 1024, len: 256 };
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(10);

struct Lost;

impl Fetcher for Lost {
    fn demand(&self, _: BlockRange) {}

    fn peek(&self, _: u64, _: &mut [u8]) -> dray_image::Result<()> {
        unreachable!("this host owns the image")
    }
}

impl PresentLog for Lost {
    fn note(&self, _run: dray_types::BlockRange) -> dray_image::Result<()> {
        Ok(())
    }

    fn record(&self, _: &BlockSet) -> dray_image::Result<()> {
        Ok(())
    }

    fn forget_notes(&self) -> dray_image::Result<()> {
        Ok(())
    }
}

/// A guest that has asked for a missing block.
async fn waiting_guest(dir: &std::path::Path) -> (GuestVm, Qmp, NbdServer) {
    let image = dir.join("image.raw");
    std::fs::File::create(&image).expect("create").set_len(SIZE).expect("size");
    let server = NbdServer::start(&image, &dir.join("disk.nbd"));
    let mut missing = BlockSet::new();
    missing.insert(MISSING);
    server.disk().serve_with_missing(missing, &BlockSet::new(), Arc::new(Lost), Arc::new(Lost));
    let NbdExport { socket, name, .. } = server.export();
    let nbd = json!({ "driver": "nbd", "node-name": "disk", "export": name,
        "server": { "type": "unix", "path": socket }, "reconnect-delay": 30 });
    let builder = GuestVm::builder(dir, "vm").blockdev(nbd.to_string());
    let builder = builder.disk_with("disk0", "disk", ",rerror=stop,werror=stop").booted();
    let mut vm = builder.start().expect("start");
    vm.wait_ready().expect("boot");
    let console = vm.console();
    console.command("open disk=vda").expect("open");
    console.send("verify disk=vda").expect("verify");
    while server.disk().waiting_ranges().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let qmp = Qmp::connect(&vm.qmp_path()).await.expect("qmp");
    (vm, qmp, server)
}

#[tokio::test]
async fn a_read_that_waits_holds_back_stop_until_it_is_served() {
    if !initramfs::available() {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let (mut vm, qmp, server) = waiting_guest(dir.path()).await;
    let error = qmp.execute_within("stop", Value::Null, SHORT).await.expect_err("it waits");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    server.disk().fill(MISSING, Fill::Zero).expect("the source is back");
    assert_eq!(status::status(&qmp).await.expect("status").state, "paused");
    status::cont(&qmp).await.expect("cont");
    vm.console().answer("verify disk=vda", LONG).expect("the guest saw no error");
    assert_eq!(vm.console().complaints(), Vec::<String>::new());
}

#[tokio::test]
async fn a_read_that_waits_holds_back_quit_until_it_fails() {
    if !initramfs::available() {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let (mut vm, qmp, server) = waiting_guest(dir.path()).await;
    let error = qmp.execute_within("quit", Value::Null, SHORT).await.expect_err("it waits");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(vm.exited().expect("wait").is_none());
    server.disk().fail_parked();
    vm.wait_exit(LONG).expect("exit");
}
