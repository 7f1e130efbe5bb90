//! An image that no VM uses moves to the other host, is written to, grows, or begins with a backup there.

use crate::faults::Aftermath;
use crate::loose::Writer;
use crate::walk::Walk;
use crate::world::{LETTERS, REPOSITORY, World};
use std::process::Child;
use std::time::Duration;

/// Until its client stops in a move, at most.
const WRITES: Duration = Duration::from_secs(3);
/// By how much an image grows, and how long it becomes at most.
const GROWS: u64 = 4 << 20;
const LONGEST: u64 = 64 << 20;

/// An image that is under way.
pub struct Moving {
    nth: usize,
    source: usize,
    args: Vec<String>,
    command: Option<Child>,
    writer: Option<Writer>,
    /// What its client saw.
    error: Option<u32>,
}

impl Walk<'_> {
    pub fn write_image(&mut self, nth: usize) -> Result<(), String> {
        let seed = self.random.below(1 << 40);
        self.images[nth].burst(&self.world, seed)
    }

    /// A client writes while the image is copied, and stops at some moment, before or after the handover.
    pub fn move_image(&mut self, nth: usize) -> Result<(), String> {
        let faults = self.draw_faults(false);
        self.tell(format!("   {faults:?}"));
        let mut moving = self.begin_image(nth)?;
        std::thread::sleep(self.random.time(WRITES));
        self.stop_client(&mut moving)?;
        let (source, mut after) = (moving.source, Aftermath::default());
        for fault in faults {
            self.fault(fault, source, None, &mut after)?;
        }
        let done = self.await_image(&mut moving)?;
        self.settle()?;
        self.end_image(&moving, done)
    }

    /// Begins to move an image and to write to it.
    pub fn begin_image(&mut self, nth: usize) -> Result<Moving, String> {
        let image = &self.images[nth];
        let (source, name, to) = (image.host, image.name.clone(), World::name(1 - image.host));
        let mut args = vec!["migrate".to_owned(), "--image".into(), name, "--to".into(), to];
        args.extend(self.options());
        self.tell(format!("   from {}: {args:?}", LETTERS[source]));
        let seed = self.random.below(1 << 40);
        let writer = Some(self.images[nth].writer(&self.world, seed));
        let words: Vec<&str> = args.iter().map(String::as_str).collect();
        let command = self.world.host(source).spawn(&words).map_err(|why| why.to_string())?;
        Ok(Moving { nth, source, args, command: Some(command), writer, error: None })
    }

    /// What the client asks of the source after the handover waits, and fails when the move is over.
    pub fn stop_client(&mut self, moving: &mut Moving) -> Result<(), String> {
        let Some(writer) = moving.writer.take() else { return Ok(()) };
        let (count, error) = self.images[moving.nth].take(writer.end()?);
        self.counts.add("writes of clients", count as u64);
        moving.error = error;
        Ok(())
    }

    /// Whether the command says that the image has moved.
    pub fn await_image(&mut self, moving: &mut Moving) -> Result<bool, String> {
        let command = moving.command.take().ok_or("nobody moves the image")?;
        let words: Vec<&str> = moving.args.iter().map(String::as_str).collect();
        let outcome = World::outcome(command, &format!("{words:?}"))?;
        Ok(self.note(&words, outcome).is_some())
    }

    /// Looks where the image is, and at what it holds.
    pub fn end_image(&mut self, moving: &Moving, done: bool) -> Result<(), String> {
        let Moving { nth, source, error, .. } = *moving;
        self.find_image(nth, done)?;
        let image = &self.images[nth];
        if let Some(error) = error.filter(|_| image.host == source) {
            return Err(format!("{} has stayed, and its client saw error {error}", image.name));
        }
        let bytes = image.judge(&self.world)?;
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
