//! The smallest NBD client that can do what a guest's disk does, one request at a time.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const OPTION_ACK: u32 = 1;
const OPTION_INFO: u32 = 3;
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
/// Time between two looks at whether to go on waiting.
const PATIENCE: Duration = Duration::from_millis(20);
/// A server that does not greet within this time is not there.
const GREETING: Duration = Duration::from_secs(2);

/// Reads, with the protocol's number.
pub const READ: u16 = 0;
/// Writes.
pub const WRITE: u16 = 1;
/// Makes durable.
pub const FLUSH: u16 = 3;
/// Discards.
pub const TRIM: u16 = 4;
/// Writes zeros.
pub const ZERO: u16 = 6;

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
    /// Connects to `export`.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(GREETING))?;
        stream.read_exact(&mut [0; 18])?;
        stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
        let mut go = Vec::new();
        go.extend((export.len() as u32).to_be_bytes());
        go.extend(export.as_bytes());
        go.extend(0u16.to_be_bytes());
        let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((go.len() as u32).to_be_bytes());
        option.extend(go);
        stream.write_all(&option)?;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header)?;
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let mut data = vec![0; word(16) as usize];
            stream.read_exact(&mut data)?;
            match word(12) {
                OPTION_ACK => break,
                OPTION_INFO => {}
                _ => return Err(io::Error::other(String::from_utf8_lossy(&data).into_owned())),
            }
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, cookie: 0 })
    }

    /// Does one request; `data` is what is written. Waits as long as `wait` says so.
    pub fn request(
        &mut self,
        kind: u16,
        offset: u64,
        len: u32,
        data: &[u8],
        wait: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, Fault> {
        self.cookie += 1;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request).map_err(|_| Fault::Lost)?;
        let mut header = [0; 16];
        self.receive(&mut header, wait)?;
        assert_eq!(header[..4], REPLY_MAGIC.to_be_bytes(), "no reply");
        assert_eq!(header[8..], self.cookie.to_be_bytes(), "the reply to another request");
        match u32::from_be_bytes(header[4..8].try_into().unwrap()) {
            0 => {}
            error => return Err(Fault::Error(error)),
        }
        let mut answer = vec![0; if kind == READ { len as usize } else { 0 }];
        self.receive(&mut answer, wait)?;
        Ok(answer)
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

/// How long something has taken, for messages.
pub fn seconds(since: Instant) -> String {
    format!("{:.1} s", since.elapsed().as_secs_f64())
}
