//! What the connection's thread and its workers share, and how each answers a request.

use crate::buffer::Buffers;
use crate::proto::Errno;
use crate::reply;
use crate::request::{Refusal, Rules};
use crate::writer::Writer;
use dray_image::{Client, Departure, ErrorKind, Image};
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One client's use of one image.
pub(crate) struct Session {
    pub image: Arc<dyn Image>,
    /// Whose use it is, as the image knows it.
    pub client: Arc<Client>,
    pub rules: Rules,
    pub writer: Writer,
    pub buffers: Buffers,
    /// Set when the server ends the connection.
    pub closing: Arc<AtomicBool>,
}

/// An error as the client gets it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub errno: Errno,
    pub why: String,
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { errno: refusal.errno, why: refusal.why.to_owned() }
    }
}

impl From<dray_image::Error> for Failure {
    fn from(error: dray_image::Error) -> Self {
        let errno = match error.kind {
            ErrorKind::OutOfRange | ErrorKind::Invalid => Errno::Inval,
            ErrorKind::ReadOnly => Errno::Perm,
            ErrorKind::NoSpace => Errno::NoSpace,
            ErrorKind::Io | ErrorKind::InUse | ErrorKind::NotFound | ErrorKind::Unavailable => {
                Errno::Io
            }
        };
        Self { errno, why: error.to_string() }
    }
}

impl Failure {
    /// A flush has failed.
    pub(crate) fn of_flush(error: &dray_image::Error) -> Self {
        let errno = match error.kind {
            ErrorKind::NoSpace => Errno::NoSpace,
            _ => Errno::Io,
        };
        Self { errno, why: error.to_string() }
    }

    /// The request has panicked.
    pub(crate) fn panicked() -> Self {
        Self { errno: Errno::Io, why: "internal error; see the server's log".to_owned() }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.ends(Departure::CutOff);
    }
}

impl Session {
    /// The client is about to send requests.
    pub(crate) fn begins(&self) {
        self.image.look_at(&self.client);
    }

    /// The client sends no more requests; the first call says how it has gone.
    pub(crate) fn ends(&self, how: Departure) {
        self.client.departs(how);
        self.image.look_at(&self.client);
    }

    /// Appends the answer to a request that succeeded and returns nothing.
    pub(crate) fn append_done(&self, out: &mut Vec<u8>, cookie: u64) {
        out.extend_from_slice(&reply::simple(cookie, None));
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Appends the answer to a request that failed. While the server leaves there is none: the
    /// failure may come of leaving, and an error reaches the guest, whereas a request without an
    /// answer is sent again. So it is of an image that is not this one's any more: the client is cut off.
    pub(crate) fn append_failure(&self, out: &mut Vec<u8>, cookie: u64, failure: &Failure) {
        if self.image.is_withdrawn() {
            self.closing.store(true, Ordering::Release);
            self.writer.cut();
        }
        if self.is_closing() {
            return;
        }
        if self.rules.structured {
            reply::error_chunk(out, cookie, failure.errno, &failure.why);
        } else {
            out.extend_from_slice(&reply::simple(cookie, Some(failure.errno)));
        }
    }

    /// Sends the answer to a request that returns nothing.
    pub(crate) fn send_outcome(&self, cookie: u64, outcome: Result<(), Failure>) -> io::Result<()> {
        let mut out = Vec::new();
        match outcome {
            Ok(()) => self.append_done(&mut out, cookie),
            Err(failure) => self.append_failure(&mut out, cookie, &failure),
        }
        self.writer.send(&mut [IoSlice::new(&out)])
    }
}
