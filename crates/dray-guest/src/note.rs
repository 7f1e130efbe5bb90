//! What a client writes down beside its images, a sector for each note. A note is written when what
//! it tells of has happened; a disk whose log has it had all of that before.

use crate::content::mix;
use crate::script::{LANES, SECTOR};

const MAGIC: u64 = 0x6472_6179_6e6f_7465; // "draynote"
/// Magic, kind, three numbers, one for each lane, the checksum.
const WORDS: usize = 6 + LANES;
/// The most bytes of a mark's text.
const TEXT: usize = 64;
/// Bytes that the checksum covers.
const COVERED: usize = 8 * (WORDS - 1) + TEXT;

/// One note.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Note {
    /// A flush was answered: what each lane had done before it was asked for is durable.
    Flushed {
        /// The image's number.
        image: u64,
        /// Which host answered.
        host: u64,
        /// Requests that each lane had done.
        done: [u64; LANES],
    },
    /// A request that is answered when it is durable was answered.
    Forced {
        /// The image's number.
        image: u64,
        /// Which host answered.
        host: u64,
        /// Who asked.
        lane: u64,
        /// The request.
        n: u64,
    },
    /// A lane goes on at a host with this request, which may have been asked for before.
    Moved {
        /// The image's number.
        image: u64,
        /// The host.
        host: u64,
        /// Who.
        lane: u64,
        /// The request.
        n: u64,
    },
    /// Something else has happened: at most 64 bytes.
    Mark(String),
}

impl Note {
    /// The sector that holds it.
    #[must_use]
    pub fn encode(&self) -> [u8; SECTOR as usize] {
        let mut words = [0; WORDS - 1];
        let mut text = "";
        let (kind, numbers): (u64, [u64; 3]) = match self {
            Self::Flushed { image, host, done } => {
                words[5..].copy_from_slice(done);
                (1, [*image, *host, 0])
            }
            Self::Forced { image, host, lane, n } => {
                words[5] = *n;
                (2, [*image, *host, *lane])
            }
            Self::Moved { image, host, lane, n } => {
                words[5] = *n;
                (3, [*image, *host, *lane])
            }
            Self::Mark(mark) => {
                text = mark;
                (4, [0; 3])
            }
        };
        (words[0], words[1]) = (MAGIC, kind);
        words[2..5].copy_from_slice(&numbers);
        let mut sector = [0; SECTOR as usize];
        for (bytes, word) in sector.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let text = &text.as_bytes()[..text.len().min(TEXT)];
        sector[8 * words.len()..][..text.len()].copy_from_slice(text);
        let check = checksum(&sector[..COVERED]);
        sector[COVERED..COVERED + 8].copy_from_slice(&check.to_le_bytes());
        sector
    }

    /// The note in a sector; `None` for anything else.
    #[must_use]
    pub fn decode(sector: &[u8]) -> Option<Self> {
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(sector.get(at..at + 8)?.try_into().ok()?))
        };
        let nth = |n: usize| word(8 * n);
        if nth(0)? != MAGIC || word(COVERED)? != checksum(&sector[..COVERED]) {
            return None;
        }
        let (image, host, lane, n) = (nth(2)?, nth(3)?, nth(4)?, nth(5)?);
        Some(match nth(1)? {
            1 => {
                let mut done = [0; LANES];
                for (lane, done) in done.iter_mut().enumerate() {
                    *done = nth(5 + lane)?;
                }
                Self::Flushed { image, host, done }
            }
            2 => Self::Forced { image, host, lane, n },
            3 => Self::Moved { image, host, lane, n },
            4 => {
                let text = &sector[8 * (WORDS - 1)..COVERED];
                let end = text.iter().position(|byte| *byte == 0).unwrap_or(TEXT);
                Self::Mark(String::from_utf8_lossy(&text[..end]).into_owned())
            }
            _ => return None,
        })
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    words.fold(0, |sum, word| mix(sum ^ word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let notes = [
            Note::Flushed { image: 1, host: 1, done: [7, 9] },
            Note::Forced { image: 2, host: 0, lane: 1, n: 12 },
            Note::Moved { image: 2, host: 1, lane: 0, n: 3 },
            Note::Mark("copy".to_owned()),
        ];
        for note in notes {
            let mut sector = note.encode();
            assert_eq!(Note::decode(&sector), Some(note));
            sector[41] ^= 1;
            assert_eq!(Note::decode(&sector), None);
        }
        assert_eq!(Note::decode(&[0; 512]), None);
    }
}
