//! Whatever bytes a client sends: no panic, no hang, no answer outside the protocol.

use crate::buffer::Buffers;
use crate::channel::Channel;
use crate::connection::transmit;
use crate::inbound::Inbound;
use crate::negotiation::negotiate;
use crate::option::{OptionHeader, export_name, info_request, meta_request};
use crate::proto::{CHUNK_MAGIC, OPTION_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, cmd};
use crate::request::{Request, Rules};
use crate::session::Session;
use crate::tls::Tls;
use crate::writer::Writer;
use dray_image::{Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode};
use dray_serve::limits::OPEN_PATIENCE;
use dray_serve::{Client, Door, ExportError, ExportInfo, Exports};
use proptest::collection::vec;
use proptest::prelude::*;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LEN: u64 = 1 << 20;

/// A client whose bytes are known beforehand.
#[derive(Default)]
struct Script {
    input: Mutex<io::Cursor<Vec<u8>>>,
    output: Mutex<Vec<u8>>,
}

impl Script {
    fn new(input: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { input: Mutex::new(io::Cursor::new(input)), output: Mutex::default() })
    }
}

impl Channel for Script {
    fn receive(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.input.lock().unwrap().read_vectored(into)
    }

    fn send(&self, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut output = self.output.lock().unwrap();
        parts.iter().for_each(|part| output.extend_from_slice(part));
        Ok(())
    }

    fn receive_within(&self, _limit: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    fn cut(&self) {}
}

/// Zeros of a certain length that check what reaches them.
struct Zeros;

impl Zeros {
    fn check(offset: u64, len: u64) -> Result<()> {
        assert!(offset + len <= LEN, "the server must refuse what is outside");
        if offset.is_multiple_of(7) {
            Err(Error::new(ErrorKind::Io, "test", "at 7"))
        } else {
            Ok(())
        }
    }
}

impl Image for Zeros {
    fn geometry(&self) -> Geometry {
        Geometry { len: LEN, min_block: 1, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        buf.fill(0);
        Self::check(offset, buf.len() as u64)
    }

    fn write_at(&self, data: &[u8], offset: u64, _fua: bool) -> Result<()> {
        Self::check(offset, data.len() as u64)
    }

    fn zero(&self, offset: u64, len: u64, _mode: ZeroMode, _fua: bool) -> Result<()> {
        Self::check(offset, len)
    }

    fn discard(&self, offset: u64, len: u64, _fua: bool) -> Result<()> {
        Self::check(offset, len)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// Answers more than it was asked for, which must not reach the client.
    fn extents(&self, offset: u64, len: u64, _max: usize) -> Result<Vec<Extent>> {
        Self::check(offset, len)?;
        Ok(vec![Extent { len: len * 3, kind: ExtentKind::Hole }; 3])
    }
}

struct One;

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo::new("")]
    }

    fn open(&self, name: &str, _: &Client) -> std::result::Result<Arc<dyn Image>, ExportError> {
        if name.is_empty() { Ok(Arc::new(Zeros)) } else { Err(ExportError::unknown(name)) }
    }
}

fn be(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |n, b| n << 8 | u64::from(*b))
}

/// Splits what the server sent after a simple or structured request stream into final replies.
fn final_cookies(mut bytes: &[u8], structured: bool, reads: &[(u64, u32)]) -> Vec<u64> {
    let mut cookies = Vec::new();
    while !bytes.is_empty() {
        if be(bytes, 0, 4) == u64::from(SIMPLE_REPLY_MAGIC) {
            let (errno, cookie) = (be(bytes, 4, 4), be(bytes, 8, 8));
            let data = reads.iter().find(|(c, _)| *c == cookie && errno == 0 && !structured);
            bytes = &bytes[16 + data.map_or(0, |(_, len)| *len as usize)..];
            cookies.push(cookie);
        } else {
            assert_eq!(be(bytes, 0, 4), u64::from(CHUNK_MAGIC));
            assert!(structured);
            if be(bytes, 4, 2) & 1 == 1 {
                cookies.push(be(bytes, 8, 8));
            }
            bytes = &bytes[20 + be(bytes, 16, 4) as usize..];
        }
    }
    cookies.sort_unstable();
    cookies
}

fn option(option: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len, payload].concat()
}

fn payloads() -> impl Strategy<Value = Vec<u8>> {
    let named = |tail: Vec<u8>| [vec![0; 4], tail].concat();
    prop_oneof![
        Just(vec![]),
        vec(any::<u8>(), 0..60),
        vec(0u8..4, 0..60),
        vec(0u8..4, 0..40).prop_map(named),
        Just(b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation".to_vec()),
    ]
}

fn requests() -> impl Strategy<Value = Request> {
    let offset = prop_oneof![0..LEN, LEN - 5..LEN + 5, any::<u64>()];
    let len = prop_oneof![0u32..5000, 0u32..300_000, 67_108_860u32..67_108_870];
    let flags = prop_oneof![4 => Just(0u16), 2 => 0u16..64, 1 => any::<u16>()];
    let command = (0u16..10).prop_filter("the end", |c| *c != cmd::DISC);
    (flags, command, offset, len).prop_map(|(flags, command, offset, len)| {
        // Long payloads cost time and show nothing new.
        let len = if command == cmd::WRITE { len.min(300_000) } else { len };
        Request { flags, command, cookie: 0, offset, len }
    })
}

fn encode(request: &Request) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&request.flags.to_be_bytes());
    bytes.extend_from_slice(&request.command.to_be_bytes());
    bytes.extend_from_slice(&request.cookie.to_be_bytes());
    bytes.extend_from_slice(&request.offset.to_be_bytes());
    bytes.extend_from_slice(&request.len.to_be_bytes());
    bytes.resize(bytes.len() + request.payload() as usize, 0);
    bytes
}

