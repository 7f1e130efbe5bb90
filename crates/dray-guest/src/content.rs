//! What a 4 KiB block contains, computed from who wrote it: image, block number and sequence
//! number. The rest of the block is pseudo random (so that it neither compresses nor repeats) and
//! fixed by those three, so checking a block means computing it again.

/// The unit in which the guest remembers what it wrote.
pub const BLOCK: usize = 4096;

/// The sequence number of a block that still has the image's first content.
pub const SEQ_BASE: u32 = 0;
/// The sequence number of a block the guest filled with zeros.
pub const SEQ_ZERO: u32 = u32::MAX;
/// The sequence number of a block the guest trimmed: zeros, or anything it held before.
pub const SEQ_TRIMMED: u32 = u32::MAX - 1;
/// The sequence number of a block whose write failed: anything may be there.
pub const SEQ_UNKNOWN: u32 = u32::MAX - 2;
/// Sequence numbers of writes stay below this.
pub const SEQ_LIMIT: u32 = u32::MAX - 16;

const MAGIC: u64 = 0x6472_6179_5f67_7565; // "dray_gue"
const HEADER_WORDS: usize = 5;

/// Who wrote a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The number the workload gave the image.
    pub image: u64,
    /// The block's place in the image.
    pub block: u64,
    /// The write's number; 0 is the content an image is seeded with.
    pub seq: u32,
}

impl Written {
    fn header(&self) -> [u64; HEADER_WORDS] {
        let seq = u64::from(self.seq);
        let check = mix(mix(mix(MAGIC ^ self.image) ^ self.block) ^ seq);
        [MAGIC, self.image, self.block, seq, check]
    }

    fn words(&self) -> impl Iterator<Item = u64> {
        let header = self.header();
        // A xorshift generator must not start at zero.
        let mut state = header[HEADER_WORDS - 1] | 1;
        let body = std::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        });
        header.into_iter().chain(body)
    }

    /// Writes the block's content into `buf`, which is [`BLOCK`] bytes long.
    pub fn fill(&self, buf: &mut [u8]) {
        for (bytes, word) in buf.chunks_exact_mut(8).zip(self.words()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Whether `buf` holds exactly this block.
    pub fn matches(&self, buf: &[u8]) -> bool {
        buf.len() == BLOCK
            && buf
                .chunks_exact(8)
                .zip(self.words())
                .all(|(bytes, word)| bytes == word.to_le_bytes())
    }

    /// Reads who wrote a block from its header; `None` for anything else.
    pub fn identify(buf: &[u8]) -> Option<Self> {
        let word = |i: usize| -> Option<u64> {
            Some(u64::from_le_bytes(buf.get(i * 8..i * 8 + 8)?.try_into().ok()?))
        };
        let seq = u32::try_from(word(3)?).ok()?;
        let written = Self { image: word(1)?, block: word(2)?, seq };
        (word(0)? == MAGIC && word(4)? == written.header()[4]).then_some(written)
    }
}

/// What an image held before the guest wrote to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Zeros everywhere.
    Zero,
    /// Every block as [`Written`] with sequence number 0.
    Seeded,
}

impl Base {
    /// The first content of a block of an image whose first `seeded_blocks` blocks are seeded.
    pub fn of(block: u64, seeded_blocks: u64) -> Self {
        if block < seeded_blocks { Self::Seeded } else { Self::Zero }
    }
}

/// Whether `buf` is what block `block` of image `image` may hold when its last write was `seq`.
pub fn block_is(buf: &[u8], image: u64, block: u64, seq: u32, base: Base) -> bool {
    let zero = || buf.iter().all(|b| *b == 0);
    match (seq, base) {
        (SEQ_UNKNOWN, _) => true,
        (SEQ_TRIMMED, _) => {
            zero()
                || Written::identify(buf)
                    .is_some_and(|w| w.image == image && w.block == block && w.matches(buf))
        }
        (SEQ_ZERO, _) | (SEQ_BASE, Base::Zero) => zero(),
        _ => Written { image, block, seq }.matches(buf),
    }
}

/// A 64-bit finaliser (splitmix64): every input bit changes half of the output bits.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_only_itself() {
        let written = Written { image: 7, block: 12, seq: 3 };
        let mut buf = vec![0; BLOCK];
        written.fill(&mut buf);
        assert!(written.matches(&buf));
        assert_eq!(Written::identify(&buf), Some(written));
        for other in [
            Written { image: 8, ..written },
            Written { block: 13, ..written },
            Written { seq: 4, ..written },
        ] {
            assert!(!other.matches(&buf));
        }
        buf[BLOCK - 1] ^= 1;
        assert!(!written.matches(&buf));
        assert_eq!(Written::identify(&buf), Some(written), "the header is still whole");
        buf[8] ^= 1;
        assert_eq!(Written::identify(&buf), None);
    }

    #[test]
    fn what_may_be_where() {
        let zeros = vec![0; BLOCK];
        let mut old = vec![0; BLOCK];
        Written { image: 1, block: 5, seq: 9 }.fill(&mut old);
        assert!(block_is(&zeros, 1, 5, SEQ_BASE, Base::Zero));
        assert!(!block_is(&zeros, 1, 5, SEQ_BASE, Base::Seeded));
        assert!(block_is(&old, 1, 5, 9, Base::Seeded));
        assert!(!block_is(&old, 1, 5, 10, Base::Seeded));
        assert!(!block_is(&old, 1, 5, SEQ_ZERO, Base::Seeded));
        assert!(block_is(&old, 1, 5, SEQ_TRIMMED, Base::Seeded));
        assert!(block_is(&zeros, 1, 5, SEQ_TRIMMED, Base::Seeded));
        assert!(!block_is(&old, 1, 6, SEQ_TRIMMED, Base::Seeded));
    }

    #[test]
    fn contents_do_not_repeat() {
        let mut seen = std::collections::HashSet::new();
        for block in 0..64 {
            for seq in 0..4 {
                let mut buf = vec![0; BLOCK];
                Written { image: 1, block, seq }.fill(&mut buf);
                assert!(seen.insert(buf[BLOCK - 64..].to_vec()));
            }
        }
    }
}
