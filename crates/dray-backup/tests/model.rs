//! What was written is what is read, over chains of incremental backups.

mod common;

use common::{Image, info, key, settings};
use dray_backup::{Dedup, MemoryStore, PIECE_BYTES, Repository, WriterOptions};
use proptest::prelude::*;
use std::sync::Arc;

/// A change of an image: pieces that become zero, or one of a few contents.
#[derive(Clone, Debug)]
struct Step {
    writes: Vec<(u64, u8)>,
    bytes: u64,
    dedup: Dedup,
    threads: usize,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let dedup = prop_oneof![Just(Dedup::Parent), Just(Dedup::Image), Just(Dedup::Everything)];
    let writes = prop::collection::vec((0u64..1200, 0u8..6), 0..60);
    let bytes = (1u64..1200 * PIECE_BYTES as u64)
        .prop_flat_map(|bytes| prop_oneof![Just(bytes), Just(700 * PIECE_BYTES as u64 + 77)]);
    let step = (writes, bytes, dedup, prop_oneof![3 => Just(0usize), 1 => Just(2)]);
    let step =
        step.prop_map(|(writes, bytes, dedup, threads)| Step { writes, bytes, dedup, threads });
    prop::collection::vec(step, 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_backup_of_a_chain_is_what_the_image_was(steps in steps(), sealed: bool) {
        let store = Arc::new(MemoryStore::default());
        let key = key(sealed);
        let repository = Repository::create_with(store, &key, settings(300_000)).unwrap();
        let mut image = Image::new(1, steps[0].bytes);
        let mut chain = Vec::new();
        for step in &steps {
            let parent = chain.last().map(|(backup, _)| repository.manifest(backup).unwrap());
            let before = image.clone();
            image.resize(step.bytes);
            for (ix, content) in &step.writes {
                image.write(*ix, *content);
            }
            let options =
                WriterOptions { threads: step.threads, dedup: step.dedup, ..Default::default() };
            let mut writer =
                repository.writer(image.id, step.bytes, parent.as_ref(), options).unwrap();
            for ix in image.changed_since(parent.is_some().then_some(&before)) {
                writer.put(ix, &image.piece(ix)).unwrap();
            }
            let backup = writer.finish(info(&image)).unwrap();
            chain.push((backup, image.clone()));
        }
        let listed = repository.backups(image.id).unwrap();
        prop_assert!(listed.damaged.is_empty());
        prop_assert_eq!(listed.backups.len(), chain.len());
        for ((backup, then), listed) in chain.iter().zip(&listed.backups) {
            prop_assert_eq!(backup, listed);
            then.check(&repository, backup);
        }
    }
}
