//! A guest that writes faster than the link takes it: Sync ends only when the guest is slowed.

use crate::case::{Case, IMAGE, SMALL};
use crate::guest::BLOCK;
use crate::lab::Lab;
use crate::moves::SLOW;
use crate::nbd::{Client, WRITE};
use serde_json::json;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Blocks that the writer goes over again and again: 2 MiB behind what the guest uses.
const BLOCKS: u64 = 512;
/// Bytes of one of its writes.
const WRITE_BYTES: u64 = 16 * BLOCK;
/// A link on which the writer's blocks take two seconds.
const CRAWL: u64 = BLOCKS * BLOCK / 2;
/// Half of what other cases take: the writer is to be faster on a busy machine too.
const LINK: u64 = SLOW / 2;
/// What may be dirty at the end: 0.15 MB at [`LINK`].
const MAX_DOWNTIME_MS: u64 = 50;

/// Writes the same content over and over, as fast as it is let, until the source no longer serves.
pub struct Writer {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Starts on the source of `case`.
    pub fn start(case: &Case) -> Self {
        let file = std::fs::File::open(case.lab.a.pool().join(IMAGE)).unwrap();
        let mut content = vec![0; (BLOCKS * BLOCK) as usize];
        file.read_exact_at(&mut content, SMALL * BLOCK).unwrap();
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let socket = case.lab.a.nbd();
        let thread = {
            let (stop, written) = (Arc::clone(&stop), Arc::clone(&written));
            std::thread::spawn(move || write(&socket, &content, &stop, &written))
        };
        Self { stop, written, thread }
    }

    fn end(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
        self.written.load(Ordering::SeqCst)
    }
}

fn write(socket: &Path, content: &[u8], stop: &AtomicBool, written: &AtomicU64) {
    let Ok(mut client) = Client::connect(socket, IMAGE) else { return };
    let go_on = || !stop.load(Ordering::SeqCst);
    for piece in content.chunks(WRITE_BYTES as usize).cycle() {
        let offset = SMALL * BLOCK + written.load(Ordering::SeqCst) % (BLOCKS * BLOCK);
        let len = piece.len() as u32;
        // At the end the source parks what comes, and later fails it.
        if !go_on() || client.request(WRITE, offset, len, piece, &go_on).is_err() {
            return;
        }
        written.fetch_add(piece.len() as u64, Ordering::SeqCst);
    }
}

fn migrate(case: &Case, throttle: &str) {
    case.lab
        .a
        .ask(json!({"migrate": {
            "subject": {"images": {"names": [IMAGE]}}, "to": "hostb", "strategy": "pre-copy",
            "bandwidth": {"bytes_per_second": LINK}, "max_downtime_ms": MAX_DOWNTIME_MS,
            "tuning": {"throttle": throttle}, "detach": true,
        }}))
        .unwrap();
}

/// The summary of a migration that ends because the guest is slowed.
fn converges(mut case: Case, writer: Writer, throttle: &str) {
    migrate(&case, throttle);
    case.await_end().unwrap();
    writer.end();
    let summary = case.lab.a.migrations().pop().unwrap()["summary"].clone();
    assert_eq!(summary["result"], "completed", "{summary}");
    let operations = summary["throttled_operations"].as_u64().unwrap();
    let waited = summary["throttled_ms"].as_f64().unwrap();
    // A writer that hardly gets a processor while a short Copy lasts leaves so little that Sync's first
    // round fits.
    let fits = summary["rounds"] == 2;
    assert!(fits || operations > 0 && waited > 1.0, "{summary}");
    case.end().unwrap();
}

#[test]
fn sync_is_hopeless_and_ends_with_a_guest_that_is_slowed() {
    let mut case = Case::begin_small(Lab::new());
    let writer = Writer::start(&case);
    migrate(&case, "none");
    case.await_shown("sync").unwrap();
    // So slow that any writer is faster, also one that hardly gets a processor.
    let crawl = json!({"limit": {"bandwidth": {"bytes_per_second": CRAWL}}});
    case.lab.a.ask(crawl).unwrap();
    case.await_shown("failed").unwrap();
    let error = case.lab.a.migrations()[0]["error"].to_string();
    assert!(error.contains("does not converge"), "{error}");
    converges(case, writer, "aggressive");
}

#[test]
fn a_soft_limit_is_enough() {
    let case = Case::begin_small(Lab::new());
    let writer = Writer::start(&case);
    converges(case, writer, "soft");
}

/// The guest is observed first; a disk that is quick enough costs the migration nothing else.
#[test]
fn a_goal_for_the_guests_latency_is_taken_and_the_guest_is_observed_first() {
    let case = Case::begin_small(Lab::new());
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify"];
    let output = case.lab.a.dray(&[&args[..], &["--max-added-latency", "20s"]].concat());
    let summary = crate::moves::result(&output);
    assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
    assert!(summary["total_seconds"].as_f64().unwrap() >= 2.0, "{summary}");
    case.end().unwrap();
}

#[test]
fn a_strategy_without_sync_refuses_to_slow_the_guest() {
    let case = Case::begin_small(Lab::new());
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--throttle", "soft"];
    let output = case.lab.a.dray(&[&args[..], &["--strategy", "post-copy"]].concat());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("--throttle"), "{text}");
    assert_eq!(case.lab.b.open_migrations(), 0, "nothing was made at the target");
    case.guest.stop();
}
