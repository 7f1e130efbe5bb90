//! An append-only journal of records: what an agent must know after `kill -9` or a power cut.
//!
//! What was appended is durable when the call returns; several records appended together are all
//! there or none is. The bytes are described in `docs/formats.md`. What a record means is its
//! writer's business.
//!
//! A power cut can tear only the last frame, because a frame is written only when all before it
//! are durable. So a bad frame with nothing valid behind it is a torn tail and is cut off; a bad
//! frame with a valid one behind it is damage, and opening fails rather than forget records.

mod frame;
mod storage;

pub use storage::{FileStorage, Storage};

use crate::{Error, ErrorKind, Result};
use std::path::Path;

/// Longest record: the set of missing blocks of an image of 8 TiB in which every part is mixed
/// takes 256 MiB; a little more for what goes with it.
pub const MAX_RECORD_LEN: usize = (256 << 20) + (1 << 20);

/// A journal in some storage; in a file unless said otherwise.
pub struct Journal<S: Storage = FileStorage> {
    storage: S,
    /// Names the journal in errors.
    name: String,
    /// Bytes that are valid and durable.
    len: u64,
    /// Number of the next frame.
    next: u64,
    /// Why nothing more can be appended.
    broken: Option<String>,
}

impl Journal<FileStorage> {
    /// Opens the journal at `path`, making an empty one when there is none, and returns its
    /// records in order.
    ///
    /// # Errors
    /// `Invalid` for a file that is no journal, is of a newer version, or is damaged.
    pub fn open(path: &Path) -> Result<(Self, Vec<Vec<u8>>)> {
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
            return Ok((Self { storage, name, len, next: 1, broken: None }, Vec::new()));
        }
        let content =
            frame::read(&bytes).map_err(|why| Error::new(ErrorKind::Invalid, context(), &why))?;
        let len = content.len as u64;
        if content.len < bytes.len() {
            tracing::info!(journal = name, bytes = bytes.len() - content.len, "torn tail cut off");
            let cut = storage.truncate(len).and_then(|()| storage.sync());
            cut.map_err(|e| Error::io(context(), e))?;
        }
        let journal = Self { storage, name, len, next: content.next, broken: None };
        Ok((journal, content.records))
    }

    /// Appends one record; durable on return.
    ///
    /// # Errors
    /// `Invalid` for one that is too long, `NoSpace`, or what the storage reports. After an error
    /// the record is not in the journal; if even that is not certain, no more can be appended.
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
        self.check_usable()?;
        let bytes = self.frame(records)?;
        if let Err(e) = self.storage.write_at(self.len, &bytes) {
            self.take_back(&e);
            return Err(Error::io(self.context("appending to"), e));
        }
        if let Err(e) = self.storage.sync() {
            // After a failed sync the kernel may call lost pages clean: nobody knows what is there.
            self.broken = Some(e.to_string());
            return Err(Error::io(self.context("appending to"), e));
        }
        self.len += bytes.len() as u64;
        self.next += 1;
        Ok(())
    }

    /// Replaces everything by `records`; a crash leaves the old journal or the new one.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn rewrite(&mut self, records: &[&[u8]]) -> Result<()> {
        self.check_usable()?;
        let mut bytes = frame::header();
        if !records.is_empty() {
            bytes.extend(self.frame(records)?);
        }
        if let Err(e) = self.storage.replace(&bytes) {
            if !self.is_unchanged() {
                self.broken = Some(e.to_string());
            }
            return Err(Error::io(self.context("rewriting"), e));
        }
        self.len = bytes.len() as u64;
        self.next += u64::from(!records.is_empty());
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

    fn check_usable(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(why) => {
                let why = format!("an earlier write failed ({why}); restart the agent");
                Err(Error::new(ErrorKind::Io, self.context("appending to"), &why))
            }
        }
    }

    /// Cuts a frame off that was not written whole, so that the journal stays usable (a full disk
    /// may have room again later).
    fn take_back(&mut self, why: &std::io::Error) {
        if self.storage.truncate(self.len).and_then(|()| self.storage.sync()).is_err() {
            self.broken = Some(why.to_string());
        }
    }
}
