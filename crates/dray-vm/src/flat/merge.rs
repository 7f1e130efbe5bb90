//! Bringing what lies over a chain down into it, through a storage daemon that may die, while a
//! guest writes on: rounds until little is left, and the rest when nobody writes.
//!
//! What lies over it is the truth until the chain has everything durably, so whatever is broken off
//! can be done again.

use dray_host::flat::ChainImage;
use dray_image::{Overlay, Result};
use dray_types::BlockRange;
use std::io;

/// Blocks that may be left for the time in which the guest is stopped: 16 MiB, 0.1 s on a disk that
/// writes 160 MB/s.
const FEW: u64 = 4096;
/// Rounds before the guest is stopped whatever it writes.
const ROUNDS: u32 = 8;
/// Times that the daemon may die in one merge.
const DEATHS: u32 = 3;

/// What is over a chain and has to get into it.
pub trait Above {
    /// Writes a little of what is unmerged, at or after block `from`, to the chain: what was written,
    /// none when nothing is left there. What a guest writes meanwhile is unmerged again.
    ///
    /// # Errors
    /// What either side reports; the blocks then stay unmerged.
    fn merge(&self, from: u64) -> Result<Option<BlockRange>>;

    /// Takes everything for unmerged again: what was merged may be lost below.
    fn unmerge(&self);

    /// Number of blocks that are unmerged; exact while nobody writes.
    fn unmerged_count(&self) -> u64;
}

impl Above for Overlay {
    fn merge(&self, from: u64) -> Result<Option<BlockRange>> {
        Self::merge(self, from)
    }

    fn unmerge(&self) {
        Self::unmerge(self);
    }

    fn unmerged_count(&self) -> u64 {
        Self::unmerged_count(self)
    }
}

/// Merges everything there is, durably. False when the daemon died and all has to be done again.
fn merge_round(above: &impl Above, chain: &dyn ChainImage) -> io::Result<bool> {
    let life = chain.life();
    let merged = (|| {
        let mut from = 0;
        while let Some(run) = above.merge(from)? {
            from = run.end();
        }
        chain.flush()
    })();
    if chain.life() != life {
        above.unmerge();
        return Ok(false);
    }
    match merged {
        Ok(()) => Ok(true),
        Err(why) if why.kind == dray_image::ErrorKind::NoSpace => Err(io::Error::other(why)),
        Err(why) => {
            tracing::warn!(%why, "a merge was interrupted");
            above.unmerge();
            // A daemon that is gone comes back with another life.
            chain.open()?;
            if chain.life() == life { Err(io::Error::other(why)) } else { Ok(false) }
        }
    }
}

fn merge_all(above: &impl Above, chain: &dyn ChainImage) -> io::Result<()> {
    for _ in 0..=DEATHS {
        if merge_round(above, chain)? {
            return Ok(());
        }
    }
    Err(io::Error::other("the storage daemon keeps ending with errors"))
}

/// Merges while the guest writes, until little is left.
pub fn merge_most(above: &impl Above, chain: &dyn ChainImage) -> io::Result<()> {
    above.unmerge();
    chain.set_writable(true)?;
    for _ in 0..ROUNDS {
        let before = above.unmerged_count();
        if before <= FEW {
            break;
        }
        merge_all(above, chain)?;
        if above.unmerged_count() >= before {
            break;
        }
    }
    Ok(())
}

