//! How fast data streams are on loopback: incompressible runs from memory, TLS, hash and all.
//!
//! `cargo run --release -p dray-net --example stream_bench [GiB]` prints a line per number of
//! streams: GB/s, and CPU seconds per GB of source and target together.

use dray_net::pace::Pacer;
use dray_net::pki;
use dray_net::tls::Identity;
use dray_net::{
    Compression, DataReceiver, DataSender, DialSettings, JobQueue, ListenSettings, Listener,
    NetError, NetStats, RunSink, RunSource, SendEvents, SendJob, SendKind, SendSetup, Stream, dial,
};
use dray_types::{BlockRange, Epoch, ImageIndex};
use dray_wire::{FrameHeader, Hello, StreamKind};
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Bytes of noise that runs are copied from: larger than the caches, like a page cache.
const NOISE: usize = 256 << 20;
const RUN: u64 = 1 << 20;

struct Noise(Vec<u8>);

impl Noise {
    fn new() -> Self {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let words = (0..NOISE / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        Self(words.collect())
    }
}

impl RunSource for Noise {
    fn read(&self, _: ImageIndex, range: BlockRange, buf: &mut [u8]) -> std::io::Result<()> {
        let at = range.byte_offset() as usize % (NOISE - buf.len());
        buf.copy_from_slice(&self.0[at..at + buf.len()]);
        Ok(())
    }
}

#[derive(Default)]
struct Sink(AtomicU64);

impl RunSink for Sink {
    fn run(&self, _: &FrameHeader, payload: &[u8]) {
        self.0.fetch_add(payload.len() as u64, Relaxed);
    }
    fn zero(&self, _: &FrameHeader) {}
    fn mismatch(&self, header: &FrameHeader) {
        eprintln!("run {} did not match", header.tag);
    }
    fn ended(&self, why: Option<NetError>) {
        if let Some(why) = why {
            eprintln!("{why}");
        }
    }
}

struct Quiet;

impl SendEvents for Quiet {
    fn unreadable(&self, _: &SendJob, why: std::io::Error) {
        eprintln!("{why}");
    }
    fn link_down(&self, why: NetError) {
        eprintln!("{why}");
    }
}

fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or("").split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

struct Hosts {
    near: Identity,
    address: SocketAddr,
    accepted: mpsc::Receiver<Stream>,
}

async fn hosts() -> Result<Hosts, Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("dray-stream-bench-{}", std::process::id()));
    pki::create_ca(&dir)?;
    let near = Identity::load(&pki::issue(&dir, "hosta", &[])?)?;
    let far = Identity::load(&pki::issue(&dir, "hostb", &[])?)?;
    std::fs::remove_dir_all(&dir)?;
    let listener = Listener::bind(([127, 0, 0, 1], 0).into(), ListenSettings::default()).await?;
    let address = listener.local_addr()?;
    let (to, accepted) = mpsc::channel(8);
    tokio::spawn(listener.run(
        far,
        |name| Some(name.to_owned()),
        move |incoming| {
            let to = to.clone();
            async move {
                if let Ok(stream) = incoming.welcome(Vec::new()).await {
                    let _ = to.send(stream).await;
                }
            }
        },
    ));
    Ok(Hosts { near, address, accepted })
}

async fn round(
    hosts: &mut Hosts,
    source: Arc<Noise>,
    streams: usize,
    bytes: u64,
    compression: Compression,
) -> Result<(f64, f64), Box<dyn Error>> {
    let setup = SendSetup {
        queue: JobQueue::new(),
        source,
        events: Arc::new(Quiet),
        pacer: Pacer::new(None),
        stats: Arc::<NetStats>::default(),
        compression,
        streams,
    };
    let sink = Arc::<Sink>::default();
    let (mut senders, mut receivers) = (Vec::new(), Vec::new());
    for index in 0..streams {
        let stream = index as u16;
        let hello = Hello {
            agent: "bench".into(),
            migration: None,
            session: 0,
            stream,
            features: Vec::new(),
        };
        let address = hosts.address.to_string();
        let settings = DialSettings::default();
        let near =
            dial(&hosts.near, "hostb", &address, StreamKind::Data, &hello, &settings).await?;
        let far = hosts.accepted.recv().await.ok_or("the listener is gone")?;
        receivers.push(DataReceiver::spawn(far, Arc::clone(&sink) as _, Arc::default())?);
        senders.push(DataSender::spawn(near, index, setup.clone())?);
    }
    let (began, cpu) = (Instant::now(), cpu_seconds());
    for tag in 0..bytes / RUN {
        let range = BlockRange::new(tag * 256, 256);
        let (image, epoch) = (ImageIndex(0), Epoch(1));
        setup.queue.push(SendJob { tag, image, range, epoch, urgent: false, kind: SendKind::Run });
    }
    setup.queue.close();
    tokio::task::spawn_blocking(move || {
        senders.into_iter().for_each(DataSender::join);
        receivers.into_iter().for_each(DataReceiver::join);
    })
    .await?;
    let (took, cpu) = (began.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    assert_eq!(sink.0.load(Relaxed), bytes / RUN * RUN, "every byte must arrive");
    let gigabytes = bytes as f64 / 1e9;
    Ok((gigabytes / took, cpu / gigabytes))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let gib: u64 = std::env::args().nth(1).map_or(Ok(6), |arg| arg.parse())?;
    let source = Arc::new(Noise::new());
    let mut hosts = hosts().await?;
    for (streams, measured) in [(1, false), (2, false), (1, true), (2, true), (4, true)] {
        let compression = if measured { Compression::measured() } else { Compression::Off };
        let words = if measured { "compression measured" } else { "compression off" };
        let (rate, cpu) =
            round(&mut hosts, Arc::clone(&source), streams, gib << 30, compression).await?;
        println!("{streams} stream(s), {words}: {rate:.2} GB/s, {cpu:.2} CPU s/GB (both ends)");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}
