//! A flattened disk goes home: what is in its overlay is merged into the chain by QEMU's own daemon,
//! and the disk is put back on it.
//!
//! The guest writes meanwhile, into the overlay; it stops for the rest and the exchange. The overlay
//! is the truth until the chain has everything durably, so a death anywhere means doing it again.

use super::chain::Chain;
use super::freeze::{layers_of, names_of};
use super::{Flat, Turn};
use crate::agent::Agent;
use crate::api::{ApiError, ApiResult, ErrorKind, SplicedDisk};
use crate::migration::abort;
use crate::ops::io_error;
use crate::registry::{CopyState, Entry, Place};
use crate::vm::qemu_error;
use dray_image::{Image, Overlay};
use dray_qemu::flatten::{self, On};
use dray_qemu::{LayerPlan, Qmp, status};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::block_in_place;

/// Blocks that may be left for the time in which the guest is stopped: 16 MiB, 0.1 s on a disk that
/// writes 160 MB/s.
const FEW: u64 = 4096;
/// Rounds before the guest is stopped whatever it writes.
const ROUNDS: u32 = 8;
/// Times that the daemon may die in one merge.
const DEATHS: u32 = 3;
/// How long writes may take to end that QEMU no longer waits for.
const QUIET: Duration = Duration::from_secs(5);
/// How often is looked for flattened disks whose VM is gone.
const LOOK: Duration = Duration::from_secs(5);
/// A VM that was gone for so many looks is.
const GONE: u32 = 3;

/// Merges everything there is, durably. False when the daemon died and all has to be done again.
fn merge_round(overlay: &Overlay, chain: &Chain) -> io::Result<bool> {
    let life = chain.life();
    let merged = (|| {
        let mut from = 0;
        while let Some(run) = overlay.merge(from)? {
            from = run.end();
        }
        chain.flush()
    })();
    if chain.life() != life {
        overlay.unmerge();
        return Ok(false);
    }
    match merged {
        Ok(()) => Ok(true),
        Err(why) if why.kind == dray_image::ErrorKind::NoSpace => Err(io::Error::other(why)),
        Err(why) => {
            tracing::warn!(%why, "a merge was broken off");
            overlay.unmerge();
            // A daemon that is gone comes back with another life.
            chain.open()?;
            if chain.life() == life { Err(io::Error::other(why)) } else { Ok(false) }
        }
    }
}

fn merge_all(flat: &Flat) -> io::Result<()> {
    for _ in 0..=DEATHS {
        if merge_round(&flat.overlay, &flat.chain)? {
            return Ok(());
        }
    }
    Err(io::Error::other("the storage daemon dies again and again"))
}

/// Merges while the guest writes, until little is left.
fn merge_most(flat: &Flat) -> io::Result<()> {
    flat.overlay.unmerge();
    flat.chain.set_writable(true)?;
    for _ in 0..ROUNDS {
        let before = flat.overlay.unmerged_count();
        if before <= FEW {
            break;
        }
        merge_all(flat)?;
        if flat.overlay.unmerged_count() >= before {
            break;
        }
    }
    Ok(())
}

/// Merges the rest; nobody writes. The chain's files are whole afterwards, and closed.
fn merge_rest(flat: &Flat) -> io::Result<()> {
    merge_all(flat)?;
    match flat.overlay.unmerged_count() {
        0 => flat.chain.finish(),
        left => Err(io::Error::other(format!("{left} blocks were written meanwhile"))),
    }
}

impl Agent {
    /// Puts a flattened disk back on its chain. On failure it stays where it is and is served.
    pub(crate) async fn bring_home(&self, qmp: &Qmp, entry: &Entry) -> ApiResult<SplicedDisk> {
        let record = entry.record();
        let what = format!("cannot put image '{}' back on its chain", record.name);
        let Some(flat) = &entry.flat else {
            return Err(ApiError::new(ErrorKind::Internal, what, "it is not flattened"));
        };
        let layers = layers_of(&record).map_err(|why| io_error(&what, why))?;
        block_in_place(|| merge_most(flat)).map_err(|why| {
            self.read_again(flat);
            io_error(&what, why)
        })?;
        abort::before(|| vec!["HomeMerged".to_owned()]);
        let running = status::status(qmp).await.map_err(|why| qemu_error(&what, &why))?.running;
        let began = Instant::now();
        let home = self.turn_home(&what, qmp, entry, &layers, running).await;
        let on = match &home {
            Ok(()) => Ok(On::Chain),
            Err(_) => self.stay(qmp, entry, &layers).await,
        };
        self.let_go_on(&what, qmp, running).await?;
        match (home, on) {
            (_, Ok(On::Chain)) => {}
            (home, Ok(On::Export)) => {
                self.end_turn(entry).map_err(|why| io_error(&what, why))?;
                home?;
            }
            (home, Err(left)) => {
                tracing::error!(image = record.name, why = %left, "a disk is nowhere for sure");
                home?;
            }
        }
        let ms = began.elapsed().as_secs_f64() * 1e3;
        tracing::info!(image = record.name, ms, "back on its chain");
        self.forget_flat(entry).map_err(|why| io_error(&what, why))?;
        let active = &layers[0];
        let node = active.format_node().unwrap_or_else(|| active.local_node()).to_owned();
        let (device, image, path) = (active.qdev.clone(), record.name, record.path);
        Ok(SplicedDisk { device, node, image, path, ms })
    }

