//! An image that no VM uses: a client writes to it through an agent's NBD socket, and knows what it wrote, in
//! which order, and what was answered.

use crate::judge;
use crate::world::World;
use dray_guest::content::{BLOCK, Written};
use dray_guest::nbd::{Client, FLUSH, Fault, Request, WRITE};
use dray_testkit::guest::Bystander;
use dray_testkit::random::Random;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of an image at first, and of them those that hold something.
const SIZE: u64 = 32 << 20;
const SEEDED: u64 = 12 << 20;
/// A request covers at most so many blocks.
const LONGEST: u64 = 16;
/// An agent that does not greet within this time is not there.
const GREETING: Duration = Duration::from_secs(5);
/// How long a client that is to stop waits for its last answers: longer than a busy machine takes for them.
const LAST: Duration = Duration::from_secs(3);
/// For how long it writes when nothing else happens.
const BURST: Duration = Duration::from_millis(500);
/// Between two writes, and two tries to connect.
const PAUSE: Duration = Duration::from_millis(10);
/// Writes until a flush.
const FLUSHED: u32 = 8;

/// One write.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    pub first: u64,
    pub count: u64,
    pub seq: u32,
    /// It was answered.
    pub answered: bool,
}

/// An image and what its client knows.
pub struct Loose {
    pub name: String,
    pub host: usize,
    pub size: u64,
    number: u64,
    /// All writes, in their order.
    pub history: Vec<Write>,
    /// So many of them are flushed.
    flushed: usize,
}

/// A client that writes until it is stopped.
pub struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Wrote>,
}

/// What a client has done.
#[derive(Default)]
pub struct Wrote {
    writes: Vec<Write>,
    flushed: usize,
    /// An error that a guest would have seen.
    errors: Vec<u32>,
}

impl Loose {
    /// Makes an image at one of the hosts, served by its agent.
    pub fn make(world: &World, random: &mut Random, nth: usize) -> Result<Self, String> {
        let host = random.below(2) as usize;
        let image = Self {
            name: format!("image{nth}.raw"),
            host,
            size: SIZE,
            number: 1000 + nth as u64,
            history: Vec::new(),
            flushed: 0,
        };
        let path = world.file(host, &image.name);
        image.beginning().create_raw(&path).map_err(|why| format!("{}: {why}", image.name))?;
        let add = ["images", "add", &image.name, crate::world::text(&path)];
        world.host(host).json(&add).map_err(|why| why.to_string())?;
        Ok(image)
    }

    fn beginning(&self) -> Bystander {
        Bystander::new(self.number, self.size, SEEDED)
    }

    /// What it holds after those of the first writes that were answered.
    pub fn after(&self, writes: usize) -> Bystander {
        let mut known = self.beginning();
        for write in self.history[..writes].iter().filter(|write| write.answered) {
            known.note(write.first, write.count, write.seq);
        }
        known
    }

    /// How many writes at the beginning of the history are flushed.
    pub fn flushed(&self) -> usize {
        self.flushed
    }

    /// Compares the owner's file: what was flushed is there, or something newer. The bytes that were compared.
    pub fn judge(&self, world: &World) -> Result<u64, String> {
        judge::judge_owner(world, &self.name, self.host)?;
        let file = world.file(self.host, &self.name);
        let length = judge::length(&file);
        if length != self.size {
            return Err(format!("{} has {length} bytes, not {}", self.name, self.size));
        }
        let checked = self.after(self.flushed).check_flushed(&file, &[]);
        checked.map_err(|why| why.to_string())?;
        Ok(length)
    }

