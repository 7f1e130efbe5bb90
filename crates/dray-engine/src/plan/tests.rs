//! Loads of which it is clear what should be done with them.

use super::*;
use dray_types::BLOCK_SIZE;

const MIB: f64 = 1048576.0;
/// 64 MiB, a chunk here.
const CHUNK: u64 = 16_384;

fn load(chunks: &[(f64, f64)]) -> Load {
    let chunk = |(n, &(written, reads)): (usize, &(f64, f64))| Chunk {
        image: ImageIndex(0),
        range: BlockRange::new(n as u64 * CHUNK, CHUNK),
        bytes: CHUNK * BLOCK_SIZE,
        written: written * MIB,
        areas: vec![BlockRange::new(n as u64 * CHUNK, CHUNK)],
        held: 0,
        reads,
        read_there: 1.0,
    };
    Load {
        chunks: chunks.iter().enumerate().map(chunk).collect(),
        images: 1,
        link: 100.0 * MIB,
        rtt: 0.05,
        memory: 512.0 * MIB,
        memory_dirty: MIB,
    }
}

fn whole(load: &Load) -> Vec<BlockRange> {
    vec![BlockRange::new(0, load.chunks.len() as u64 * CHUNK)]
}

fn chosen(load: &Load, goals: &Goals) -> (Vec<usize>, Plan) {
    let plan = choose(load, goals, &whole(load));
    let set = &plan.copy_only[0];
    let chosen = (0..load.chunks.len()).filter(|&n| set.contains(n as u64 * CHUNK)).collect();
    (chosen, plan)
}

fn preset(strategy: Strategy, load: &Load) -> Prediction {
    predict(strategy, load, &Goals::default(), None)
}

/// 64 chunks of which the first `hot` have the given rates, the others none.
fn mixed(hot: usize, written: f64, reads: f64) -> Load {
    load(&(0..64).map(|n| if n < hot { (written, reads) } else { (0.0, 0.0) }).collect::<Vec<_>>())
}

#[test]
fn what_is_only_read_is_copied_as_pre_copy_would() {
    let load = mixed(64, 0.0, 5.0);
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert_eq!(chunks.len(), 64);
    let best = preset(Strategy::PreCopy, &load);
    assert_eq!((plan.prediction.extra, plan.prediction.remote_reads), (0.0, 0.0));
    assert!(plan.prediction.total <= best.total * 1.05);
    assert!(preset(Strategy::PostCopy, &load).remote_reads > 100.0);
}

#[test]
fn what_is_overwritten_all_the_time_is_left_as_post_copy_would() {
    let load = mixed(64, 20.0, 0.0);
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert!(chunks.is_empty(), "{chunks:?}");
    let best = preset(Strategy::PostCopy, &load);
    assert_eq!(plan.prediction.extra, 0.0);
    assert!(plan.prediction.total <= best.total * 1.05);
    assert!(!preset(Strategy::PreCopy, &load).converges);
    assert!(preset(Strategy::Hybrid, &load).extra > 1000.0 * MIB);
}

#[test]
fn what_is_read_and_hardly_written_is_copied_as_hybrid_would() {
    let load = mixed(64, 0.001, 20.0);
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert_eq!(chunks.len(), 64);
    let best = preset(Strategy::Hybrid, &load);
    assert_eq!(plan.prediction.extra, best.extra);
    assert!(plan.prediction.remote_reads <= best.remote_reads * 1.05);
}

#[test]
fn a_mixed_load_is_better_off_than_with_any_preset() {
    // A log that is overwritten, a database that is read, and much that rests.
    let rates = |n| match n {
        0..8 => (8.0, 0.0),
        8..16 => (0.0, 50.0),
        _ => (0.0, 0.0),
    };
    let load = load(&(0..64).map(rates).collect::<Vec<_>>());
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert_eq!(chunks, (8..64).collect::<Vec<_>>());
    assert!(plan.prediction.extra == 0.0 && plan.prediction.remote_reads == 0.0);
    assert!(preset(Strategy::Hybrid, &load).extra > 100.0 * MIB);
    assert!(preset(Strategy::PostCopy, &load).remote_reads > 100.0);
    assert!(preset(Strategy::PreCopy, &load).total > plan.prediction.total);
}

