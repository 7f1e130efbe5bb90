//! Orders by heat: what a guest writes most is copied last, what it reads most is fetched first.

use crate::case::IMAGE;
use crate::guest::{BLOCK, content};
use crate::lab::{Lab, wait_for};
use crate::moves::{SLOW, result};
use crate::nbd::{Client, READ, WRITE};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Blocks of the image, all of them data: 32 MiB, which take five seconds at [`SLOW`].
pub const BLOCKS: u64 = 8192;
/// Blocks that heat counts together: 4 MiB.
pub const CHUNK: u64 = 1024;
/// Accesses that heat is made of before the migration.
const HISTORY: u64 = 600;

/// A lab with an image full of data.
pub fn full_lab() -> Lab {
    let mut lab = Lab::new();
    let file = std::fs::File::create(lab.a.pool().join(IMAGE)).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
    lab.start();
    lab.a.add(IMAGE);
    lab
}

/// Reads or writes single blocks of a chunk until it is told to stop or the disk goes.
pub struct User {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl User {
    /// Starts with `requests` requests of `kind` to the blocks of `chunk`.
    pub fn start(socket: &Path, kind: u16, chunk: u64, requests: u64, pause: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, socket) = (Arc::clone(&stop), socket.to_owned());
        let thread = std::thread::spawn(move || {
            let mut client = Client::connect(&socket, IMAGE).unwrap();
            for nth in 0..requests {
                // Odd, so that every block of the chunk has its turn.
                let block = chunk * CHUNK + nth * 769 % CHUNK;
                let data = if kind == WRITE { content(block, nth + 2) } else { Vec::new() };
                let wait = || !stopped.load(Ordering::SeqCst);
                let done = client.request(kind, block * BLOCK, BLOCK as u32, &data, &wait);
                if done.is_err() || stopped.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::sleep(pause);
            }
        });
        Self { stop, thread }
    }

    /// Ends it.
    pub fn stop(self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}

/// Blocks sent twice when the guest writes 200 blocks a second to the image's first chunk.
fn sent_twice(order: &str) -> u64 {
    let lab = full_lab();
    User::start(&lab.a.nbd(), WRITE, 0, HISTORY, Duration::ZERO).thread.join().unwrap();
    let user = User::start(&lab.a.nbd(), WRITE, 0, u64::MAX, Duration::from_millis(5));
    let rate = format!("{}MiB/s", SLOW >> 20);
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--strategy"];
    let more = ["hybrid", "--order", order, "--bandwidth", &rate];
    let summary = result(&lab.a.dray(&[&args[..], &more].concat()));
    user.stop();
    assert_eq!(summary["result"], "completed", "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    assert_eq!(summary["order"], order);
    summary["blocks_sent_twice"].as_u64().unwrap()
}

#[test]
fn what_the_guest_writes_most_is_copied_last() {
    let sequential = sent_twice("sequential");
    let by_heat = sent_twice("workload-aware");
    // In address order the chunk is sent first and waits five seconds, by heat less than one.
    assert!(sequential > CHUNK / 3, "{sequential}");
    // On a busy machine the guest writes during the handover as well.
    assert!(by_heat * 4 < sequential * 3, "{by_heat} blocks instead of {sequential}");
}

/// How many blocks of the hot chunk, and of all others, a file has.
fn arrived(path: &Path, hot: u64) -> (u64, u64) {
    let Ok(bytes) = std::fs::read(path) else { return (0, 0) };
    let (mut inside, mut outside) = (0, 0);
    for (number, block) in (0..).zip(bytes.chunks(BLOCK as usize)) {
        let there = u64::from(block.iter().any(|&byte| byte != 0));
        if number / CHUNK == hot { inside += there } else { outside += there }
    }
    (inside, outside)
}

#[test]
fn what_the_guest_reads_most_is_fetched_first_even_after_a_restart() {
    const HOT: u64 = 6;
    let mut lab = full_lab();
    User::start(&lab.a.nbd(), READ, HOT, HISTORY, Duration::ZERO).thread.join().unwrap();
    lab.a.stop();
    lab.a.start();
    let rate = format!("{}MiB/s", SLOW >> 20);
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--detach", "--strategy"];
    let output = lab.a.dray(&[&args[..], &["post-copy", "--bandwidth", &rate]].concat());
    assert!(output.status.success(), "{output:?}");
    let path = lab.b.pool().join(format!(".{IMAGE}.dray-partial"));
    let mut last = (0, 0);
    wait_for("the hot chunk", Duration::from_secs(20), || {
        last = arrived(&path, HOT);
        last.0 == CHUNK
    })
    .unwrap_or_else(|why| panic!("{why}: {last:?}\n{}", lab.b.log()));
    // In address order six chunks would be there before it.
    assert!(last.1 <= 2 * CHUNK, "{} other blocks came first", last.1);
    lab.a.dray(&["limit", "none"]);
    wait_for("the end", Duration::from_secs(20), || lab.b.open_migrations() == 0).unwrap();
}
