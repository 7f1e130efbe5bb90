//! Requests that may wait: what a worker does with one. Blocks for as long as the image does.

use crate::buffer::Buffer;
use crate::limits::MAX_EXTENTS;
use crate::proto::Errno;
use crate::reply;
use crate::session::{Failure, Session};
use dray_image::{Extent, ZeroMode};
use std::io::{self, IoSlice};

/// Workers read this much at a time: long enough for a disk to be at its best, short enough that
/// sixteen workers' buffers stay small.
const PIECE: u32 = 1 << 20;

/// A request whose answer may have to wait.
pub(crate) struct Job {
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
    pub work: Work,
}

/// What is to be done.
pub(crate) enum Work {
    /// Read; `whole` when the answer must be one piece.
    Read { whole: bool },
    /// Write these bytes.
    Write { data: Buffer, fua: bool },
    /// Make zero.
    Zero { mode: ZeroMode, fua: bool },
    /// Give the space back.
    Discard { fua: bool },
    /// Bring the data close.
    Prefetch,
    /// Say what is where; only the first extent with `one`.
    Status { one: bool },
}

impl Job {
    /// Bytes of memory it holds or will hold.
    pub(crate) fn cost(&self) -> u64 {
        match self.work {
            Work::Read { whole: false } => u64::from(self.len.min(PIECE)),
            Work::Read { whole: true } | Work::Write { .. } => u64::from(self.len),
            _ => 0,
        }
    }

    /// Whether it changes the image.
    pub(crate) fn changes(&self) -> bool {
        matches!(self.work, Work::Write { .. } | Work::Zero { .. } | Work::Discard { .. })
    }

    /// Does it and sends the answer.
    ///
    /// # Errors
    /// The answer could not be sent; the connection is of no more use.
    pub(crate) fn run(self, session: &Session) -> io::Result<()> {
        let Self { cookie, offset, len, work } = self;
        let bytes = u64::from(len);
        let image = &session.image;
        let outcome = match work {
            Work::Read { whole } if session.rules.structured && !whole => {
                return read_in_pieces(session, cookie, offset, len);
            }
            Work::Read { .. } => return read_whole(session, cookie, offset, len),
            Work::Status { one } => return status(session, cookie, offset, len, one),
            Work::Write { data, fua } => {
                let outcome = image.write_at(&data, offset, fua);
                session.buffers.put(data);
                outcome
            }
            Work::Zero { mode, fua } => image.zero(offset, bytes, mode, fua),
            Work::Discard { fua } => image.discard(offset, bytes, fua),
            Work::Prefetch => image.prefetch(offset, bytes),
        };
        session.send_outcome(cookie, outcome.map_err(Failure::from))
    }
}

fn read_whole(session: &Session, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
    let mut data = session.buffers.get(len as usize);
    if let Err(error) = session.image.read_at(&mut data, offset) {
        session.buffers.put(data);
        return session.send_outcome(cookie, Err(error.into()));
    }
    let sent = if session.rules.structured {
        let header = reply::data_chunk(cookie, offset, len, true);
        session.writer.send(&mut [IoSlice::new(&header), IoSlice::new(&data)])
    } else {
        let header = reply::simple(cookie, None);
        session.writer.send(&mut [IoSlice::new(&header), IoSlice::new(&data)])
    };
    session.buffers.put(data);
    sent
}

fn read_in_pieces(session: &Session, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
    let mut data = session.buffers.get(len.min(PIECE) as usize);
    let mut done = 0;
    let mut result = Ok(());
    while done < len && result.is_ok() {
        let now = PIECE.min(len - done);
        let at = offset + u64::from(done);
        let piece = &mut data[..now as usize];
        if let Err(error) = session.image.read_at(piece, at) {
            result = session.send_outcome(cookie, Err(error.into()));
            break;
        }
        done += now;
        let header = reply::data_chunk(cookie, at, now, done == len);
        result = session.writer.send(&mut [IoSlice::new(&header), IoSlice::new(piece)]);
    }
    session.buffers.put(data);
    result
}

fn status(session: &Session, cookie: u64, offset: u64, len: u32, one: bool) -> io::Result<()> {
    let max = if one { 1 } else { MAX_EXTENTS };
    let mut out = Vec::new();
    match session.image.extents(offset, u64::from(len), max) {
        Ok(found) => {
            let extents = within(found, u64::from(len), max);
            if extents.is_empty() {
                let why = "the image did not say what the range holds".to_owned();
                session.append_failure(&mut out, cookie, &Failure { errno: Errno::Io, why });
            } else {
                reply::status_chunk(&mut out, cookie, &extents);
            }
        }
        Err(error) => session.append_failure(&mut out, cookie, &error.into()),
    }
    session.writer.send(&mut [IoSlice::new(&out)])
}

/// At most `max` of `extents`, none empty, together no longer than `len`: clients treat anything
/// else as a broken server.
fn within(extents: Vec<Extent>, len: u64, max: usize) -> Vec<Extent> {
    let mut left = len;
    let cut = extents.into_iter().map(move |extent| {
        let len = extent.len.min(left);
        left -= len;
        Extent { len, ..extent }
    });
    cut.filter(|extent| extent.len > 0).take(max).collect()
}
