//! Another user may write to the folder of a pool, or to one that leads there: he could exchange files while the agent,
//! which is root, looks at them and opens them.

use crate::attacker::start;
use crate::lab::{DRAY, Host, Lab, run, wait_for};
use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

fn set_mode(path: &Path, mode: u32) {
    set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat()
}

fn check_config(host: &Host) -> (bool, String) {
    let output = Command::new(DRAY).args(["check-config", "--config"]).arg(host.config()).output();
    let output = output.unwrap();
    (output.status.success(), said(&output))
}

fn add(host: &Host, path: &Path) -> Output {
    run(Command::new("truncate").args(["-s", "1M"]).arg(path));
    host.dray(&[
        "images",
        "add",
        path.file_name().unwrap().to_str().unwrap(),
        path.to_str().unwrap(),
    ])
}

/// Why the image is closed.
fn closed(host: &Host, name: &str) -> Option<String> {
    let image = host.image(name).unwrap();
    Some(format!("{}; {}", image["closed"]["why"].as_str()?, image["closed"]["hint"].as_str()?))
}

/// A lab of which hosta has a second pool, below a folder of its own.
fn two_pools() -> (Lab, PathBuf) {
    let lab = Lab::with(|_, text| text);
    let (open, second) = (lab.a.dir.join("open"), lab.a.dir.join("open/second"));
    std::fs::create_dir_all(&second).unwrap();
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    let pool = format!("[[pool]]\nname = \"second\"\npath = \"{}\"\n", second.display());
    std::fs::write(lab.a.config(), text + &pool).unwrap();
    (lab, open)
}

#[test]
fn a_pool_that_others_could_exchange_files_in_stays_closed_and_the_others_serve() {
    let (mut lab, open) = two_pools();
    start(&mut lab.a);
    let (first, second) = (lab.a.pool().join("one.img"), open.join("second/two.img"));
    for path in [&first, &second] {
        let added = add(&lab.a, path);
        assert!(added.status.success(), "{}", said(&added));
    }
    assert!(check_config(&lab.a).0, "{}", check_config(&lab.a).1);
    lab.a.stop();
    // The folder that leads to it is enough: the pool can be exchanged as a whole.
    for folder in [&open, &open.join("second")] {
        set_mode(folder, 0o777);
        let (good, why) = check_config(&lab.a);
        assert!(!good && why.contains("pool.second.path: every user may write to "), "{why}");
        start(&mut lab.a);
        assert_eq!(closed(&lab.a, "one.img"), None);
        let why = closed(&lab.a, "two.img").expect("closed");
        assert!(why.contains("every user may write to "), "{why}");
        assert!(why.ends_with(&format!("chmod go-w {}", folder.display())), "{why}");
        let refused = add(&lab.a, &open.join("second/three.img"));
        assert_eq!(refused.status.code(), Some(7), "{}", said(&refused));
        assert!(said(&refused).contains("could exchange files below it"), "{}", said(&refused));
        let added = add(&lab.a, &lab.a.pool().join(format!("{}.img", folder.components().count())));
        assert!(added.status.success(), "{}", said(&added));
        // As soon as that is put right, it is served.
        set_mode(folder, 0o755);
        let serves = || closed(&lab.a, "two.img").is_none();
        wait_for("the image to open", Duration::from_secs(20), serves).unwrap();
        lab.a.stop();
    }
}
