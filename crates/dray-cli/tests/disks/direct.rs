//! Pools whose images bypass the page cache.

use crate::case::{Case, IMAGE};
use crate::lab::Lab;
use crate::mounts::Mount;
use crate::moves::result;
use dray_config::Config;
use std::path::Path;
use std::process::Command;

/// Bytes of a file in the page cache, as `fincore` says.
fn cached(path: &Path) -> Option<u64> {
    let shown = Command::new("fincore").args(["-b", "-n", "-r", "-o", "RES"]).arg(path).output();
    let Ok(shown) = shown else {
        println!("SKIP: fincore is not there");
        return None;
    };
    Some(String::from_utf8_lossy(&shown.stdout).trim().parse().unwrap())
}

/// A lab whose pools do their I/O so.
fn lab(io: &str) -> Lab {
    Lab::with(|_, config| config.replace("[[pool]]", &format!("[[pool]]\nio = \"{io}\"")))
}

/// Moves an image under a guest; how much of it is in the page caches of source and target then.
fn cached_after_a_move(io: &str) -> Option<[u64; 2]> {
    let mut case = Case::begin(lab(io), 21, &[], &[]);
    let pool = case.lab.a.pool();
    // What the test wrote itself does not count.
    let file = std::fs::File::open(pool.join(IMAGE)).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let before = case.guest.requests();
    crate::lab::wait_for("the guest", std::time::Duration::from_secs(20), || {
        case.guest.requests() > before + 100 || case.guest.complaint().is_some()
    })
    .unwrap_or_else(|why| panic!("{why}: {}", case.picture()));
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify"];
    let summary = result(&case.lab.a.dray(&args));
    assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
    case.await_end().unwrap();
    let source = cached(&pool.join(format!(".{IMAGE}.dray-replica-2")))?;
    let target = cached(&case.lab.b.pool().join(IMAGE))?;
    // Compares every byte.
    case.end().unwrap();
    Some([source, target])
}

#[test]
fn direct_io_leaves_the_page_cache_alone() {
    let Some(direct) = cached_after_a_move("direct") else { return };
    let Some(buffered) = cached_after_a_move("buffered") else { return };
    assert_eq!(direct, [0, 0], "bytes in the page cache of source and target");
    assert!(buffered.iter().all(|&bytes| bytes > 0), "else the test shows nothing: {buffered:?}");
}

#[test]
fn a_pool_without_direct_io_is_refused_when_the_agent_starts() {
    let lab = lab("direct");
    let Some(_ramfs) = Mount::ramfs(&lab.a.pool()) else { return };
    let config = Config::load(&lab.a.config()).unwrap();
    let problems: Vec<_> = config.check().iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 1, "{problems:?}");
    let wanted = ["pool.p.io: ", "its file system has no direct I/O", "io = \"buffered\""];
    assert!(wanted.iter().all(|word| problems[0].contains(word)), "{problems:?}");
    assert_eq!(std::fs::read_dir(lab.a.pool()).unwrap().count(), 0);
}