fn session(channel: Arc<Script>, structured: bool) -> Arc<Session> {
    let rules = Rules {
        len: LEN,
        min_block: 1,
        read_only: false,
        structured,
        allocation: structured,
        fast_zero: true,
    };
    let writer = Writer::new(channel);
    let client = dray_image::Client::new(Arc::new(|| true));
    let buffers = Buffers::default();
    let closing = Arc::new(AtomicBool::new(false));
    Arc::new(Session { image: Arc::new(Zeros), client, rules, writer, buffers, closing })
}

/// Whether the negotiation ended in transmission, and what the server said.
fn talk(input: Vec<u8>) -> (io::Result<bool>, Vec<u8>) {
    let script = Script::new(input);
    let mut inbound = Inbound::new(Arc::clone(&script) as Arc<dyn Channel>);
    let door = Door::new(&One, Client::default(), OPEN_PATIENCE, &|_| false);
    let tls = (&Tls::Off, None);
    let end = negotiate(&mut inbound, door, tls, || false, |_| {}, |_| Some(()));
    let end = end.map(|end| end.is_some());
    let output = script.output.lock().unwrap().clone();
    (end, output)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn parsers_take_anything(bytes in vec(any::<u8>(), 0..200), small in vec(0u8..5, 0..200)) {
        for bytes in [&bytes, &small] {
            let _ = (info_request(bytes), meta_request(bytes), export_name(bytes));
            if let Some(head) = bytes.first_chunk() {
                prop_assert!(OptionHeader::parse(head).is_none());
            }
            if let Some(head) = bytes.first_chunk() {
                prop_assert!(Request::parse(head).is_none());
            }
        }
    }

    #[test]
    fn requests_survive_encoding(request in requests(), cookie: u64) {
        let request = Request { cookie, ..request };
        let bytes = encode(&request);
        prop_assert_eq!(Request::parse(bytes.first_chunk().unwrap()), Some(request));
    }

    #[test]
    fn negotiation_takes_anything(bytes in vec(any::<u8>(), 0..300)) {
        let _ = talk([vec![0, 0, 0, 3], bytes].concat());
    }

    #[test]
    fn every_option_is_answered(options in vec((3u32..14, payloads()), 0..20)) {
        let mut input = vec![0, 0, 0, 3];
        options.iter().for_each(|(number, payload)| input.extend(option(*number, payload)));
        let (end, output) = talk(input);
        prop_assert!(end.is_ok(), "a clean end of the stream is no error");
        if end.is_ok_and(|transmits| transmits) {
            return Ok(()); // Ended before the last option.
        }
        let mut rest = &output[18..];
        let mut answered = Vec::new();
        while !rest.is_empty() {
            let (number, kind) = (be(rest, 8, 4) as u32, be(rest, 12, 4));
            if kind == 1 || kind >> 31 == 1 {
                answered.push(number);
            }
            rest = &rest[20 + be(rest, 16, 4) as usize..];
        }
        prop_assert_eq!(answered, options.iter().map(|(n, _)| *n).collect::<Vec<_>>());
    }

    #[test]
    fn transmission_takes_anything(bytes in vec(any::<u8>(), 0..300), structured: bool) {
        let script = Script::new([REQUEST_MAGIC.to_be_bytes().to_vec(), bytes].concat());
        let inbound = Inbound::new(Arc::clone(&script) as Arc<dyn Channel>);
        let _ = transmit(inbound, session(script, structured), Arc::default(), |_| {});
    }

    #[test]
    fn every_request_is_answered_once(requests in vec(requests(), 0..25), structured: bool) {
        let mut input = Vec::new();
        let mut reads = Vec::new();
        for (cookie, request) in (0..).zip(&requests) {
            let request = Request { cookie, ..*request };
            input.extend(encode(&request));
            if request.command == cmd::READ {
                reads.push((cookie, request.len));
            }
        }
        let goodbye = Request { flags: 0, command: cmd::DISC, cookie: 0, offset: 0, len: 0 };
        input.extend(encode(&goodbye));
        let script = Script::new(input);
        let inbound = Inbound::new(Arc::clone(&script) as Arc<dyn Channel>);
        let session = session(Arc::clone(&script), structured);
        transmit(inbound, session, Arc::default(), |_| {}).unwrap();
        let output = script.output.lock().unwrap();
        let expected: Vec<u64> = (0..requests.len() as u64).collect();
        prop_assert_eq!(final_cookies(&output, structured, &reads), expected);
    }
}
