//! What a disk's layers cost a guest: 4 KiB random writes over a unix socket, in short turns to two
//! exports of one file, every turn of one beside a turn of the other.
//! `cargo run --release -p dray-nbd --example heat_cost [SECONDS [DEPTH …]]`; the file is where TMPDIR says.
//!
//! * `bare` and `bare again`: the file without a disk. What they differ by is the error of the rest.
//! * `disk`: a disk that tracks nothing. Nobody counts its accesses: its log is full and closed.
//! * `generation`: it remembers what changes, each region's write intent durable before.
//! * `tracked`: it tracks for a migration as well.
//! * `all`: the same, and during its turns a thread counts the accesses into heat with a full history,
//!   as the agent does. What the end of a turn leaves, and what is left of the pause between two
//!   drains, is the next one of its turns' matter, so that they pay for everything.
//!
//! Told are the medians, and the median of each pair's ratio with the interval that holds it in 95 of
//! 100 cases (by rank: nothing is assumed of how ratios are distributed).

use dray_heat::{DrainPause, Heat, HeatConfig, Op};
use dray_image::{Disk, FileImage, FileOptions, Image, IntentLog};
use dray_nbd::Server;
use dray_serve::{ExportError, ExportInfo, Exports};
use dray_types::{BlockRange, BlockSet};
use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// As many chunks as heat ever counts.
const LEN: u64 = 2 << 30;
const BLOCK: u64 = 4096;
/// Of one turn: short, so that what else the machine does meets both of a pair.
const SPAN: Duration = Duration::from_millis(25);
/// Of one turn in which accesses are counted: many drains.
const LONG_SPAN: Duration = Duration::from_millis(200);
/// Rounds of 20,000 operations before: trials have begun to pause.
const HISTORY: u64 = 5 * 20_000;
const NAMES: [&str; 6] = ["bare", "bare again", "disk", "generation", "tracked", "all"];
/// What is compared with what.
const PAIRS: [(usize, usize, Duration); 6] = [
    (1, 0, LONG_SPAN),
    (2, 0, SPAN),
    (3, 2, SPAN),
    (4, 3, SPAN),
    (5, 3, LONG_SPAN),
    (5, 0, LONG_SPAN),
];

struct All([Arc<dyn Image>; 6]);

impl Exports for All {
    fn list(&self) -> Vec<ExportInfo> {
        NAMES.map(ExportInfo::new).to_vec()
    }

    fn open(&self, name: &str, _: &dray_serve::Client) -> Result<Arc<dyn Image>, ExportError> {
        let nth = NAMES.iter().position(|known| *known == name);
        nth.map(|nth| Arc::clone(&self.0[nth])).ok_or_else(|| ExportError::unknown(name))
    }
}

/// Write intents as an agent keeps them: durable before the first write into a region.
struct Intents(File);

impl IntentLog for Intents {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        let written = (&self.0).write_all(&region.to_le_bytes()).and_then(|()| self.0.sync_data());
        written.map_err(|why| dray_image::Error::io("noting a write intent", why))
    }
}

/// Remembers what changes from now on.
fn keep_generation(disk: &Disk) -> Result<(), Box<dyn Error>> {
    let intents = Intents(tempfile::tempfile()?);
    disk.start_history(Arc::new(intents), &BlockSet::new());
    Ok(())
}

