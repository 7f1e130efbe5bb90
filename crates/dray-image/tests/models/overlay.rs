//! An overlay against plain memory: guests write and a merge goes on meanwhile.

use crate::lane::{Log, first_byte, guest};
use crate::random::{Random, seeds};
use dray_image::{Disk, Extent, ExtentKind, FileImage, FileOptions, Image, Overlay};
use dray_types::{BLOCK_SIZE, BlockSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const BLOCKS: u64 = 120;
/// Not a whole number of blocks.
const LEN: u64 = (BLOCKS - 1) * BLOCK_SIZE + 1536;
const OPERATIONS: u64 = 150;
const GUESTS: u64 = 2;

/// What the extents call a hole must read as zeros.
fn check_extents(image: &dyn Image, model: &[u8], label: &str) {
    let mut at = 0;
    while at < LEN {
        for Extent { len, kind } in image.extents(at, LEN - at, 7).unwrap() {
            let part = &model[at as usize..(at + len) as usize];
            let zeros = part.iter().all(|&byte| byte == 0);
            assert!(kind == ExtentKind::Data || zeros, "{label}: no hole at {at}");
            at += len;
        }
    }
}

fn open(path: &std::path::Path) -> Arc<dyn Image> {
    let options = FileOptions { write: true, direct: false, export_len: None };
    Arc::new(FileImage::open(path, options).unwrap())
}

fn run(seed: u64) {
    let label = format!("DRAY_SEED={seed}");
    let dir = tempfile::Builder::new().prefix("image-overlay-").tempdir().unwrap();
    let (below, file) = (dir.path().join("below.raw"), dir.path().join("file.raw"));
    let mut model: Vec<u8> = (0..LEN).map(first_byte).collect();
    std::fs::write(&below, &model).unwrap();
    std::fs::File::create(&file).unwrap().set_len(LEN).unwrap();
    let log = Arc::new(Log::default());
    for life in 0..2 {
        let here = log.0.lock().unwrap().clone();
        let overlay =
            Overlay::new(open(&below), open(&file), &here, &BlockSet::new(), Arc::clone(&log) as _);
        let overlay = Arc::new(overlay.unwrap());
        assert_eq!(overlay.unmerged_count(), here.len(), "{label}");
        let disk = Disk::new(Arc::clone(&overlay) as _);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (overlay, over) = (&overlay, &over);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    overlay.merge(0).unwrap();
                    thread::yield_now();
                }
            });
            let parts = model.chunks_mut(LEN.div_ceil(GUESTS) as usize);
            let guests: Vec<_> = parts
                .enumerate()
                .map(|(nth, part)| {
                    let from = nth as u64 * LEN.div_ceil(GUESTS);
                    let random = Random(seed * 8 + life * GUESTS + nth as u64);
                    let (disk, label) = (&disk, &label);
                    scope.spawn(move || guest(disk, from, part, OPERATIONS, random, label))
                })
                .collect();
            guests.into_iter().for_each(|guest| guest.join().unwrap());
            over.store(true, Ordering::SeqCst);
        });
        check_extents(&*overlay, &model, &label);
        // The merge of one life is lost in the next.
        if life == 1 {
            while overlay.merge(0).unwrap().is_some() {}
            assert_eq!(overlay.unmerged_count(), 0, "{label}");
            assert!(std::fs::read(&below).unwrap() == model, "{label}: not all was merged");
        }
    }
}

#[test]
fn an_overlay_reads_as_what_was_written_and_merges_down_whole() {
    seeds(30).for_each(run);
}
