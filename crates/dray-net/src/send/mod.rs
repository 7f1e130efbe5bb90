//! The source's end of a data stream: takes jobs, reads runs, makes frames, writes them.
//!
//! One thread per stream. A run is read into the memory that is written from; the only copies are
//! the kernel's, the cipher's, and the moving together of blocks when some are zeros.

mod described;

use crate::compress::Chooser;
use crate::error::{NetError, NetErrorKind};
use crate::pace::Pacer;
use crate::queue::{JobQueue, SendJob, SendKind};
use crate::stats::NetStats;
use crate::stream::{BlockingStream, Closer, Stream};
use crate::zeros::{RunBuffer, squeeze};
use dray_types::{BlockRange, ImageIndex, MAX_RUN_BLOCKS};
use dray_wire::frame::{MAX_PAYLOAD, MAX_ZERO_BLOCKS, frame_hash, run_hash};
use dray_wire::{Encoding, FrameHeader, FrameKind};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// zstd's level: the fastest one, which finds most of what there is in disk images.
const LEVEL: i32 = 1;
/// Bytes of a frame and of TLS round it, for the budget: header, and 22 bytes a record.
const RECORD: u64 = 16 * 1024;
const RECORD_EXTRA: u64 = 22;

/// Where the content of images comes from.
pub trait RunSource: Send + Sync {
    /// Fills `buf` with the content of `range`; every byte or an error.
    ///
    /// # Errors
    /// What the disk said.
    fn read(&self, image: ImageIndex, range: BlockRange, buf: &mut [u8]) -> io::Result<()>;
}

/// What the owner of a session hears from its data streams. Called on their threads: must not block.
pub trait SendEvents: Send + Sync {
    /// The frame of this job was handed to the kernel.
    fn sent(&self, job: &SendJob) {
        let _ = job;
    }
    /// The blocks of a job could not be read; nothing was sent.
    fn unreadable(&self, job: &SendJob, why: io::Error);
    /// A data stream broke. Said once for all streams of a queue.
    fn link_down(&self, why: NetError);
}

/// Whether runs may be compressed.
#[derive(Clone, Debug)]
pub enum Compression {
    /// Never.
    Off,
    /// When it was measured to pay; shared by all streams and sessions of a migration.
    Measured(Arc<Mutex<Chooser>>),
}

impl Compression {
    /// Measures from the beginning.
    pub fn measured() -> Self {
        Self::Measured(Arc::default())
    }

    fn chooser<R>(&self, ask: impl FnOnce(&mut Chooser) -> R) -> Option<R> {
        match self {
            Self::Off => None,
            Self::Measured(chooser) => Some(ask(&mut chooser.lock())),
        }
    }
}

/// What the data streams of a session share.
#[derive(Clone)]
pub struct SendSetup {
    /// Where jobs come from.
    pub queue: Arc<JobQueue>,
    /// Where content comes from.
    pub source: Arc<dyn RunSource>,
    /// Who hears what happens.
    pub events: Arc<dyn SendEvents>,
    /// The migration's budget.
    pub pacer: Arc<Pacer>,
    /// The migration's counters.
    pub stats: Arc<NetStats>,
    /// Whether to compress.
    pub compression: Compression,
    /// Number of data streams of the session.
    pub streams: usize,
}

/// A running sender thread.
#[derive(Debug)]
pub struct DataSender {
    thread: Option<JoinHandle<()>>,
    closer: Closer,
}

impl DataSender {
    /// Starts a thread that sends the queue's jobs over `stream`, which is number `index` of the
    /// session. It ends when the queue is closed and empty, or when a stream of the queue broke.
    ///
    /// # Errors
    /// `Local` when no thread can be started.
    pub fn spawn(mut stream: Stream, index: usize, setup: SendSetup) -> Result<Self, NetError> {
        stream.count_into(&setup.stats);
        let stream = stream.into_blocking()?;
        let closer = stream.closer();
        let local = |why: std::io::Error| {
            NetError::new(NetErrorKind::Local, format!("start a sender: {why}"))
        };
        let work = Worker::new(stream, index, setup).map_err(local)?;
        let thread = std::thread::Builder::new()
            .name(format!("dray-send-{index}"))
            .spawn(move || work.run())
            .map_err(local)?;
        Ok(Self { thread: Some(thread), closer })
    }