#[test]
fn the_last_chunk_is_dirty_again_before_it_has_been_sent() {
    let mut load = mixed(1, 20.0, 0.0);
    (load.memory, load.memory_dirty) = (0.0, 0.0);
    let hybrid = preset(Strategy::Hybrid, &load);
    // It takes 0.64 s, and on the mean a block waits for half of that: 6.2 MiB less what hits twice.
    assert!((5.0 * MIB..6.4 * MIB).contains(&hybrid.extra), "{}", hybrid.extra / MIB);
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert!(!chunks.contains(&0), "{chunks:?}");
    assert!(plan.prediction.extra < MIB, "{}", plan.prediction.extra);
}

#[test]
fn a_log_of_a_few_blocks_is_dirty_in_a_few_blocks() {
    let mut load = mixed(8, 4.0, 10.0);
    let all = preset(Strategy::Hybrid, &load).extra;
    // 128 KiB of each, in two places.
    let two = |start| vec![BlockRange::new(start, 16), BlockRange::new(start + 64, 16)];
    load.chunks.iter_mut().for_each(|chunk| chunk.areas = two(chunk.range.start));
    let few = preset(Strategy::Hybrid, &load);
    assert!(all > 10.0 * few.extra && few.extra <= 8.0 * 131_072.0, "{all} {}", few.extra);
    // These are left, and nothing of what is read around them.
    let plan = chosen(&load, &Goals::default()).1;
    let left = plan.copy_only[0].complement_in(whole(&load)[0]);
    assert_eq!(left, load.chunks[..8].iter().flat_map(|chunk| two(chunk.range.start)).collect());
    assert!(plan.prediction.extra < 1.0 && plan.prediction.remote_reads <= few.remote_reads * 1.05);
}

#[test]
fn a_place_is_waited_for_once() {
    let load = mixed(1, 0.0, 1e6);
    let waits = preset(Strategy::PostCopy, &load).remote_reads;
    assert!((1000.0..=1024.0).contains(&waits), "64 MiB in pieces of 64 KiB: {waits}");
}

#[test]
fn what_is_read_beside_what_is_written_does_not_keep_it_from_being_left() {
    let mut load = mixed(8, 4.0, 10.0);
    for chunk in &mut load.chunks[..8] {
        chunk.areas = vec![BlockRange::new(chunk.range.start, 16)];
        chunk.read_there = 0.0;
    }
    let (hybrid, post) = (preset(Strategy::Hybrid, &load), preset(Strategy::PostCopy, &load));
    let plan = chosen(&load, &Goals::default()).1;
    assert!(hybrid.remote_reads == 0.0 && plan.prediction.remote_reads == 0.0);
    assert_eq!(plan.copy_only[0].complement_in(whole(&load)[0]).len(), 8 * 16);
    assert!(post.remote_reads > 100.0, "of the rest all of them: {post:?}");
    // Half of what is missing beside it, half of its reads.
    let chunk = &load.chunks[0];
    let (written, all) = (chunk.footprint(), chunk.bytes as f64);
    let half = chunk.share_of_reads(f64::midpoint(written, all));
    assert_eq!((chunk.share_of_reads(written), chunk.share_of_reads(all)), (0.0, 1.0));
    assert!((half - 0.5).abs() < 1e-9, "{half}");
}

#[test]
fn what_is_read_while_the_guest_stands_still_waits_as_well() {
    // It all crosses in a hundredth of a second; the guest stops for longer.
    let mut load = mixed(1, 20.0, 10.0);
    load.chunks[0].areas = vec![BlockRange::new(0, 256)];
    let hybrid = preset(Strategy::Hybrid, &load);
    let stop = hybrid.downtime + load.rtt;
    assert!(stop > 0.2 && hybrid.extra < 1.01 * MIB, "{hybrid:?}");
    assert!(hybrid.remote_reads > 0.8 * 10.0 * stop, "{hybrid:?}");
}

