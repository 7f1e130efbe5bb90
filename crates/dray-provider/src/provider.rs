//! Who gives the content of an image, stretch by stretch.

/// Stretches of content: where each begins in the image, and its bytes.
pub type Parts = Vec<(u64, Vec<u8>)>;

/// Somebody who has an image's content as it was at the wanted generation.
pub trait Provider: Send + Sync {
    /// Its name, for people.
    fn name(&self) -> String;

    /// Bytes of what it gave that were at hand here.
    fn bytes_of_old(&self) -> u64 {
        0
    }

    /// The content of `len` bytes at `offset`, checked: parts in ascending order; what they leave out
    /// is zero.
    ///
    /// # Errors
    /// Why it cannot be had from here.
    fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure>;
}

/// Why a provider cannot give a stretch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// It has it, but wrong: for this stretch only.
    Damaged(String),
    /// It does not answer, or with errors.
    Unavailable(String),
}