    /// Breaks the connection off; the thread ends with a `link_down` unless it was done.
    pub fn close(&self) {
        self.closer.close();
    }

    /// Waits until the thread has ended.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic was already printed by the thread; the queue knows that the link is down.
            let _ = thread.join();
        }
    }
}

/// Why a job was not sent.
enum Failed {
    Unreadable(io::Error),
    Link(io::Error),
}

/// A job that no honest engine makes.
fn refused(why: String) -> Failed {
    Failed::Unreadable(io::Error::new(io::ErrorKind::InvalidInput, why))
}

struct Worker {
    stream: BlockingStream,
    index: usize,
    setup: SendSetup,
    run: RunBuffer,
    packed: Vec<u8>,
    zstd: zstd::bulk::Compressor<'static>,
}

/// A frame's payload: where it lies and how it is encoded.
struct Payload {
    encoding: Encoding,
    len: usize,
}

impl Worker {
    fn new(stream: BlockingStream, index: usize, setup: SendSetup) -> io::Result<Self> {
        Ok(Self {
            stream,
            index,
            setup,
            run: RunBuffer::new(MAX_RUN_BLOCKS),
            packed: vec![0; MAX_PAYLOAD as usize],
            zstd: zstd::bulk::Compressor::new(LEVEL)?,
        })
    }

    fn run(mut self) {
        let guard = PanicIsLinkDown(self.setup.clone());
        let (queue, pacer) = (Arc::clone(&self.setup.queue), Arc::clone(&self.setup.pacer));
        loop {
            let look = || self.stream.look();
            let job = match queue.pop(self.index, self.setup.streams, &pacer, look) {
                Ok(Some(job)) => job,
                Ok(None) => break,
                Err(why) => return self.broken(why),
            };
            match self.send(&job) {
                Ok(()) => self.setup.events.sent(&job),
                Err(Failed::Unreadable(why)) => self.setup.events.unreadable(&job, why),
                Err(Failed::Link(why)) => return self.broken(why),
            }
        }
        if let Err(why) = self.stream.finish() {
            self.broken(why);
        }
        drop(guard);
    }

    fn broken(&self, why: io::Error) {
        if self.setup.queue.break_off() {
            let why = crate::tls::translate(why, self.stream.peer());
            self.setup.events.link_down(why.doing("data stream"));
        }
    }

    fn send(&mut self, job: &SendJob) -> Result<(), Failed> {
        match job.kind {
            SendKind::Zero => self.send_zeros(job),
            SendKind::Run => self.send_run(job),
            SendKind::Described { keep } => self.describe(job, keep),
            SendKind::Kept(of) => self.send_kept(job, of),
            SendKind::DescribedBlocks(of) => self.describe_blocks(job, of),
            SendKind::Part { of, blocks } => self.send_part(job, of, blocks),
        }
    }

    fn send_zeros(&mut self, job: &SendJob) -> Result<(), Failed> {
        for range in job.range.pieces(MAX_ZERO_BLOCKS) {
            let header = FrameHeader {
                kind: FrameKind::Zero,
                encoding: Encoding::Raw,
                image: job.image,
                epoch: job.epoch,
                tag: job.tag,
                range,
                zero_mask: [0; 4],
                payload_len: 0,
                hash: run_hash(job.image, range, &[0; 4], &[]),
            };
            self.write(job, &header, Encoding::Raw, 0)?;
            self.setup.stats.zero_blocks.fetch_add(range.len, Relaxed);
        }
        Ok(())
    }

    fn send_run(&mut self, job: &SendJob) -> Result<(), Failed> {
        if job.range.is_empty() || job.range.len > MAX_RUN_BLOCKS {
            return Err(refused(format!("a run of {} blocks cannot be sent", job.range.len)));
        }
        let began = Instant::now();
        self.read(job)?;
        self.send_content(job, began)
    }

    fn read(&mut self, job: &SendJob) -> Result<(), Failed> {
        let bytes = self.run.bytes(job.range.byte_len() as usize);
        self.setup.source.read(job.image, job.range, bytes).map_err(Failed::Unreadable)
    }

