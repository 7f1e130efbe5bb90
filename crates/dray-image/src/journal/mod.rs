//! An append-only journal of records: what an agent must know after `kill -9` or a power cut.
//!
//! What was appended is durable when the call returns; several records appended together are all
//! there or none is. The bytes are described in `docs/reference/formats.md`. What a record means is its
//! writer's business.
//!
//! A power cut can tear only the last frame, because a frame is written only when all before it
//! are durable, and it tears between sectors. So a bad frame with nothing valid behind it, of which a sector is
//! missing, is a torn tail and is cut off. Any other bad frame is damage, and opening fails rather than forget
//! records; so does opening a file that is empty, which no writer leaves behind.
//!
//! After a sync that failed nobody knows whether the last frame is there, and the page cache may show
//! one that the disk has not. So whoever opens a journal writes its last frame once more before it is
//! believed, and who appends after such a failure writes the whole anew.

mod frame;
mod storage;

pub use frame::Damage;
pub use storage::{FileStorage, Storage};

use crate::{Error, ErrorKind, Result};
use dray_files::StatePath;
use std::io;

/// Longest record: the set of missing blocks of an image of 8 TiB in which every part is mixed
/// takes 256 MiB; a little more for what goes with it.
pub const MAX_RECORD_LEN: usize = (256 << 20) + (1 << 20);

/// The records of a journal whose bytes these are; what is torn at its end does not count.
///
/// # Errors
/// What is wrong with them.
pub fn records(bytes: &[u8]) -> Result<Vec<Vec<u8>>, Damage> {
    match bytes {
        [] => Err(Damage::Empty),
        bytes => frame::read(bytes).map(|content| content.records),
    }
}

/// What a failure has left open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unsure {
    /// What is behind the valid bytes.
    Tail,
    /// Whether it was replaced.
    Replaced,
}

/// A journal in some storage; in a file unless said otherwise.
pub struct Journal<S: Storage = FileStorage> {
    storage: S,
    /// Names the journal in errors.
    name: String,
    /// Bytes that are valid and durable.
    len: u64,
    /// Number of the next frame.
    next: u64,
    /// What nobody knows.
    unsure: Option<Unsure>,
    /// Bytes behind the valid ones for which there is to be room.
    reserve: u64,
    /// Where the room that was taken ends.
    room: u64,
}

impl Journal<FileStorage> {
    /// Opens the journal at `path`, making an empty one when there is none, and returns its
    /// records in order.
    ///
    /// # Errors
    /// `Invalid` for a file that is no journal, is of a newer version, or is damaged.
    pub fn open(path: &StatePath) -> Result<(Self, Vec<Vec<u8>>)> {
        Self::open_in(FileStorage::new(path), path.display().to_string())
    }
}

impl<S: Storage> Journal<S> {
    /// Opens the journal in `storage`; `name` names it in errors.
    ///
    /// # Errors
    /// As [`open`](Journal::open).
    pub fn open_in(mut storage: S, name: String) -> Result<(Self, Vec<Vec<u8>>)> {
        let context = || format!("opening journal {name}");
        let bytes = storage.read().map_err(|e| Error::io(context(), e))?;
        if bytes.is_empty() {
            storage.replace(&frame::header()).map_err(|e| Error::io(context(), e))?;
            let len = frame::HEADER_LEN as u64;
            let journal = Self { storage, name, len, next: 1, unsure: None, reserve: 0, room: 0 };
            return Ok((journal, Vec::new()));
        }
        let content = frame::read(&bytes)
            .map_err(|why| Error::with_source(ErrorKind::Invalid, context(), why))?;
        let len = content.len as u64;
        if content.len < bytes.len() {
            tracing::info!(journal = name, bytes = bytes.len() - content.len, "torn tail cut off");
            storage.truncate(len).map_err(|e| Error::io(context(), e))?;
        }
        // Whoever wrote it may have been killed before the sync, or its sync may have failed. What is
        // believed from here on, and told to others, must not be undone by a power cut: the last frame is
        // written again, which needs no room, and everything is synced.
        let again = storage.write_at(content.last as u64, &bytes[content.last..content.len]);
        again.and_then(|()| storage.settle()).map_err(|e| Error::io(context(), e))?;
        let next = content.next;
        let journal = Self { storage, name, len, next, unsure: None, reserve: 0, room: 0 };
        Ok((journal, content.records))
    }

