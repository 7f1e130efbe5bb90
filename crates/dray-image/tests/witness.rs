//! Who is told of a guest's changes, and when.

use dray_image::{Attempt, Disk, FileImage, FileOptions, Image, WriteWitness, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange};
use std::sync::{Arc, Mutex, Weak};

/// Looks, each time it is told, whether what it is told is true.
struct Checks {
    disk: Weak<Disk>,
    told: Mutex<Vec<BlockRange>>,
}

impl WriteWitness for Checks {
    fn written(&self, range: BlockRange) {
        let disk = self.disk.upgrade().unwrap();
        let dirty = disk.dirty_snapshot();
        assert!(dirty.contains_range(range), "{range:?} is not dirty: {dirty:?}");
        let mut block = [0; BLOCK_SIZE as usize];
        disk.backing().read_at(&mut block, range.byte_offset()).unwrap();
        assert!(block.contains(&5) || range.start >= 10, "{range:?} is not written");
        self.told.lock().unwrap().push(range);
    }
}

#[test]
fn every_change_is_told_once_it_is_there_and_dirty() {
    let dir = tempfile::Builder::new().prefix("image-witness-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let options = FileOptions { write: true, ..Default::default() };
    let disk = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
    disk.start_tracking(None).unwrap();
    let witness = Arc::new(Checks { disk: Arc::downgrade(&disk), told: Mutex::default() });
    disk.set_write_witness(Some(Arc::clone(&witness) as Arc<dyn WriteWitness>));
    disk.write_at(&[5; 100], BLOCK_SIZE - 50, false).unwrap();
    let mut told = vec![BlockRange::new(0, 2)];
    if disk.try_write_at(&[5; BLOCK_SIZE as usize], 4 * BLOCK_SIZE).unwrap() == Attempt::Done {
        told.push(BlockRange::new(4, 1));
    }
    disk.zero(10 * BLOCK_SIZE, 2 * BLOCK_SIZE, ZeroMode::MayUnmap, false).unwrap();
    disk.discard(20 * BLOCK_SIZE, BLOCK_SIZE, false).unwrap();
    disk.flush().unwrap();
    told.extend([BlockRange::new(10, 2), BlockRange::new(20, 1)]);
    assert_eq!(*witness.told.lock().unwrap(), told);
    assert!(disk.write_at(&[5; 10], 1 << 20, false).is_err());
    disk.set_write_witness(None);
    disk.write_at(&[5; 10], 0, false).unwrap();
    assert_eq!(*witness.told.lock().unwrap(), told, "neither what failed nor what came later");
}
