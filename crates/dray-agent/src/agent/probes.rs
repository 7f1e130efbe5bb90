//! A peer measures its link to here, and how fast it could write to the pool that its images would come to.

use super::Agent;
use super::room::Bounded;
use dray_config::Right;
use dray_host::pool::PoolKind;
use dray_net::probe::{self, Speed};
use dray_net::{Incoming, NetError};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long is written, and how much at most. Where it ends, all of it is on the disk.
const WRITTEN: Duration = Duration::from_millis(150);
const MAX_BYTES: u64 = 256 << 20;
/// Bytes that are written before the disk is waited for.
const STEP: usize = 8 << 20;

impl Agent {
    /// Counts what a peer sends, and answers.
    pub(super) async fn be_measured(&self, incoming: Incoming) -> Result<(), NetError> {
        let peer = incoming.peer.clone();
        match self.questions.begin(&peer, Bounded::Probe) {
            Ok(_one) => {
                let stream = incoming.welcome(Vec::new()).await?;
                probe::serve(stream, self.pool_speed(&peer)).await
            }
            Err(why) => {
                incoming.refuse(why).await;
                Ok(())
            }
        }
    }

    /// How fast the pool is written to which images of the peer come; zeros where that cannot be tried.
    async fn pool_speed(&self, peer: &str) -> Speed {
        let Some(pool) = self.pool_of(peer) else { return Speed::default() };
        let tried = tokio::task::spawn_blocking(move || write_speed(&pool)).await;
        let speed = tried.unwrap_or_else(|why| Err(io::Error::other(why)));
        speed.unwrap_or_else(|why| {
            tracing::debug!(peer, %why, "cannot measure a pool");
            Speed::default()
        })
    }

    /// The folder of the pool that a peer which may move images here uses if it names none.
    fn pool_of(&self, peer: &str) -> Option<PathBuf> {
        let peer = self.config.peer(peer).filter(|peer| peer.may(Right::Receive))?;
        let pool = self.config.pool_for(&peer, None).ok()?;
        (pool.kind == PoolKind::Files).then(|| pool.path.clone())
    }
}

/// Writes into a file that has no name, as fast as the disk takes it.
fn write_speed(folder: &Path) -> io::Result<Speed> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let mut file = File::from(rustix::fs::open(folder, flags, mode)?);
    // No file system makes less of it than there is.
    let mut step = vec![0; STEP];
    for (nth, word) in step.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(nth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < WRITTEN && bytes < MAX_BYTES {
        file.write_all(&step)?;
        file.sync_data()?;
        bytes += STEP as u64;
    }
    Ok(Speed { bytes, nanos: u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_and_nothing_stays_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let speed = write_speed(dir.path()).unwrap();
        assert!(speed.bytes >= STEP as u64 && speed.bytes <= MAX_BYTES + STEP as u64, "{speed:?}");
        assert!(speed.rate().is_some());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(write_speed(&dir.path().join("none")).is_err());
    }
}
