//! The simulated world: whose turn it is, what time it is, what the store holds, what must be true.

use super::store::{Peek, SimStore};
use crate::key::Keys;
use crate::manifest;
use crate::piece::{PIECE_BYTES, piece_len};
use crate::reader::Reader;
use crate::repository::{Core, Repository, Settings};
use crate::store::Put;
use crate::tombstone::{TOMBSTONE_BYTES, is_tombstone};
use crate::world::World;
use crate::{Key, Result};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What the store holds: bytes and when they were created.
pub(super) type Objects = BTreeMap<String, (Arc<Vec<u8>>, u64)>;

/// SplitMix64.
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True in `per_mille` of 1000 cases.
    pub(super) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// What happened, so that a test can tell whether it tests anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) backups: u64,
    pub(super) pruned: u64,
    pub(super) crashes: u64,
    pub(super) late: u64,
    pub(super) fenced_writers: u64,
    pub(super) removed_packs: u64,
    pub(super) removed_while_writing: u64,
    pub(super) named_though_condemned: u64,
    pub(super) revisions: u64,
    /// Hash of everything that happened.
    pub(super) trace: u64,
}

impl Counters {
    pub(super) fn all(&self) -> [(&'static str, u64); 9] {
        [
            ("backups", self.backups),
            ("pruned", self.pruned),
            ("crashes", self.crashes),
            ("late", self.late),
            ("fenced writers", self.fenced_writers),
            ("removed packs", self.removed_packs),
            ("removed while somebody wrote", self.removed_while_writing),
            ("named though condemned", self.named_though_condemned),
            ("revisions", self.revisions),
        ]
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.backups += other.backups;
        self.pruned += other.pruned;
        self.crashes += other.crashes;
        self.late += other.late;
        self.fenced_writers += other.fenced_writers;
        self.removed_packs += other.removed_packs;
        self.removed_while_writing += other.removed_while_writing;
        self.named_though_condemned += other.named_though_condemned;
        self.revisions += other.revisions;
    }
}

/// A change that somebody asked for.
#[derive(Clone)]
pub(super) enum Change {
    Put(String, Arc<Vec<u8>>),
    Delete(String),
}

/// What must be true.
#[derive(Default)]
pub(super) struct Expected {
    /// What each attempt at a backup would contain, by its generation's id.
    pub(super) content: HashMap<u128, BTreeMap<u64, u8>>,
    /// Backups that were reported as finished.
    pub(super) finished: HashSet<u128>,
    /// Backups that somebody began to remove.
    pub(super) pruned: HashSet<u128>,
    /// Backups that writers are building on.
    pub(super) parents: HashSet<u128>,
    /// The manifests that exist: backup and packs.
    named: BTreeMap<String, (u128, BTreeSet<String>)>,
}

pub(super) struct State {
    pub(super) rng: Rng,
    pub(super) objects: Objects,
    pub(super) expected: Expected,
    pub(super) counters: Counters,
    pub(super) clock_ms: u64,
    pub(super) steps_left: u32,
    pub(super) crashed: Vec<bool>,
    pub(super) crash_per_mille: u64,
    pub(super) error_per_mille: u64,
    late: Vec<Change>,
    turn: Option<usize>,
    alive: Vec<bool>,
    weights: Vec<u64>,
    skew_ms: Vec<u64>,
    failure: Option<String>,
}

pub(super) struct Sim {
    state: Mutex<State>,
    turns: Vec<Condvar>,
}

/// Bytes of every image: three segments, the last piece short.
pub(super) const IMAGE_BYTES: u64 = 1100 * PIECE_BYTES as u64 + 99;
const HOUR_MS: u64 = 3600 * 1000;

impl Sim {
    pub(super) fn new(seed: u64, actors: usize) -> Self {
        let mut rng = Rng(seed);
        let crash_per_mille = [0, 5, 20, 60][rng.below(4) as usize];
        let error_per_mille = [0, 10, 50][rng.below(3) as usize];
        let skew_ms = (0..actors).map(|_| rng.below(2 * HOUR_MS)).collect();
        let state = State {
            rng,
            objects: Objects::new(),
            expected: Expected::default(),
            counters: Counters::default(),
            clock_ms: 1_700_000_000_000,
            steps_left: 700,
            crashed: vec![false; actors],
            crash_per_mille,
            error_per_mille,
            late: Vec::new(),
            turn: None,
            alive: vec![true; actors],
            weights: vec![1; actors],
            skew_ms,
            failure: None,
        };
        let turns = (0..actors).map(|_| Condvar::new()).collect();
        Self { state: Mutex::new(state), turns }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the actors go.
    pub(super) fn start(&self) {
        let mut state = self.lock();
        let store = Arc::new(Peek::default());
        let created = Repository::create(store.clone(), &Key::None);
        assert!(created.is_ok());
        state.objects.insert("config".into(), (Arc::new(store.config()), 0));
        self.pass_on(&mut state);
    }

    fn pass_on(&self, state: &mut State) {
        state.choose();
        if let Some(next) = state.turn {
            self.turns[next].notify_one();
        }
    }

    /// Waits for the first turn.
    pub(super) fn wait(&self, actor: usize) {
        drop(self.wait_in(self.lock(), actor));
    }

    fn wait_in<'a>(&'a self, state: MutexGuard<'a, State>, me: usize) -> MutexGuard<'a, State> {
        let turn = self.turns[me].wait_while(state, |state| state.turn != Some(me));
        turn.unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the turn away; returns when it is this actor's again.
    pub(super) fn step(&self, actor: usize) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        if state.turn.is_none() {
            // The quiet end: there is one actor only.
            return state;
        }
        self.pass_on(&mut state);
        let mut state = self.wait_in(state, actor);
        state.steps_left = state.steps_left.saturating_sub(1);
        state.time_passes();
        state
    }

    /// This actor has done what it wanted.
    pub(super) fn leave(&self, actor: usize) {
        let mut state = self.lock();
        state.alive[actor] = false;
        self.pass_on(&mut state);
    }

    pub(super) fn failure(&self) -> std::result::Result<(), String> {
        self.lock().failure.clone().map_or(Ok(()), Err)
    }

    pub(super) fn counters(&self) -> Counters {
        self.lock().counters.clone()
    }

    /// No more faults; everything under way arrives.
    pub(super) fn calm(&self) {
        let mut state = self.lock();
        (state.crash_per_mille, state.error_per_mille) = (0, 0);
        state.crashed.fill(false);
        while let Some(change) = state.late.pop() {
            state.apply(change);
        }
    }

    pub(super) fn pass_days(&self) {
        self.lock().clock_ms += 100 * HOUR_MS;
    }

    pub(super) fn look<T>(&self, look: impl FnOnce(&Objects, &Expected) -> T) -> T {
        let state = self.lock();
        look(&state.objects, &state.expected)
    }

    /// The repository as `actor` sees it.
    pub(super) fn repository(self: &Arc<Self>, actor: usize) -> Repository {
        let store = Arc::new(SimStore { sim: self.clone(), actor });
        let world = Arc::new(SimWorld { sim: self.clone(), actor });
        // Some packs hold one piece, some two or three; contents compress to about 20 bytes.
        let settings = Settings { world, pack_bytes: 45 };
        Repository::of(store, Keys::new(None), 0, settings)
    }
}

impl State {
    /// Whose turn is next. Weights change now and then, so that somebody sleeps for long.
    fn choose(&mut self) {
        if self.rng.chance(30) {
            for nth in 0..self.weights.len() {
                self.weights[nth] = [1, 10, 100, 1000][self.rng.below(4) as usize];
            }
        }
        let weight = |nth: usize| if self.alive[nth] { self.weights[nth] } else { 0 };
        let all: u64 = (0..self.alive.len()).map(weight).sum();
        if all == 0 {
            self.turn = None;
            return;
        }
        let mut at = self.rng.below(all);
        let weight = |nth: usize| if self.alive[nth] { self.weights[nth] } else { 0 };
        self.turn = (0..self.alive.len()).find(|nth| match at.checked_sub(weight(*nth)) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        });
    }

