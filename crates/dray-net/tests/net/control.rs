//! Control streams: messages both ways, pings, and links that die.

use crate::lab::Lab;
use dray_net::{
    ControlReceiver, ControlSender, ControlSettings, NetErrorKind, NetStats, Stream, control_stream,
};
use dray_types::{Attempt, BlockRange, BlockSet, Epoch};
use dray_wire::control::{Envelope, ToSource, ToTarget};
use dray_wire::{ImageHandover, MapHash, StreamKind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

const QUICK: ControlSettings =
    ControlSettings { ping: Duration::from_millis(50), dead: Duration::from_millis(400) };

fn source(stream: Stream) -> (ControlSender<ToTarget>, ControlReceiver<ToSource>) {
    control_stream(stream, QUICK, &Arc::new(NetStats::default()))
}

pub fn target(stream: Stream) -> (ControlSender<ToSource>, ControlReceiver<ToTarget>) {
    control_stream(stream, QUICK, &Arc::new(NetStats::default()))
}

pub fn envelope<T>(body: T) -> Envelope<T> {
    Envelope { epoch: Epoch(3), attempt: Attempt(2), body }
}

#[tokio::test]
async fn messages_cross_in_order_both_ways_and_pings_are_not_seen() {
    let lab = Lab::new();
    let (near, far) = lab.pair(StreamKind::Control).await;
    let ((to_target, mut at_source), (to_source, mut at_target)) = (source(near), target(far));
    for tag in 0..5000 {
        to_target.send(&envelope(ToTarget::Hashed { tag, hashes: Vec::new() })).unwrap();
        to_source.send(&envelope(ToSource::Mismatch { tag })).unwrap();
    }
    for tag in 0..5000 {
        let hashed = envelope(ToTarget::Hashed { tag, hashes: Vec::new() });
        assert_eq!(at_target.next().await.unwrap().unwrap(), hashed);
        let mismatch = envelope(ToSource::Mismatch { tag });
        assert_eq!(at_source.next().await.unwrap().unwrap(), mismatch);
    }
    // Longer than a dead link is given: the pings keep it, and are not handed on.
    tokio::time::sleep(2 * QUICK.dead).await;
    to_target.send(&envelope(ToTarget::Void)).unwrap();
    assert_eq!(at_target.next().await.unwrap().unwrap().body, ToTarget::Void);
}

#[tokio::test]
async fn a_large_map_crosses_whole() {
    let lab = Lab::new();
    let (near, far) = lab.pair(StreamKind::Control).await;
    let ((to_target, _at_source), (_to_source, mut at_target)) = (source(near), target(far));
    let missing: BlockSet = (0..2_000_000).map(|at| BlockRange::new(at * 3, 1)).collect();
    let images = vec![ImageHandover { len: 6_000_000 * 4096, missing }];
    let map_hash = MapHash::of(&images);
    let message = envelope(ToTarget::Prepare { images, map_hash });
    to_target.send(&message).unwrap();
    assert_eq!(at_target.next().await.unwrap().unwrap(), message);
}

#[tokio::test]
async fn a_finished_stream_says_closed_once() {
    let lab = Lab::new();
    let (near, far) = lab.pair(StreamKind::Control).await;
    let ((to_target, _at_source), (_to_source, mut at_target)) = (source(near), target(far));
    to_target.send(&envelope(ToTarget::Void)).unwrap();
    drop(to_target);
    assert_eq!(at_target.next().await.unwrap().unwrap().body, ToTarget::Void);
    let error = at_target.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Closed, "{error}");
    assert!(at_target.next().await.is_none());
}

#[tokio::test]
async fn a_silent_peer_is_a_dead_link() {
    let lab = Lab::new();
    let (near, _silent) = lab.pair(StreamKind::Control).await;
    let began = Instant::now();
    let (to_target, mut at_source) = source(near);
    let error = at_source.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Timeout);
    assert!(error.to_string().contains("nothing arrived for 0.4 s"), "{error}");
    assert!(began.elapsed() < 3 * QUICK.dead, "{:?}", began.elapsed());
    assert!(at_source.next().await.is_none());
    let error = to_target.send(&envelope(ToTarget::Void)).unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Broken);
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed_at_once() {
    let lab = Lab::new();
    let (near, far) = lab.pair(StreamKind::Control).await;
    let (_to_target, mut at_source) = source(near);
    drop(far);
    let error = at_source.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind, NetErrorKind::Broken, "{error}");
}

#[tokio::test]
async fn nonsense_ends_the_stream() {
    for bytes in [&[0xff, 0xff, 0xff, 0xff][..], &[2, 0, 0, 0, 0xff, 0xff], &[5, 0, 0, 0, 1]] {
        let lab = Lab::new();
        let (address, mut accepted) = lab.listen().await;
        let mut raw = lab.raw(address).await;
        raw.write_all(&crate::lab::hello().encode(StreamKind::Control)).await.unwrap();
        let (_to_source, mut at_target) = target(accepted.recv().await.unwrap());
        raw.write_all(bytes).await.unwrap();
        raw.shutdown().await.unwrap();
        let error = at_target.next().await.unwrap().unwrap_err();
        let wanted = if bytes.len() == 5 { NetErrorKind::Broken } else { NetErrorKind::Protocol };
        assert_eq!(error.kind, wanted, "{error}");
    }
}
