//! Blocks that say which write they hold: any block tells, by itself, whether it is where it
//! belongs and which of the writes to that place it is.
//!
//! It is here and not in a test because tests make and compare gigabytes of it, and this crate is
//! compiled with optimisation.

/// Bytes of a block.
pub const BLOCK: u64 = 4096;

/// What `block` holds after write number `version` to it: zeros for zero; otherwise both numbers,
/// and words that no other block and no other version has and that do not compress.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK as usize);
    append(&mut bytes, block, version);
    bytes
}

/// What the blocks from `first` hold one after the other, whose versions are `versions`.
pub fn contents(first: u64, versions: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(versions.len() * BLOCK as usize);
    for (block, &version) in (first..).zip(versions) {
        append(&mut bytes, block, version);
    }
    bytes
}

fn append(bytes: &mut Vec<u8>, block: u64, version: u64) {
    let end = bytes.len() + BLOCK as usize;
    if version == 0 {
        bytes.resize(end, 0);
        return;
    }
    // Mixed first, or neighbours would hold the same words one place further and compress well.
    let mut state = next(&mut (block ^ version.rotate_left(32)));
    bytes.extend(block.to_le_bytes());
    bytes.extend(version.to_le_bytes());
    while bytes.len() < end {
        bytes.extend(next(&mut state).to_le_bytes());
    }
}

/// A step of splitmix64.
pub fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_and_every_version_differs() {
        let all: Vec<_> = (0..8).flat_map(|b| (1..8).map(move |v| content(b, v))).collect();
        for (nth, one) in all.iter().enumerate() {
            assert_eq!(one.len() as u64, BLOCK);
            assert!(all[..nth].iter().all(|other| other[16..24] != one[16..24]));
        }
    }

    #[test]
    fn several_blocks_are_those_blocks() {
        let alone = [content(5, 2), content(6, 0), content(7, 9)].concat();
        assert_eq!(contents(5, &[2, 0, 9]), alone);
        assert!(alone[4096..8192].iter().all(|&byte| byte == 0));
    }
}
