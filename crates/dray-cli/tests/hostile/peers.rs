//! A peer asks for what it has no right to.

use crate::attacker::{Attacker, lab, start};
use crate::lab::{Lab, run};
use dray_net::NetErrorKind;
use dray_types::{ErrorKind, ImageId, MigrationId};
use dray_wire::StreamKind;
use dray_wire::request::{ComingImage, Reply, Request, WantedImage};
use std::process::Command;

/// What a refusal says: that it is one, which right lacks, and the line that gives it.
fn is_denied<T>(answer: Result<T, dray_net::NetError>, right: &str, line: &str) {
    let Err(why) = answer else { panic!("the right '{right}' is not needed") };
    assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Denied), "{why}");
    assert!(why.what.contains(&format!("does not have the right '{right}' on hosta")), "{why}");
    let hint = why.hint.as_deref().unwrap_or_default();
    assert!(hint.contains("the dray.toml of hosta") && hint.contains(line), "{hint}");
}

fn image(id: u128) -> ComingImage {
    let name = format!("evil-{id}.img");
    let image = WantedImage { id: ImageId(id), name, len: 1 << 20, allocated: 0, read_only: false };
    ComingImage { image, ancestors: Vec::new(), digest: None, qcow2: false, owner: None }
}

pub fn prepare(migration: u128) -> Request {
    let (migration, images) = (MigrationId(migration), vec![image(migration + 1)]);
    Request::Prepare { migration, pool: None, images }
}

/// Without a word about rights a peer may move images to this host, and nothing else.
#[test]
fn a_peer_may_only_move_images_here_unless_more_is_said() {
    let store = tempfile::tempdir().unwrap();
    let offer = format!("[backup_store]\npath = \"{}\"\n", store.path().display());
    let lab = lab("", &offer);
    let attacker = Attacker::new(&lab, "hostb");
    assert!(matches!(attacker.ask(&lab.a, &Request::Identify), Ok(Reply::Identity { .. })));
    let holdings = Request::Holdings { image: ImageId(1) };
    let line = "rights = [\"receive\", \"read-replicas\"]";
    is_denied(attacker.ask(&lab.a, &holdings), "read-replicas", line);
    is_denied(attacker.open(&lab.a, StreamKind::Replica, None), "read-replicas", line);
    let line = "rights = [\"receive\", \"store\"]";
    is_denied(attacker.open_blocking(&lab.a, StreamKind::Store), "store", line);
    assert!(std::fs::read_dir(store.path()).unwrap().next().is_none(), "nothing was made");
    let prepared = attacker.ask(&lab.a, &prepare(1)).unwrap();
    assert!(matches!(prepared, Reply::Prepared { .. }), "{prepared:?}");
}

#[test]
fn who_may_only_keep_backups_here_does_not_learn_of_the_pools() {
    let store = tempfile::tempdir().unwrap();
    let offer = format!("[backup_store]\npath = \"{}\"\n", store.path().display());
    let lab = lab("rights = [\"store\"]", &offer);
    let attacker = Attacker::new(&lab, "hostb");
    let line = "rights = [\"observe\", \"store\"]";
    is_denied(attacker.ask(&lab.a, &Request::Identify), "observe", line);
}

#[test]
fn who_may_not_move_images_here_makes_and_reads_nothing() {
    let lab = lab("rights = [\"observe\"]", "");
    let attacker = Attacker::new(&lab, "hostb");
    let (pool, images) = (None, Vec::new());
    let line = "rights = [\"receive\", \"observe\"]";
    for request in [
        prepare(1),
        Request::Seed { number: 1, pool: None, images: Vec::new(), link: None },
        Request::Survey { number: None, pool, images, backups: true },
        Request::Bases { pool: None, images: Vec::new() },
    ] {
        is_denied(attacker.ask(&lab.a, &request), "receive", line);
    }
    assert!(lab.a.files().is_empty() && lab.a.migrations().is_empty());
    assert!(matches!(attacker.ask(&lab.a, &Request::Identify), Ok(Reply::Identity { .. })));
}

/// A peer says which image it brings. Backups and replicas go by that, and so did what the image may be told.
#[test]
fn an_image_that_this_host_has_is_not_brought_by_another_one() {
    let lab = lab("", "");
    run(Command::new("truncate").args(["-s", "1M"]).arg(lab.a.pool().join("vm.img")));
    lab.a.add("vm.img");
    let line = lab.a.dray(&["--json", "lineage", "vm.img"]);
    let line: serde_json::Value = serde_json::from_slice(&line.stdout).unwrap();
    let id = u128::from_str_radix(line["id"].as_str().unwrap(), 16).unwrap();
    let attacker = Attacker::new(&lab, "hostb");
    let bring = |images| {
        let request = Request::Prepare { migration: MigrationId(1), pool: None, images };
        attacker.ask(&lab.a, &request)
    };
    for images in [vec![image(id)], vec![image(7), image(7)]] {
        let why = bring(images).unwrap_err();
        assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Conflict), "{why}");
        assert!(why.what.contains("an image with that id"), "{why}");
    }
    assert_eq!(lab.a.files(), ["vm.img"]);
    assert!(matches!(bring(vec![image(7)]), Ok(Reply::Prepared { .. })));
}

/// What is of a migration is for its other end only, with whatever rights.
#[test]
fn the_migration_of_two_hosts_is_not_a_third_ones() {
    let mut lab = Lab::new();
    let _third = lab.third();
    start(&mut lab.a);
    let (owner, attacker) = (Attacker::new(&lab, "hostb"), Attacker::new(&lab, "hostc"));
    let (migration, some) = (MigrationId(1), Some(MigrationId(1)));
    owner.ask(&lab.a, &prepare(1)).unwrap();
    let other = |why: dray_net::NetError| {
        assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Denied), "{why}");
        assert!(why.what.contains("the migration belongs to another peer"), "{why}");
    };
    for request in
        [Request::Forget { migration }, Request::Fate { migration, images: vec![ImageId(2)] }]
    {
        other(attacker.ask(&lab.a, &request).unwrap_err());
    }
    for kind in [StreamKind::Control, StreamKind::Data, StreamKind::Memory] {
        other(attacker.open(&lab.a, kind, some).unwrap_err());
    }
    assert_eq!(lab.a.migrations().len(), 1);
    owner.open(&lab.a, StreamKind::Control, some).unwrap();
}

/// The operator of the asking host learns which line lacks, and scripts learn it from the exit code.
#[test]
fn the_refusal_reaches_the_operator() {
    let mut lab = lab("rights = []", "");
    start(&mut lab.b);
    let told = lab.b.dray(&["peers", "--json"]);
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("does not have the right 'observe' on hosta"), "{told}");
    run(Command::new("truncate").args(["-s", "1M"]).arg(lab.b.pool().join("vm.img")));
    lab.b.add("vm.img");
    let refused = lab.b.dray(&["migrate", "--image", "vm.img", "--to", "hosta"]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(7), "{why}");
    assert!(why.contains("does not have the right 'receive' on hosta"), "{why}");
    assert!(why.contains("write rights = [\"receive\"] in the [[peer]] of hostb"), "{why}");
}
