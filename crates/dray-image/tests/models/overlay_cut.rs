//! I2: what a guest was told is flushed survives a power cut at a host with an overlay, before and
//! after any merge. Now and then the agent is killed, and another process goes on with what the
//! first has noted.

use crate::power::{self, Machine, PER_BLOCK, Records, SECTOR, value_of};
use crate::random::{Random, seeds};
use dray_image::{Disk, Image, Overlay, Result};
use dray_types::BlockSet;
use std::sync::Arc;

/// Four blocks and three sectors: the tail of an image need not be a block.
const SECTORS: u64 = 4 * PER_BLOCK + 3;

/// One thing that a guest or the merger does; `may` is every content that each sector may have
/// after a power cut.
fn act(
    disk: &Disk,
    overlay: &Overlay,
    may: &mut [Vec<u64>],
    random: &mut Random,
    next: &mut u64,
) -> Result<()> {
    let first = random.below(SECTORS);
    let first = if random.below(2) == 0 { first } else { first / PER_BLOCK * PER_BLOCK };
    let count = (random.below(2 * PER_BLOCK) + 1).min(SECTORS - first);
    let (offset, len) = (first * SECTOR, count * SECTOR);
    let part = first as usize..(first + count) as usize;
    match random.below(8) {
        0..=2 => {
            let mut data = vec![0; len as usize];
            for sector in data.chunks_mut(SECTOR as usize) {
                *next += 1;
                sector[..8].copy_from_slice(&next.to_le_bytes());
            }
            for (may, sector) in may[part].iter_mut().zip(data.chunks(SECTOR as usize)) {
                may.push(value_of(sector));
            }
            disk.write_at(&data, offset, false)
        }
        3 => {
            may[part].iter_mut().for_each(|may| may.push(0));
            disk.discard(offset, len, false)
        }
        4 => {
            disk.flush()?;
            may.iter_mut().for_each(|may| {
                may.drain(..may.len() - 1);
            });
            Ok(())
        }
        5 => {
            let mut buf = vec![0; len as usize];
            disk.read_at(&mut buf, offset)?;
            for (may, sector) in may[part].iter().zip(buf.chunks(SECTOR as usize)) {
                assert_eq!(value_of(sector), *may.last().unwrap(), "read");
            }
            Ok(())
        }
        _ => overlay.merge(0).map(drop),
    }
}

/// What of a host survives its power cut.
struct Left {
    below: Vec<u64>,
    file: Vec<u64>,
    here: BlockSet,
}

/// A process begins to serve the disk with what the one before it has recorded and noted.
fn serve(
    host: &power::Host,
    machines: &[Arc<Machine>; 2],
    here: &BlockSet,
) -> (Arc<Overlay>, Arc<Disk>) {
    let (recorded, noted) = host.lock().unwrap().believed();
    let mut here = here.clone();
    here.union_with(&recorded);
    let [below, file] = machines.clone();
    let log = Arc::new(Records(Arc::clone(host)));
    let overlay = Arc::new(Overlay::new(below, file, &here, &noted, log).unwrap());
    let disk = Disk::new(Arc::clone(&overlay) as _);
    (overlay, disk)
}

/// Until the power goes, or for some time.
fn live(
    host: &power::Host,
    left: &mut Left,
    may: &mut [Vec<u64>],
    random: &mut Random,
    next: &mut u64,
) {
    let machines = [&left.below, &left.file].map(|sectors| Machine::new(host, sectors));
    let (mut overlay, mut disk) = serve(host, &machines, &left.here);
    for _ in 0..10 {
        if random.below(4) == 0 {
            (overlay, disk) = serve(host, &machines, &left.here);
        }
        if act(&disk, &overlay, may, random, next).is_err() {
            break;
        }
    }
    (left.below, left.file) = (machines[0].cut(), machines[1].cut());
    left.here.union_with(&host.lock().unwrap().believed().0);
}

/// One run with the power cut at step `cut_at`, then a second life, cut at the same step again.
fn cut(seed: u64, cut_at: u64) -> u64 {
    let mut random = Random(seed);
    let below: Vec<u64> = (0..SECTORS).map(|sector| 1000 + sector).collect();
    let mut may: Vec<Vec<u64>> = below.iter().map(|&value| vec![value]).collect();
    let mut left = Left { below, file: vec![0; SECTORS as usize], here: BlockSet::new() };
    let (mut next, mut steps) = (10_000, 0);
    for life in 0..2 {
        let host = power::host(cut_at, Random(seed ^ cut_at << 32 ^ life));
        live(&host, &mut left, &mut may, &mut random, &mut next);
        if life == 0 {
            steps = host.lock().unwrap().steps;
        }
        for (sector, may) in may.iter_mut().enumerate() {
            let over = left.here.contains(sector as u64 / PER_BLOCK);
            let found = if over { left.file[sector] } else { left.below[sector] };
            let label = format!("seed {seed}, cut at {cut_at}, life {life}, sector {sector}");
            assert!(may.contains(&found), "{label}: {found}, may hold {may:?} (here: {over})");
            *may = vec![found];
        }
    }
    steps
}

#[test]
fn no_flushed_write_is_lost_whatever_was_merged() {
    for seed in seeds(300) {
        let steps = cut(seed, u64::MAX - 1);
        (0..=steps).for_each(|cut_at| {
            cut(seed, cut_at);
        });
    }
}
