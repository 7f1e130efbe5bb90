//! Runs without their zero blocks: which blocks are all zeros, and the others moved together.

use dray_types::BLOCK_SIZE;
use dray_wire::frame::{mask_bit, set_mask_bit};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A block on a page's boundary, as direct I/O wants it.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; BLOCK_SIZE as usize]);

/// Memory for one run, aligned for direct I/O and used again for every run.
pub struct RunBuffer(Vec<Page>);

impl RunBuffer {
    /// Room for `blocks` blocks.
    pub fn new(blocks: u64) -> Self {
        Self(vec![Page([0; BLOCK_SIZE as usize]); blocks as usize])
    }

    /// The first `len` bytes.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.0.as_mut_slice().as_mut_bytes()[..len]
    }
}

/// True when every byte is zero.
pub fn is_zero(block: &[u8]) -> bool {
    // The first words decide for nearly all data; only then is the whole block looked at, in
    // pieces long enough for the widest registers.
    let (head, rest) = block.split_at(block.len().min(16));
    head.iter().all(|&byte| byte == 0)
        && rest.chunks(512).all(|piece| piece.iter().fold(0, |any, &byte| any | byte) == 0)
}

/// The mask of a run's all-zero blocks.
pub fn zero_mask(run: &[u8]) -> [u64; 4] {
    let mut mask = [0u64; 4];
    for (index, block) in run.chunks_exact(BLOCK_SIZE as usize).enumerate() {
        if is_zero(block) {
            mask[index / 64] |= 1 << (index % 64);
        }
    }
    mask
}

/// Finds the all-zero blocks of a run and moves the other blocks together at the front. Returns
/// the mask of zero blocks and the number of bytes that are left.
pub fn squeeze(run: &mut [u8]) -> ([u64; 4], usize) {
    let mask = zero_mask(run);
    (mask, close_up(run, &mask))
}

/// Moves those blocks of a run together at the front that `wanted` names. Returns the mask of the
/// others and the number of bytes that are left.
pub fn squeeze_to(run: &mut [u8], wanted: &[u64; 4]) -> ([u64; 4], usize) {
    let mut mask = [0u64; 4];
    let others = (0..run.len() / BLOCK_SIZE as usize).map(|nth| nth as u64);
    others.filter(|&nth| !mask_bit(wanted, nth)).for_each(|nth| set_mask_bit(&mut mask, nth));
    (mask, close_up(run, &mask))
}

/// Moves the blocks that are not in the mask together; how many bytes they are.
fn close_up(run: &mut [u8], mask: &[u64; 4]) -> usize {
    if *mask == [0; 4] {
        return run.len();
    }
    let mut kept = 0;
    let block = BLOCK_SIZE as usize;
    for index in 0..run.len() / block {
        if mask[index / 64] >> (index % 64) & 1 == 0 {
            if kept != index * block {
                run.copy_within(index * block..(index + 1) * block, kept);
            }
            kept += block;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_blocks_are_found_to_the_last_byte() {
        let mut block = [0u8; 4096];
        assert!(is_zero(&block));
        for at in [0, 1, 15, 16, 527, 528, 4095] {
            block[at] = 1;
            assert!(!is_zero(&block), "{at}");
            block[at] = 0;
        }
    }

    #[test]
    fn the_others_move_together_in_order() {
        let mut buffer = RunBuffer::new(256);
        let run = buffer.bytes(256 * 4096);
        for index in (0..256usize).filter(|index| index % 3 != 0) {
            run[index * 4096 + 7] = index as u8;
        }
        let (mask, kept) = squeeze(run);
        let zeros: u32 = mask.iter().map(|word| word.count_ones()).sum();
        assert_eq!((zeros, kept), (86, 170 * 4096));
        let order: Vec<u8> = run[..kept].chunks(4096).map(|block| block[7]).collect();
        let wanted: Vec<u8> = (0..=255).filter(|index| index % 3 != 0).collect();
        assert_eq!(order, wanted);
        assert_eq!(squeeze(&mut run[..4096]), ([0; 4], 4096));
        let (mask, kept) = squeeze_to(&mut run[..5 * 4096], &[0b01010, 0, 0, 0]);
        assert_eq!((mask, kept), ([0b10101, 0, 0, 0], 2 * 4096));
        assert_eq!((run[7], run[4096 + 7]), (2, 5));
    }

    #[test]
    fn run_memory_is_aligned() {
        assert_eq!(RunBuffer::new(2).bytes(1).as_ptr() as usize % 4096, 0);
    }
}