/// Merges the rest; nobody writes. The chain's files are whole afterwards, and closed.
pub fn merge_rest(above: &impl Above, chain: &dyn ChainImage) -> io::Result<()> {
    merge_all(above, chain)?;
    match above.unmerged_count() {
        0 => chain.finish(),
        left => Err(io::Error::other(format!("{left} blocks were written meanwhile"))),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::chain::Chain;
    use super::super::chain::tests::{LEN, contents, fixture};
    use super::super::confined::anything;
    use super::*;
    use dray_host::folder::present::PresentFile;
    use dray_image::{FileImage, FileOptions, Image, ZeroMode};
    use std::io::Write;
    use std::path::Path;
    use std::process::Command;
    use std::sync::Arc;

    struct Flat {
        chain: Arc<Chain>,
        overlay: Arc<Overlay>,
    }

    fn open(dir: &Path, layers: &[dray_host::record::chain::ChainLayer]) -> Flat {
        let path = dir.join("overlay.raw");
        let made = std::fs::File::options().create(true).truncate(false).write(true).open(&path);
        made.unwrap().set_len(LEN).unwrap();
        let options = FileOptions { write: true, direct: false, export_len: None };
        let file = Arc::new(FileImage::open(&path, options).unwrap());
        let log =
            PresentFile::open(&dray_files::StatePath::real(dir.join("disk.flat")), &path, 1 << 20)
                .unwrap();
        let chain = Chain::new(dir.join("chain"), layers.to_vec(), LEN, None, anything());
        let here = log.all();
        let (below, noted) = (Arc::clone(&chain) as _, log.noted());
        let overlay = Overlay::new(below, file, &here, &noted, log).unwrap();
        Flat { chain, overlay: Arc::new(overlay) }
    }

    /// A file system of this many MiB; none where one cannot be mounted.
    pub struct Small(pub std::path::PathBuf);

    impl Small {
        pub fn mount(path: &Path, mib: u32) -> Option<Self> {
            std::fs::create_dir(path).unwrap();
            let mut mount = Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]).arg(path);
            if !mount.status().is_ok_and(|status| status.success()) {
                println!("SKIP: a small file system cannot be mounted here");
                return None;
            }
            Some(Self(path.to_owned()))
        }

        /// Leaves no room in it.
        fn fill(&self) -> std::path::PathBuf {
            let path = self.0.join("filler");
            let mut filler = std::fs::File::create(&path).unwrap();
            while filler.write_all(&[1; 4096]).is_ok() {}
            path
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }

    /// There is no room to merge: nothing is lost, and it is merged when there is.
    #[test]
    fn a_full_disk_stops_a_merge_until_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let Some(small) = Small::mount(&dir.path().join("pool"), 24) else { return };
        let (layers, mut seen) = fixture(&small.0);
        let flat = open(dir.path(), &layers);
        // The active image has nothing there yet.
        flat.overlay.write_at(&vec![9; 1 << 20], 0, false).unwrap();
        seen[..1 << 20].fill(9);
        // So little is left to the time in which the guest is stopped.
        merge_most(&*flat.overlay, &*flat.chain).unwrap();
        let filler = small.fill();
        let why = merge_rest(&*flat.overlay, &*flat.chain).unwrap_err().to_string();
        assert!(why.contains("No space left"), "{why}");
        let mut buf = vec![0; LEN as usize];
        flat.overlay.read_at(&mut buf, 0).unwrap();
        assert!(buf == seen, "the guest reads what it wrote");
        std::fs::remove_file(filler).unwrap();
        merge_rest(&*flat.overlay, &*flat.chain).unwrap();
        assert!(contents(&layers[0].path) == seen);
    }

    /// A daemon dies in the middle of a merge, and the agent too: nothing is lost, and the chain has
    /// everything at the end.
    #[test]
    fn what_was_written_over_a_chain_gets_into_it() {
        let dir = tempfile::tempdir().unwrap();
        let (layers, mut seen) = fixture(dir.path());
        let flat = open(dir.path(), &layers);
        let mut write = |flat: &Flat, at: usize, byte: u8, len: usize| {
            flat.overlay.write_at(&vec![byte; len], at as u64, false).unwrap();
            seen[at..at + len].fill(byte);
        };
        write(&flat, 1000, 9, 3000);
        write(&flat, 2 << 20, 8, 1 << 20);
        write(&flat, LEN as usize - 700, 7, 700);
        flat.overlay.zero(3 << 19, 1 << 19, ZeroMode::MayUnmap, false).unwrap();
        merge_most(&*flat.overlay, &*flat.chain).unwrap();
        flat.overlay.unmerge();
        assert!(flat.overlay.merge(0).unwrap().is_some());
        flat.chain.kill_daemon();
        assert!(!merge_round(&*flat.overlay, &*flat.chain).unwrap(), "what it held back is lost");
        write(&flat, 5 << 18, 6, 20_000);
        flat.overlay.flush().unwrap();
        // The agent dies: what it knows is on the disk.
        drop(flat);
        let flat = open(dir.path(), &layers);
        merge_most(&*flat.overlay, &*flat.chain).unwrap();
        merge_rest(&*flat.overlay, &*flat.chain).unwrap();
        seen[3 << 19..1 << 21].fill(0);
        assert!(contents(&layers[0].path) == seen);
        // The daemon saw room to grow; the file has what was written.
        assert!(std::fs::metadata(&layers[0].path).unwrap().len() < 2 * LEN);
    }
}
