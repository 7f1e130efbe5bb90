//! A guest that sleeps (ACPI S3) moves, and is not paused where it arrives.

use crate::support::pair::{LONG, Pair};
use dray_qemu::status;
use dray_testkit::guest::tools;
use serde_json::{Value, json};

/// The port of the machine's power management, and what sends it to S3.
const SLEEP: &str = "o/w 0x604 0x2400";

#[tokio::test]
async fn a_guest_that_sleeps_is_not_paused_at_the_target() {
    if !tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        return;
    }
    let mut pair = Pair::new(true).await;
    let own = &pair.source.own;
    own.execute("human-monitor-command", json!({ "command-line": SLEEP })).await.expect("asked");
    while status::status(own).await.expect("status").state != "suspended" {
        tokio::task::yield_now().await;
    }
    let mut incoming = pair.listen().await;
    pair.send().await;
    incoming.wait_loaded(LONG).await.expect("loaded");
    pair.target.check_asleep("loaded").await;
    pair.hand_over();
    incoming.resume().await.expect("resume");
    let there = &pair.target.vm.own;
    if status::status(there).await.expect("status").state == "suspended" {
        // A newer QEMU has moved it as it is.
        there.execute("system_wakeup", Value::Null).await.expect("woken");
        while !status::status(there).await.expect("status").running {
            tokio::task::yield_now().await;
        }
    }
    pair.finish("asleep", &[(1, "0 1M")]).await;
}