    async fn turn_home(
        &self,
        what: &str,
        qmp: &Qmp,
        entry: &Entry,
        layers: &[LayerPlan],
        running: bool,
    ) -> ApiResult<()> {
        let failed = |why: dray_qemu::Error| qemu_error(what, &why);
        let (io, turn) = (|why| io_error(what, why), Some(Turn { home: true, running }));
        block_in_place(|| self.hold_peeks(entry));
        self.set_turn(entry, Place::Chain, turn).map_err(io)?;
        if running {
            status::stop(qmp).await.map_err(failed)?;
        }
        abort::before(|| vec!["HomeStopped".to_owned()]);
        let _quiet =
            block_in_place(|| entry.disk.quiesce(QUIET)).map_err(|why| io_error(what, why))?;
        block_in_place(|| self.show_chain(entry, turn)).map_err(io)?;
        abort::before(|| vec!["HomeNamed".to_owned()]);
        flatten::unflatten(qmp, layers).await.map_err(failed)?;
        abort::before(|| vec!["HomePivoted".to_owned()]);
        Ok(())
    }

    /// Merges the rest and gives the chain's active file its name: it holds everything.
    fn show_chain(&self, entry: &Entry, turn: Option<Turn>) -> io::Result<()> {
        let Some(flat) = &entry.flat else { return Ok(()) };
        merge_rest(flat)?;
        let record = entry.record();
        names_of(&record)?.thaw_chain(record.mode).map_err(io::Error::other)?;
        flat.chain.moved(&record.path);
        self.set_turn(entry, Place::Named, turn)
    }

    /// It came to nothing: the disk stays on the overlay, unless it is home already.
    async fn stay(&self, qmp: &Qmp, entry: &Entry, layers: &[LayerPlan]) -> io::Result<On> {
        let on = flatten::settle(qmp, layers).await.map_err(io::Error::other)?;
        if on == On::Export {
            let hidden = self.hide_chain(entry);
            if let Some(flat) = &entry.flat {
                self.read_again(flat);
            }
            hidden?;
        }
        Ok(on)
    }

    /// The chain is only read from now on.
    pub(super) fn read_again(&self, flat: &Flat) {
        flat.overlay.unmerge();
        if let Err(why) = block_in_place(|| flat.chain.set_writable(false)) {
            tracing::warn!(%why, "a chain's storage daemon did not end well");
        }
    }

    /// Merges the overlay of a disk whose VM is gone into its chain, which gets its name back.
    fn bring_home_alone(&self, entry: &Entry) -> io::Result<()> {
        let Some(flat) = &entry.flat else { return Ok(()) };
        let quiet = entry.disk.quiesce(QUIET).map_err(io::Error::other)?;
        flat.overlay.unmerge();
        self.hold_peeks(entry);
        let home = flat.chain.set_writable(true).and_then(|()| {
            let turn = Some(Turn { home: true, running: false });
            self.set_turn(entry, Place::Chain, turn)?;
            self.show_chain(entry, turn)
        });
        if let Err(why) = home {
            drop(quiet);
            self.hide_chain(entry)?;
            self.end_turn(entry)?;
            self.read_again(flat);
            return Err(why);
        }
        // A QEMU that comes back is told that there is no such export.
        entry.disk.park(quiet);
        entry.disk.fail_parked();
        self.forget_flat(entry)
    }

