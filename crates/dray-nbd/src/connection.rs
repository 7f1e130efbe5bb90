//! Transmission: one thread receives a client's requests and answers at once whatever needs no
//! waiting; the rest goes to the `Workers`.

use crate::batch::Batch;
use crate::inbound::Inbound;
use crate::job::{Job, Parts, Work};
use crate::limits::{
    JOB_PIECE, LARGE_WRITE, MAX_DISCARDED_PAYLOAD, READ_PIECE, REPLY_BATCH, WRITE_PIECE,
};
use crate::proto::{Errno, cmd, cmd_flag};
use crate::reply::{self, DATA_CHUNK_LEN, SIMPLE_LEN};
use crate::request::{HEADER_LEN, Refusal, Request};
use crate::session::{Failure, Session};
use dray_image::{Attempt, Departure, ZeroMode};
use dray_serve::{Share, Workers};
use std::io;
use std::sync::Arc;

/// Serves requests until the client says goodbye, leaves, or the session is closing.
///
/// # Errors
/// The client broke the protocol or the connection failed.
///
/// Requests that had not begun are dropped then. `ends` is called before the client can know that the
/// connection is over, when no request begins any more; it is told whether writes are still under
/// way.
pub(crate) fn transmit(
    inbound: Inbound,
    session: Arc<Session>,
    share: Arc<Share>,
    ends: impl Fn(bool),
) -> io::Result<()> {
    session.begins();
    let workers = Workers::new(Arc::clone(&session), share);
    let mut connection = Connection { session, inbound, workers, batch: Batch::default() };
    let end = connection.run(&ends);
    if connection.session.is_closing() {
        connection.leave(&ends);
    }
    connection.workers.abandon();
    connection.session.ends(Departure::CutOff);
    ends(connection.workers.are_changing());
    // Now, not after the workers: what they wait for may take for ever.
    connection.inbound.channel().cut();
    end
}

struct Connection {
    session: Arc<Session>,
    inbound: Inbound,
    workers: Workers<Session>,
    batch: Batch,
}

