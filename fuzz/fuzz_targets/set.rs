//! Encoded sets of blocks: one set has one encoding, and whatever decodes is a set.

#![no_main]

use dray_types::BlockSet;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(set) = BlockSet::decode(bytes) else { return };
    assert_eq!(set.encode(), bytes);
    let mut count = 0;
    let mut end = None;
    for run in set.runs().take(10_000) {
        assert!(run.len > 0 && end.is_none_or(|end| run.start > end));
        end = Some(run.end());
        count += run.len;
    }
    assert!(count <= set.len());
});