    /// Whether nobody can be using a flattened disk: no VM answers, and no client is attached.
    async fn is_left_alone(&self, entry: &Entry) -> bool {
        let record = entry.record();
        let idle = record.state == CopyState::Owner
            && record.migration.is_none()
            && record.flat.as_ref().is_some_and(|flat| flat.turn.is_none())
            && self.nbd.connections(&record.name) == 0;
        let Some(adopted) = record.adopted.filter(|_| idle) else { return false };
        // Somebody else may be talking to it: only a socket that nobody listens on tells.
        let refused = std::os::unix::net::UnixStream::connect(&adopted.qmp).err();
        let gone = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
        refused.is_some_and(|why| gone.contains(&why.kind()))
    }

    /// The chains of images that have left are not read any more once they are verified: their
    /// daemons end when nobody has asked since the last look.
    fn rest_replicas(&self, asked: &mut BTreeMap<String, u64>) {
        for entry in self.registry.all() {
            let (record, Some(flat)) = (entry.record(), &entry.flat) else { continue };
            if record.state != CopyState::Replica || record.migration.is_some() {
                continue;
            }
            let now = flat.chain.asked();
            if asked.insert(record.name, now) == Some(now) {
                flat.chain.rest();
            }
        }
    }

    /// Looks now and then for flattened disks whose VM has ended, and brings them home; and for
    /// daemons that are of no more use.
    pub(crate) async fn keep_flat(self: Arc<Self>) {
        let mut looks: BTreeMap<String, u32> = BTreeMap::new();
        let mut asked = BTreeMap::new();
        loop {
            tokio::time::sleep(LOOK).await;
            block_in_place(|| self.rest_replicas(&mut asked));
            let mut left = BTreeMap::new();
            for entry in self.registry.all().into_iter().filter(|entry| entry.flat.is_some()) {
                if !self.is_left_alone(&entry).await {
                    continue;
                }
                let name = entry.record().name;
                let seen = looks.get(&name).copied().unwrap_or(0) + 1;
                if seen < GONE {
                    left.insert(name, seen);
                    continue;
                }
                match block_in_place(|| self.bring_home_alone(&entry)) {
                    Ok(()) => tracing::info!(image = name, "its vm is gone: merged into its chain"),
                    Err(why) => {
                        tracing::error!(image = name, %why, "cannot merge an image into its chain");
                    }
                }
            }
            looks = left;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain::tests::{LEN, contents, fixture};
    use super::*;
    use crate::migration::present::PresentFile;
    use dray_image::{FileImage, FileOptions, ZeroMode};
    use std::io::Write;
    use std::path::Path;
    use std::process::Command;

    fn open(dir: &Path, layers: &[super::super::ChainLayer]) -> Flat {
        let path = dir.join("overlay.raw");
        let made = std::fs::File::options().create(true).truncate(false).write(true).open(&path);
        made.unwrap().set_len(LEN).unwrap();
        let options = FileOptions { write: true, direct: false, export_len: None };
        let file = Arc::new(FileImage::open(&path, options).unwrap());
        let log = PresentFile::open(&dir.join("disk.flat")).unwrap();
        let chain = Chain::new(dir.join("chain"), layers.to_vec(), LEN, None);
        let here = log.all();
        let overlay = Overlay::new(Arc::clone(&chain) as _, file, &here, log).unwrap();
        Flat { chain, overlay: Arc::new(overlay) }
    }

    /// A file system of this many MiB; none where one cannot be mounted.
    struct Small(std::path::PathBuf);

    impl Small {
        fn mount(path: &Path, mib: u32) -> Option<Self> {
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
        merge_most(&flat).unwrap();
        let filler = small.fill();
        let why = merge_rest(&flat).unwrap_err().to_string();
        assert!(why.contains("No space left"), "{why}");
        let mut buf = vec![0; LEN as usize];
        flat.overlay.read_at(&mut buf, 0).unwrap();
        assert!(buf == seen, "the guest reads what it wrote");
        std::fs::remove_file(filler).unwrap();
        merge_rest(&flat).unwrap();
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
        merge_most(&flat).unwrap();
        flat.overlay.unmerge();
        assert!(flat.overlay.merge(0).unwrap().is_some());
        flat.chain.kill_daemon();
        assert!(!merge_round(&flat.overlay, &flat.chain).unwrap(), "what it held back is lost");
        write(&flat, 5 << 18, 6, 20_000);
        flat.overlay.flush().unwrap();
        // The agent dies: what it knows is on the disk.
        drop(flat);
        let flat = open(dir.path(), &layers);
        merge_most(&flat).unwrap();
        merge_rest(&flat).unwrap();
        seen[3 << 19..1 << 21].fill(0);
        assert!(contents(&layers[0].path) == seen);
    }
}
