//! A VM that nobody uses but the test: its disk is read and written by the guest's device, as QEMU's own tool
//! does it.

use dray_qemu::{ErrorKind, LayerPlan, NodeOptions, Qmp, VmDisk, graph, status};
use dray_testkit::guest::{GuestVm, GuestVmBuilder, tools};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a QEMU may take to come up, and to leave.
const LONG: Duration = Duration::from_secs(20);

/// The VM, stopped. Its disk is `disk0`.
pub struct Idle {
    vm: GuestVm,
    /// A monitor for the test alone, with which nothing goes wrong.
    pub own: Qmp,
}

/// QEMU makes its monitors one after the other.
async fn connect(monitor: &Path) -> Qmp {
    let deadline = Instant::now() + LONG;
    loop {
        match Qmp::connect(monitor).await {
            Err(why) if why.kind() == ErrorKind::Connect => {
                assert!(Instant::now() < deadline, "{why}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            connected => return connected.expect("qmp"),
        }
    }
}

/// Whoever reads the image finds in each range the number that was written there.
pub fn check_image(path: &Path, format: &str, written: &[(u8, &str)], what: &str) {
    let path = path.to_string_lossy();
    for (number, range) in written {
        let read = format!("read -P {number} {range}");
        let said = tools::run("qemu-io", &["-f", format, "-c", &read, &path]).expect("qemu-io");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        let fine = said.contains("bytes at offset") && !said.contains("verification failed");
        assert!(fine, "{what}: {read}: {said}");
    }
}

impl Idle {
    /// Describes a VM without a system that has its sockets and logs in `dir`.
    pub fn builder(dir: &Path, name: &str) -> GuestVmBuilder {
        GuestVm::builder(dir, name).memory_mib(32).bare()
    }

    /// Starts it with one monitor more.
    pub async fn start(builder: GuestVmBuilder, dir: &Path, name: &str) -> Self {
        let own = dir.join(format!("{name}.own"));
        let monitor = format!("unix:{},server=on,wait=off", own.display());
        let vm = builder.arg("-qmp").arg(&monitor).start().expect("start");
        Self { own: connect(&own).await, vm }
    }

    /// The monitor that is the operation's.
    pub fn monitor(&self) -> PathBuf {
        self.vm.qmp_path()
    }

    /// The disk as it is now.
    pub async fn disk(&self) -> VmDisk {
        graph::disk(&self.own, "disk0").await.expect("disk")
    }

    /// The plans of the disk's layers, the active one first.
    pub async fn layers(&self) -> Vec<LayerPlan> {
        let known = NodeOptions::of_process(self.own.pid().expect("pid")).expect("command line");
        LayerPlan::of_disk(&self.disk().await, &known).expect("plan")
    }

    /// What QEMU's tool says of a command that it carries out as the guest's device. It says so where QEMU
    /// itself does, not to the monitor.
    pub async fn tool(&self, command: &str) -> String {
        let line = format!("qemu-io -d /machine/peripheral/disk0/virtio-backend \"{command}\"");
        let before = self.vm.log().len();
        let done = self.own.execute("human-monitor-command", json!({ "command-line": line })).await;
        let refused = done.expect("qemu-io");
        assert_eq!(refused, "", "{command}");
        self.vm.log().split_off(before)
    }

    /// The guest's device reads or writes.
    pub async fn io(&self, command: &str) {
        let said = self.tool(command).await;
        let fine = said.contains("bytes at offset") && !said.contains("failed");
        assert!(fine, "{command}: {said:?}");
    }

    /// The guest's device finds in each range the number that was written there.
    pub async fn check(&self, written: &[(u8, &str)]) {
        for (number, range) in written {
            self.io(&format!("read -P {number} {range}")).await;
        }
    }

    /// The names of all block nodes.
    pub async fn nodes(&self) -> Vec<String> {
        let nodes = self.own.execute("query-named-block-nodes", json!({ "flat": true })).await;
        let nodes = nodes.expect("nodes");
        let name = |node: &Value| node["node-name"].as_str().unwrap_or_default().to_owned();
        let mut names: Vec<String> = nodes.as_array().into_iter().flatten().map(name).collect();
        names.sort();
        names
    }

    /// QEMU ends, of its own accord.
    pub async fn quit(&mut self) {
        status::quit(&self.own).await.expect("quit");
        self.wait_ended();
    }

    /// QEMU has ended, or is about to.
    pub fn wait_ended(&mut self) {
        self.vm.wait_exit(LONG).expect("it ends");
    }

    /// QEMU is killed.
    pub fn kill(&mut self) {
        self.vm.kill().expect("kill");
    }
}
