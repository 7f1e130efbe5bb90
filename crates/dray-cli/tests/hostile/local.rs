//! Users of this host: each group gets what the configuration gives it, and nothing of the others.

use dray_testkit::guest::tools;
use dray_testkit::lab::{Host, Lab};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// A user who is nobody, and groups that every Debian has.
const USER: u32 = 65534;
const OPERATORS: (&str, u32) = ("games", 60);
const READERS: (&str, u32) = ("users", 100);
const GUESTS: (&str, u32) = ("operator", 37);
const STRANGERS: u32 = 65534;

/// A lab of which the first host serves an image, and lets these groups in.
fn lab(name: &str) -> Lab {
    let lab = Lab::new(name, Path::new(env!("CARGO_BIN_EXE_dray"))).unwrap();
    let host = lab.host("a");
    let file = host.dir().join("dray.toml");
    let config = fs::read_to_string(&file).unwrap();
    let groups = format!(
        "[agent]\ngroup = '{}'\nreaders = '{}'\nguests = '{}'\n",
        OPERATORS.0, READERS.0, GUESTS.0
    );
    fs::write(&file, config.replacen("[agent]\n", &groups, 1)).unwrap();
    for dir in host.dir().ancestors().take(2).chain([host.dir().join("run").as_path()]) {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::File::create(host.pool().join("vm.raw")).unwrap().set_len(1 << 20).unwrap();
    host.start().unwrap();
    let path = host.pool().join("vm.raw");
    host.json(&["images", "add", "vm", path.to_str().unwrap()]).unwrap();
    lab
}

/// What becomes of a command of somebody in `group` who is not root.
fn ask(mut command: Command, group: u32) -> (Option<i32>, String) {
    let command = command.uid(USER).gid(group).stdin(Stdio::null());
    let ran = command.output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    (ran.status.code(), String::from_utf8_lossy(&said).into_owned())
}

fn dray(host: &Host, args: &[&str], group: u32) -> (Option<i32>, String) {
    ask(host.command(args), group)
}

/// What a QEMU of that group would find.
fn open_export(host: &Host, group: u32) -> (Option<i32>, String) {
    let mut command = Command::new("qemu-img");
    command.arg("info").arg(format!("nbd+unix:///vm?socket={}", host.nbd_socket().display()));
    ask(command, group)
}

const DENIED: Option<i32> = Some(7);

#[test]
fn each_group_has_its_own_door() {
    if !tools::available(&["qemu-img"]) {
        return;
    }
    let lab = lab("doors");
    let host = lab.host("a");
    let (looks, changes) = (["images"], ["images", "remove", "vm"]);
    for (group, may_look, may_open) in [
        (OPERATORS.1, true, false),
        (READERS.1, true, false),
        (GUESTS.1, false, true),
        (STRANGERS, false, false),
    ] {
        let (code, said) = dray(host, &looks, group);
        assert_eq!(code, if may_look { Some(0) } else { DENIED }, "{group}: {said}");
        let (code, said) = open_export(host, group);
        assert_eq!(code == Some(0), may_open, "{group}: {said}");
    }
    for group in [READERS.1, GUESTS.1, STRANGERS] {
        let (code, said) = dray(host, &changes, group);
        assert_eq!(code, DENIED, "{group}: {said}");
    }
    let (code, said) = dray(host, &changes, READERS.1);
    assert!(code == DENIED && said.contains("agent.group"), "{said}");
    let (code, said) = dray(host, &changes, OPERATORS.1);
    assert_eq!(code, Some(0), "{said}");
}

/// The agent is root: it opens nothing for an operator that the configuration does not name.
#[test]
fn an_operator_is_not_root() {
    let lab = lab("operator");
    let host = lab.host("a");
    let secret = lab.dir().join("secret");
    fs::create_dir(&secret).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();
    let url = format!("file://{}", secret.display());
    let refused: [&[&str]; 5] = [
        &["backups", "init", &url],
        &["backup", "vm", "--to", &url],
        &["backups", "list", &url],
        &["adopt", "--qmp", "/etc/passwd"],
        &["migrate", "--qmp", "/etc/passwd", "--to", "hostb", "--target-qmp", "/run/x"],
    ];
    for args in refused {
        let (code, said) = dray(host, args, OPERATORS.1);
        let invalid = said.contains("is not below");
        assert!(code == DENIED || invalid && code != Some(0), "{args:?}: {code:?}: {said}");
    }
    assert_eq!(fs::read_dir(&secret).unwrap().count(), 0, "nothing was written there");
    host.json(&["backups", "init", &url]).expect("root may");
    let (_, shown) = dray(host, &["--json", "images"], OPERATORS.1);
    let shown: Value = serde_json::from_str(shown.lines().last().unwrap()).unwrap();
    assert_eq!(shown[0]["name"], "vm", "the image is as it was: {shown}");
}
