//! Memory that a host gives to its peers: for what is read of their messages until it is handled, and for
//! answers until they are taken (I7).
//!
//! Who has a place for a message has it for all of it, so that it can always be finished: nobody who has begun
//! waits for another one. Places are given in the order in which they were asked for, first out of what a peer
//! may have, then out of what all peers may have together. Short messages have a part of their own, and other
//! peers no share in it: what one host does, however many connections it opens, does not keep another
//! host's acknowledgements waiting.

use crate::error::{NetError, NetErrorKind};
use dray_wire::control::{MAX_CONTROL, MAX_SHORT};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// What memory is counted in.
const PAGE: usize = 4096;
/// Longest wait of a control message for a place. Who has one gives it back in its own time; a session that ends is
/// made anew.
const WAIT: Duration = Duration::from_secs(60);
/// The same for an object. Those before it may have to cross a slow link, and nobody asks again.
const WAIT_FOR_OBJECT: Duration = Duration::from_secs(15 * 60);
/// Time that each message has, however short.
const LEAST_TIME: Duration = Duration::from_secs(30);
/// Bytes a second at which a message has to come, and an answer to be taken: a link of 2 Mbit/s.
const SLOWEST: u64 = 256 << 10;

/// How much memory there is, in bytes, and how long a message may have its part of it.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimits {
    /// For a peer's short messages: each migration has some on their way.
    pub short: usize,
    /// For a peer's long messages: one of the longest, and others beside it.
    pub long: usize,
    /// For the long messages of all peers.
    pub all_long: usize,
    /// For a peer's objects of the backup store and content of replicas, in either direction: a list, or six objects.
    pub answers: usize,
    /// For those of all peers.
    pub all_answers: usize,
    /// Time that each message has, however short.
    pub least_time: Duration,
    /// Bytes a second at which it has to come or go.
    pub slowest: u64,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        let (long, answers) = (MAX_CONTROL as usize + (32 << 20), 192 << 20);
        Self {
            short: 32 << 20,
            long,
            all_long: 3 * long,
            answers,
            all_answers: 3 * answers,
            least_time: LEAST_TIME,
            slowest: SLOWEST,
        }
    }
}

/// Memory of one kind.
#[derive(Clone, Debug)]
struct Lane {
    pages: Arc<Semaphore>,
    most: usize,
}

impl Lane {
    fn new(bytes: usize) -> Self {
        let most = bytes.div_ceil(PAGE).max(1);
        Self { pages: Arc::new(Semaphore::new(most)), most }
    }

    /// Waits for so many bytes. What is more than all of the lane gets all of it.
    async fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let pages = bytes.div_ceil(PAGE).clamp(1, self.most) as u32;
        // Nobody closes a lane.
        Arc::clone(&self.pages).acquire_many_owned(pages).await.ok()
    }

    fn taken(&self) -> usize {
        (self.most - self.pages.available_permits()) * PAGE
    }
}

/// The memory that a host gives to all of its peers; cheap to clone.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Host>);

#[derive(Debug)]
struct Host {
    limits: MemoryLimits,
    long: Lane,
    answers: Lane,
    /// A long message that is decoded takes a few times its length for that moment: one at a time.
    decoding: Arc<Semaphore>,
    peers: Mutex<BTreeMap<String, PeerMemory>>,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(MemoryLimits::default())
    }
}

impl Memory {
    /// So much memory.
    pub fn new(limits: MemoryLimits) -> Self {
        let (long, answers) = (Lane::new(limits.all_long), Lane::new(limits.all_answers));
        let decoding = Arc::new(Semaphore::new(1));
        Self(Arc::new(Host { limits, long, answers, decoding, peers: Mutex::default() }))
    }

    /// The part of one peer, the same for all of its connections. A peer has one entry in the configuration, so
    /// there are only so many.
    pub fn of(&self, peer: &str) -> PeerMemory {
        let mut peers = self.0.peers.lock();
        let new = || PeerMemory::new(&self.0);
        peers.entry(peer.to_ascii_lowercase()).or_insert_with(new).clone()
    }
}

/// One peer's part of the memory; cheap to clone.
#[derive(Clone, Debug)]
pub struct PeerMemory {
    short: Lane,
    long: Lane,
    all_long: Lane,
    answers: Lane,
    all_answers: Lane,
    decoding: Arc<Semaphore>,
    limits: MemoryLimits,
}

impl PeerMemory {
    fn new(host: &Host) -> Self {
        Self {
            short: Lane::new(host.limits.short),
            long: Lane::new(host.limits.long),
            all_long: host.long.clone(),
            answers: Lane::new(host.limits.answers),
            all_answers: host.answers.clone(),
            decoding: Arc::clone(&host.decoding),
            limits: host.limits,
        }
    }

    /// How long a message of so many bytes may take from its first byte to its last.
    pub fn time_for(&self, bytes: usize) -> Duration {
        let MemoryLimits { least_time, slowest, .. } = self.limits;
        least_time + Duration::from_millis((bytes as u64).saturating_mul(1000) / slowest.max(1))
    }

