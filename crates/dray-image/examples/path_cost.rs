//! What the layers of a disk add to a request, in one run on one file in the page cache.
//!
//! `cargo run --release -p dray-image --example path_cost [ROUNDS [WAY]]`
//!
//! With one way alone and two numbers of rounds, `valgrind --tool=callgrind` counts the
//! instructions of a request, which no other load on the machine disturbs.

use dray_image::{
    Attempt, Disk, Error, Fetcher, FileImage, FileOptions, Image, IntentLog, PresentLog, Result,
};
use dray_types::{BlockRange, BlockSet};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

const LEN: u64 = 64 << 20;
/// Short, so that a round can pass undisturbed on a busy machine.
const REQUESTS: u64 = 500;
/// Each way is measured this often, in turn, and the best counts.
const ROUNDS: usize = 400;

struct Nobody;

impl Fetcher for Nobody {
    fn demand(&self, _range: BlockRange) {}

    fn peek(&self, _offset: u64, _buf: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

impl PresentLog for Nobody {
    fn note(&self, _run: dray_types::BlockRange) -> Result<()> {
        Ok(())
    }

    fn record(&self, _present: &BlockSet) -> Result<()> {
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        Ok(())
    }
}

/// Write intents as an agent keeps them: durable before the first write into a region.
struct Intents(File);

impl IntentLog for Intents {
    fn open_region(&self, region: u64) -> Result<()> {
        let written = (&self.0).write_all(&region.to_le_bytes()).and_then(|()| self.0.sync_data());
        written.map_err(|why| Error::io("noting a write intent", why))
    }
}

/// Nanoseconds a 4 KiB request, read or write, at scattered places.
fn measure(image: &dyn Image, write: bool) -> f64 {
    let mut buf = [1; 4096];
    let began = Instant::now();
    for nth in 0..REQUESTS {
        // The last MiB stays out: it is what the disk with missing blocks misses.
        let at = nth * 7919 % ((LEN >> 12) - 256) * 4096;
        let attempt =
            if write { image.try_write_at(&buf, at) } else { image.try_read_at(&mut buf, at) };
        assert_eq!(attempt.expect("I/O on a file"), Attempt::Done);
    }
    began.elapsed().as_nanos() as f64 / REQUESTS as f64
}

fn main() {
    let path = std::env::temp_dir().join(format!("image-path-cost-{}", std::process::id()));
    std::fs::write(&path, vec![1; LEN as usize]).expect("writing the test file");
    let options = FileOptions { write: true, ..FileOptions::default() };
    let file: Arc<dyn Image> = Arc::new(FileImage::open(&path, options).expect("opening it"));
    std::fs::remove_file(&path).expect("removing it");
    let plain = Disk::new(Arc::clone(&file));
    let tracked = Disk::new(Arc::clone(&file));
    tracked.start_tracking(None).unwrap();
    // As the owner of an image of which another host has a replica.
    let generation = Disk::new(Arc::clone(&file));
    let intents = Intents(tempfile::tempfile().expect("a file for the intents"));
    generation.start_history(Arc::new(intents), &BlockSet::new());
    generation.write_at(&[1; 4096], 0, false).expect("the first write into the region");
    let missing = Disk::new(Arc::clone(&file));
    let last = [BlockRange::new((LEN >> 12) - 256, 256)].into_iter().collect();
    missing.serve_with_missing(last, &BlockSet::new(), Arc::new(Nobody), Arc::new(Nobody));
    let ways: [(&str, &dyn Image); 5] = [
        ("file alone", &*file),
        ("disk", &*plain),
        ("disk, tracked", &*tracked),
        ("disk, generation kept", &*generation),
        ("disk, blocks missing", &*missing),
    ];
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rounds = args.first().map_or(ROUNDS, |text| text.parse().expect("a number of rounds"));
    let wanted = |name: &str| args.get(1).is_none_or(|only| only == name);
    for write in [false, true] {
        let mut best = [f64::MAX; 5];
        for _ in 0..rounds {
            for ((_, image), best) in ways.iter().zip(&mut best).filter(|((n, _), _)| wanted(n)) {
                *best = best.min(measure(*image, write));
            }
        }
        for ((name, _), nanos) in ways.iter().zip(best).filter(|((name, _), _)| wanted(name)) {
            let what = if write { "write" } else { "read" };
            println!("{what:5} {name:22} {nanos:7.0} ns  +{:.0} ns", nanos - best[0]);
        }
    }
}