    fn send_content(&mut self, job: &SendJob, began: Instant) -> Result<(), Failed> {
        let bytes = self.run.bytes(job.range.byte_len() as usize);
        let (zero_mask, kept) = squeeze(bytes);
        self.send_squeezed(job, FrameKind::Run, zero_mask, kept, began)
    }

    /// Sends a frame of the blocks that are not in the mask, which lie together at the front.
    fn send_squeezed(
        &mut self,
        job: &SendJob,
        kind: FrameKind,
        zero_mask: [u64; 4],
        kept: usize,
        began: Instant,
    ) -> Result<(), Failed> {
        let content = self.run.bytes(kept);
        let hash = frame_hash(kind, job.image, job.range, &zero_mask, content);
        let payload = self.pack(kept);
        let header = FrameHeader {
            kind,
            encoding: payload.encoding,
            image: job.image,
            epoch: job.epoch,
            tag: job.tag,
            range: job.range,
            zero_mask,
            payload_len: payload.len as u32,
            hash,
        };
        let made = began.elapsed();
        let writing = self.write(job, &header, payload.encoding, payload.len)?;
        if payload.len > 0 {
            let packed = payload.encoding == Encoding::Zstd;
            let note = |c: &mut Chooser| c.written(payload.len, packed, made, writing);
            let _ = self.setup.compression.chooser(note);
        }
        self.count(&header, kept);
        Ok(())
    }

    /// Compresses the first `len` bytes of the run if that pays and makes them fewer.
    fn pack(&mut self, len: usize) -> Payload {
        let raw = Payload { encoding: Encoding::Raw, len };
        if len == 0 || self.setup.compression.chooser(Chooser::compress_next) != Some(true) {
            return raw;
        }
        let began = Instant::now();
        // No room for the result means that it would not be shorter.
        let room = &mut self.packed[..len - 1];
        let packed = self.zstd.compress_to_buffer(self.run.bytes(len), room);
        let size = packed.as_ref().copied().unwrap_or(len);
        let _ = self.setup.compression.chooser(|c| c.compressed(len, size, began.elapsed()));
        match packed {
            Ok(len) => Payload { encoding: Encoding::Zstd, len },
            Err(_) => raw,
        }
    }

    fn write(
        &mut self,
        job: &SendJob,
        header: &FrameHeader,
        encoding: Encoding,
        len: usize,
    ) -> Result<Duration, Failed> {
        let bytes = header.encode();
        let wire = (bytes.len() + len) as u64;
        let wire = wire + wire.div_ceil(RECORD) * RECORD_EXTRA;
        if job.urgent {
            self.setup.pacer.charge_urgent(wire);
            self.setup.stats.urgent_frames.fetch_add(1, Relaxed);
        } else {
            self.setup.pacer.charge(wire);
        }
        self.setup.stats.frames.fetch_add(1, Relaxed);
        let began = Instant::now();
        let payload = match encoding {
            Encoding::Raw => self.run.bytes(len),
            Encoding::Zstd => &mut self.packed[..len],
        };
        self.stream.write_both(&bytes, payload).map_err(Failed::Link)?;
        Ok(began.elapsed().max(self.setup.pacer.ready_in(crate::bucket::Class::Bulk)))
    }

    fn count(&self, header: &FrameHeader, kept: usize) {
        let stats = &self.setup.stats;
        let data = header.data_blocks();
        stats.data_blocks.fetch_add(data, Relaxed);
        if header.kind == FrameKind::Run {
            stats.zero_blocks.fetch_add(header.range.len - data, Relaxed);
        }
        match header.encoding {
            Encoding::Raw => {
                stats.raw_bytes.fetch_add(kept as u64, Relaxed);
            }
            Encoding::Zstd => {
                stats.compressed_in.fetch_add(kept as u64, Relaxed);
                stats.compressed_out.fetch_add(header.payload_len.into(), Relaxed);
            }
        }
    }
}

/// Reports a sender that panicked, so that its session does not wait for it for ever.
struct PanicIsLinkDown(SendSetup);

impl Drop for PanicIsLinkDown {
    fn drop(&mut self) {
        if std::thread::panicking() && self.0.queue.break_off() {
            let why = NetError::new(NetErrorKind::Local, "a data stream's sender panicked");
            self.0.events.link_down(why);
        }
    }
}
