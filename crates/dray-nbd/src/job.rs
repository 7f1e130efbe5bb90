//! Requests that may wait: what a worker does with one. Blocks for as long as the image does.

use crate::buffer::Buffer;
use crate::limits::{JOB_PIECE, MAX_EXTENTS};
use crate::proto::Errno;
use crate::reply;
use crate::session::{Failure, Session};
use dray_image::{Client, Extent, Image, ZeroMode};
use dray_serve::Flushed;
use parking_lot::Mutex;
use std::io::{self, IoSlice};
use std::sync::Arc;

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
    /// Write these bytes; with `parts`, they are not all of their request.
    Write { data: Buffer, fua: bool, parts: Option<Arc<Parts>> },
    /// Make zero.
    Zero { mode: ZeroMode, fua: bool },
    /// Give the space back.
    Discard { fua: bool },
    /// Bring the data close.
    Prefetch,
    /// Say what is where; only the first extent with `one`.
    Status { one: bool },
}

/// A write that is done in several jobs. It is answered when the last of them has ended, with the
/// first failure if there was one.
pub(crate) struct Parts(Mutex<(u32, Option<Failure>)>);

impl Parts {
    /// A write in `count` parts.
    pub(crate) fn new(count: u32) -> Arc<Self> {
        Arc::new(Self(Mutex::new((count, None))))
    }

    /// One part has ended. The outcome of all is returned with the last.
    fn ended(&self, outcome: Result<(), Failure>) -> Option<Result<(), Failure>> {
        let mut state = self.0.lock();
        let (left, failure) = &mut *state;
        *left -= 1;
        if let Err(why) = outcome {
            failure.get_or_insert(why);
        }
        (*left == 0).then(|| failure.take().map_or(Ok(()), Err))
    }
}

/// Where the outcome of a job goes.
pub(crate) struct Outlet {
    cookie: u64,
    parts: Option<Arc<Parts>>,
}

impl Outlet {
    /// Sends the outcome, if it is the request's last.
    pub(crate) fn send(self, session: &Session, outcome: Result<(), Failure>) -> io::Result<()> {
        let whole = match &self.parts {
            Some(parts) => parts.ended(outcome),
            None => Some(outcome),
        };
        whole.map_or(Ok(()), |outcome| session.send_outcome(self.cookie, outcome))
    }
}

impl dray_serve::Session for Session {
    type Job = Job;

    fn image(&self) -> &dyn Image {
        &*self.image
    }

    fn client(&self) -> &Arc<Client> {
        &self.client
    }

    fn is_closing(&self) -> bool {
        Session::is_closing(self)
    }

    fn flushed(&self, cookie: u64, outcome: Flushed<'_>) {
        let outcome = match outcome {
            Some(outcome) => outcome.map_err(Failure::of_flush),
            None => Err(Failure::panicked()),
        };
        // A failed send needs no handling: the writer stays broken and the connection's thread finds the end.
        let _ = self.send_outcome(cookie, outcome);
    }
}

impl dray_serve::Job<Session> for Job {
    type Outlet = Outlet;

    fn cost(&self) -> u64 {
        match self.work {
            Work::Read { .. } | Work::Write { .. } => u64::from(self.len.min(JOB_PIECE)),
            _ => 0,
        }
    }

    fn changes(&self) -> bool {
        matches!(self.work, Work::Write { .. } | Work::Zero { .. } | Work::Discard { .. })
    }

    fn outlet(&self) -> Outlet {
        let parts = match &self.work {
            Work::Write { parts, .. } => parts.clone(),
            _ => None,
        };
        Outlet { cookie: self.cookie, parts }
    }

    fn run(self, session: &Session) {
        // A failed send needs no handling: the writer stays broken and the connection's thread finds the end.
        let _ = self.answer(session);
    }

    fn panicked(outlet: Outlet, session: &Session) {
        // As in `run`.
        let _ = outlet.send(session, Err(Failure::panicked()));
    }
}

