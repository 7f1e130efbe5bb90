//! Faults on order: named, counted, and random only by seed.

use super::{Layer, Op, Request};
use crate::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;

/// When a fault strikes, among the requests of its kind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum When {
    /// Always.
    Always,
    /// At the n-th, counted from 1.
    Nth(u64),
    /// At the n-th, counted from 1, and all after it.
    From(u64),
    /// At those that touch one of these bytes.
    Touching(Range<u64>),
    /// At one in `n`, chosen by a generator that starts at `seed`.
    OneIn {
        /// How rare it is.
        n: u64,
        /// Where the generator starts.
        seed: u64,
    },
}

/// A fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Appears in the error, so that a test knows which of its faults it met.
    pub name: String,
    /// Which requests it looks at.
    pub op: Op,
    /// At which of them it strikes.
    pub when: When,
    /// What the request fails with.
    pub kind: ErrorKind,
}

struct Armed {
    fault: Fault,
    seen: u64,
    random: u64,
}

/// A layer that fails requests.
#[derive(Default)]
pub struct Faults {
    armed: Mutex<Vec<Armed>>,
}

impl Faults {
    /// No faults yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault; it counts requests from now on.
    pub fn arm(&self, fault: Fault) {
        let random = match fault.when {
            When::OneIn { seed, .. } => seed,
            _ => 0,
        };
        self.lock().push(Armed { fault, seen: 0, random });
    }

    /// Takes the faults called `name` away.
    pub fn disarm(&self, name: &str) {
        self.lock().retain(|armed| armed.fault.name != name);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Armed>> {
        self.armed.lock()
    }
}

impl Armed {
    fn strikes(&mut self, request: Request) -> bool {
        if request.op != self.fault.op {
            return false;
        }
        self.seen += 1;
        match &self.fault.when {
            When::Always => true,
            When::Nth(n) => self.seen == *n,
            When::From(n) => self.seen >= *n,
            When::Touching(bytes) => {
                request.offset < bytes.end && bytes.start < request.offset + request.len
            }
            When::OneIn { n, .. } => next(&mut self.random).is_multiple_of((*n).max(1)),
        }
    }
}

/// SplitMix64: every seed gives another sequence and the same seed the same one.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Layer for Faults {
    fn before(&self, request: Request) -> Result<()> {
        let mut armed = self.lock();
        // Every fault counts every request, whichever of them strikes.
        let struck: Vec<bool> = armed.iter_mut().map(|fault| fault.strikes(request)).collect();
        let Some(place) = struck.iter().position(|&struck| struck) else { return Ok(()) };
        let fault = &armed[place].fault;
        let context = format!("{:?} of {} bytes at {}", request.op, request.len, request.offset);
        Err(Error::new(fault.kind, context.to_lowercase(), &format!("fault '{}'", fault.name)))
    }
}
