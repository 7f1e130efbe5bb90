//! A store in memory, for tests.

use super::{Object, Put, Store, check_name};
use crate::error::{Error, Kind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fmt;

use std::time::Instant;

type Objects = BTreeMap<String, (Vec<u8>, Instant)>;

/// Objects in a map.
#[derive(Default)]
pub struct MemoryStore(Mutex<Objects>);

impl MemoryStore {
    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.0.lock()
    }

    /// Changes an object's bytes behind everybody's back; false when there is no such object.
    pub fn tamper(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        match self.objects().get_mut(name) {
            Some((bytes, _)) => {
                change(bytes);
                true
            }
            None => false,
        }
    }

    /// All bytes in it.
    pub fn bytes(&self) -> u64 {
        self.objects().values().map(|(bytes, _)| bytes.len() as u64).sum()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} objects in memory", self.objects().len())
    }
}

pub(super) fn missing(name: &str) -> Error {
    Error::new(Kind::NotFound, format!("there is no {name}"))
}

impl Store for MemoryStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        check_name(name)?;
        let mut objects = self.objects();
        if objects.contains_key(name) {
            return Ok(Put::Existed);
        }
        objects.insert(name.to_owned(), (bytes.to_vec(), Instant::now()));
        Ok(Put::Created)
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        match self.objects().get(name) {
            None => Err(missing(name)),
            Some((bytes, _)) if bytes.len() > limit => {
                Err(Error::damaged(format!("{name} is longer than {limit} bytes")))
            }
            Some((bytes, _)) => Ok(bytes.clone()),
        }
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        let objects = self.objects();
        let (bytes, _) = objects.get(name).ok_or_else(|| missing(name))?;
        let range = offset as usize..offset as usize + len;
        let part = bytes.get(range);
        let part = part.ok_or_else(|| Error::damaged(format!("{name} ends before its end")))?;
        Ok(part.to_vec())
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let objects = self.objects();
        let found = objects.iter().filter(|(name, _)| name.starts_with(prefix));
        let object = |(name, (bytes, since)): (&String, &(Vec<u8>, Instant))| Object {
            name: name.clone(),
            bytes: bytes.len() as u64,
            age: since.elapsed(),
        };
        Ok(found.map(object).collect())
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.objects().remove(name);
        Ok(())
    }

    fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.objects().contains_key(name))
    }
}