    /// Begins to write where the image is.
    pub fn writer(&self, world: &World, seed: u64) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let client = Job {
            socket: world.host(self.host).nbd_socket(),
            name: self.name.clone(),
            blocks: self.size / BLOCK as u64,
            number: self.number,
            seq: self.history.last().map_or(0, |write| write.seq),
            stop: stop.clone(),
        };
        Writer { stop, thread: std::thread::spawn(move || client.run(Random::new(seed))) }
    }

    /// Takes what a client has done; how many writes, and an error that it saw.
    pub fn take(&mut self, wrote: Wrote) -> (usize, Option<u32>) {
        if wrote.flushed > 0 {
            self.flushed = self.history.len() + wrote.flushed;
        }
        let count = wrote.writes.len();
        self.history.extend(wrote.writes);
        (count, wrote.errors.first().copied())
    }

    /// The same where no client may see an error.
    pub fn take_well(&mut self, wrote: Wrote) -> Result<(), String> {
        match self.take(wrote).1 {
            Some(error) => Err(format!("{}: the client saw error {error}", self.name)),
            None => Ok(()),
        }
    }

    /// Writes for a moment, and flushes. Nothing is in the way of it.
    pub fn burst(&mut self, world: &World, seed: u64) -> Result<(), String> {
        let before = self.flushed;
        let writer = self.writer(world, seed);
        std::thread::sleep(BURST);
        let wrote = writer.end()?;
        self.take_well(wrote)?;
        if self.flushed == before {
            return Err(format!("{}: nothing is written where nothing is wrong", self.name));
        }
        if self.flushed != self.history.len() {
            return Err(format!("{}: the last writes were not answered", self.name));
        }
        Ok(())
    }
}

impl Writer {
    /// Stops it; what it has done. It waits a moment for its last answers, and goes then.
    pub fn end(self) -> Result<Wrote, String> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().map_err(|_| "the client fell over a reply".to_owned())
    }
}

/// What a client does in its thread.
struct Job {
    socket: PathBuf,
    name: String,
    blocks: u64,
    number: u64,
    seq: u32,
    stop: Arc<AtomicBool>,
}

impl Job {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn run(mut self, mut random: Random) -> Wrote {
        let mut wrote = Wrote::default();
        while !self.stopped() {
            match connect(&self.socket, &self.name) {
                Some(mut client) => self.write(&mut client, &mut random, &mut wrote),
                None => std::thread::sleep(PAUSE),
            }
        }
        wrote
    }

    /// Writes until it is stopped, or the connection is gone.
    fn write(&mut self, client: &mut Client, random: &mut Random, wrote: &mut Wrote) {
        let mut since = 0;
        while !self.stopped() {
            if !self.one(client, random, wrote) {
                return;
            }
            since += 1;
            if since % FLUSHED == 0 && !self.flush(client, wrote) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
        self.flush(client, wrote);
    }

    fn one(&mut self, client: &mut Client, random: &mut Random, wrote: &mut Wrote) -> bool {
        self.seq += 1;
        let count = 1 + random.below(LONGEST);
        let first = random.below(self.blocks - count + 1);
        let mut data = vec![0; count as usize * BLOCK];
        for (block, chunk) in (first..).zip(data.chunks_exact_mut(BLOCK)) {
            Written { image: self.number, block, seq: self.seq }.fill(chunk);
        }
        let offset = first * BLOCK as u64;
        let answered = self.request(client, WRITE, offset, &data, wrote);
        wrote.writes.push(Write { first, count, seq: self.seq, answered });
        answered
    }

    fn flush(&self, client: &mut Client, wrote: &mut Wrote) -> bool {
        let done = self.request(client, FLUSH, 0, &[], wrote);
        if done {
            wrote.flushed = wrote.writes.len();
        }
        done
    }

    /// Whether it was answered. A client that is to stop waits a moment for it.
    fn request(
        &self,
        client: &mut Client,
        kind: u16,
        offset: u64,
        data: &[u8],
        wrote: &mut Wrote,
    ) -> bool {
        let len = data.len() as u32;
        let stopped = std::cell::Cell::new(None);
        let wait = || {
            if self.stopped() && stopped.get().is_none() {
                stopped.set(Some(Instant::now()));
            }
            stopped.get().is_none_or(|since: Instant| since.elapsed() < LAST)
        };
        match client.request(&Request { kind, forced: false, offset, len, data }, &wait) {
            Ok(_) => true,
            Err(Fault::Lost) => false,
            Err(Fault::Error(error)) => {
                wrote.errors.push(error);
                false
            }
        }
    }
}

fn connect(socket: &Path, name: &str) -> Option<Client> {
    Client::connect(socket, name, GREETING).ok()
}
