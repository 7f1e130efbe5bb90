//! A guest that writes, reads back and verifies without end, and follows its disk to the target as
//! a VM would: it goes there when the target owns the image, and issues again what was never
//! acknowledged. What it was told is on its disk it never doubts.

use crate::lab;
use crate::nbd::{Client, FLUSH, Fault, READ, TRIM, WRITE, ZERO};
use dray_testkit::numbered::next;
pub use dray_testkit::numbered::{BLOCK, content, contents};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Blocks that belong to one lane together; requests stay inside.
const GROUP: u64 = 16;
/// Requests that are under way at once.
const LANES: u64 = 3;
/// Pause after each request, so that a debug build on two cores has time for the migration.
const PAUSE: Duration = Duration::from_millis(3);
/// Longest a request may take: restarts, reconnects and a handover lie in between.
const STALL: Duration = Duration::from_secs(45);
/// How often the guest's manager looks who owns the image.
const LOOK: Duration = Duration::from_millis(20);

/// One in this many groups of a new image is a hole.
const HOLE: u64 = 4;

/// What blocks hold: the number of the write that they hold, zero for zeros.
pub type Versions = BTreeMap<u64, u64>;

/// Blocks of a region whose writes are noted together: 64 MiB.
const REGION: u64 = 16384;

/// What a block of a new image of `blocks` blocks holds. An image of more than one region has little
/// data in the first one.
pub fn first_version(block: u64, blocks: u64) -> u64 {
    let used = blocks <= REGION || !(REGION / 8..REGION).contains(&block);
    u64::from(used && (block / GROUP) % HOLE != HOLE - 1)
}

/// The first block of a new image of `blocks` blocks that is a hole.
pub fn first_hole(blocks: u64) -> u64 {
    (0..blocks).find(|&block| first_version(block, blocks) == 0).unwrap()
}

/// What the blocks of a new image hold.
pub fn first_versions(blocks: u64) -> Versions {
    (0..blocks).map(|block| (block, first_version(block, blocks))).collect()
}

/// Makes a sparse image of `blocks` blocks.
pub fn make_image(path: &Path, blocks: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(blocks * BLOCK).unwrap();
    for block in (0..blocks).filter(|&block| first_version(block, blocks) != 0) {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
}

struct Shared {
    api: [PathBuf; 2],
    nbd: [PathBuf; 2],
    image: String,
    /// What the blocks held at the start.
    before: Versions,
    /// Which host the guest is on.
    at: AtomicUsize,
    stop: AtomicBool,
    requests: AtomicU64,
    failed: Mutex<Option<String>>,
}

impl Shared {
    fn owns(&self, host: usize) -> bool {
        let image = lab::image(&self.api[host], &self.image);
        image.is_some_and(|image| image["state"] == "owner")
    }

    /// Whether the source has a replica that no migration needs.
    fn is_let_go(&self) -> bool {
        let image = lab::image(&self.api[0], &self.image);
        image.is_some_and(|image| image["state"] == "replica" && image["migration"].is_null())
    }

    fn fail(&self, why: String) {
        self.failed.lock().unwrap().get_or_insert(why);
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// A guest that runs.
pub struct Guest {
    shared: Arc<Shared>,
    lanes: Vec<JoinHandle<Versions>>,
    manager: JoinHandle<()>,
}

impl Guest {
    /// Starts using the first `used` blocks of `image`, which has `blocks` and was made by
    /// [`make_image`], on the first host.
    pub fn start(lab: &lab::Lab, image: &str, blocks: u64, used: u64, seed: u64) -> Self {
        Self::go_on([&lab.a, &lab.b], image, first_versions(blocks), used, seed)
    }

    /// Starts using the first `used` blocks of `image`, whose blocks hold `before`, on the first of
    /// the hosts; it will be moved to the second.
    pub fn go_on(
        hosts: [&lab::Host; 2],
        image: &str,
        before: Versions,
        used: u64,
        seed: u64,
    ) -> Self {
        let version = before.values().copied().max().unwrap_or(0).max(1);
        let shared = Arc::new(Shared {
            api: hosts.map(lab::Host::api),
            nbd: hosts.map(lab::Host::nbd),
            image: image.to_owned(),
            before,
            at: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            failed: Mutex::new(None),
        });
        let lanes = (0..LANES).map(|nth| {
            let lane = Lane {
                shared: Arc::clone(&shared),
                nth,
                groups: used / GROUP / LANES,
                versions: Versions::new(),
                random: seed.wrapping_mul(LANES) + nth,
                version,
                client: None,
            };
            std::thread::spawn(move || lane.run())
        });
        let lanes = lanes.collect();
        let manager = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || manage(&shared))
        };
        Self { shared, lanes, manager }
    }

    /// Requests done so far.
    pub fn requests(&self) -> u64 {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Pulls its plug.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::SeqCst);
    }

    /// What the guest complains of, if it does.
    pub fn complaint(&self) -> Option<String> {
        self.shared.failed.lock().unwrap().clone()
    }

    /// Lets the guest do some more requests, then shuts it down; what every block must hold now.
    pub fn shut_down(self) -> Result<Versions, String> {
        let enough = self.requests() + 50;
        lab::wait_for("the guest's last requests", STALL, || {
            self.requests() >= enough || self.complaint().is_some()
        })?;
        self.shared.stop.store(true, Ordering::SeqCst);
        let mut versions = self.shared.before.clone();
        for lane in self.lanes {
            versions.extend(lane.join().map_err(|_| "a lane of the guest panicked")?);
        }
        self.manager.join().map_err(|_| "the guest's manager panicked")?;
        if self.shared.at.load(Ordering::SeqCst) == 0 {
            self.shared.fail("the guest has not moved".to_owned());
        }
        let failed = self.shared.failed.lock().unwrap().take();
        failed.map_or(Ok(versions), Err)
    }
}