/// Counts the accesses of `disk` while it is told to; it has seen a whole history already.
fn count(disk: Arc<Disk>) -> Sender<bool> {
    let mut heat = Heat::new(LEN / BLOCK, HeatConfig::default());
    for nth in 0..HISTORY {
        let block = nth * 7919 % (LEN / BLOCK);
        heat.access(Op::Write, BlockRange::new(block, 1));
    }
    let (tell, told) = channel();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut pause = DrainPause::new(cores);
    std::thread::spawn(move || {
        let mut rest = Duration::ZERO;
        while let Ok(true) = told.recv() {
            let mut from = Instant::now();
            while told.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
                let (used, began) = (disk.accesses().used(), Instant::now());
                disk.accesses().drain_into(&mut heat);
                rest = pause.after(used, began.elapsed());
                from = Instant::now();
            }
            rest = rest.saturating_sub(from.elapsed());
        }
    });
    tell
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
    fn measure(&mut self, depth: usize, span: Duration) -> Result<(f64, Vec<u64>), Box<dyn Error>> {
        let mut request = vec![1; 28 + BLOCK as usize];
        request[..28].fill(0);
        request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
        request[7] = 1;
        request[24..28].copy_from_slice(&(BLOCK as u32).to_be_bytes());
        let began = Instant::now();
        let mut times = Vec::new();
        while began.elapsed() < span {
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

/// What was measured of the two of a pair, and the ratios turn by turn.
#[derive(Default)]
struct Seen {
    each: [Vec<f64>; 2],
    ratios: Vec<f64>,
}

impl Seen {
    fn add(&mut self, now: [f64; 2]) {
        (0..2).for_each(|which| self.each[which].push(now[which]));
        self.ratios.push(now[0] / now[1]);
    }

    fn tell(&mut self, depth: usize, names: [&str; 2], what: &str) {
        let [one, other] = self.each.each_mut().map(|values| median(values));
        let ratio = median(&mut self.ratios);
        let count = self.ratios.len() as f64;
        let off = (0.98 * count.sqrt()).ceil();
        let at = |rank: f64| self.ratios[rank.clamp(0.0, count - 1.0) as usize];
        let [low, high] = [at(count / 2.0 - off), at(count / 2.0 + off)];
        println!(
            "depth {depth:2} {:10} against {:5} {what:16} {one:9.1} {other:9.1} \
             ratio {ratio:.4} ({low:.4} to {high:.4})",
            names[0], names[1]
        );
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Turns of two exports for `seconds`; which is first changes from pair to pair. Every turn has a
/// connection of its own: where the kernel has put the threads of one would be told as a difference
/// of the exports.
fn compare(
    pair: (usize, usize, Duration),
    depth: usize,
    seconds: u64,
    socket: &Path,
    counts: &Sender<bool>,
) -> Result<(), Box<dyn Error>> {
    let both = [pair.0, pair.1];
    let mut seen: [Seen; 3] = Default::default();
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < Duration::from_secs(seconds) {
        let mut now = [[0.0; 2]; 3];
        for turn in 0..2 {
            let which = (round + turn) % 2;
            let mut client = Client::connect(socket, NAMES[both[which]])?;
            client.random = round as u64 * 2 + 1;
            let is_counted = NAMES[both[which]] == "all";
            if is_counted {
                counts.send(true)?;
            }
            let (rate, times) = client.measure(depth, pair.2)?;
            if is_counted {
                counts.send(false)?;
            }
            let at = |share: f64| times[(times.len() as f64 * share) as usize] as f64 / 1e3;
            for (value, found) in now.iter_mut().zip([rate, at(0.5), at(0.99)]) {
                value[which] = found;
            }
        }
        round += 1;
        seen.iter_mut().zip(now).for_each(|(seen, now)| seen.add(now));
    }
    for (seen, what) in seen.iter_mut().zip(["writes a second", "p50 µs", "p99 µs"]) {
        seen.tell(depth, both.map(|nth| NAMES[nth]), what);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let seconds = args.next().unwrap_or(Ok(40))? as u64;
    let mut depths = args.collect::<Result<Vec<_>, _>>()?;
    if depths.is_empty() {
        depths = vec![1, 16, 64];
    }
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("file");
    let mut file = File::create(&path)?;
    (0..LEN >> 20).try_for_each(|_| file.write_all(&[1; 1 << 20]))?;
    let options = FileOptions { write: true, ..FileOptions::default() };
    let open = || FileImage::open(&path, options).map(Arc::new);
    let disk = || open().map(|file| Disk::new(file));
    let [plain, generation, tracked, all] = [disk()?, disk()?, disk()?, disk()?];
    for disk in [&generation, &tracked, &all] {
        keep_generation(disk)?;
    }
    tracked.start_tracking(None).expect("nothing is in flight");
    all.start_tracking(None).expect("nothing is in flight");
    let counts = count(Arc::clone(&all));
    let log = Arc::clone(&all);
    let server = Server::new(Arc::new(All([open()?, open()?, plain, generation, tracked, all])));
    let socket = dir.path().join("socket");
    let _handle = server.bind_unix(&socket, 0o600, None)?;
    println!("{seconds} s each, in turns; medians, median ratio");
    for depth in depths {
        for pair in PAIRS {
            compare(pair, depth, seconds, &socket, &counts)?;
        }
    }
    println!("{} accesses were not counted", log.accesses().dropped());
    Ok(())
}
