//! After a migration that came to nothing: the guest goes on at the source on its own file, and
//! nothing is left behind on either host.

use crate::stage::{PATIENCE, Stage, qmp};
use std::fs;
use std::time::Instant;

/// Everything is as before the migration, and the guest is well to its end.
pub fn assert_back_home(stage: &mut Stage) {
    stage.target = None;
    stage.assert_guest_is_well();
    assert_nothing_left(stage);
    stage.finish_guest();
    stage.assert_images("a");
}

/// Neither agent has an image or a migration that is not forgotten, the target's pool is empty, no
/// disk is under dray and no socket is left. A target that was away is asked again.
pub fn assert_nothing_left(stage: &Stage) {
    let deadline = Instant::now() + PATIENCE;
    let left = || {
        let of = |letter| {
            let host = stage.lab.host(letter);
            let images = host.json(&["images"]).expect("images");
            (images.as_array().map(Vec::len), host.open_migrations().expect("state"))
        };
        (of("a"), of("b"), stage.lab.host("b").pool_files().expect("pool"))
    };
    while left() != ((Some(0), 0), (Some(0), 0), Vec::new()) {
        assert!(Instant::now() < deadline, "left behind: {:?}\n{}", left(), stage.logs());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let nodes = qmp(&stage.source.qmp_path(), "{\"execute\":\"query-named-block-nodes\"}");
    assert!(!nodes.to_string().contains("nbd.sock"), "a disk is still under dray: {nodes}");
    for letter in ["a", "b"] {
        let run = stage.lab.host(letter).dir().join("run");
        let names = fs::read_dir(run).expect("run").map(|e| e.expect("entry").file_name());
        let mut left: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        left.sort();
        assert_eq!(left, ["api.sock", "nbd.sock"]);
    }
}