/// Compares a file with what the guest wrote.
pub fn compare(path: &Path, versions: &Versions) -> Result<(), String> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).map_err(|why| format!("{}: {why}", path.display()))?;
    let mut block = vec![0; BLOCK as usize];
    for (&number, &version) in versions {
        file.read_exact_at(&mut block, number * BLOCK).map_err(|why| why.to_string())?;
        if block != content(number, version) {
            return Err(format!("{}: {}", path.display(), difference(number, version, &block)));
        }
    }
    Ok(())
}

fn difference(number: u64, version: u64, block: &[u8]) -> String {
    let word = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().unwrap());
    format!(
        "block {number} should hold write {version} and holds write {} of block {}",
        word(8),
        word(0)
    )
}

/// Does what a VM's manager does: moves the guest when the target owns its disk. Also the witness of
/// who owns it: the target is asked first, so that two owners are never seen by mistake.
fn manage(shared: &Shared) {
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.owns(1) {
            if shared.owns(0) {
                shared.fail("both hosts say that they own the image".to_owned());
            }
            shared.at.store(1, Ordering::SeqCst);
        } else if shared.at.load(Ordering::SeqCst) == 1 && shared.owns(0) {
            shared.fail("the source owns the image again".to_owned());
        }
        std::thread::sleep(LOOK);
    }
}

/// One request at a time, on blocks of its own.
struct Lane {
    shared: Arc<Shared>,
    nth: u64,
    groups: u64,
    versions: Versions,
    random: u64,
    version: u64,
    client: Option<(usize, Client)>,
}

impl Lane {
    fn run(mut self) -> Versions {
        while !self.shared.stop.load(Ordering::SeqCst) {
            if let Err(why) = self.request() {
                self.shared.fail(why);
                break;
            }
            self.shared.requests.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(PAUSE);
        }
        self.versions
    }

    fn below(&mut self, limit: u64) -> u64 {
        next(&mut self.random) % limit
    }

    fn held(&self, block: u64) -> u64 {
        self.versions.get(&block).or_else(|| self.shared.before.get(&block)).copied().unwrap_or(0)
    }

    fn request(&mut self) -> Result<(), String> {
        let group = self.below(self.groups) * LANES + self.nth;
        let count = 1 + self.below(GROUP);
        let first = group * GROUP + self.below(GROUP - count + 1);
        let (offset, len) = (first * BLOCK, (count * BLOCK) as u32);
        match self.below(20) {
            0..11 => {
                self.version += 1;
                let version = self.version;
                let data = contents(first, &vec![version; count as usize]);
                self.done(WRITE, offset, len, &data)?;
                self.versions.extend((first..first + count).map(|block| (block, version)));
            }
            kind @ 11..13 => {
                self.done(if kind == 11 { TRIM } else { ZERO }, offset, len, &[])?;
                self.versions.extend((first..first + count).map(|block| (block, 0)));
            }
            13 => drop(self.done(FLUSH, 0, 0, &[])?),
            _ => {
                let data = self.done(READ, offset, len, &[])?;
                for (block, bytes) in (first..).zip(data.chunks_exact(BLOCK as usize)) {
                    let held = self.held(block);
                    if bytes != content(block, held) {
                        return Err(format!("the guest reads: {}", difference(block, held, bytes)));
                    }
                }
            }
        }
        Ok(())
    }

    /// Does a request, wherever the disk is, until it is acknowledged.
    fn done(&mut self, kind: u16, offset: u64, len: u32, data: &[u8]) -> Result<Vec<u8>, String> {
        let deadline = Instant::now() + STALL;
        let mut trouble = String::new();
        loop {
            if Instant::now() > deadline {
                return Err(format!("request {kind} at {offset} is stalled: {trouble}"));
            }
            let shared = Arc::clone(&self.shared);
            let host = shared.at.load(Ordering::SeqCst);
            let connected = match self.client.take() {
                Some((at, client)) if at == host => Ok(client),
                _ => Client::connect(&shared.nbd[host], &shared.image),
            };
            let mut client = match connected {
                Ok(client) => client,
                Err(why) => {
                    trouble = why.to_string();
                    std::thread::sleep(LOOK);
                    continue;
                }
            };
            let wait = || shared.at.load(Ordering::SeqCst) == host && Instant::now() < deadline;
            match client.request(kind, offset, len, data, &wait) {
                Ok(answer) => {
                    self.client = Some((host, client));
                    return Ok(answer);
                }
                Err(Fault::Lost) => "the connection was lost".clone_into(&mut trouble),
                // What still waits at the source when the migration is over is failed: a VM that was
                // not stopped would be now (`werror=stop`), and goes on at the target.
                Err(Fault::Error(_)) if host == 0 && shared.is_let_go() => {
                    std::thread::sleep(LOOK);
                }
                Err(Fault::Error(error)) => {
                    return Err(format!(
                        "the guest sees error {error} for request {kind} at {offset} on host {host}"
                    ));
                }
            }
        }
    }
}
