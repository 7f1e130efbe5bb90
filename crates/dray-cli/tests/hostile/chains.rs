//! Images that name what is not theirs.

use crate::heads::Head;
use crate::stage::{NAME, Secret, Stage, text};
use dray_testkit::lab::Answer;
use std::path::Path;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
/// The exit code of what dray does not do.
const UNSUPPORTED: i32 = 14;

/// What the target or a backup gets of the secret is nothing: nobody has opened it.
fn refused(answer: &Answer, words: &str) {
    assert_ne!(answer.code, 0, "{answer:?}");
    assert!(answer.stderr.contains(words), "{answer:?}");
}

fn a_head_names_data(name: &str, secret: impl FnOnce(&Stage) -> Secret) {
    let Some(stage) = Stage::new(name) else { return };
    let secret = secret(&stage);
    Head::of(&stage.disk()).names_data(text(&secret.path));
    let answer = stage.prepare();
    secret.assert_untouched(&stage);
    refused(&answer, "data is in another file");
    assert_eq!(answer.code, UNSUPPORTED, "{answer:?}");
    assert_eq!(stage.lab.host("a").pool_files().expect("pool"), [NAME], "something was changed");
}

#[test]
fn data_in_a_file_of_root_is_not_read() {
    a_head_names_data("hostile-data", Stage::secret_file);
}

#[test]
fn data_on_a_device_is_not_read() {
    a_head_names_data("hostile-device", Stage::secret_device);
}

/// A backup contains what a disk is built on.
#[test]
fn names_of_files_below_lead_nowhere_outside_the_pools() {
    let Some(mut stage) = Stage::new("hostile-below") else { return };
    let (file, device) = (stage.secret_file(), stage.secret_device());
    stage.vm.kill().expect("kill");
    let (disk, a) = (stage.disk(), stage.lab.host("a"));
    let url = format!("file://{}", stage.lab.dir().join("repository").display());
    a.json(&["backups", "init", &url]).expect("repository");
    a.json(&["images", "add", NAME, text(&disk), "--format", "qcow2"]).expect("add");
    let node = format!(r#"json:{{"driver":"host_device","filename":"{}"}}"#, device.path.display());
    let above = Path::new("../../kept").join("secret.raw");
    for name in [text(&file.path), text(&above), text(&device.path), &node] {
        Head::of(&disk).names_backing(name);
        let answer = a.dray(&["backup", NAME, "--to", &url]).expect("backup");
        file.assert_untouched(&stage);
        device.assert_untouched(&stage);
        assert_ne!(answer.code, 0, "{name}: {answer:?}");
    }
}

/// Names of files below are not asked for when a disk is flattened: its QEMU has said what is below.
#[test]
fn a_flattened_disk_has_no_file_below_that_its_head_names() {
    let Some(stage) = Stage::new("hostile-backing") else { return };
    let secret = stage.secret_file();
    Head::of(&stage.disk()).names_backing(text(&secret.path));
    let answer = stage.prepare();
    secret.assert_untouched(&stage);
    answer.json().expect("what is not looked at does no harm");
}

#[test]
fn a_head_that_changes_after_the_check_is_not_followed() {
    let Some(mut stage) = Stage::new("hostile-later") else { return };
    let secret = stage.secret_file();
    let prepared = stage.prepare().json().expect("prepared");
    stage.start_target(&prepared);
    Head::of(&stage.disk()).names_data(text(&secret.path));
    let answer = Answer::of(stage.migrate(&[])).expect("answer");
    secret.assert_untouched(&stage);
    refused(&answer, "data is in another file");
    assert_eq!(stage.lab.host("a").pool_files().expect("pool"), [NAME], "the disk stays");
}

/// A migration that is cancelled merges what the guest wrote into the chain: as the agent's user, and into
/// whatever the head named.
#[test]
fn a_head_that_changes_while_its_disk_moves_is_not_written_to() {
    let Some(mut stage) = Stage::new("hostile-merge") else { return };
    let secret = stage.secret_file();
    let prepared = stage.prepare().json().expect("prepared");
    stage.start_target(&prepared);
    let head = Head::of(&stage.disk());
    let migrate = stage.migrate(&["--bandwidth", "4Mbit", "--strategy", "pre-copy"]);
    let a = stage.lab.host("a");
    a.wait_status(PATIENCE, |status| {
        status["progress"]["total"]["bytes_done"].as_u64().is_some_and(|done| done > 0)
    })
    .expect("it copies");
    head.names_data(text(&secret.path));
    // Whether the guest has its disk back is not the point.
    let _ = a.dray(&["cancel"]).expect("cancel");
    let ended = Answer::of(migrate).expect("answer");
    assert_ne!(ended.code, 0, "it came to its end before: {ended:?}");
    let deadline = Instant::now() + PATIENCE;
    let tried = |log: &str| {
        ["data is in another file", "back on its chain"].iter().any(|words| log.contains(words))
    };
    while !tried(&a.log()) {
        assert!(Instant::now() < deadline, "nobody has merged: {}", a.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    secret.assert_untouched(&stage);
}
