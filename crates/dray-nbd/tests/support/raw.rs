//! A client of bare bytes: what it sends need not make sense.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const GO: u32 = 7;
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const ZEROES: u16 = 6;
pub const STATUS: u16 = 7;
pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const ONE: u16 = 8;
pub const FAST: u16 = 16;

/// An option reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub option: u32,
    pub kind: u32,
    pub payload: Vec<u8>,
}

/// A simple reply, or one chunk of a structured one.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    Simple { errno: u32, cookie: u64 },
    Chunk { last: bool, kind: u16, cookie: u64, payload: Vec<u8> },
}

impl Reply {
    pub fn cookie(&self) -> u64 {
        match self {
            Self::Simple { cookie, .. } | Self::Chunk { cookie, .. } => *cookie,
        }
    }

    /// The error number, zero for success.
    pub fn errno(&self) -> u32 {
        match self {
            Self::Simple { errno, .. } => *errno,
            Self::Chunk { kind, payload, .. } if kind >> 15 == 1 => {
                u32::from_be_bytes(payload[..4].try_into().unwrap())
            }
            Self::Chunk { .. } => 0,
        }
    }
}

/// A server that does not answer shall fail the test, not hang it.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Client {
    pub stream: UnixStream,
    /// Flags from the server's greeting.
    pub greeting: u16,
}

impl Client {
    /// Connects and takes the greeting; sends nothing.
    pub fn silent(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        Self { stream, greeting: u16::from_be_bytes([greeting[16], greeting[17]]) }
    }

    /// Connects and sends usual flags.
    pub fn connect(socket: &Path) -> Self {
        let mut client = Self::silent(socket);
        client.send(&3u32.to_be_bytes());
        client
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn take_u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    fn take_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    fn take_u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    /// Whether the server has hung up. Bytes it sent before are thrown away.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn send_option(&mut self, option: u32, payload: &[u8]) {
        self.send(b"IHAVEOPT");
        self.send(&option.to_be_bytes());
        self.send(&(payload.len() as u32).to_be_bytes());
        self.send(payload);
    }

    pub fn answer(&mut self) -> Answer {
        assert_eq!(self.take_u64(), 0x0003_e889_0455_65a9, "magic of an option reply");
        let (option, kind) = (self.take_u32(), self.take_u32());
        let len = self.take_u32();
        Answer { option, kind, payload: self.take(len as usize) }
    }

    /// Sends an option and takes all its answers up to the last.
    pub fn option(&mut self, option: u32, payload: &[u8]) -> Vec<Answer> {
        self.send_option(option, payload);
        let mut all = Vec::new();
        loop {
            let answer = self.answer();
            assert_eq!(answer.option, option);
            let last = answer.kind == 1 || answer.kind >> 31 == 1;
            all.push(answer);
            if last {
                return all;
            }
        }
    }

    /// The kind of the last answer to an option.
    pub fn verdict(&mut self, option: u32, payload: &[u8]) -> u32 {
        self.option(option, payload).last().unwrap().kind
    }

    /// Into transmission with simple replies.
    pub fn go_simple(mut self) -> Self {
        assert_eq!(self.verdict(GO, &info("", &[3])), 1);
        self
    }

    /// Into transmission with structured replies and block status.
    pub fn go_structured(mut self) -> Self {
        assert_eq!(self.verdict(8, &[]), 1);
        assert_eq!(self.verdict(10, &meta("", &["base:allocation"])), 1);
        self.go_simple()
    }

    pub fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request(flags, command, cookie, offset, len));
    }

    pub fn write(&mut self, flags: u16, cookie: u64, offset: u64, data: &[u8]) {
        let mut bytes = request(flags, WRITE, cookie, offset, data.len() as u32);
        bytes.extend_from_slice(data);
        self.send(&bytes);
    }

    /// The next reply; read data of a simple reply is left on the stream.
    pub fn reply(&mut self) -> Reply {
        let magic = self.take_u32();
        if magic == 0x6744_6698 {
            return Reply::Simple { errno: self.take_u32(), cookie: self.take_u64() };
        }
        assert_eq!(magic, 0x668e_33ef, "magic of a reply");
        let last = self.take_u16() & 1 == 1;
        let (kind, cookie) = (self.take_u16(), self.take_u64());
        let len = self.take_u32();
        Reply::Chunk { last, kind, cookie, payload: self.take(len as usize) }
    }

    /// A structured read from request to the last chunk.
    pub fn read(&mut self, flags: u16, offset: u64, len: u32) -> Vec<u8> {
        self.request(flags, READ, 77, offset, len);
        let mut data = vec![0xee; len as usize];
        loop {
            let Reply::Chunk { last, kind, cookie, payload } = self.reply() else {
                panic!("simple reply to a structured read")
            };
            assert_eq!((kind, cookie), (1, 77));
            let at = u64::from_be_bytes(payload[..8].try_into().unwrap()) - offset;
            data[at as usize..][..payload.len() - 8].copy_from_slice(&payload[8..]);
            if last {
                return data;
            }
            assert_eq!(flags & DF, 0, "a read that must not be fragmented was");
        }
    }
}

pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// The payload of INFO and GO.
pub fn info(name: &str, items: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend_from_slice(&(items.len() as u16).to_be_bytes());
    items.iter().for_each(|item| bytes.extend_from_slice(&item.to_be_bytes()));
    bytes
}

/// The payload of the metadata options.
pub fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| bytes.extend_from_slice(&string(query)));
    bytes
}