impl Job {
    /// Does it and sends the answer.
    ///
    /// # Errors
    /// The answer could not be sent; the connection is of no more use.
    fn answer(self, session: &Session) -> io::Result<()> {
        let outlet = dray_serve::Job::outlet(&self);
        let Self { cookie, offset, len, work } = self;
        let bytes = u64::from(len);
        let image = &session.image;
        let outcome = match work {
            Work::Read { whole } if session.rules.structured && !whole => {
                return read_in_pieces(session, cookie, offset, len);
            }
            Work::Read { .. } if len > JOB_PIECE => {
                return read_twice(session, cookie, offset, len);
            }
            Work::Read { .. } => return read_whole(session, cookie, offset, len),
            Work::Status { one } => return status(session, cookie, offset, len, one),
            Work::Write { data, fua, .. } => {
                let outcome = image.write_at(&data, offset, fua);
                session.buffers.put(data);
                outcome
            }
            Work::Zero { mode, fua } => image.zero(offset, bytes, mode, fua),
            Work::Discard { fua } => image.discard(offset, bytes, fua),
            Work::Prefetch => image.prefetch(offset, bytes),
        };
        outlet.send(session, outcome.map_err(Failure::from))
    }
}

/// Room for the longest header before data.
type Header = [u8; reply::DATA_CHUNK_LEN];

/// Writes the header before the data of an answer in one piece into `room`.
fn whole_header<'a>(
    session: &Session,
    cookie: u64,
    (offset, len): (u64, u32),
    room: &'a mut Header,
) -> &'a [u8] {
    if session.rules.structured {
        *room = reply::data_chunk(cookie, offset, len, true);
        return room;
    }
    room[..reply::SIMPLE_LEN].copy_from_slice(&reply::simple(cookie, None));
    &room[..reply::SIMPLE_LEN]
}

fn read_whole(session: &Session, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
    let mut data = session.buffers.get(len as usize);
    if let Err(error) = session.image.read_at(&mut data, offset) {
        session.buffers.put(data);
        return session.send_outcome(cookie, Err(error.into()));
    }
    let mut room = [0; reply::DATA_CHUNK_LEN];
    let header = whole_header(session, cookie, (offset, len), &mut room);
    let sent = session.writer.send(&mut [IoSlice::new(header), IoSlice::new(&data)]);
    session.buffers.put(data);
    sent
}

/// Reads `len` bytes at `offset` piece by piece.
fn each_piece<E>(
    session: &Session,
    (offset, len): (u64, u32),
    data: &mut [u8],
    mut then: impl FnMut(dray_image::Result<&[u8]>) -> Result<(), E>,
) -> Result<(), E> {
    let mut done = 0;
    while done < len {
        let now = JOB_PIECE.min(len - done);
        let piece = &mut data[..now as usize];
        let read = session.image.read_at(piece, offset + u64::from(done));
        then(read.map(|()| &*piece))?;
        done += now;
    }
    Ok(())
}

/// An answer in one piece that is too long to be held in memory. Once its header is out it can
/// neither fail nor let other answers pass; so all is read once before that, to wait and to fail.
fn read_twice(session: &Session, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
    let mut data = session.buffers.get(JOB_PIECE as usize);
    let first = each_piece(session, (offset, len), &mut data, |piece| piece.map(drop));
    let sent = match first {
        Err(error) => session.send_outcome(cookie, Err(error.into())),
        Ok(()) => stream(session, cookie, (offset, len), &mut data),
    };
    session.buffers.put(data);
    sent
}

fn stream(session: &Session, cookie: u64, range: (u64, u32), data: &mut [u8]) -> io::Result<()> {
    let mut room = [0; reply::DATA_CHUNK_LEN];
    let header = whole_header(session, cookie, range, &mut room);
    let sent = session.writer.compose(|channel| {
        channel.send(&mut [IoSlice::new(header)])?;
        each_piece(session, range, data, |piece| {
            channel.send(&mut [IoSlice::new(piece.map_err(io::Error::other)?)])
        })
    });
    if let Err(error) = &sent {
        tracing::debug!(%error, "an nbd reply was cut short; connection closed");
        // The connection's thread would wait for requests that nobody sends.
        session.writer.cut();
    }
    sent
}

fn read_in_pieces(session: &Session, cookie: u64, offset: u64, len: u32) -> io::Result<()> {
    let mut data = session.buffers.get(len.min(JOB_PIECE) as usize);
    let mut done = 0;
    let mut result = Ok(());
    while done < len && result.is_ok() {
        let now = JOB_PIECE.min(len - done);
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
