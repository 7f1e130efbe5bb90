//! Runs of blocks from a source to a sink, good and bad.

use crate::lab::{Lab, Link, hello};
use dray_net::pace::Pacer;
use dray_net::{
    Compression, DataReceiver, DataSender, JobQueue, NetError, NetErrorKind, NetStats, RunSink,
    RunSource, SendEvents, SendJob, SendKind, SendSetup,
};
use dray_types::{BitRate, BlockRange, Epoch, ImageIndex};
use dray_wire::frame::run_hash;
use dray_wire::{Encoding, FrameHeader, FrameKind, StreamKind};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

/// How long a peer may confirm nothing.
const SILENCE: Duration = Duration::from_secs(2);

/// Every block of image 0 is noise, of image 1 text, of image 2 half zeros; image 9 is broken.
struct Disk;

fn block(image: ImageIndex, number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    match image.0 {
        2 if number.is_multiple_of(2) => vec![0; 4096],
        1 => format!("block {number} of a log file\n").into_bytes().repeat(200)[..4096].to_vec(),
        _ => (0..512).flat_map(|_| noise()).collect(),
    }
}

impl RunSource for Disk {
    fn read(&self, image: ImageIndex, range: BlockRange, buf: &mut [u8]) -> io::Result<()> {
        if image.0 == 9 {
            return Err(io::Error::other("input/output error"));
        }
        for (number, out) in (range.start..range.end()).zip(buf.chunks_mut(4096)) {
            out.copy_from_slice(&block(image, number));
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Event {
    Run(FrameHeader, Instant),
    Zero(FrameHeader),
    Mismatch(FrameHeader),
    Ended(Option<NetError>),
    Unreadable(u64, String),
    LinkDown(NetError),
}

struct Ears {
    events: Mutex<Sender<Event>>,
    blocks: Mutex<HashMap<(u16, u64), Vec<u8>>>,
    keep: bool,
}

impl Ears {
    fn new(keep: bool) -> (Arc<Self>, Receiver<Event>) {
        let (events, heard) = channel();
        (Arc::new(Self { events: Mutex::new(events), blocks: Mutex::default(), keep }), heard)
    }

    fn say(&self, event: Event) {
        let _ = self.events.lock().unwrap().send(event);
    }
}

impl RunSink for Ears {
    fn run(&self, header: &FrameHeader, payload: &[u8]) {
        if self.keep {
            let mut blocks = self.blocks.lock().unwrap();
            let mut data = payload.chunks(4096);
            for (bit, number) in (header.range.start..header.range.end()).enumerate() {
                let zero = header.zero_mask[bit / 64] >> (bit % 64) & 1 == 1;
                let content = if zero { vec![0; 4096] } else { data.next().unwrap().to_vec() };
                blocks.insert((header.image.0, number), content);
            }
        }
        self.say(Event::Run(*header, Instant::now()));
    }
    fn zero(&self, header: &FrameHeader) {
        self.say(Event::Zero(*header));
    }
    fn mismatch(&self, header: &FrameHeader) {
        self.say(Event::Mismatch(*header));
    }
    fn ended(&self, why: Option<NetError>) {
        self.say(Event::Ended(why));
    }
}

impl SendEvents for Ears {
    fn unreadable(&self, job: &SendJob, why: io::Error) {
        self.say(Event::Unreadable(job.tag, why.to_string()));
    }
    fn link_down(&self, why: NetError) {
        self.say(Event::LinkDown(why));
    }
}

fn job(tag: u64, image: u16, range: BlockRange) -> SendJob {
    let (image, epoch) = (ImageIndex(image), Epoch(4));
    SendJob { tag, image, range, epoch, urgent: false, kind: SendKind::Run }
}

/// One stream without a limit or compression.
fn one_stream(ears: &Arc<Ears>) -> SendSetup {
    SendSetup {
        queue: JobQueue::new(),
        source: Arc::new(Disk),
        events: Arc::clone(ears) as _,
        pacer: Pacer::new(None),
        stats: Arc::default(),
        compression: Compression::Off,
        streams: 1,
    }
}

/// A session of data streams over a counting link.
struct Session {
    queue: Arc<JobQueue>,
    senders: Vec<DataSender>,
    receivers: Vec<DataReceiver>,
    near: Arc<NetStats>,
    far: Arc<NetStats>,
    ears: Arc<Ears>,
    heard: Receiver<Event>,
    link: Link,
}

impl Session {
    async fn start(streams: usize, pacer: Arc<Pacer>, rate: Option<f64>) -> Self {
        let lab = Lab::new();
        let (address, mut accepted) = lab.listen().await;
        let link = Link::to(address, rate).await;
        let (ears, heard) = Ears::new(rate.is_none());
        let (queue, near, far) = (JobQueue::new(), Arc::default(), Arc::default());
        let setup = SendSetup {
            queue: Arc::clone(&queue),
            pacer,
            stats: Arc::clone(&near),
            compression: Compression::measured(),
            streams,
            ..one_stream(&ears)
        };
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for index in 0..streams {
            let mut stream = lab.dial(link.address, StreamKind::Data).await.unwrap();
            stream.limit_silence(SILENCE);
            senders.push(DataSender::spawn(stream, index, setup.clone()).unwrap());
            let stream = accepted.recv().await.unwrap();
            let sink = Arc::clone(&ears) as _;
            receivers.push(DataReceiver::spawn(stream, sink, Arc::clone(&far)).unwrap());
        }
        Self { queue, senders, receivers, near, far, ears, heard, link }
    }

    fn next(&self) -> Event {
        self.heard.recv_timeout(Duration::from_secs(20)).expect("something happens")
    }

    /// Closes the queue and waits for both ends.
    fn finish(&mut self) -> Vec<Event> {
        self.queue.close();
        self.senders.drain(..).for_each(DataSender::join);
        self.receivers.drain(..).for_each(DataReceiver::join);
        self.heard.try_iter().collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_arrives_and_every_byte_is_counted() {
    let mut session = Session::start(2, Pacer::new(None), None).await;
    let ranges: Vec<_> = BlockRange::new(5, 1500).pieces(256).collect();
    for (tag, (image, range)) in
        (0..3).flat_map(|image| ranges.iter().map(move |range| (image, *range))).enumerate()
    {
        session.queue.push(job(tag as u64, image, range));
    }
    let zeros = SendJob { kind: SendKind::Zero, ..job(99, 3, BlockRange::new(0, 20_000_000)) };
    session.queue.push(zeros);
    let events = tokio::task::block_in_place(|| session.finish());
    let runs = events.iter().filter(|event| matches!(event, Event::Run(..))).count();
    let zeros = events.iter().filter_map(|event| match event {
        Event::Zero(header) => Some((header.tag, header.range.len)),
        _ => None,
    });
    assert_eq!(runs, 18);
    assert_eq!(zeros.collect::<Vec<_>>(), [(99, 1 << 24), (99, 20_000_000 - (1 << 24))]);
    let ended = events.iter().filter(|event| matches!(event, Event::Ended(None))).count();
    assert_eq!((ended, events.len()), (2, 22));
    let blocks = session.ears.blocks.lock().unwrap();
    assert_eq!(blocks.len(), 4500);
    for ((image, number), content) in blocks.iter() {
        assert!(*content == block(ImageIndex(*image), *number), "block {number} of {image}");
    }
    let (near, far) = (session.near.totals(), session.far.totals());
    assert_eq!(near.zero_blocks, 750 + 20_000_000);
    assert_eq!((near.data_blocks, near.frames), (3750, 20));
    assert_eq!((near.data_sent, near.data_received), (far.data_received, far.data_sent));
    assert_eq!(near.wire_bytes(), session.link.both_ways());
    let carried = near.raw_bytes + near.compressed_out;
    assert!(near.data_sent > carried && near.data_sent < carried + carried / 100 + 10_000);
    assert_eq!((near.raw_bytes, near.compressed_out), (far.raw_bytes, far.compressed_out));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_is_compressed_when_the_link_is_slow() {
    let pacer = Pacer::new(Some(BitRate { bytes_per_second: 20_000_000 }));
    let mut session = Session::start(1, pacer, None).await;
    for tag in 0..40 {
        session.queue.push(job(tag, 1, BlockRange::new(tag * 64, 64)));
    }
    let events = tokio::task::block_in_place(|| session.finish());
    assert_eq!(events.len(), 41);
    let totals = session.near.totals();
    assert!(totals.compressed_in > 30 * 64 * 4096, "{totals:?}");
    assert!(totals.compressed_out < totals.compressed_in / 10, "{totals:?}");
}

/// How long an urgent job takes while bulk is queued, at its worst.
fn urgent_latency(session: &Session, jobs: u64) -> Duration {
    (0..400).for_each(|tag| session.queue.push(job(tag, 0, BlockRange::new(tag * 256, 256))));
    let mut worst = Duration::ZERO;
    for tag in 1000..1000 + jobs {
        std::thread::sleep(Duration::from_millis(30));
        let pushed = Instant::now();
        session.queue.push(SendJob { urgent: true, ..job(tag, 0, BlockRange::new(tag, 8)) });
        let arrived = loop {
            match session.next() {
                Event::Run(header, at) if header.tag == tag => break at,
                Event::Run(..) => {}
                other => panic!("{other:?}"),
            }
        };
        worst = worst.max(arrived - pushed);
    }
    assert!(!session.queue.is_empty(), "bulk must have been waiting all the time");
    worst
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urgent_jobs_overtake_bulk_held_back_by_the_budget() {
    let pacer = Pacer::new(Some(BitRate { bytes_per_second: 4_000_000 }));
    let session = Session::start(1, pacer, None).await;
    let worst = tokio::task::block_in_place(|| urgent_latency(&session, 8));
    session.queue.clear();
    eprintln!("urgent, one stream, budget of 32 Mbit: worst {worst:?}");
    // A few ms; in order it would be more than 100 s, which even the slowest machine tells apart.
    assert!(worst < Duration::from_secs(1), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urgent_jobs_overtake_bulk_on_a_slow_link() {
    let session = Session::start(2, Pacer::new(None), Some(20_000_000.0)).await;
    let worst = tokio::task::block_in_place(|| urgent_latency(&session, 8));
    session.queue.clear();
    eprintln!("urgent, two streams, link of 160 Mbit: worst {worst:?}");
    // The first may find a run of 1 MiB on both streams (105 ms) and what the proxy's sockets hold
    // (200 ms); in order it would be 20 s.
    assert!(worst < Duration::from_secs(10), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_is_said_and_the_rest_goes_on() {
    let mut session = Session::start(1, Pacer::new(None), None).await;
    session.queue.push(job(1, 9, BlockRange::new(0, 4)));
    session.queue.push(job(2, 0, BlockRange::new(0, 257)));
    session.queue.push(job(3, 0, BlockRange::new(0, 4)));
    let events = tokio::task::block_in_place(|| session.finish());
    let unreadable = events.iter().filter_map(|event| match event {
        Event::Unreadable(tag, why) => Some((*tag, why.as_str())),
        _ => None,
    });
    let wanted = [(1, "input/output error"), (2, "a run of 257 blocks cannot be sent")];
    assert_eq!(unreadable.collect::<Vec<_>>(), wanted);
    assert!(events.iter().any(|event| matches!(event, Event::Run(header, _) if header.tag == 3)));
}

/// What was under way is lost with it, and nothing more may be sent that would show it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_without_work_is_a_broken_link() {
    let mut session = Session::start(2, Pacer::new(None), None).await;
    session.queue.push(job(1, 0, BlockRange::new(0, 64)));
    tokio::task::block_in_place(|| {
        assert!(matches!(session.next(), Event::Run(..)));
        session.receivers[1].close();
        while !matches!(session.next(), Event::LinkDown(_)) {}
        assert!(session.queue.is_empty());
        session.finish();
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_link_is_said_once_by_all_streams_together() {
    let mut session = Session::start(3, Pacer::new(None), None).await;
    session.receivers.iter().for_each(DataReceiver::close);
    (0..2000).for_each(|tag| session.queue.push(job(tag, 0, BlockRange::new(tag, 64))));
    let events = tokio::task::block_in_place(|| session.finish());
    let downs = events.iter().filter(|event| matches!(event, Event::LinkDown(_))).count();
    assert_eq!(downs, 1, "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_sender_ends_even_when_nobody_reads() {
    let lab = Lab::new();
    let (near, _far_never_reads) = lab.pair(StreamKind::Data).await;
    let (ears, heard) = Ears::new(false);
    let setup = one_stream(&ears);
    let queue = Arc::clone(&setup.queue);
    let stats = Arc::clone(&setup.stats);
    let sender = DataSender::spawn(near, 0, setup).unwrap();
    (0..100).for_each(|tag| queue.push(job(tag, 0, BlockRange::new(tag, 256))));
    tokio::task::block_in_place(|| {
        let mut sent = 0;
        // Wait until the kernel takes no more.
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = stats.totals().data_sent;
            if now == sent && now > 0 {
                break;
            }
            sent = now;
        }
        sender.close();
        sender.join();
    });
    let Ok(Event::LinkDown(why)) = heard.try_recv() else { panic!("no link_down") };
    assert_eq!(why.kind, NetErrorKind::Broken, "{why}");
}

/// Sends these bytes on a welcomed data stream; what the sink hears until the end.
async fn receive(bytes: Vec<u8>) -> (Vec<Event>, Arc<NetStats>) {
    let lab = Lab::new();
    let (address, mut accepted) = lab.listen().await;
    let mut raw = lab.raw(address).await;
    raw.write_all(&hello().encode(StreamKind::Data)).await.unwrap();
    let (ears, heard) = Ears::new(true);
    let stats = Arc::<NetStats>::default();
    let sink = Arc::clone(&ears) as _;
    let stream = accepted.recv().await.unwrap();
    let receiver = DataReceiver::spawn(stream, sink, Arc::clone(&stats)).unwrap();
    // Fails when the receiver has already given up on what came before.
    let _ = raw.write_all(&bytes).await;
    let _ = raw.shutdown().await;
    tokio::task::block_in_place(|| receiver.join());
    (heard.try_iter().collect(), stats)
}

fn frame(payload: &[u8]) -> (FrameHeader, Vec<u8>) {
    let range = BlockRange::new(3, payload.len() as u64 / 4096);
    let header = FrameHeader {
        kind: FrameKind::Run,
        encoding: Encoding::Raw,
        image: ImageIndex(0),
        epoch: Epoch(4),
        tag: 5,
        range,
        zero_mask: [0; 4],
        payload_len: payload.len() as u32,
        hash: run_hash(ImageIndex(0), range, &[0; 4], payload),
    };
    (header, [&header.encode()[..], payload].concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_is_a_mismatch_and_the_stream_goes_on() {
    let (_, good) = frame(&[7; 8192]);
    let mut bad = good.clone();
    bad[5000] ^= 1;
    let (events, stats) = receive([bad, good].concat()).await;
    assert!(matches!(events[0], Event::Mismatch(header) if header.tag == 5), "{events:?}");
    assert!(matches!(events[1], Event::Run(header, _) if header.tag == 5), "{events:?}");
    assert!(matches!(events[2], Event::Ended(None)), "{events:?}");
    assert_eq!(stats.mismatches.load(Relaxed), 1);
}

/// `hello` offers `zstd` and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_describes_without_having_agreed_to_it_is_not_answered() {
    let (header, good) = frame(&[7; 65536]);
    let kind = FrameKind::Described;
    let header = FrameHeader { kind, payload_len: 32, range: BlockRange::new(16, 16), ..header };
    let described = [&header.encode()[..], &[7; 32]].concat();
    let (events, _) = receive([good, described].concat()).await;
    let [Event::Run(..), Event::Ended(Some(why))] = &events[..] else { panic!("{events:?}") };
    assert_eq!(why.kind, NetErrorKind::Protocol, "{why}");
    assert!(why.what.contains("'reuse' was not agreed"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_compression_is_a_mismatch() {
    let payload = vec![7; 8192];
    let (header, _) = frame(&payload);
    let zipped = |content: &[u8]| {
        let packed = zstd::bulk::compress(content, 1).unwrap();
        let payload_len = packed.len() as u32;
        let header = FrameHeader { encoding: Encoding::Zstd, payload_len, ..header };
        [&header.encode()[..], &packed].concat()
    };
    let nonsense = FrameHeader { encoding: Encoding::Zstd, payload_len: 64, ..header };
    let nonsense = [&nonsense.encode()[..], &[0xab; 64]].concat();
    // A bomb: decodes to far more than the header says.
    let bomb = zipped(&vec![7; 64 << 20]);
    let (events, _) =
        receive([zipped(&payload), zipped(&[7; 4096]), nonsense, bomb].concat()).await;
    let kinds: Vec<_> = events.iter().map(|event| matches!(event, Event::Mismatch(_))).collect();
    assert_eq!(kinds, [false, true, true, true, false], "{events:?}");
    assert!(matches!(events[0], Event::Run(..)) && matches!(events[4], Event::Ended(None)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_over_the_limits_and_torn_ones_end_the_stream() {
    let (header, good) = frame(&[7; 4096]);
    let range = BlockRange::new(0, 257);
    let oversize = FrameHeader { range, payload_len: 257 * 4096, ..header }.encode().to_vec();
    let lying = FrameHeader { payload_len: 1 << 30, ..header }.encode().to_vec();
    let zeros = BlockRange::new(0, u32::MAX.into());
    let zeros = FrameHeader { kind: FrameKind::Zero, range: zeros, payload_len: 0, ..header };
    for bytes in [oversize, lying, zeros.encode().to_vec(), vec![0; 80]] {
        let (events, _) = receive(bytes).await;
        let [Event::Ended(Some(why))] = &events[..] else { panic!("{events:?}") };
        assert_eq!(why.kind, NetErrorKind::Protocol, "{why}");
    }
    for torn in [&good[..40], &good[..80], &good[..2000]] {
        let (events, _) = receive(torn.to_vec()).await;
        assert!(matches!(&events[..], [Event::Ended(Some(_))]), "{events:?}");
    }
}

/// The sender hears that its stream is down, soon.
fn notices(session: &Session) {
    let began = Instant::now();
    loop {
        match session.next() {
            Event::LinkDown(why) => {
                assert!(why.to_string().contains("confirmed nothing for 2 s"), "{why}");
                break;
            }
            Event::Run(..) | Event::Ended(_) => {}
            other => panic!("{other:?}"),
        }
    }
    let took = began.elapsed();
    // Without a limit of its own it would take the kernel a quarter of an hour.
    assert!(took >= SILENCE && took < 20 * SILENCE, "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_waits_notices_that_its_packets_are_swallowed() {
    let session = Session::start(1, Pacer::new(None), None).await;
    session.queue.push(job(1, 0, BlockRange::new(0, 1)));
    tokio::task::block_in_place(|| {
        assert!(matches!(session.next(), Event::Run(..)));
        session.link.swallow();
        // It fits into the kernel's memory: nothing is left to be written.
        session.queue.push(job(2, 0, BlockRange::new(1, 1)));
        notices(&session);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_writes_notices_that_its_packets_are_swallowed() {
    let session = Session::start(1, Pacer::new(None), None).await;
    tokio::task::block_in_place(|| {
        session.link.swallow();
        (0..100).for_each(|tag| session.queue.push(job(tag, 0, BlockRange::new(0, 256))));
        notices(&session);
    });
}

/// Takes its time over the first run, as a slow disk does.
struct Slow(Arc<Ears>, Mutex<Option<Duration>>);

impl RunSink for Slow {
    fn run(&self, header: &FrameHeader, payload: &[u8]) {
        let nap = self.1.lock().unwrap().take();
        nap.into_iter().for_each(std::thread::sleep);
        self.0.run(header, payload);
    }
    fn zero(&self, header: &FrameHeader) {
        self.0.zero(header);
    }
    fn mismatch(&self, header: &FrameHeader) {
        self.0.mismatch(header);
    }
    fn ended(&self, why: Option<NetError>) {
        RunSink::ended(&*self.0, why);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_is_slow_to_read_is_waited_for() {
    let lab = Lab::new();
    let (mut stream, far) = lab.pair(StreamKind::Data).await;
    stream.limit_silence(Duration::from_secs(1));
    let (ears, heard) = Ears::new(false);
    let setup = one_stream(&ears);
    let slow = Arc::new(Slow(ears, Mutex::new(Some(Duration::from_secs(5)))));
    let receiver = DataReceiver::spawn(far, slow as _, Arc::default()).unwrap();
    // Several times what the kernel holds of a connection.
    (0..64).for_each(|tag| setup.queue.push(job(tag, 0, BlockRange::new(0, 256))));
    setup.queue.close();
    let sender = DataSender::spawn(stream, 0, setup).unwrap();
    tokio::task::block_in_place(|| {
        sender.join();
        receiver.join();
    });
    let events: Vec<_> = heard.try_iter().collect();
    let runs = events.iter().filter(|event| matches!(event, Event::Run(..))).count();
    assert_eq!((runs, events.len()), (64, 65), "{events:?}");
}

/// Who reads nothing would keep a thread, and the answer in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_takes_no_answer_is_not_waited_for_without_end() {
    let lab = Lab::new();
    let (stream, _far) = lab.pair(StreamKind::Store).await;
    let mut stream = stream.into_blocking().unwrap();
    stream.limit_waits(Duration::from_secs(1)).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(stream.write_both(&[], &vec![0; 32 << 20])));
    let written = tokio::task::block_in_place(|| told.recv_timeout(Duration::from_secs(30)));
    let why = written.expect("it is waited for").unwrap_err();
    assert_eq!(why.kind(), std::io::ErrorKind::TimedOut, "{why}");
}