    fn time_passes(&mut self) {
        let most = if self.rng.chance(20) { HOUR_MS } else { 20_000 };
        self.clock_ms += self.rng.below(most);
        if !self.late.is_empty() && self.rng.chance(100) {
            let nth = self.rng.below(self.late.len() as u64) as usize;
            let change = self.late.swap_remove(nth);
            self.apply(change);
        }
    }

    pub(super) fn now(&self, actor: usize) -> u64 {
        self.clock_ms + self.skew_ms[actor]
    }

    /// A change that `actor` asks for: what it is told, or none when it crashed or got an error.
    pub(super) fn change(&mut self, actor: usize, change: Change) -> Option<Put> {
        if self.crashed[actor] {
            return None;
        }
        let crash = self.rng.chance(self.crash_per_mille);
        if crash {
            self.crashed[actor] = true;
            self.counters.crashes += 1;
        }
        if !crash && !self.rng.chance(self.error_per_mille) {
            return Some(self.apply(change));
        }
        match self.rng.below(3) {
            0 => {}
            1 => drop(self.apply(change)),
            _ => {
                self.counters.late += 1;
                self.late.push(change);
            }
        }
        None
    }

    pub(super) fn note(&mut self, what: &str) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.counters.trace.to_le_bytes()).update(what.as_bytes());
        hasher.update(&self.clock_ms.to_le_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
        self.counters.trace = u64::from_le_bytes(first);
    }

