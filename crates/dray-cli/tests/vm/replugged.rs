//! Disks that are on dray are unplugged, and plugged in under other device ids: dray finds them by their exports.

use crate::unlocked::{AFTER, SCSI, Scene};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;

fn images(scene: &Scene) -> Vec<Value> {
    scene.dray(&["images"]).as_array().cloned().expect("a list")
}

/// Each of two disks gets the id of the other one.
#[test]
fn disks_that_exchange_their_ids_go_back_to_their_own_files() {
    let scene = Scene::new("replugged", &[SCSI, SCSI]);
    scene.on_vm("adopt");
    [0, 1].iter().for_each(|disk| scene.unplug(*disk));
    for (disk, id) in [(0, 1), (1, 0)] {
        scene.monitor(&format!("device_add {SCSI},id=disk{id},drive=dray-nbd-disk{disk}-0"));
    }
    scene.on_vm("release");
    let nodes = scene.ask("query-named-block-nodes", &json!({}));
    assert!(!nodes.to_string().contains("nbd"), "{nodes:#}");
    assert!(images(&scene).iter().all(|image| image["state"] != "owner"), "{:#?}", images(&scene));
    scene.write(1, AFTER);
    for (disk, wanted) in [(0, 7), (1, 0)] {
        let mut found = [0];
        File::open(scene.path(disk))
            .and_then(|f| f.read_exact_at(&mut found, AFTER))
            .expect("read");
        assert_eq!(found, [wanted], "disk {disk}");
    }
    scene.on_vm("adopt");
    scene.on_vm("release");
}
