//! Mirroring: what the guest writes during the copy is sent on at once.

use crate::case::{Case, IMAGE};
use crate::lab::Lab;
use crate::moves::result;

/// More than the guest writes, and slow enough that it writes a lot during the copy.
const RATE: &str = "32MiB/s";

/// The guest goes over its blocks again and again while the rest is copied, so most of its writes
/// touch what the target has already.
#[test]
fn mirror_moves_an_image_and_everything_is_equal_at_handover() {
    let mut case = Case::begin_small(Lab::new());
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--strategy"];
    let summary = result(&case.lab.a.dray(&[&args[..], &["mirror", "--bandwidth", RATE]].concat()));
    assert_eq!(summary["result"], "completed", "{summary}");
    assert_eq!(summary["strategy"], "mirror");
    assert_eq!(summary["verified"], true, "{summary}");
    assert!(summary["blocks_mirrored"].as_u64() > Some(0), "{summary}");
    assert_eq!(summary["remote_reads"], 0, "nothing was missing: {summary}");
    case.await_end().unwrap();
    case.end().unwrap();
}
