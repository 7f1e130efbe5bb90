//! A guest that works on its own part of a disk and knows what it holds.

use crate::random::Random;
use dray_image::{Attempt, Disk, Image, PresentLog, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::Mutex;

/// What the disks below hold at the beginning; one block in five is zeros.
pub fn first_byte(offset: u64) -> u8 {
    let block = offset / BLOCK_SIZE;
    if block.is_multiple_of(5) { 0 } else { (block * 7 + offset % 251) as u8 }
}

/// Remembers what is recorded as present.
#[derive(Default)]
pub struct Log(pub Mutex<BlockSet>);

impl PresentLog for Log {
    fn note(&self, run: BlockRange) -> Result<()> {
        self.0.lock().unwrap().insert(run);
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        self.0.lock().unwrap().union_with(present);
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        Ok(())
    }
}

/// Does `operations` things to its own part of the disk, from byte `from` to the end of `model`,
/// which says what the part holds. Parts meet inside a block.
pub fn guest(
    disk: &Disk,
    from: u64,
    model: &mut [u8],
    operations: u64,
    mut random: Random,
    label: &str,
) {
    let to = from + model.len() as u64;
    for _ in 0..operations {
        let at = from + random.below(to - from);
        let at = if random.below(2) == 0 { at } else { (at & !4095).max(from) };
        let len = [random.below(5000), BLOCK_SIZE * random.below(20)][random.below(2) as usize];
        let len = len.min(to - at);
        let part = &mut model[(at - from) as usize..(at - from + len) as usize];
        match random.below(8) {
            0..=2 => {
                let data = vec![random.below(256) as u8; part.len()];
                if disk.try_write_at(&data, at).unwrap() == Attempt::WouldWait {
                    disk.write_at(&data, at, random.below(4) == 0).unwrap();
                }
                part.copy_from_slice(&data);
            }
            3 => {
                disk.zero(at, len, ZeroMode::MayUnmap, false).unwrap();
                part.fill(0);
            }
            4 => {
                disk.discard(at, len, false).unwrap();
                part.fill(0);
            }
            5 => disk.flush().unwrap(),
            _ => {
                let mut buf = vec![0; part.len()];
                if disk.try_read_at(&mut buf, at).unwrap() == Attempt::WouldWait {
                    disk.read_at(&mut buf, at).unwrap();
                }
                assert!(buf == part, "{label}: {len} bytes at {at} differ");
            }
        }
    }
}
