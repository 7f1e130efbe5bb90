//! The target's end of a data stream: reads frames, checks them, hands runs on.
//!
//! Nothing is believed: lengths are bounded by the header's own check, compressed data by what the
//! header says it decodes to, content by its hash (I3, I7). Whether the image has such blocks, and
//! whether the epoch is right, is the sink's business.

use crate::error::{NetError, NetErrorKind};
use crate::stats::NetStats;
use crate::stream::{BlockingStream, Closer, Stream};
use crate::zeros::RunBuffer;
use dray_types::MAX_RUN_BLOCKS;
use dray_wire::control::FEATURE_REUSE;
use dray_wire::frame::{HEADER_LEN, MAX_PAYLOAD};
use dray_wire::{Encoding, FrameHeader, FrameKind};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

/// Where runs go. Called on the stream's thread, which reads no further until it returns: a sink
/// that is slow slows its sender down.
pub trait RunSink: Send + Sync {
    /// A run whose hash matched; `payload` holds its non-zero blocks in order.
    fn run(&self, header: &FrameHeader, payload: &[u8]);
    /// A range of zeros.
    fn zero(&self, header: &FrameHeader);
    /// A run that did not match its hash; it must be asked for again.
    fn mismatch(&self, header: &FrameHeader);
    /// A described run: `hashes` are those of its pieces that are not all zeros, in order. A sink
    /// that looks nothing up says that it did not match: it then comes as data.
    fn described(&self, header: &FrameHeader, hashes: &[u8]) {
        let _ = hashes;
        self.mismatch(header);
    }
    /// Described blocks: `hashes` are those of the blocks that are not all zeros, in order.
    fn described_blocks(&self, header: &FrameHeader, hashes: &[u8]) {
        let _ = hashes;
        self.mismatch(header);
    }
    /// A part of a run: `payload` holds the blocks that are not in the mask, in order.
    fn part(&self, header: &FrameHeader, payload: &[u8]) {
        let _ = payload;
        self.mismatch(header);
    }
    /// The stream ended; `None` when the peer finished it in order.
    fn ended(&self, why: Option<NetError>);
}

/// A running receiver thread.
#[derive(Debug)]
pub struct DataReceiver {
    thread: Option<JoinHandle<()>>,
    closer: Closer,
}

impl DataReceiver {
    /// Starts a thread that reads the frames of `stream`.
    ///
    /// # Errors
    /// `Local` when no thread can be started.
    pub fn spawn(
        mut stream: Stream,
        sink: Arc<dyn RunSink>,
        stats: Arc<NetStats>,
    ) -> Result<Self, NetError> {
        stream.count_into(&stats);
        let reuses = stream.agreed(FEATURE_REUSE);
        let stream = stream.into_blocking()?;
        let closer = stream.closer();
        let local =
            |why: io::Error| NetError::new(NetErrorKind::Local, format!("start a receiver: {why}"));
        let work = Reader {
            stream,
            reuses,
            sink,
            stats,
            run: RunBuffer::new(MAX_RUN_BLOCKS),
            packed: vec![0; MAX_PAYLOAD as usize],
            zstd: zstd::bulk::Decompressor::new().map_err(local)?,
        };
        let thread = std::thread::Builder::new()
            .name("dray-receive".to_owned())
            .spawn(move || work.run())
            .map_err(local)?;
        Ok(Self { thread: Some(thread), closer })
    }

    /// Breaks the connection off; the thread ends.
    pub fn close(&self) {
        self.closer.close();
    }

    /// Waits until the thread has ended.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic was already printed by the thread, and told to the sink.
            let _ = thread.join();
        }
    }
}

struct Reader {
    stream: BlockingStream,
    /// The peer may describe content.
    reuses: bool,
    sink: Arc<dyn RunSink>,
    stats: Arc<NetStats>,
    run: RunBuffer,
    packed: Vec<u8>,
    zstd: zstd::bulk::Decompressor<'static>,
}

impl Reader {
    fn run(mut self) {
        let _guard = PanicIsEnd(Arc::clone(&self.sink));
        loop {
            match self.frame() {
                Ok(true) => {}
                Ok(false) => return self.sink.ended(None),
                Err(why) => return self.sink.ended(Some(why.doing("data stream"))),
            }
        }
    }

