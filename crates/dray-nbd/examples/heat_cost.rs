//! What counting accesses costs a guest: 4 KiB random writes over a unix socket, in turns to a disk
//! that tracks writes and counts accesses into heat (a history of 20,000, drained and counted five
//! times a second by a thread of this process, as the agent does) and to the same file without
//! either. `cargo run --release -p dray-nbd --example heat_cost [ROUNDS]`
//!
//! *Without* is the bare file: the gate and the map of missing blocks are charged to *with* as well.

use dray_heat::{Heat, HeatConfig, Op};
use dray_image::{Disk, FileImage, FileOptions, Image};
use dray_nbd::{ExportError, ExportInfo, Exports, Server};
use dray_types::BlockRange;
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LEN: u64 = 256 << 20;
const BLOCK: u64 = 4096;
/// Of one measurement.
const SPAN: Duration = Duration::from_millis(250);
const DRAIN: Duration = Duration::from_millis(200);
const HISTORY: u64 = 20_000;

struct Two([Arc<dyn Image>; 2]);

impl Exports for Two {
    fn list(&self) -> Vec<ExportInfo> {
        ["with", "without"].map(ExportInfo::new).to_vec()
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Image>, ExportError> {
        match name {
            "with" => Ok(Arc::clone(&self.0[0])),
            "without" => Ok(Arc::clone(&self.0[1])),
            _ => Err(ExportError::unknown(name)),
        }
    }
}

/// Just enough of a client to write.
struct Client {
    stream: UnixStream,
    random: u64,
}

impl Client {
    fn connect(socket: &Path, export: &str) -> Result<Self, Box<dyn Error>> {
        let mut stream = UnixStream::connect(socket)?;
        stream.read_exact(&mut [0; 18])?;
        let mut go = 3_u32.to_be_bytes().to_vec();
        go.extend(b"IHAVEOPT");
        go.extend(7_u32.to_be_bytes());
        go.extend((export.len() as u32 + 6).to_be_bytes());
        go.extend((export.len() as u32).to_be_bytes());
        go.extend(export.as_bytes());
        go.extend([0; 2]);
        stream.write_all(&go)?;
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            let word = |at: usize| {
                u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
            };
            stream.read_exact(&mut vec![0; word(16) as usize])?;
            match word(12) {
                1 => return Ok(Self { stream, random: 1 }),
                3 => {}
                other => return Err(format!("the server answers {other:#x}").into()),
            }
        }
    }

    fn send(&mut self, request: &mut [u8]) -> Result<(), Box<dyn Error>> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let offset = self.random % (LEN / BLOCK) * BLOCK;
        request[16..24].copy_from_slice(&offset.to_be_bytes());
        Ok(self.stream.write_all(request)?)
    }

    fn receive(&mut self) -> Result<(), Box<dyn Error>> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        if reply[4..8] == [0; 4] { Ok(()) } else { Err("a write failed".into()) }
    }

    /// Writes at this depth for a while: writes a second, and the latencies in nanoseconds.
    fn measure(&mut self, depth: usize) -> Result<(f64, Vec<u64>), Box<dyn Error>> {
        let mut request = vec![1; 28 + BLOCK as usize];
        request[..28].fill(0);
        request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        request[7] = 1;
        request[24..28].copy_from_slice(&(BLOCK as u32).to_be_bytes());
        let began = Instant::now();
        let mut times = Vec::new();
        while began.elapsed() < SPAN {
            let at = Instant::now();
            for _ in 0..depth {
                self.send(&mut request)?;
            }
            for _ in 0..depth {
                self.receive()?;
            }
            times.push(at.elapsed().as_nanos() as u64);
        }
        let rate = (times.len() * depth) as f64 / began.elapsed().as_secs_f64();
        times.sort_unstable();
        Ok((rate, times))
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(100), |text| text.parse())?;
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; LEN as usize])?;
    let options = FileOptions { write: true, ..FileOptions::default() };
    let open = || FileImage::open(&path, options).map(Arc::new);
    let disk = Disk::new(open()?);
    disk.start_tracking(None);
    let heat = Arc::new(Mutex::new(Heat::new(LEN / BLOCK, HeatConfig::default())));
    for nth in 0..HISTORY {
        let block = nth * 7919 % (LEN / BLOCK);
        heat.lock().map_err(|_| "poisoned")?.access(Op::Write, BlockRange::new(block, 1));
    }
    let counted = Arc::clone(&disk);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(DRAIN);
            let Ok(mut heat) = heat.lock() else { return };
            counted.accesses().drain_into(&mut heat);
        }
    });
    let server = Server::new(Arc::new(Two([disk, open()?])));
    let socket = dir.path().join("socket");
    let _handle = server.bind_unix(&socket, 0o600, None)?;
    let mut clients = [Client::connect(&socket, "with")?, Client::connect(&socket, "without")?];
    println!("{rounds} rounds in turns, medians; ratio: median of each round's with ÷ without");
    for depth in [1, 16] {
        let mut seen: [[Vec<f64>; 2]; 3] = Default::default();
        let mut ratios: [Vec<f64>; 3] = Default::default();
        for round in 0..rounds {
            let mut now = [[0.0; 2]; 3];
            for turn in 0..2 {
                let which = (round + turn) % 2;
                let (rate, times) = clients[which].measure(depth)?;
                let at = |share: f64| times[(times.len() as f64 * share) as usize] as f64 / 1e3;
                for (value, found) in now.iter_mut().zip([rate, at(0.5), at(0.99)]) {
                    value[which] = found;
                }
            }
            for (what, value) in now.iter().enumerate() {
                (0..2).for_each(|which| seen[what][which].push(value[which]));
                ratios[what].push(value[0] / value[1]);
            }
        }
        for (what, name) in ["writes a second", "p50 µs", "p99 µs"].into_iter().enumerate() {
            let [with, without] = [0, 1].map(|which| median(&mut seen[what][which]));
            let ratio = median(&mut ratios[what]);
            println!(
                "depth {depth:2} {name:16} with {with:9.1} without {without:9.1} ratio {ratio:.4}"
            );
        }
    }
    Ok(())
}