    fn apply(&mut self, change: Change) -> Put {
        match change {
            Change::Put(name, bytes) => {
                self.note(&name);
                if self.objects.contains_key(&name) {
                    return Put::Existed;
                }
                let now = self.clock_ms;
                self.objects.insert(name.clone(), (bytes.clone(), now));
                if name.starts_with(manifest::FOLDER) && !is_tombstone(&bytes) {
                    let check = self.expected.appears(&self.objects, &name);
                    self.fail_on(check);
                    self.count_condemned(&name);
                }
                Put::Created
            }
            Change::Delete(name) => {
                self.note(&name);
                if self.objects.remove(&name).is_some() {
                    self.removed(&name);
                }
                Put::Created
            }
        }
    }

    fn removed(&mut self, name: &str) {
        if name.starts_with(crate::place::FOLDER) {
            self.counters.removed_packs += 1;
            let writing = self.objects.keys().any(|name| name.starts_with("sessions/"));
            self.counters.removed_while_writing += u64::from(writing);
            let check = self.expected.pack_goes(name);
            self.fail_on(check);
        } else if name.starts_with(manifest::FOLDER) {
            let check = self.expected.disappears(name);
            self.fail_on(check);
        }
    }

    /// Counts manifests that name something which is condemned: the collector must notice.
    fn count_condemned(&mut self, manifest: &str) {
        let core = peek(&self.objects);
        let Ok(condemned) = crate::mark::all_condemned(&core) else { return };
        let Some((_, named)) = self.expected.named.get(manifest) else { return };
        let hit = condemned.iter().any(|pack| named.contains(&pack.name()));
        self.counters.named_though_condemned += u64::from(hit);
    }

    fn fail_on(&mut self, check: std::result::Result<(), String>) {
        if let (Err(why), None) = (check, &self.failure) {
            self.failure = Some(why);
            self.steps_left = 0;
        }
    }
}

/// A repository on what the store holds now, without anybody's turn.
fn peek(objects: &Objects) -> Arc<Core> {
    let store = Arc::new(Peek::of(objects));
    Repository::of(store, Keys::new(None), 0, Settings::default()).core.clone()
}

impl Expected {
    /// Backups that name something condemned, which must be rescued.
    pub(super) fn at_risk(&self, objects: &Objects) -> HashSet<u128> {
        let Ok(condemned) = crate::mark::all_condemned(&peek(objects)) else {
            return HashSet::new();
        };
        let condemned: BTreeSet<String> =
            condemned.iter().map(crate::place::PackId::name).collect();
        let hit = self.named.values().filter(|(_, packs)| !packs.is_disjoint(&condemned));
        hit.map(|(backup, _)| *backup).collect()
    }

