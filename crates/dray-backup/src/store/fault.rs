//! A store that fails as it is told, in front of another one.

use super::{Object, Put, Store};
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What goes wrong with the objects whose names begin with a prefix.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Every request is answered with an error.
    Error,
    /// Every request takes that much longer.
    Slow(Duration),
    /// Reads give at most that many bytes of the object.
    Truncate(usize),
    /// Reads see one bit flipped in the byte at that offset of the object.
    Flip(u64),
    /// After that many changes (creations and deletions) every request fails: the power went.
    CrashAfter(u64),
}

/// A store with faults. They may be changed while it is used.
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Mutex<Vec<(String, Fault)>>,
    changes: AtomicU64,
    refused: AtomicU64,
}

impl FaultyStore {
    /// No fault so far.
    pub fn new(inner: Arc<dyn Store>) -> Self {
        let (changes, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { inner, faults: Mutex::new(Vec::new()), changes, refused }
    }

    /// From now on these faults, each for names with its prefix, and no others; changes are counted
    /// from zero.
    pub fn set(&self, faults: impl IntoIterator<Item = (&'static str, Fault)>) {
        let faults = faults.into_iter().map(|(prefix, fault)| (prefix.to_owned(), fault));
        *self.faults.lock() = faults.collect();
        self.changes.store(0, Ordering::Relaxed);
        self.refused.store(0, Ordering::Relaxed);
    }

    /// Requests that were answered with an error since the faults were set.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn faults(&self, name: &str) -> Vec<Fault> {
        let faults = self.faults.lock();
        let hit = faults.iter().filter(|(prefix, _)| name.starts_with(prefix.as_str()));
        hit.map(|(_, fault)| fault.clone()).collect()
    }

    fn before(&self, name: &str, change: bool) -> Result<()> {
        let failed = || {
            self.refused.fetch_add(1, Ordering::Relaxed);
            Error::unavailable(format!("cannot reach {name}"), "injected fault")
        };
        let before = self.changes.fetch_add(u64::from(change), Ordering::Relaxed);
        for fault in self.faults(name) {
            match fault {
                Fault::Error => return Err(failed()),
                Fault::Slow(time) => std::thread::sleep(time),
                Fault::CrashAfter(most) if before >= most => return Err(failed()),
                _ => {}
            }
        }
        Ok(())
    }

    /// `bytes` of `name` from `offset`, as a reader gets to see them.
    fn spoil(&self, name: &str, offset: u64, mut bytes: Vec<u8>) -> Vec<u8> {
        for fault in self.faults(name) {
            match fault {
                Fault::Flip(at) if at >= offset => {
                    if let Some(byte) = bytes.get_mut((at - offset) as usize) {
                        *byte ^= 1;
                    }
                }
                Fault::Truncate(len) => bytes.truncate(len.saturating_sub(offset as usize)),
                _ => {}
            }
        }
        bytes
    }
}

impl fmt::Debug for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with faults", self.inner)
    }
}

impl Store for FaultyStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        self.before(name, true)?;
        self.inner.put_new(name, bytes)
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        self.before(name, false)?;
        Ok(self.spoil(name, 0, self.inner.get(name, limit)?))
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.before(name, false)?;
        let bytes = self.spoil(name, offset, self.inner.get_range(name, offset, len)?);
        if bytes.len() < len {
            return Err(Error::damaged(format!("{name} ends before byte {}", offset + len as u64)));
        }
        Ok(bytes)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        self.before(prefix, false)?;
        self.inner.list(prefix)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.before(name, true)?;
        self.inner.delete(name)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.before(name, false)?;
        self.inner.exists(name)
    }
}
