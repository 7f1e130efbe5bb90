//! What the messages of a peer take of a host's memory: a fixed part, whatever the number of its streams.

use crate::control::{envelope, target};
use crate::lab::{self, Lab, hello};
use dray_net::memory::MemoryLimits;
use dray_net::{ControlReceiver, ListenSettings, Listener, Memory, NetErrorKind, Stream};
use dray_types::{BlockRange, BlockSet};
use dray_wire::control::{self, Envelope, ToTarget};
use dray_wire::{ImageHandover, MapHash, StreamKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::client::TlsStream;

const MIB: usize = 1 << 20;
/// Longer than what every kind may have, and more than half of what a peer has.
const LONG: usize = 9 * MIB;

fn limits() -> MemoryLimits {
    let (long, least_time) = (16 * MIB, Duration::from_secs(2));
    MemoryLimits { long, all_long: 2 * long, least_time, slowest: u64::MAX, ..Default::default() }
}

/// hostb with this memory; what it welcomes comes out of the channel.
async fn listen(lab: &Lab, memory: &Memory) -> (SocketAddr, mpsc::Receiver<Stream>) {
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), ListenSettings::default());
    let listener = listener.await.unwrap().share(memory);
    let address = listener.local_addr().unwrap();
    let (to, accepted) = mpsc::channel(8);
    let handle = move |incoming: dray_net::Incoming| {
        let to = to.clone();
        async move {
            let _ = to.send(incoming.welcome(Vec::new()).await.unwrap()).await;
        }
    };
    tokio::spawn(listener.run(lab.hostb.clone(), |name| Some(name.to_owned()), handle));
    (address, accepted)
}

/// A control stream of hosta on which it writes what it likes.
struct Raw {
    tls: TlsStream<TcpStream>,
    at_target: ControlReceiver<ToTarget>,
}

async fn raw(lab: &Lab, address: SocketAddr, accepted: &mut mpsc::Receiver<Stream>) -> Raw {
    let mut tls = lab::raw_tls(&lab.host_dir("hosta"), address).await.unwrap();
    tls.write_all(&hello().encode(StreamKind::Control)).await.unwrap();
    let (to_source, at_target) = target(accepted.recv().await.unwrap());
    // Its pings stop with it.
    std::mem::forget(to_source);
    Raw { tls, at_target }
}

/// The handover of an image whose map is so long that only one fits in beside the rest.
fn prepare() -> Vec<u8> {
    let missing: BlockSet =
        (0..LONG as u64 / 2 + 4096).map(|at| BlockRange::new(at * 16, 1)).collect();
    let images = vec![ImageHandover { len: LONG as u64 * 16 * 4096, missing }];
    let map_hash = MapHash::of(&images);
    control::encode(&envelope(ToTarget::Prepare { images, map_hash })).unwrap()
}

fn is_prepare(message: &Envelope<ToTarget>) -> bool {
    matches!(message.body, ToTarget::Prepare { .. })
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_messages_hold_a_peers_part_and_no_more() {
    let (lab, memory) = (Lab::new(), Memory::new(limits()));
    let (address, mut accepted) = listen(&lab, &memory).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = raw(&lab, address, &mut accepted).await;
        let begun = [&(LONG as u32).to_le_bytes()[..], &[3, 2, 1], &[0; 1000]].concat();
        stream.tls.write_all(&begun).await.unwrap();
        streams.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let of = memory.of("hosta");
    assert!(of.taken() > LONG - MIB && of.taken() <= 16 * MIB, "{}", of.taken());
    // A byte now and then keeps the link, and not the place.
    let began = Instant::now();
    let why = loop {
        let _ = streams[0].tls.write_all(&[0]).await;
        let _ = streams[0].tls.flush().await;
        let next = streams[0].at_target.next();
        if let Ok(told) = tokio::time::timeout(Duration::from_millis(50), next).await {
            break told.unwrap().unwrap_err();
        }
    };
    assert_eq!(why.kind, NetErrorKind::Timeout);
    assert!(why.to_string().contains("was not complete after 2 s"), "{why}");
    assert!(began.elapsed() < Duration::from_secs(4));
    drop(streams);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(memory.of("hosta").taken(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn several_long_messages_of_an_honest_peer_arrive_one_after_the_other() {
    let (lab, memory) = (Lab::new(), Memory::new(limits()));
    let (address, mut accepted) = listen(&lab, &memory).await;
    let message = prepare();
    assert!(message.len() > LONG, "{}", message.len());
    let mut arriving = Vec::new();
    for _ in 0..3 {
        let Raw { mut tls, mut at_target } = raw(&lab, address, &mut accepted).await;
        let message = message.clone();
        let written = tokio::spawn(async move {
            tls.write_all(&message).await.unwrap();
            tls.flush().await.unwrap();
            tls
        });
        arriving.push(tokio::spawn(async move {
            let (message, held) = at_target.next_held().await.unwrap().unwrap();
            assert!(is_prepare(&message));
            (written.await.unwrap(), held)
        }));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(memory.of("hosta").taken() <= 16 * MIB);
    for arrived in arriving {
        let (_tls, held) =
            tokio::time::timeout(Duration::from_secs(60), arrived).await.unwrap().unwrap();
        drop(held);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_message_of_a_kind_that_is_never_long_is_not_waited_for() {
    let (lab, memory) = (Lab::new(), Memory::new(limits()));
    let (address, mut accepted) = listen(&lab, &memory).await;
    let mut stream = raw(&lab, address, &mut accepted).await;
    let ping = [&(LONG as u32).to_le_bytes()[..], &[3, 2, 9], &[0; 100]].concat();
    stream.tls.write_all(&ping).await.unwrap();
    let why = stream.at_target.next().await.unwrap().unwrap_err();
    assert_eq!(why.kind, NetErrorKind::Protocol, "{why}");
    assert_eq!(memory.of("hosta").taken(), 0);
}
