//! What a schedule costs in time. Here and not beside the code, which knows no clock.

use dray_engine::order::Waiting;
use dray_types::{BlockRange, Schedule};
use std::time::{Duration, Instant};

/// 1 TiB, 50,000 pieces, half a million runs that come and go, pieces coming back all the time.
#[test]
fn a_large_image_with_many_pieces_is_not_slow() {
    const PIECES: u64 = 50_000;
    const LEN: u64 = (1 << 28) / PIECES;
    let whole = BlockRange::new(0, 1 << 28);
    // Every other piece from the end, then the others from the front.
    let place = |n: u64| if n < PIECES / 2 { PIECES - 1 - 2 * n } else { 2 * n - PIECES };
    let schedule: Schedule =
        (0..PIECES).map(|n| BlockRange::new(place(n) * LEN, LEN - 1)).collect();
    assert_eq!(schedule.ranges().len() as u64, PIECES);
    let began = Instant::now();
    let mut all = Waiting::default();
    all.insert(whole);
    all.set_order(&schedule, whole);
    for n in 0..500_000u64 {
        let run = all.next(256).unwrap();
        all.remove(run);
        if n % 5 == 0 {
            all.insert(BlockRange::new(run.start, 1));
        }
    }
    // A set of single blocks, at the end of the order: every other piece has nothing.
    let mut rest = Waiting::default();
    rest.set_order(&schedule, whole);
    for n in 0..200_000u64 {
        rest.insert(BlockRange::new(place(PIECES - 1) * LEN + n % 64, 1));
        let run = rest.next(256).unwrap();
        rest.remove(run);
    }
    // Seconds even in a debug build; a scan of the pieces for each run would take hours.
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

#[test]
fn a_schedule_of_ranges_that_all_overlap_is_not_slow() {
    let whole = BlockRange::new(0, 1 << 31);
    let small = (0..32_768).map(|n| BlockRange::new(n * 64, 32));
    let large = (0..32_768).map(|n| BlockRange::new(32_768 - n, 1 << 31));
    let began = Instant::now();
    let mut all = Waiting::default();
    all.set_order(&small.chain(large).collect(), whole);
    all.insert(whole);
    // The first piece, and what it leaves of the ones behind it.
    for _ in 0..1000 {
        let run = all.next(256).unwrap();
        all.remove(run);
    }
    assert!(all.is_scheduled());
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}
