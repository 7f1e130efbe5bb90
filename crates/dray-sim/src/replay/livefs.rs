//! The two experiments of the LiveFS paper (section V), as guests to replay.
//!
//! *Bonnie++*: a guest that writes a file, rewrites it, reads it and seeks in it, again and again:
//! a fixed working set under heavy writes. *AFS*: workers that read a block of 1 MiB each, over and
//! over; nothing is written. The paper names the disk (6 GB), the memory (512 MB), the link
//! (1 Gbit/s), the segment (64 MiB) and of AFS the workers (200) and their blocks; file sizes and
//! rates are choices.

use dray_engine::SECOND;
use dray_trace::{Op, Record, Rng};

const MIB: u64 = 1 << 20;
/// Bonnie++ writes in pieces of this many bytes.
const PIECE: u64 = MIB / 4;

/// Bonnie++ on `file` bytes in the middle of a disk of `disk` bytes: written, rewritten and read at
/// `rate` bytes a second, then 200 seeks a second for as long as one of these took, every tenth of
/// which writes. Begins anew for ever.
pub fn bonnie(disk: u64, file: u64, rate: u64, seed: u64) -> impl Iterator<Item = Record> {
    let begin = (disk - file) / 2 / MIB * MIB;
    let pieces = file / PIECE;
    let step = u128::from(PIECE) * u128::from(SECOND) / u128::from(rate.max(1));
    let pass = step as u64 * pieces;
    let mut rng = Rng::new(seed);
    let mut cycle = 0;
    std::iter::from_fn(move || {
        let from = cycle * 4 * pass;
        cycle += 1;
        let piece = move |passes: u64, n: u64, op| Record {
            time_ns: from + passes * pass + n * step as u64,
            op,
            offset: begin + n * PIECE,
            length: PIECE,
        };
        let mut records: Vec<Record> = Vec::new();
        records.extend((0..pieces).map(|n| piece(0, n, Op::Write)));
        // Rewriting reads a piece and writes it back.
        records.extend((0..pieces).flat_map(|n| [piece(1, n, Op::Read), piece(1, n, Op::Write)]));
        records.extend((0..pieces).map(|n| piece(2, n, Op::Read)));
        let seeks = pass / (SECOND / 200);
        records.extend((0..seeks).map(|n| Record {
            time_ns: from + 3 * pass + n * (SECOND / 200),
            op: if n % 10 == 0 { Op::Write } else { Op::Read },
            offset: begin + rng.below(file / 4096) * 4096,
            length: 4096,
        }));
        Some(records)
    })
    .flatten()
}

/// AFS on a disk of `disk` bytes: each of `workers` reads its own 1 MiB, somewhere on the disk, in
/// pieces of 64 KiB, all of them together `rate` pieces a second.
pub fn afs(disk: u64, workers: u64, rate: u64, seed: u64) -> impl Iterator<Item = Record> {
    let mut rng = Rng::new(seed);
    let blocks: Vec<u64> = (0..workers).map(|_| rng.below(disk / MIB) * MIB).collect();
    let step = SECOND / rate.max(1);
    (0..).map(move |n: u64| {
        let worker = rng.below(workers) as usize;
        let offset = blocks[worker] + rng.below(16) * (64 << 10);
        Record { time_ns: n * step, op: Op::Read, offset, length: 64 << 10 }
    })
}