    /// Takes room for `bytes` bytes of records to come, so that they can be appended when there is
    /// no more; it is taken again after each record, as far as there is any.
    ///
    /// # Errors
    /// What the storage reports.
    pub fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.reserve = bytes;
        self.take_room().map_err(|e| Error::io(self.context("extending"), e))
    }

    fn take_room(&mut self) -> io::Result<()> {
        if self.reserve > 0 {
            self.storage.reserve(self.len, self.reserve)?;
            self.room = self.len + self.reserve;
        }
        Ok(())
    }

    /// Whether an append has failed in a way that leaves open whether its records are there. The
    /// next one that succeeds decides it: they are not.
    pub fn is_unsure(&self) -> bool {
        self.unsure.is_some()
    }

    /// Appends one record; durable on return.
    ///
    /// # Errors
    /// `Invalid` for one that is too long, `NoSpace`, or what the storage reports. After an error
    /// the record is not in the journal, unless it [is unsure](Self::is_unsure).
    pub fn append(&mut self, record: &[u8]) -> Result<()> {
        self.append_all(&[record])
    }

    /// Appends several records; all are durable on return, or none is there.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn append_all(&mut self, records: &[&[u8]]) -> Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        if self.unsure == Some(Unsure::Replaced) {
            self.look_again()?;
        }
        let bytes = self.frame(records)?;
        let appended = match self.unsure {
            Some(_) => self.append_anew(&bytes),
            None => self.append_frame(&bytes),
        };
        appended.map_err(|e| Error::io(self.context("appending to"), e))?;
        self.len += bytes.len() as u64;
        self.next += 1;
        if self.room < self.len + self.reserve / 2 {
            // As far as there is any; what is left of the old room is.
            let _ = self.take_room();
        }
        Ok(())
    }

    fn append_frame(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Err(e) = self.storage.write_at(self.len, bytes) {
            self.take_back();
            return Err(e);
        }
        // After a failed sync the kernel may call lost pages clean: nobody knows what is there.
        self.storage.sync().inspect_err(|_| self.unsure = Some(Unsure::Tail))
    }

    /// Finds out whether a replacement that failed is there after all.
    fn look_again(&mut self) -> Result<()> {
        let context = self.context("looking again at");
        let bytes = self.storage.read().map_err(|e| Error::io(context.clone(), e))?;
        let content = frame::read(&bytes);
        let content =
            content.map_err(|why| Error::with_source(ErrorKind::Invalid, context, why))?;
        (self.len, self.next) = (content.len as u64, content.next);
        self.unsure = Some(Unsure::Tail);
        Ok(())
    }

    /// Writes everything that is certain, and the frame, to a new place: whatever an earlier failure
    /// has left in the old one is gone then.
    fn append_anew(&mut self, frame: &[u8]) -> io::Result<()> {
        let mut bytes = self.storage.read()?;
        if (bytes.len() as u64) < self.len {
            return Err(io::Error::other("it is shorter than the bytes that were written"));
        }
        bytes.truncate(self.len as usize);
        bytes.extend_from_slice(frame);
        self.storage.replace(&bytes)?;
        (self.unsure, self.room) = (None, 0);
        Ok(())
    }

    /// Replaces everything by `records`; a crash leaves the old journal or the new one.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn rewrite(&mut self, records: &[&[u8]]) -> Result<()> {
        let mut bytes = frame::header();
        if !records.is_empty() {
            bytes.extend(self.frame(records)?);
        }
        if let Err(e) = self.storage.replace(&bytes) {
            // The old bytes are there or the new ones; which, the next append must not guess.
            if !self.is_unchanged() {
                self.unsure = Some(Unsure::Replaced);
            }
            return Err(Error::io(self.context("rewriting"), e));
        }
        self.unsure = None;
        self.len = bytes.len() as u64;
        self.next += u64::from(!records.is_empty());
        // As far as there is any.
        let _ = self.take_room();
        Ok(())
    }

    /// Whether the old journal is certainly there: a full disk need not be the end of it.
    fn is_unchanged(&mut self) -> bool {
        self.storage.read().is_ok_and(|bytes| {
            let same = |content: frame::Content| {
                content.len as u64 == self.len && (content.next == self.next || self.is_empty())
            };
            bytes.len() as u64 == self.len && frame::read(&bytes).is_ok_and(same)
        })
    }

    /// Length in bytes: when to rewrite is the caller's choice.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when it holds no record.
    pub fn is_empty(&self) -> bool {
        self.len == frame::HEADER_LEN as u64
    }

    fn context(&self, what: &str) -> String {
        format!("{what} journal {}", self.name)
    }

    fn frame(&self, records: &[&[u8]]) -> Result<Vec<u8>> {
        frame::encode(self.next, records).ok_or_else(|| {
            let why = format!("a record is longer than {MAX_RECORD_LEN} bytes");
            Error::new(ErrorKind::Invalid, self.context("appending to"), &why)
        })
    }

    /// Cuts a frame off that was not written whole, so that the journal stays usable (a full disk
    /// may have room again later).
    fn take_back(&mut self) {
        if self.storage.truncate(self.len).and_then(|()| self.storage.sync()).is_err() {
            self.unsure = Some(Unsure::Tail);
        }
        // Cutting off gives back what lies behind.
        let _ = self.take_room();
    }
}
