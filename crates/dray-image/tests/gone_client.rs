//! A client goes while its write is held up, and another program may have the image by then.

use dray_image::{
    Client, Disk, FileImage, FileOptions, Image, IntentLog, Result, ZeroMode, working_for,
};
use dray_types::{BLOCK_SIZE, BlockSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A log whose disk is so slow that the client is gone when it has answered.
struct Slow(Arc<AtomicBool>);

impl IntentLog for Slow {
    fn open_region(&self, _region: u64) -> Result<()> {
        self.0.store(false, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn nothing_is_written_for_a_client_that_went_while_its_write_was_noted() {
    let dir = tempfile::Builder::new().prefix("image-gone-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    for unlocked in [true, false] {
        std::fs::write(&path, [7; 2 * BLOCK_SIZE as usize]).unwrap();
        let options = FileOptions { write: true, ..Default::default() };
        let disk = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
        let there = Arc::new(AtomicBool::new(true));
        disk.start_history(Arc::new(Slow(Arc::clone(&there))), &BlockSet::new());
        disk.set_unlocked(unlocked);
        let client = Client::new(Arc::new({
            let there = Arc::clone(&there);
            move || there.load(Ordering::SeqCst)
        }));
        let written = working_for(&client, || disk.write_at(&[5; 100], 0, false));
        assert_eq!(written.is_err(), unlocked, "{written:?}");
        let zeroed = working_for(&client, || disk.zero(4096, 512, ZeroMode::MayUnmap, false));
        assert_eq!(zeroed.is_err(), unlocked, "{zeroed:?}");
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes[0] == 7, bytes[4096] == 7), (unlocked, unlocked));
    }
}