    /// As much as one answer can have: all that the peer has for them.
    pub fn longest_answer(&self) -> usize {
        self.limits.answers
    }

    /// Waits until a control message of so many bytes has a place.
    ///
    /// # Errors
    /// `Timeout` when none becomes free.
    pub async fn for_message(&self, bytes: usize) -> Result<Held, NetError> {
        if bytes > MAX_SHORT as usize {
            return in_time(WAIT, bytes, both(&self.long, &self.all_long, bytes)).await;
        }
        in_time(WAIT, bytes, async { Some(Held::new(self.short.take(bytes).await?, None)) }).await
    }

    /// Waits until a question or an answer with so many bytes of an object has a place.
    ///
    /// # Errors
    /// `Timeout` when none becomes free.
    pub async fn for_answer(&self, bytes: usize) -> Result<Held, NetError> {
        in_time(WAIT_FOR_OBJECT, bytes, both(&self.answers, &self.all_answers, bytes)).await
    }

    /// Waits until no other long message is being decoded.
    pub(crate) async fn turn_to_decode(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.decoding).acquire_owned().await.ok()
    }

    /// Bytes that this peer has.
    pub fn taken(&self) -> usize {
        self.short.taken() + self.long.taken() + self.answers.taken()
    }
}

/// Of its own part first: what it waits for there takes nothing from others.
async fn both(own: &Lane, all: &Lane, bytes: usize) -> Option<Held> {
    let own = own.take(bytes).await?;
    Some(Held::new(own, Some(all.take(bytes).await?)))
}

async fn in_time(
    limit: Duration,
    bytes: usize,
    taking: impl Future<Output = Option<Held>>,
) -> Result<Held, NetError> {
    timeout(limit, taking).await.ok().flatten().ok_or_else(|| {
        let seconds = limit.as_secs();
        let what = format!(
            "no memory for a message of {bytes} bytes for {seconds} s: other messages have it"
        );
        NetError::new(NetErrorKind::Timeout, what)
    })
}

/// A place for a message, free again when this is dropped.
#[derive(Debug, Default)]
pub struct Held {
    own: Option<OwnedSemaphorePermit>,
    all: Option<OwnedSemaphorePermit>,
}

impl Held {
    fn new(own: OwnedSemaphorePermit, all: Option<OwnedSemaphorePermit>) -> Self {
        Self { own: Some(own), all }
    }

    /// Gives back what is beyond so many bytes.
    pub fn keep(&mut self, bytes: usize) {
        let pages = bytes.div_ceil(PAGE).max(1);
        for permit in [&mut self.own, &mut self.all].into_iter().flatten() {
            drop(permit.split(permit.num_permits().saturating_sub(pages)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const LONG: usize = MAX_CONTROL as usize;

    /// What is given within a moment.
    async fn now<T>(taking: impl Future<Output = Result<T, NetError>>) -> Option<T> {
        timeout(Duration::from_millis(20), taking).await.ok().and_then(Result::ok)
    }

    #[tokio::test]
    async fn a_peer_has_one_longest_message_and_the_host_three_however_many_are_asked_for() {
        let memory = Memory::default();
        let mut held = Vec::new();
        for peer in ["a", "b", "c"] {
            let of = memory.of(peer);
            held.push(now(of.for_message(LONG)).await.unwrap());
            assert!(now(of.for_message(LONG)).await.is_none(), "another one of {peer}");
            assert!(of.taken() <= 320 * MIB);
        }
        assert!(now(memory.of("D").for_message(LONG)).await.is_none(), "a fourth host's");
        // Short ones go on, of everybody.
        for peer in ["a", "d"] {
            now(memory.of(peer).for_message(MIB)).await.unwrap();
        }
        drop(held.pop());
        now(memory.of("d").for_message(LONG)).await.unwrap();
    }

    #[tokio::test]
    async fn who_waits_for_long_is_not_overtaken_for_ever() {
        let of = Memory::default().of("a");
        let first = now(of.for_message(LONG)).await.unwrap();
        let second = tokio::spawn({
            let of = of.clone();
            async move { of.for_message(LONG).await }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        // It would fit, and would keep the one before it waiting.
        assert!(now(of.for_message(8 * MIB)).await.is_none());
        drop(first);
        second.await.unwrap().unwrap();
        now(of.for_message(8 * MIB)).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn who_finds_no_place_is_told_in_the_end() {
        let of = Memory::default().of("a");
        let mut all = of.for_answer(192 * MIB).await.unwrap();
        let why = of.for_answer(1).await.unwrap_err();
        assert_eq!(why.kind, NetErrorKind::Timeout);
        assert!(why.to_string().contains("no memory for a message of 1 bytes for 900 s"), "{why}");
        assert_eq!(of.taken(), 192 * MIB);
        all.keep(MIB);
        assert_eq!(of.taken(), MIB);
        of.for_answer(191 * MIB).await.unwrap();
    }

    #[test]
    fn a_long_message_has_more_time_and_none_has_for_ever() {
        let of = Memory::default().of("a");
        assert_eq!(of.time_for(1), LEAST_TIME);
        assert_eq!(of.time_for(256 * MIB).as_secs(), 30 + 1024);
    }
}
