//! The store as an actor sees it, and as the checker does.

use super::world::{Change, Objects, Sim, State};
use crate::store::{Object, Put, Store};
use crate::{Error, Kind, MemoryStore, Result};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(super) struct SimStore {
    pub(super) sim: Arc<Sim>,
    pub(super) actor: usize,
}

fn failed() -> Error {
    Error::unavailable("the store", "simulated fault")
}

impl SimStore {
    fn read<T>(&self, read: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let mut state = self.sim.step(self.actor);
        let errors = state.error_per_mille / 5;
        if state.crashed[self.actor] || state.rng.chance(errors) {
            return Err(failed());
        }
        read(&mut state)
    }

    fn whole(objects: &Objects, name: &str) -> Result<Arc<Vec<u8>>> {
        let object = objects.get(name).map(|(bytes, _)| bytes.clone());
        object.ok_or_else(|| Error::new(Kind::NotFound, format!("there is no {name}")))
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store of actor {}", self.actor)
    }
}

impl Store for SimStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        let mut state = self.sim.step(self.actor);
        let change = Change::Put(name.to_owned(), Arc::new(bytes.to_vec()));
        state.change(self.actor, change).ok_or_else(failed)
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        self.read(|state| {
            let bytes = Self::whole(&state.objects, name)?;
            assert!(bytes.len() <= limit);
            Ok(bytes.to_vec())
        })
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.read(|state| {
            let bytes = Self::whole(&state.objects, name)?;
            Ok(bytes[offset as usize..offset as usize + len].to_vec())
        })
    }

    /// Takes time: what is there all along is in the list, what comes or goes may be.
    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let first = self.read(|state| Ok(state.objects.clone()))?;
        self.read(|state| {
            let mut all = first.clone();
            all.extend(state.objects.iter().map(|(name, object)| (name.clone(), object.clone())));
            all.retain(|name, _| name.starts_with(prefix));
            let now = state.now(self.actor);
            let mut found = Vec::new();
            for (name, (bytes, created)) in all {
                let all_along = first.contains_key(&name) && state.objects.contains_key(&name);
                if !all_along && state.rng.chance(500) {
                    continue;
                }
                let age = Duration::from_millis(now.saturating_sub(created));
                found.push(Object { name, bytes: bytes.len() as u64, age });
            }
            Ok(found)
        })
    }

    fn delete(&self, name: &str) -> Result<()> {
        let mut state = self.sim.step(self.actor);
        let change = Change::Delete(name.to_owned());
        state.change(self.actor, change).map(drop).ok_or_else(failed)
    }

    fn exists(&self, name: &str) -> Result<bool> {
        self.read(|state| Ok(state.objects.contains_key(name)))
    }
}

/// What the checker looks at; it notes which packs are read.
#[derive(Default)]
pub(super) struct Peek {
    objects: Objects,
    new: MemoryStore,
    touched: Mutex<BTreeSet<String>>,
}

impl Peek {
    pub(super) fn of(objects: &Objects) -> Self {
        Self { objects: objects.clone(), ..Self::default() }
    }

    /// The configuration that was created.
    pub(super) fn config(&self) -> Vec<u8> {
        self.new.get("config", 4096).unwrap_or_default()
    }

    pub(super) fn touched(&self) -> BTreeSet<String> {
        self.touched.lock().clone()
    }
}

impl fmt::Debug for Peek {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("what the checker sees")
    }
}

impl Store for Peek {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        self.new.put_new(name, bytes)
    }

    fn get(&self, name: &str, _limit: usize) -> Result<Vec<u8>> {
        SimStore::whole(&self.objects, name).map(|bytes| bytes.to_vec())
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut touched = self.touched.lock();
        touched.insert(name.to_owned());
        let bytes = SimStore::whole(&self.objects, name)?;
        Ok(bytes[offset as usize..offset as usize + len].to_vec())
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let found = self.objects.iter().filter(|(name, _)| name.starts_with(prefix));
        let object = |(name, (bytes, _)): (&String, &(Arc<Vec<u8>>, u64))| Object {
            name: name.clone(),
            bytes: bytes.len() as u64,
            age: Duration::ZERO,
        };
        Ok(found.map(object).collect())
    }

    fn delete(&self, _name: &str) -> Result<()> {
        Err(failed())
    }

    fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.objects.contains_key(name))
    }
}
