//! Gives a disk back to QEMU: the guest continues on a file that QEMU opens itself.
//!
//! Only dray knows of a loss that one of its own syncs, or a flush of QEMU's, was told of. When QEMU has
//! the file nobody tells the guest any more. So a disk whose guest has not heard of a loss stays, or comes
//! back. That is asked
//! 1. before anything is done;
//! 2. as late as the exchange can be broken off. QEMU has the file open by then: what the page cache loses
//!    later the kernel tells QEMU too. Of a guest that is stopped dray reads everything for the last time,
//!    syncs, and asks then: what is lost after that the new file has;
//! 3. when QEMU has a disk whose guest runs, before the image is forgotten. What a device told dray alone in
//!    between brings the disk back ([`crate::released`]).
//!
//! Meanwhile a flush may be QEMU's own, which tells the guest nothing; what it was told is owed again.

use dray_api::{ErrorKind, Refusal};
use dray_host::registry::{Entry, Registry};
use dray_image::{ImageFile, WriteBackError};
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

/// What ends it.
const HINT: &str = "give `sync` in the guest, which reports the loss and fails once; after that, \
                    `dray release` gives the disk back to QEMU, once other clients that wrote to \
                    it have been told as well";

/// What ends it where there is no guest: somebody else flushes image `name`.
pub fn take_note(name: &str, socket: &Path) -> String {
    let socket = socket.display();
    format!(
        "check the content of the image, then acknowledge the loss with `qemu-io -c flush \
         'nbd+unix:///{name}?socket={socket}'`, which fails once for each client that may have \
         ended without being told"
    )
}

/// Why a disk stays under dray.
#[derive(Debug)]
pub struct Untold(WriteBackError);

impl Untold {
    /// As the API tells it of the command that is refused.
    pub fn refused(&self, what: &str) -> Refusal {
        Refusal::new(ErrorKind::DataAtRisk, what, self).hint(HINT)
    }

    /// As one line, with what ends it.
    pub fn with_hint(&self) -> String {
        format!("{self}; {HINT}")
    }
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&untold(&self.0))
    }
}

impl std::error::Error for Untold {}

impl From<Untold> for io::Error {
    fn from(why: Untold) -> Self {
        Self::other(why)
    }
}

/// Refuses a disk whose guest is still to be told of a loss.
///
/// # Errors
/// What it is to be told.
pub fn refuse_untold(entry: &Entry) -> Result<(), Untold> {
    ask(&*entry.file)
}

fn ask(file: &dyn ImageFile) -> Result<(), Untold> {
    block_in_place(|| file.untold_loss()).map_or(Ok(()), |loss| Err(Untold(loss)))
}

/// A disk that is leaving, until this is dropped: a flush may be QEMU's own, and a loss that it was told of
/// is owed to the guest again if the disk stays.
pub struct Leaving(Arc<dyn ImageFile>);

impl Leaving {
    /// Before QEMU stops the guest or exchanges anything.
    ///
    /// # Errors
    /// What the guest is still to be told.
    pub fn begin(entry: &Entry) -> Result<Self, Untold> {
        refuse_untold(entry)?;
        Ok(Self::found(entry))
    }

    /// A disk that was leaving when the agent before this one died.
    fn found(entry: &Entry) -> Self {
        entry.file.guest_stops(true);
        Self(Arc::clone(&entry.file))
    }

    /// Whether it may leave.
    ///
    /// # Errors
    /// What the guest is still to be told.
    pub fn check(&self) -> Result<(), Untold> {
        ask(&*self.0)
    }

    /// [`check`](Self::check) for a disk that nobody writes to and of which everything was copied: a write
    /// that was lost before it was copied is found now.
    ///
    /// # Errors
    /// What the guest is still to be told.
    pub fn check_copied(&self) -> Result<(), Untold> {
        // An error of it is remembered: it is what is asked for.
        let _ = block_in_place(|| self.0.sync());
        self.check()
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.guest_stops(false);
    }
}

/// The disks whose guests an agent before this one had stopped: QEMU repeats a flush that was not answered,
/// and the guest does not hear of that either.
pub fn left_stopped(registry: &Registry) -> Vec<Leaving> {
    let stopped = |entry: &&Arc<Entry>| {
        let record = entry.record();
        let swaps = record.swap.is_some_and(|swap| !swap.done);
        swaps || record.flat.is_some_and(|flat| flat.turn.is_some())
    };
    registry.all().iter().filter(stopped).map(|entry| Leaving::found(entry)).collect()
}

/// Why an image with such a loss is not handed over.
pub fn untold(lost: &WriteBackError) -> String {
    format!(
        "writes of the guest may be lost, and its next flush must report this first: {}",
        lost.why
    )
}