impl Connection {
    fn run(&mut self, ends: &impl Fn(bool)) -> io::Result<()> {
        loop {
            if self.inbound.buffered().len() < HEADER_LEN || self.batch.len() >= REPLY_BATCH {
                self.send_batch()?;
            }
            if !self.inbound.need(HEADER_LEN)? || self.session.is_closing() {
                return Ok(());
            }
            let request = Request::parse(&self.inbound.take()?).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "wrong magic at the start of a request")
            })?;
            if request.command == cmd::DISC {
                self.send_batch()?;
                self.session.ends(Departure::Goodbye);
                self.finish(ends);
                return Ok(());
            }
            self.handle(&request)?;
        }
    }

    /// Waits for the requests under way. The client may be cut off, or leave, before they end.
    fn finish(&self, ends: &impl Fn(bool)) {
        ends(self.workers.are_changing());
        self.workers.drain();
    }

    /// The server ends the connection: answers what has begun, drops the rest.
    fn leave(&mut self, ends: &impl Fn(bool)) {
        self.workers.abandon();
        // Fails only if the client has gone, and then nobody misses the answers.
        let _ = self.send_batch();
        self.session.ends(Departure::CutOff);
        self.finish(ends);
    }

    fn send_batch(&mut self) -> io::Result<()> {
        self.batch.send(&self.session.writer)
    }

    fn handle(&mut self, request: &Request) -> io::Result<()> {
        if let Err(refusal) = request.check(&self.session.rules) {
            return self.refuse(request, refusal);
        }
        if matches!(request.command, cmd::WRITE | cmd::WRITE_ZEROES | cmd::TRIM) {
            self.session.client.writes();
        }
        match request.command {
            cmd::READ => self.read(request),
            cmd::WRITE if request.len as usize <= LARGE_WRITE => self.short_write(request),
            cmd::WRITE => self.long_write(request),
            cmd::FLUSH => {
                self.make_room(0)?;
                self.workers.flush(request.cookie)
            }
            _ => self.other(request),
        }
    }

    fn refuse(&mut self, request: &Request, refusal: Refusal) -> io::Result<()> {
        let payload = request.payload();
        if payload > MAX_DISCARDED_PAYLOAD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "write is far too long"));
        }
        if payload as usize > self.inbound.buffered().len() {
            self.send_batch()?;
        }
        self.inbound.skip(u64::from(payload))?;
        self.failed(request.cookie, &refusal.into());
        Ok(())
    }

    fn failed(&mut self, cookie: u64, failure: &Failure) {
        let mut out = Vec::new();
        self.session.append_failure(&mut out, cookie, failure);
        self.batch.append(&out);
    }

    /// Before a request is handed over: at the limit, wait, but send what is done first.
    fn make_room(&mut self, bytes: u64) -> io::Result<()> {
        if self.workers.has_room(bytes) {
            return Ok(());
        }
        self.send_batch()?;
        let channel = self.inbound.channel();
        let is_over = || self.session.is_closing() || channel.has_hung_up();
        if self.workers.wait_for_room(bytes, is_over) {
            return Ok(());
        }
        Err(io::ErrorKind::ConnectionAborted.into())
    }

    fn hand_over(&mut self, cookie: u64, offset: u64, len: u32, work: Work) -> io::Result<()> {
        let job = Job { cookie, offset, len, work };
        self.make_room(dray_serve::Job::cost(&job))?;
        self.workers.submit(job)
    }

    fn short_write(&mut self, request: &Request) -> io::Result<()> {
        self.inbound.expect_long(false);
        let len = request.len as usize;
        if self.inbound.buffered().len() < len {
            self.send_batch()?;
            if !self.inbound.need(len)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let data = &self.inbound.buffered()[..len];
        let fua = request.has(cmd_flag::FUA);
        match self.try_write(data, request.offset, fua) {
            Ok(Attempt::Done) => {
                self.inbound.consume(len);
                self.batch.append(&reply::simple(request.cookie, None));
                Ok(())
            }
            Ok(Attempt::WouldWait) => {
                let mut kept = self.session.buffers.get(len);
                kept.copy_from_slice(data);
                self.inbound.consume(len);
                let work = Work::Write { data: kept, fua, parts: None };
                self.hand_over(request.cookie, request.offset, request.len, work)
            }
            Err(error) => {
                self.inbound.consume(len);
                self.failed(request.cookie, &error.into());
                Ok(())
            }
        }
    }

    fn try_write(&self, data: &[u8], offset: u64, fua: bool) -> dray_image::Result<Attempt> {
        if fua { Ok(Attempt::WouldWait) } else { self.session.image.try_write_at(data, offset) }
    }

    fn long_write(&mut self, request: &Request) -> io::Result<()> {
        self.inbound.expect_long(true);
        if self.inbound.buffered().len() < request.len as usize {
            self.send_batch()?;
        }
        if request.has(cmd_flag::FUA) {
            return self.defer_rest(request, 0, &[]);
        }
        let mut piece = self.session.buffers.get(WRITE_PIECE.min(request.len as usize));
        let end = self.write_in_pieces(request, &mut piece);
        self.session.buffers.put(piece);
        end
    }

    /// Writes what has come while the client sends the rest: a piece is still in the processor's
    /// cache, and both sides work.
    fn write_in_pieces(&mut self, request: &Request, piece: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < request.len {
            let now = (piece.len() as u32).min(request.len - done);
            let piece = &mut piece[..now as usize];
            self.inbound.read_exact(piece)?;
            match self.try_write(piece, request.offset + u64::from(done), false) {
                Ok(Attempt::Done) => done += now,
                Ok(Attempt::WouldWait) => return self.defer_rest(request, done, piece),
                Err(error) => {
                    self.inbound.skip(u64::from(request.len - done - now))?;
                    self.failed(request.cookie, &error.into());
                    return Ok(());
                }
            }
        }
        self.batch.append(&reply::simple(request.cookie, None));
        Ok(())
    }

    /// Hands a write over from `done` bytes on, piece by piece as it comes in; `begun` are the first
    /// of those that have come.
    fn defer_rest(&mut self, request: &Request, done: u32, begun: &[u8]) -> io::Result<()> {
        let left = request.len - done;
        let parts = (left > JOB_PIECE).then(|| Parts::new(left.div_ceil(JOB_PIECE)));
        let fua = request.has(cmd_flag::FUA);
        let (mut done, mut begun) = (done, begun);
        while done < request.len {
            let now = JOB_PIECE.min(request.len - done);
            self.make_room(u64::from(now))?;
            let mut data = self.session.buffers.get(now as usize);
            data[..begun.len()].copy_from_slice(begun);
            self.inbound.read_exact(&mut data[begun.len()..])?;
            begun = &[];
            let work = Work::Write { data, fua, parts: parts.clone() };
            self.hand_over(request.cookie, request.offset + u64::from(done), now, work)?;
            done += now;
        }
        Ok(())
    }

    fn other(&mut self, request: &Request) -> io::Result<()> {
        let fua = request.has(cmd_flag::FUA);
        if request.len == 0 {
            self.batch.append(&reply::simple(request.cookie, None));
            return Ok(());
        }
        let work = match request.command {
            cmd::TRIM => Work::Discard { fua },
            cmd::CACHE => Work::Prefetch,
            cmd::BLOCK_STATUS => Work::Status { one: request.has(cmd_flag::REQ_ONE) },
            _ if !request.has(cmd_flag::NO_HOLE) => Work::Zero { mode: ZeroMode::MayUnmap, fua },
            // Keeping the space may mean writing zeros, and nobody can tell beforehand.
            _ if request.has(cmd_flag::FAST_ZERO) => {
                let why = "zeroing without a hole may be as slow as writing".to_owned();
                self.failed(request.cookie, &Failure { errno: Errno::NotSup, why });
                return Ok(());
            }
            _ => Work::Zero { mode: ZeroMode::KeepAllocated, fua },
        };
        self.hand_over(request.cookie, request.offset, request.len, work)
    }

    fn read(&mut self, request: &Request) -> io::Result<()> {
        if request.len == 0 {
            let empty = reply::none_chunk(request.cookie);
            let simple = reply::simple(request.cookie, None);
            self.batch.append(if self.session.rules.structured { &empty } else { &simple });
            return Ok(());
        }
        let whole = request.has(cmd_flag::DF) || !self.session.rules.structured;
        if whole && request.len > JOB_PIECE {
            return self.hand_over(
                request.cookie,
                request.offset,
                request.len,
                Work::Read { whole },
            );
        }
        let step = if whole { request.len } else { READ_PIECE as u32 };
        let mut done = 0;
        while done < request.len {
            if self.batch.len() >= REPLY_BATCH {
                self.send_batch()?;
            }
            let now = step.min(request.len - done);
            let at = request.offset + u64::from(done);
            match self.try_read(request.cookie, at, now, done + now == request.len) {
                Ok(Attempt::Done) => done += now,
                Ok(Attempt::WouldWait) => {
                    let left = request.len - done;
                    return self.hand_over(request.cookie, at, left, Work::Read { whole });
                }
                Err(error) => {
                    self.failed(request.cookie, &error.into());
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Reads straight into the batch, behind the place for the header.
    fn try_read(
        &mut self,
        cookie: u64,
        offset: u64,
        len: u32,
        last: bool,
    ) -> dray_image::Result<Attempt> {
        let structured = self.session.rules.structured;
        let header = if structured { DATA_CHUNK_LEN } else { SIMPLE_LEN };
        let total = header + len as usize;
        let room = self.batch.room(total);
        let attempt = self.session.image.try_read_at(&mut room[header..], offset)?;
        if attempt == Attempt::Done {
            if structured {
                room[..header].copy_from_slice(&reply::data_chunk(cookie, offset, len, last));
            } else {
                room[..header].copy_from_slice(&reply::simple(cookie, None));
            }
            self.batch.commit(total);
        }
        Ok(attempt)
    }
}
