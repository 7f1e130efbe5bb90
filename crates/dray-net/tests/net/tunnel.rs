//! Guest memory through the agents.

use crate::lab::{Lab, Link};
use dray_net::pace::Pacer;
use dray_net::{NetErrorKind, NetStats, tunnel};
use dray_types::BitRate;
use dray_wire::StreamKind;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// QEMU is played by this process.
fn is_it(pid: i32) -> bool {
    pid == std::process::id() as i32
}

#[tokio::test]
async fn both_directions_and_their_ends_are_carried() {
    let lab = Lab::new();
    let (address, mut accepted) = lab.listen().await;
    let link = Link::to(address, None).await;
    let (out, incoming) = (lab.dir.path().join("out.sock"), lab.dir.path().join("in.sock"));
    let entry = tunnel::TunnelEntry::bind(&out, None).unwrap();
    assert_eq!(out.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let target_qemu = UnixListener::bind(&incoming).unwrap();
    let (near, far) = <(Arc<NetStats>, Arc<NetStats>)>::default();
    let pacer = Pacer::new(Some(BitRate { bytes_per_second: 20_000_000 }));

    let memory: Vec<u8> = (0..5_000_000u32).map(|at| (at * 7 % 251) as u8).collect();
    let began = Instant::now();
    let guest = async {
        let mut qemu = UnixStream::connect(&out).await.unwrap();
        qemu.write_all(&memory).await.unwrap();
        qemu.shutdown().await.unwrap();
        let mut answer = Vec::new();
        qemu.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let target_guest = async {
        let (mut qemu, _) = target_qemu.accept().await.unwrap();
        let mut received = Vec::new();
        // Only the end of the source's direction ends this; the answer goes out after it.
        qemu.read_to_end(&mut received).await.unwrap();
        qemu.write_all(b"arrived").await.unwrap();
        received
    };
    let target_agent = async {
        let stream = accepted.recv().await.unwrap();
        tunnel::deliver(stream, UnixStream::connect(&incoming).await, &far).await.unwrap()
    };
    let source_agent =
        entry.carry(is_it, lab.dial(link.address, StreamKind::Memory), &pacer, &near);
    let (answer, received, delivered, carried) =
        tokio::join!(guest, target_guest, target_agent, source_agent);
    let carried = carried.unwrap();
    assert!(received == memory && answer == b"arrived");
    assert_eq!((carried.sent, carried.received), (5_000_000, 7));
    assert_eq!((delivered.sent, delivered.received), (7, 5_000_000));
    // 250 ms at the limit, less what may be saved up for 20 ms and the last piece, which is paid for
    // after it was sent.
    assert!(began.elapsed() > Duration::from_millis(220), "{:?}", began.elapsed());
    assert_eq!(near.totals().memory_bytes, 5_000_007);
    assert_eq!(near.totals().memory_sent, far.totals().memory_received);
    assert_eq!(near.totals().wire_bytes(), link.both_ways());
    assert!(!out.exists());
}

#[tokio::test]
async fn a_missing_incoming_qemu_ends_both_sides_with_an_error() {
    let lab = Lab::new();
    let (address, mut accepted) = lab.listen().await;
    let out = lab.dir.path().join("out.sock");
    std::fs::write(&out, "left over").unwrap();
    let entry = tunnel::TunnelEntry::bind(&out, None).unwrap();
    let (stats, pacer) = (Arc::<NetStats>::default(), Pacer::new(None));
    let nowhere = lab.dir.path().join("nowhere.sock");
    let guest = async {
        let mut qemu = UnixStream::connect(&out).await.unwrap();
        qemu.write_all(b"memory").await.unwrap();
        let mut answer = Vec::new();
        let _ = qemu.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
    };
    let target = async {
        let stream = accepted.recv().await.unwrap();
        tunnel::deliver(stream, UnixStream::connect(&nowhere).await, &stats).await.unwrap_err()
    };
    let source = entry.carry(is_it, lab.dial(address, StreamKind::Memory), &pacer, &stats);
    let ((), target, source) = tokio::join!(guest, target, source);
    assert_eq!(target.kind, NetErrorKind::Local);
    assert!(target.to_string().contains("No such file"), "{target}");
    assert_eq!(source.unwrap_err().kind, NetErrorKind::Broken);
}

#[tokio::test]
async fn memory_that_is_swallowed_on_its_way_ends_the_source() {
    let lab = Lab::new();
    let (address, mut accepted) = lab.listen().await;
    let link = Link::to(address, None).await;
    let out = lab.dir.path().join("out.sock");
    let entry = tunnel::TunnelEntry::bind(&out, None).unwrap();
    let (stats, pacer) = (Arc::<NetStats>::default(), Pacer::new(None));
    let dial = async {
        let mut stream = lab.dial(link.address, StreamKind::Memory).await?;
        stream.limit_silence(Duration::from_secs(2));
        link.swallow();
        Ok(stream)
    };
    let guest = async {
        let mut qemu = UnixStream::connect(&out).await.unwrap();
        qemu.write_all(b"memory").await.unwrap();
        let mut answer = Vec::new();
        // The end of its socket is what QEMU fails its migration by.
        qemu.read_to_end(&mut answer).await
    };
    let carried = async { tokio::join!(entry.carry(is_it, dial, &pacer, &stats), guest) };
    let (carried, _) = tokio::time::timeout(Duration::from_secs(20), carried).await.unwrap();
    let why = carried.unwrap_err();
    assert!(why.to_string().contains("confirmed nothing for 2 s"), "{why}");
    drop(accepted.try_recv());
}

/// Of two VMs that run as one user, neither gives the other its memory.
#[tokio::test]
async fn another_process_than_the_vms_is_not_heard() {
    let lab = Lab::new();
    let (address, mut accepted) = lab.listen().await;
    let out = lab.dir.path().join("out.sock");
    let entry = tunnel::TunnelEntry::bind(&out, None).unwrap();
    let (stats, pacer) = (Arc::<NetStats>::default(), Pacer::new(None));
    let (first, second) = (tokio::sync::Notify::new(), std::cell::Cell::new(0));
    // The first that comes is taken for another process.
    let is_it = |_| {
        second.set(second.get() + 1);
        first.notify_one();
        second.get() > 1
    };
    let guests = async {
        let mut stranger = UnixStream::connect(&out).await.unwrap();
        // It may have been shown the door before it says anything.
        let _ = stranger.write_all(b"forged").await;
        first.notified().await;
        let mut qemu = UnixStream::connect(&out).await.unwrap();
        qemu.write_all(b"memory").await.unwrap();
        qemu.shutdown().await.unwrap();
        assert_eq!(stranger.read(&mut [0; 8]).await.unwrap_or(0), 0, "its connection has ended");
        let mut answer = Vec::new();
        qemu.read_to_end(&mut answer).await.unwrap();
    };
    let target = async {
        let (mut near, far) = UnixStream::pair().unwrap();
        let stream = accepted.recv().await.unwrap();
        let received = async {
            let mut received = Vec::new();
            near.read_to_end(&mut received).await.unwrap();
            near.shutdown().await.unwrap();
            received
        };
        tokio::join!(tunnel::deliver(stream, Ok(far), &stats), received).1
    };
    let source = entry.carry(is_it, lab.dial(address, StreamKind::Memory), &pacer, &stats);
    let ((), received, _) = tokio::join!(guests, target, source);
    assert_eq!(received, b"memory");
}
