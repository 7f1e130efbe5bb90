//! The smallest NBD client that does what a disk is asked to, one request at a time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const OPTION_ACK: u32 = 1;
const OPTION_INFO: u32 = 3;
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
/// Answer when it is durable.
const FORCED: u16 = 1;
/// Time between two looks at whether to go on waiting.
const PATIENCE: Duration = Duration::from_millis(20);

/// Reads, with the protocol's number.
pub const READ: u16 = 0;
/// Writes.
pub const WRITE: u16 = 1;
/// Says goodbye; has no reply.
pub const LEAVE: u16 = 2;
/// Makes durable.
pub const FLUSH: u16 = 3;
/// Discards.
pub const TRIM: u16 = 4;
/// Writes zeros.
pub const ZERO: u16 = 6;

/// A request.
pub struct Request<'a> {
    /// What it does.
    pub kind: u16,
    /// It is answered when it is durable.
    pub forced: bool,
    /// Where, in bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    /// What is written.
    pub data: &'a [u8],
}

/// A request that was not done.
#[derive(Debug)]
pub enum Fault {
    /// The connection is gone, or nobody wants to wait any longer: it may or may not be done.
    Lost,
    /// The guest would see this error.
    Error(u32),
}

/// A connection to an export.
pub struct Client {
    stream: UnixStream,
    cookie: u64,
}

impl Client {
    /// Connects to `export`. A server that does not greet within `greeting` is not there.
    ///
    /// # Errors
    /// What the system reports, or what the server says instead.
    pub fn connect(socket: &Path, export: &str, greeting: Duration) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(greeting))?;
        stream.read_exact(&mut [0; 18])?;
        let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPTION_GO.to_be_bytes());
        hello.extend((export.len() as u32 + 6).to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        hello.extend(0u16.to_be_bytes());
        stream.write_all(&hello)?;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header)?;
            let mut data = vec![0; word(&header, 16) as usize];
            stream.read_exact(&mut data)?;
            match word(&header, 12) {
                OPTION_ACK => break,
                OPTION_INFO => {}
                _ => return Err(io::Error::other(String::from_utf8_lossy(&data).into_owned())),
            }
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, cookie: 0 })
    }

    /// Does one request, and waits as long as `wait` says so. Returns what was read.
    ///
    /// # Errors
    /// When it was not done, or nobody knows.
    ///
    /// # Panics
    /// When what the server sends is not the reply to it.
    pub fn request(
        &mut self,
        request: &Request<'_>,
        wait: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, Fault> {
        self.send(request)?;
        let mut reply = [0; 16];
        self.receive(&mut reply, wait)?;
        assert_eq!(word(&reply, 0), REPLY_MAGIC, "no reply");
        assert_eq!(reply[8..], self.cookie.to_be_bytes(), "the reply to another request");
        match word(&reply, 4) {
            0 => {}
            error => return Err(Fault::Error(error)),
        }
        let mut answer = vec![0; if request.kind == READ { request.len as usize } else { 0 }];
        self.receive(&mut answer, wait)?;
        Ok(answer)
    }

    /// Sends a request and does not wait for a reply.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn send(&mut self, request: &Request<'_>) -> Result<(), Fault> {
        self.cookie += 1;
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(if request.forced { FORCED } else { 0 }.to_be_bytes());
        bytes.extend(request.kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(request.offset.to_be_bytes());
        bytes.extend(request.len.to_be_bytes());
        bytes.extend(request.data);
        self.stream.write_all(&bytes).map_err(|_| Fault::Lost)
    }

    fn receive(&mut self, buf: &mut [u8], wait: &dyn Fn() -> bool) -> Result<(), Fault> {
        let mut filled = 0;
        while filled < buf.len() {
            match self.stream.read(&mut buf[filled..]) {
                Ok(0) => return Err(Fault::Lost),
                Ok(count) => filled += count,
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if !wait() {
                        return Err(Fault::Lost);
                    }
                }
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Fault::Lost),
            }
        }
        Ok(())
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}
