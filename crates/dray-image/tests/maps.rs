//! What the maps of a disk cost: memory by use, scans by what is in them.

use dray_image::blockmap::AtomicBlockMap;
use dray_image::{Disk, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use proptest::prelude::*;
use std::sync::Arc;

const TIB: u64 = 1 << 40;
const MIB: usize = 1 << 20;

/// An image that takes writes and forgets them.
struct Nothing(u64);

impl Image for Nothing {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.0, min_block: 1, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], _: u64) -> Result<()> {
        buf.fill(0);
        Ok(())
    }

    fn write_at(&self, _: &[u8], _: u64, _: bool) -> Result<()> {
        Ok(())
    }

    fn zero(&self, _: u64, _: u64, _: ZeroMode, _: bool) -> Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64, _: bool) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        Err(Error::new(ErrorKind::Io, "mapping", "not here"))
    }
}

#[test]
fn maps_take_memory_by_use_and_not_by_size() {
    let disk = Disk::new(Arc::new(Nothing(64 * TIB)));
    disk.start_tracking(None).unwrap();
    assert!(disk.memory_bytes() < 64 * MIB, "{} bytes for a clean disk", disk.memory_bytes());
    let whole = Disk::new(Arc::new(Nothing(TIB)));
    whole.start_tracking(None).unwrap();
    whole.discard(0, TIB, false).unwrap();
    assert_eq!(whole.dirty_count(), TIB / BLOCK_SIZE);
    // Two maps, one of the migration and one of the generation, of a bit for each block.
    let maps = 2 * (TIB / BLOCK_SIZE / 8) as usize;
    assert!(whole.memory_bytes() < 16 * MIB + maps, "{} bytes", whole.memory_bytes());
    assert_eq!(whole.take_dirty(0, u64::MAX).accept(), [BlockRange::whole(TIB)]);
    assert_eq!(whole.dirty_count(), 0);
}

fn ranges() -> impl Strategy<Value = Vec<(u8, u64, u64)>> {
    let start = prop_oneof![0..70_000u64, 32_700..32_800u64, Just(65_536)];
    let len = prop_oneof![0..200u64, Just(64), Just(40_000)];
    prop::collection::vec((0..4u8, start, len), 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn an_atomic_map_is_a_set(steps in ranges(), probe in 0..80_000u64, max in 1..300u64) {
        let map = AtomicBlockMap::new(120_000);
        let mut model = BlockSet::new();
        for (step, start, len) in steps {
            let range = BlockRange::new(start, len);
            let inside = model.intersection(range).len();
            match step {
                0 | 1 => {
                    prop_assert_eq!(map.set(range), len - inside);
                    model.insert(range);
                }
                2 => {
                    prop_assert_eq!(map.clear(range), inside);
                    model.remove(range);
                }
                _ => {
                    let taken: BlockSet = map.take(start, len).into_iter().collect();
                    let rest = model.intersection(BlockRange::new(start, 120_000 - start));
                    prop_assert_eq!(taken.len(), rest.len().min(len));
                    let last = taken.runs().last().map_or(start, BlockRange::end);
                    prop_assert_eq!(&taken, &rest.intersection(BlockRange::new(start, last - start)));
                    model.subtract(&taken);
                }
            }
        }
        prop_assert_eq!(map.snapshot(), model.clone());
        prop_assert_eq!(map.count(), model.len());
        prop_assert_eq!(map.next_run(probe, max), model.next_run(probe, max));
        let window = BlockRange::new(probe, max);
        prop_assert_eq!(map.intersects(window), model.intersects(window));
        prop_assert!(map.runs_in(window).into_iter().eq(model.intersection(window).runs()));
    }
}