#[test]
fn no_more_reads_wait_than_with_hybrid() {
    for (written, reads) in [(1.5, 0.02), (1.5, 0.5), (0.3, 0.5), (0.3, 20.0)] {
        let load = mixed(32, written, reads);
        let plan = chosen(&load, &Goals::default()).1.prediction;
        let hybrid = preset(Strategy::Hybrid, &load);
        let case = format!("{written} MiB/s, {reads} reads/s: {plan:?} {hybrid:?}");
        assert!(plan.remote_reads <= hybrid.remote_reads + 0.1, "{case}");
        assert!(plan.extra <= hybrid.extra, "{case}");
    }
}

#[test]
fn a_latency_goal_makes_it_copy_what_is_read() {
    // So few reads that even with everything left hardly one more waits than with hybrid.
    let load = mixed(32, 1.5, 0.002);
    let (free, cheap) = chosen(&load, &Goals::default());
    let goal = cheap.prediction.added_latency / 3.0;
    let goals = Goals { max_added_latency: Some(goal), ..Goals::default() };
    let (forced, plan) = chosen(&load, &goals);
    assert!(forced.len() > free.len(), "{} and {}", free.len(), forced.len());
    assert_eq!(plan.forced, Some(Forced::AddedLatency));
    assert!(plan.prediction.added_latency < cheap.prediction.added_latency);
    assert!(plan.prediction.extra > cheap.prediction.extra, "the price");
}

#[test]
fn a_deadline_makes_it_send_nothing_twice() {
    let load = mixed(32, 0.2, 40.0);
    let (free, cheap) = chosen(&load, &Goals::default());
    let goals = Goals { deadline: Some(cheap.prediction.total - 0.5), ..Goals::default() };
    let (forced, plan) = chosen(&load, &goals);
    assert!(forced.len() < free.len(), "{} and {}", free.len(), forced.len());
    assert_eq!(plan.forced, Some(Forced::Deadline));
    assert!(plan.prediction.total < cheap.prediction.total);
    let hopeless = Goals { deadline: Some(1.0), ..Goals::default() };
    assert!(chosen(&load, &hopeless).1.missed[0].starts_with("the total time"));
}

#[test]
fn half_the_bandwidth_takes_twice_as_long() {
    let load = mixed(0, 0.0, 0.0);
    let goals = Goals { bandwidth: Some(50.0 * MIB), ..Goals::default() };
    let (full, half) = (chosen(&load, &Goals::default()).1, chosen(&load, &goals).1);
    let ratio = half.prediction.total / full.prediction.total;
    assert!((1.99..2.03).contains(&ratio), "{ratio}");
}

#[test]
fn pre_copy_converges_when_the_link_is_faster_than_the_writes() {
    let slow = preset(Strategy::PreCopy, &mixed(16, 2.0, 0.0));
    assert!(slow.converges && slow.downtime < 0.5, "{slow:?}");
    let fast = preset(Strategy::PreCopy, &mixed(16, 50.0, 0.0));
    assert!(!fast.converges, "{fast:?}");
    assert!(!preset(Strategy::Mirror, &mixed(16, 50.0, 0.0)).converges);
}

#[test]
fn pre_copy_is_told_to_give_up_when_the_engine_would() {
    // Each round is as large as the one before: two of them say so, and not one of thirty more.
    let load = mixed(16, 50.0, 0.0);
    let hopeless = preset(Strategy::PreCopy, &load);
    let places = 16.0 * 64.0 * MIB;
    assert!(!hopeless.converges && hopeless.extra < 4.0 * places, "{}", hopeless.extra / places);
    // The rounds of a guest that writes nearly as much as the link carries shrink ever less, and
    // thirty of them are not enough; with two thirds of it they are.
    assert!(!preset(Strategy::PreCopy, &mixed(16, 6.2, 0.0)).converges);
    assert!(preset(Strategy::PreCopy, &mixed(16, 4.2, 0.0)).converges);
}

