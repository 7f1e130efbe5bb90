//! An image that no VM uses moves to the other host, is written to, grows, or begins with a backup there.

use crate::faults::Aftermath;
use crate::walk::Walk;
use crate::world::{LETTERS, REPOSITORY, World};
use std::time::Duration;

/// Until its client stops in a move, at most.
const WRITES: Duration = Duration::from_secs(3);
/// By how much an image grows, and how long it becomes at most.
const GROWS: u64 = 4 << 20;
const LONGEST: u64 = 64 << 20;

impl Walk<'_> {
    pub fn write_image(&mut self, nth: usize) -> Result<(), String> {
        let seed = self.random.below(1 << 40);
        self.images[nth].burst(&self.world, seed)
    }

    /// A client writes while the image is copied, and stops at some moment, before or after the handover: what it
    /// asks of the source then waits, and fails when the move is over.
    pub fn move_image(&mut self, nth: usize) -> Result<(), String> {
        let (source, name) = (self.images[nth].host, self.images[nth].name.clone());
        let to = World::name(1 - source);
        let mut args =
            vec!["migrate".to_owned(), "--image".into(), name.clone(), "--to".into(), to];
        args.extend(self.options());
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        let faults = self.draw_faults(false);
        self.tell(format!("   from {}: {words:?}, {faults:?}", LETTERS[source]));
        let writer = self.images[nth].writer(&self.world, self.random.below(1 << 40));
        let spawned = self.world.host(source).spawn(&words).map_err(|why| why.to_string())?;
        std::thread::sleep(self.random.time(WRITES));
        let wrote = writer.end()?;
        let (count, error) = self.images[nth].take(wrote);
        self.counts.add("writes of clients", count as u64);
        let mut after = Aftermath::default();
        for fault in faults {
            self.fault(fault, source, None, &mut after)?;
        }
        let outcome = World::outcome(spawned, &format!("{words:?}"))?;
        let done = self.note(&words, outcome).is_some();
        self.settle()?;
        self.find_image(nth, done)?;
        if let Some(error) = error.filter(|_| self.images[nth].host == source) {
            return Err(format!("{name} has stayed, and its client saw error {error}"));
        }
        let bytes = self.images[nth].judge(&self.world)?;
        self.counts.add("MiB compared", bytes >> 20);
        self.write_image(nth)
    }

    /// Exactly one host owns the image now.
    fn find_image(&mut self, nth: usize, done: bool) -> Result<(), String> {
        let (source, name) = (self.images[nth].host, self.images[nth].name.clone());
        let all = [self.world.image(0, &name)?, self.world.image(1, &name)?];
        let owners: Vec<usize> = (0..2).filter(|&host| all[host]["state"] == "owner").collect();
        let [host] = owners[..] else {
            return Err(format!("hosts {owners:?} own {name}: {all:?}"));
        };
        if done && host == source {
            return Err(format!("the move of {name} is complete, and it is where it was"));
        }
        self.tell(format!("   {name} is at {}", LETTERS[host]));
        self.counts.add(if host == source { "images that stayed" } else { "images moved" }, 1);
        self.images[nth].host = host;
        Ok(())
    }

    pub fn resize_image(&mut self, nth: usize) -> Result<(), String> {
        let (host, name) = (self.images[nth].host, self.images[nth].name.clone());
        let size = self.images[nth].size + GROWS;
        if size > LONGEST {
            return Ok(());
        }
        if self.ask(host, &["resize", &name, &size.to_string()])?.is_some() {
            self.images[nth].size = size;
        }
        self.write_image(nth)
    }

    /// The other host reads the image from its backup, before a migration that may come.
    pub fn seed(&mut self, nth: usize) -> Result<(), String> {
        let (host, name) = (self.images[nth].host, self.images[nth].name.clone());
        self.ask(host, &["backup", &name, "--to", REPOSITORY])?;
        self.write_image(nth)?;
        self.ask(host, &["seed", "--image", &name, "--to", &World::name(1 - host)]).map(drop)
    }
}
