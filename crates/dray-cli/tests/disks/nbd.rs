//! A guest's connection to an export, one request at a time.

use dray_guest::nbd::{self, Request};
pub use dray_guest::nbd::{FLUSH, Fault, LEAVE, READ, TRIM, WRITE, ZERO};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// An agent that does not greet within this time is not there.
const GREETING: Duration = Duration::from_secs(2);

/// A connection to an export.
pub struct Client(nbd::Client);

impl Client {
    /// Connects to `export`.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        nbd::Client::connect(socket, export, GREETING).map(Self)
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
        self.0.request(&Request { kind, forced: false, offset, len, data }, wait)
    }

    /// Makes what was written durable.
    pub fn flush(&mut self) -> Result<(), Fault> {
        self.request(FLUSH, 0, 0, &[], &|| true).map(drop)
    }

    /// Sends a last request, whose reply nobody reads. With `LEAVE` the client is then gone in good order.
    pub fn last(&mut self, kind: u16) {
        let last = Request { kind, forced: false, offset: 0, len: 0, data: &[] };
        self.0.send(&last).expect("a connection");
    }
}

/// How long something has taken, for messages.
pub fn seconds(since: Instant) -> String {
    format!("{:.1} s", since.elapsed().as_secs_f64())
}