    /// A manifest is there: all of it must be readable and right.
    fn appears(&mut self, objects: &Objects, name: &str) -> std::result::Result<(), String> {
        let (backup, packs) = self.read(objects, name)?;
        self.named.insert(name.to_owned(), (backup, packs));
        Ok(())
    }

    fn read(
        &self,
        objects: &Objects,
        name: &str,
    ) -> std::result::Result<(u128, BTreeSet<String>), String> {
        let store = Arc::new(Peek::of(objects));
        let core = Repository::of(store.clone(), Keys::new(None), 0, Settings::default()).core;
        let wrong = |why: &dyn std::fmt::Display| format!("{name} cannot be read: {why}");
        let manifest = crate::repository::read(&core, name).map_err(|e| wrong(&e))?;
        let generation = manifest.info().generation.id.0;
        let content = self.content.get(&generation).ok_or_else(|| wrong(&"nobody made it"))?;
        let reader = Reader::new(&core, &manifest);
        for ix in 0..reader.piece_count() {
            let piece = reader.piece(ix).map_err(|e| wrong(&e))?;
            let expected = content.get(&ix).copied().unwrap_or(0);
            let right = match piece.hash() {
                None => expected == 0,
                Some(_) => {
                    let bytes = reader.read_piece(ix).map_err(|e| wrong(&e))?;
                    bytes == vec![expected; piece_len(IMAGE_BYTES, ix)]
                }
            };
            if !right {
                return Err(wrong(&format!("piece {ix} is not what was backed up")));
            }
        }
        Ok((manifest.backup().id, store.touched()))
    }

    fn disappears(&mut self, name: &str) -> std::result::Result<(), String> {
        let Some((backup, _)) = self.named.remove(name) else { return Ok(()) };
        let other = self.named.values().any(|(other, _)| *other == backup);
        if other || self.pruned.contains(&backup) {
            return Ok(());
        }
        Err(format!("{name} was removed and nobody pruned it"))
    }

    fn pack_goes(&self, pack: &str) -> std::result::Result<(), String> {
        match self.named.iter().find(|(_, (_, packs))| packs.contains(pack)) {
            Some((manifest, _)) => Err(format!("{pack} was removed, {manifest} needs it")),
            None => Ok(()),
        }
    }

    /// Everything that was finished and not pruned is there, and no pack that nobody names.
    pub(super) fn check_all(&self, objects: &Objects) -> std::result::Result<(), String> {
        let mut needed = BTreeSet::new();
        let mut there = HashSet::new();
        for (name, (bytes, _)) in objects {
            let tombstone = bytes.len() as u64 <= TOMBSTONE_BYTES && is_tombstone(bytes);
            if name.starts_with(manifest::FOLDER) && !tombstone {
                let (backup, packs) = self.read(objects, name)?;
                if !there.insert(backup) {
                    return Err(format!("an old revision is left: {name}"));
                }
                needed.extend(packs);
            }
        }
        let lost = self.finished.iter().find(|id| !there.contains(id) && !self.pruned.contains(id));
        if let Some(id) = lost {
            return Err(format!("backup {id:032x} is lost"));
        }
        let packs = objects.keys().filter(|name| name.starts_with(crate::place::FOLDER));
        match packs.into_iter().find(|name| !needed.contains(*name)) {
            Some(dead) => Err(format!("{dead} is dead and still there")),
            None => Ok(()),
        }
    }
}

struct SimWorld {
    sim: Arc<Sim>,
    actor: usize,
}

impl World for SimWorld {
    fn unix_ms(&self) -> u64 {
        self.sim.lock().now(self.actor)
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        let mut state = self.sim.lock();
        bytes.iter_mut().for_each(|byte| *byte = state.rng.next() as u8);
        Ok(())
    }
}
