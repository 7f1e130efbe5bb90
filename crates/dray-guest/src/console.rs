//! The console: a virtio-serial port on which commands arrive and answers leave. All writing is
//! done by one thread, so that a console nobody reads never holds up a disk.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// The port the host named `dray`.
pub const PORT: &str = "/dev/vport0p1";
/// Lines waiting for a slow console; a dump of a large disk waits here for the host to read it.
const QUEUE: usize = 4096;
/// A port without a host reads as end of file; ask again after this time.
const NO_HOST: Duration = Duration::from_millis(20);

/// Where lines go.
#[derive(Clone)]
pub struct Output(SyncSender<String>);

impl Output {
    /// Starts the writing thread.
    pub fn start(port: File) -> Self {
        let (sender, receiver) = sync_channel(QUEUE);
        std::thread::spawn(move || write_lines(port, &receiver));
        Self(sender)
    }

    /// Queues a line; waits while the queue is full.
    pub fn send(&self, line: impl Display) {
        // The writing thread ends only with the program.
        let _ = self.0.send(format!("{line}\n"));
    }

    /// Queues a line unless the queue is full: for reports that are stale a second later.
    pub fn offer(&self, line: impl Display) {
        let _ = self.0.try_send(format!("{line}\n"));
    }
}

fn write_lines(mut port: File, receiver: &Receiver<String>) {
    while let Ok(mut text) = receiver.recv() {
        while text.len() < 32 * 1024 {
            match receiver.try_recv() {
                Ok(more) => text.push_str(&more),
                Err(_) => break,
            }
        }
        // Blocks while no host is connected; an error means the port is gone.
        if port.write_all(text.as_bytes()).is_err() {
            return;
        }
    }
}

/// A port that waits for its host instead of ending.
struct Patient(File);

impl Read for Patient {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.0.read(buf)? {
                0 => std::thread::sleep(NO_HOST),
                n => return Ok(n),
            }
        }
    }
}

/// The lines the host sends.
pub fn commands(port: File) -> impl Iterator<Item = String> {
    BufReader::new(Patient(port)).lines().map_while(Result::ok)
}