    /// A description asks whether content is here: only a peer with which that was agreed may ask.
    fn check_agreed(&self, kind: FrameKind) -> Result<(), NetError> {
        let asks = match kind {
            FrameKind::Run | FrameKind::Zero => false,
            FrameKind::Described | FrameKind::DescribedBlocks | FrameKind::Part => true,
        };
        if asks && !self.reuses {
            let what = format!("the peer describes content, but '{FEATURE_REUSE}' was not agreed");
            return Err(NetError::new(NetErrorKind::Protocol, what));
        }
        Ok(())
    }

    /// Reads and hands on one frame; `false` at the end.
    fn frame(&mut self) -> Result<bool, NetError> {
        let mut bytes = [0; HEADER_LEN];
        if !self.read(&mut bytes)? {
            return Ok(false);
        }
        let header = FrameHeader::decode(&bytes)?;
        self.check_agreed(header.kind)?;
        self.stats.frames.fetch_add(1, Relaxed);
        match header.kind {
            FrameKind::Zero => {
                self.stats.zero_blocks.fetch_add(header.range.len, Relaxed);
                self.finish(&header, 0);
            }
            _ => {
                let decoded = self.payload(&header)?;
                self.finish(&header, decoded);
            }
        }
        Ok(true)
    }

    fn read(&mut self, out: &mut [u8]) -> Result<bool, NetError> {
        let peer = self.stream.peer().to_owned();
        self.stream.read_all_or_end(out).map_err(|why| crate::tls::translate(why, &peer))
    }

    /// Reads the payload and decodes it; the number of decoded bytes, fewer when it is no good.
    fn payload(&mut self, header: &FrameHeader) -> Result<usize, NetError> {
        let (len, decoded) = (header.payload_len as usize, header.decoded_len());
        let into = match header.encoding {
            Encoding::Raw => self.run.bytes(len),
            Encoding::Zstd => &mut self.packed[..len],
        };
        let read = self.stream.read_all_or_end(into);
        let whole = read.map_err(|why| crate::tls::translate(why, self.stream.peer()))?;
        if !whole && len > 0 {
            let what = "the peer finished in the middle of a run";
            return Err(NetError::new(NetErrorKind::Protocol, what));
        }
        let stats = &self.stats;
        if header.kind.is_described() {
            return Ok(len);
        }
        let data = header.data_blocks();
        stats.data_blocks.fetch_add(data, Relaxed);
        if header.kind == FrameKind::Run {
            stats.zero_blocks.fetch_add(header.range.len - data, Relaxed);
        }
        if header.encoding == Encoding::Raw {
            stats.raw_bytes.fetch_add(len as u64, Relaxed);
            return Ok(len);
        }
        stats.compressed_in.fetch_add(decoded as u64, Relaxed);
        stats.compressed_out.fetch_add(len as u64, Relaxed);
        let out = self.run.bytes(decoded);
        // What does not decode, or not to the right length, is a mismatch like any other.
        Ok(self.zstd.decompress_to_buffer(&self.packed[..len], out).unwrap_or(0))
    }

    fn finish(&mut self, header: &FrameHeader, decoded: usize) {
        let payload = self.run.bytes(decoded);
        if header.verify(payload).is_err() {
            self.stats.mismatches.fetch_add(1, Relaxed);
            return self.sink.mismatch(header);
        }
        match header.kind {
            FrameKind::Run => self.sink.run(header, payload),
            FrameKind::Zero => self.sink.zero(header),
            FrameKind::Described => self.sink.described(header, payload),
            FrameKind::DescribedBlocks => self.sink.described_blocks(header, payload),
            FrameKind::Part => self.sink.part(header, payload),
        }
    }
}

/// Reports a receiver that panicked, so that its session does not wait for it for ever.
struct PanicIsEnd(Arc<dyn RunSink>);

impl Drop for PanicIsEnd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = NetError::new(NetErrorKind::Local, "a data stream's receiver panicked");
            self.0.ended(Some(why));
        }
    }
}