#[test]
fn what_a_round_did_not_send_is_dirty_as_well() {
    let chunk = &mixed(1, 1.0, 0.0).chunks[0];
    // 1 MiB/s for 1 s to 64 MiB: hardly a place is written twice.
    let (all, none) = (chunk.dirty_again(64.0 * MIB, 1.0), chunk.dirty_again(0.0, 1.0));
    assert!((0.98 * MIB..MIB).contains(&none), "{none}");
    assert!((0.49 * MIB..0.5 * MIB).contains(&all), "each block half of the round: {all}");
    let half = chunk.dirty_again(32.0 * MIB, 1.0);
    assert!((half - f64::midpoint(all, none)).abs() < 1.0, "{half}");
}

#[test]
fn nothing_to_move_and_a_link_that_is_down_are_no_numbers_to_fear() {
    let mut none = load(&[]);
    none.memory_dirty = 1e12;
    let plan = choose(&none, &Goals { bandwidth: Some(0.0), ..Goals::default() }, &[]);
    assert!(!plan.prediction.converges && plan.prediction.total.is_finite());
}

/// As after years at home and a day away: the target has everything but two chunks.
fn back_home(written: f64, reads: f64) -> Load {
    let mut load = mixed(8, written, reads);
    for chunk in &mut load.chunks[2..] {
        (chunk.bytes, chunk.held) = (0, CHUNK * BLOCK_SIZE);
    }
    load
}

#[test]
fn what_lies_at_the_target_costs_nothing() {
    let (load, all) = (back_home(0.0, 5.0), mixed(8, 0.0, 5.0));
    for strategy in [Strategy::PreCopy, Strategy::PostCopy, Strategy::Hybrid, Strategy::Mirror] {
        let (home, away) = (preset(strategy, &load), preset(strategy, &all));
        assert_eq!(home.bytes, 128.0 * MIB, "{strategy:?}");
        assert_eq!(away.bytes, 4096.0 * MIB, "{strategy:?}");
        // 1.28 s and 40.96 s, and the memory, for both alike.
        assert!((away.total - home.total - 39.68).abs() < 0.01, "{strategy:?}: {home:?} {away:?}");
    }
    let (chunks, plan) = chosen(&load, &Goals::default());
    assert_eq!((chunks.len(), plan.prediction.bytes), (64, 128.0 * MIB));
}

#[test]
fn what_lies_at_the_target_crosses_once_it_is_written() {
    let (load, all) = (back_home(10.0, 5.0), mixed(8, 10.0, 5.0));
    let hybrid = preset(Strategy::Hybrid, &load);
    // 80 MiB a second to 512 MiB, of which 384 MiB were there: dirty from the start, not from when
    // they would have been sent. The guest moves after 128 MiB and its memory.
    let moves = (128.0 + 512.0 * 100.0 / 99.0) / 100.0;
    assert!((hybrid.handover - moves).abs() < 0.01, "{hybrid:?}, {moves}");
    let held = 384.0 * MIB * (1.0 - (-10.0 * moves / 64.0).exp());
    let more = hybrid.bytes - 128.0 * MIB - held;
    assert!(more > 0.0 && more < 128.0 * MIB, "{more}");
    assert!((hybrid.extra - held - more).abs() < 1.0, "{hybrid:?}");
    // Of what is left for later, what the guest writes meanwhile crosses too.
    let post = preset(Strategy::PostCopy, &load);
    assert!(post.bytes > 128.0 * MIB && post.bytes < 512.0 * MIB, "{post:?}");
    assert!(hybrid.total < preset(Strategy::Hybrid, &all).total);
    let (_, plan) = chosen(&load, &Goals::default());
    assert!(plan.prediction.total <= hybrid.total * 1.05, "{:?} {hybrid:?}", plan.prediction);
}
