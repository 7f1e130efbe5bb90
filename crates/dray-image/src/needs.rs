//! The interfaces that a disk needs: to fetch blocks that this host does not have, and to make
//! records durable.

use crate::error::Result;
use dray_types::{BlockRange, BlockSet};

/// Gets blocks that this host does not have from the one that has them.
pub trait Fetcher: Send + Sync {
    /// Someone waits for these blocks: fetch them before others. Never blocks; the arrival shows
    /// through [`Disk::fill`](crate::Disk::fill).
    fn demand(&self, range: BlockRange);

    /// Reads from the owner before handover, when this host owns nothing yet. May block.
    ///
    /// # Errors
    /// When the owner cannot be asked or answers with an error.
    fn peek(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

/// Remembers which blocks arrived or were overwritten since this host became the owner (I2).
pub trait PresentLog: Send + Sync {
    /// The image is about to be made durable, with the time at which its file was changed. What is
    /// [recorded](Self::record) next is in it then.
    fn before_sync(&self) {}

    /// Adds `present`; durable on return. Called only after the blocks' data is durable.
    ///
    /// # Errors
    /// When it cannot be made durable; the guest's flush then fails.
    fn record(&self, present: &BlockSet) -> Result<()>;

    /// Notes that the blocks of `run` are in the image before anyone is told. The note need not
    /// survive the host, only this process: a restart within the same boot takes noted blocks for
    /// present, one after a power cut does not.
    ///
    /// # Errors
    /// When it cannot be noted; what brought the blocks then fails, and they stay missing.
    fn note(&self, run: BlockRange) -> Result<()>;

    /// A data sync failed: of what was noted and is not recorded nobody knows what is in the image.
    /// From the return on no later process takes it for present; what is noted after it counts
    /// again.
    ///
    /// # Errors
    /// When the notes cannot be taken back durably; nothing is noted or recorded until they are.
    fn forget_notes(&self) -> Result<()>;
}

/// Remembers which regions were written into since tracking began.
pub trait IntentLog: Send + Sync {
    /// Adds region number `region`; durable on return. Called before the first write into it.
    ///
    /// # Errors
    /// When it cannot be made durable; the guest's write then fails. A log that would rather give
    /// the migration up than fail the write notes that and returns `Ok`.
    fn open_region(&self, region: u64) -> Result<()>;
}

/// What arrived for a run of missing blocks.
#[derive(Clone, Copy, Debug)]
pub enum Fill<'a> {
    /// Their content; as long as the run (what lies past the image's end is ignored).
    Data(&'a [u8]),
    /// They are all zeros.
    Zero,
}
