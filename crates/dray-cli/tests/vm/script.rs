//! `dray prepare --script`: the QEMU that waits is started by nothing else.

use crate::released::await_release;
use crate::stage::{Kind, Stage};
use dray_testkit::guest::GuestVm;
use std::process::{Command, Stdio};

/// Both hosts of the test are one machine, so that what the source's QEMU is called in has to be called otherwise,
/// as an operator would do it.
fn renamed(script: &str) -> String {
    script.replace("/source.", "/target.").replace("other.qmp", "other-target.qmp")
}

#[test]
fn the_script_starts_a_qemu_to_which_the_vm_moves() {
    let kinds = [Kind::Plain, Kind::Qcow2, Kind::Drive];
    let Some(mut stage) = Stage::new("script", &kinds, 1_000_000) else { return };
    let socket = stage.source_qmp();
    let args = ["prepare", "--qmp", &socket, "--to", "hostb", "--script"];
    let answer = stage.lab.host("a").dray(&args).expect("prepare");
    assert!(answer.code == 0, "{answer:?}");
    let next = format!("dray migrate --qmp {socket} --to hostb --target-qmp {socket}");
    assert!(answer.stderr.contains(&next), "{}", answer.stderr);

    let path = stage.lab.dir().join("start.sh");
    std::fs::write(&path, &answer.stdout).expect("script");
    let refused = Command::new("sh").arg(&path).output().expect("sh");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && why.contains("is here already"), "{why}");

    std::fs::write(&path, renamed(&answer.stdout)).expect("script");
    let mut command = Command::new("sh");
    command.arg(&path).stdin(Stdio::null());
    let builder = GuestVm::builder(&stage.lab.dir(), "target");
    stage.target = Some(builder.start_with(command).expect("the script starts qemu"));
    let summary = stage.migrate(&["--verify"]).expect("moves");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    await_release(&stage);
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.lab.host("b").stop().expect("stop");
    stage.assert_images("b");
}
