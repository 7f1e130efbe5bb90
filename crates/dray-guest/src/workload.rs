//! A workload on one disk: writers at a requested rate and a reader that checks what was written
//! earlier, or the steps of a trace at their times.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dray_guest::content::{BLOCK, mix};
use dray_guest::line::Line;

use crate::console::Output;
use crate::disk::{Aligned, Blocks, Disk};
use crate::histogram::Histogram;
use crate::steps::Steps;

/// A writer that fell behind catches up by at most this much; what is older was not achieved.
const MAX_BACKLOG: Duration = Duration::from_secs(2);
/// The longest sleep of a thread that waits for a step's time.
const MAX_NAP: Duration = Duration::from_millis(500);
/// After this many bad blocks only the count goes on, so that the console stays usable.
const MAX_REPORTED: u64 = 20;

/// What to write.
#[derive(Clone, Debug)]
pub struct Options {
    unit_blocks: u64,
    first_unit: u64,
    units: u64,
    rate: u64,
    random: bool,
    flush_every: u64,
    threads: u64,
    verify_every: u64,
    seed: u64,
    log: bool,
}

impl Options {
    /// Reads `block=`, `offset=`, `span=`, `rate=`, `pattern=`, `flush=`, `threads=`, `verify=`,
    /// `seed=` and `log=`; sizes in bytes, `rate=0` as fast as possible, `flush=N` after every N
    /// writes, `log=1` tells after each flush which writes it covers.
    pub fn parse(line: &Line, disk: &Disk) -> Result<Self, String> {
        let unit: u64 = line.value("block", 65536)?;
        if unit == 0 || !unit.is_multiple_of(BLOCK as u64) {
            return Err(format!("block={unit}: must be a multiple of {BLOCK}"));
        }
        let size = disk.block_count() * BLOCK as u64;
        let offset: u64 = line.value("offset", 0)?;
        let span: u64 = line.value("span", size.saturating_sub(offset))?;
        let units = span / unit;
        if units == 0 || !offset.is_multiple_of(unit) || offset + span > size {
            return Err(format!("offset={offset} span={span}: not on a disk of {size} bytes"));
        }
        Ok(Self {
            unit_blocks: unit / BLOCK as u64,
            first_unit: offset / unit,
            units,
            rate: line.value("rate", 0)?,
            random: line.get("pattern") != Some("seq"),
            flush_every: line.value("flush", 0)?,
            threads: line.value("threads", 1u64)?.clamp(1, 64),
            verify_every: line.value("verify", 4)?,
            seed: line.value("seed", 1)?,
            log: line.value("log", 0)? == 1,
        })
    }

    fn unit_bytes(&self) -> u64 {
        self.unit_blocks * BLOCK as u64
    }

    /// The `n`th write's place.
    fn nth(&self, n: u64) -> Blocks {
        let unit =
            if self.random { mix(self.seed ^ (n << 8)) % self.units } else { n % self.units };
        Blocks { first: (self.first_unit + unit) * self.unit_blocks, count: self.unit_blocks }
    }
}

/// What happened in an interval.
pub struct Counts {
    since: Instant,
    writes: u64,
    bytes: u64,
    flushes: u64,
    verified: u64,
    bad: u64,
    errors: u64,
    latency: Histogram,
}

impl Counts {
    fn new() -> Self {
        let latency = Histogram::new();
        let since = Instant::now();
        Self { since, writes: 0, bytes: 0, flushes: 0, verified: 0, bad: 0, errors: 0, latency }
    }

    /// The counts as a console line.
    pub fn line(&self, word: &str, disk: &Disk, asked: u64) -> Line {
        let seconds = self.since.elapsed().as_secs_f64();
        Line::new(word)
            .with("disk", &disk.name)
            .with("seconds", format!("{seconds:.3}"))
            .with("bytes", self.bytes)
            .with("rate", (self.bytes as f64 / seconds) as u64)
            .with("asked", asked)
            .with("writes", self.writes)
            .with("flushes", self.flushes)
            .with("p50_us", self.latency.percentile_us(500))
            .with("p90_us", self.latency.percentile_us(900))
            .with("p99_us", self.latency.percentile_us(990))
            .with("p999_us", self.latency.percentile_us(999))
            .with("max_us", self.latency.max_us())
            .with("verified", self.verified)
            .with("bad", self.bad)
            .with("errors", self.errors)
            .with("fresh_blocks", disk.fresh_count())
    }
}

/// Counts since the last second and since the last mark.
struct Meters {
    second: Counts,
    interval: Counts,
}

impl Meters {
    fn each(&mut self, f: impl Fn(&mut Counts)) {
        f(&mut self.second);
        f(&mut self.interval);
    }
}

/// A running or stopped workload.
pub struct Workload {
    /// The disk it works on.
    pub disk: Arc<Disk>,
    options: Options,
    meters: Mutex<Meters>,
    begun: Instant,
    pace: Mutex<Instant>,
    issued: AtomicU64,
    completed: Mutex<u64>,
    progressed: Condvar,
    stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    output: Output,
    reported: AtomicU64,
    /// What was written since the last flush, if flushes are logged.
    unflushed: Mutex<Vec<(Blocks, u32)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workload {
    /// Starts the writers and the checker.
    pub fn start(disk: Arc<Disk>, options: Options, output: Output) -> Arc<Self> {
        let this = Self::new(disk, options, output);
        for _ in 0..this.options.threads {
            this.spawn(Self::write_loop);
        }
        if this.options.verify_every > 0 {
            this.spawn(Self::check_loop);
        }
        this
    }

    /// Starts doing the steps of a trace, each at its time or as soon as a thread is free; reads
    /// are checked. Of the options only the number of threads counts.
    pub fn replay(disk: Arc<Disk>, options: Options, steps: Steps, output: Output) -> Arc<Self> {
        let this = Self::new(disk, options, output);
        let steps = Arc::new(steps);
        for _ in 0..this.options.threads {
            let steps = steps.clone();
            this.spawn(move |this| this.step_loop(&steps));
        }
        this
    }

    fn new(disk: Arc<Disk>, options: Options, output: Output) -> Arc<Self> {
        let meters = Meters { second: Counts::new(), interval: Counts::new() };
        Arc::new(Self {
            disk,
            options,
            meters: Mutex::new(meters),
            begun: Instant::now(),
            pace: Mutex::new(Instant::now()),
            issued: AtomicU64::new(0),
            completed: Mutex::new(0),
            progressed: Condvar::new(),
            stopping: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
            output,
            reported: AtomicU64::new(0),
            unflushed: Mutex::new(Vec::new()),
        })
    }

    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        let this = self.clone();
        lock(&self.threads).push(std::thread::spawn(move || work(&this)));
    }

    /// Stops and waits for what is in flight.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Taken so that the checker is either before its test of the flag or already waiting.
        drop(lock(&self.completed));
        self.progressed.notify_all();
        for thread in lock(&self.threads).drain(..) {
            if thread.join().is_err() {
                self.output.send(Line::new("ERROR").with("disk", &self.disk.name).with("panic", 1));
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Starts a new interval for [`Workload::report`].
    pub fn mark(&self) {
        self.disk.mark();
        lock(&self.meters).interval = Counts::new();
    }

    /// What happened since the last mark.
    pub fn report(&self) -> Line {
        lock(&self.meters).interval.line("REPORT", &self.disk, self.options.rate)
    }

    /// What happened since the last call.
    pub fn second(&self) -> Line {
        let mut meters = lock(&self.meters);
        let line = meters.second.line("STAT", &self.disk, self.options.rate);
        meters.second = Counts::new();
        line.with("total_bad", meters.interval.bad).with("total_errors", meters.interval.errors)
    }

    fn wait_for_turn(&self) {
        if self.options.rate == 0 {
            return;
        }
        let step =
            Duration::from_secs_f64(self.options.unit_bytes() as f64 / self.options.rate as f64);
        let now = Instant::now();
        let turn = {
            let mut next = lock(&self.pace);
            if let Some(oldest) = now.checked_sub(MAX_BACKLOG) {
                *next = (*next).max(oldest);
            }
            let turn = *next;
            *next += step;
            turn
        };
        std::thread::sleep(turn.saturating_duration_since(now));
    }

    fn write_loop(&self) {
        let mut buf = Aligned::new(self.options.unit_bytes() as usize);
        while !self.stopped() {
            self.wait_for_turn();
            let n = self.issued.fetch_add(1, Ordering::Relaxed);
            self.write_one(self.options.nth(n), &mut buf);
            *lock(&self.completed) = n + 1;
            self.progressed.notify_all();
            let every = self.options.flush_every;
            if every > 0 && n % every == every - 1 {
                self.flush();
            }
        }
    }

    fn step_loop(&self, steps: &Steps) {
        let begun = self.begun;
        let mut buf = Aligned::new(steps.longest());
        while let Some(step) = steps.get(self.issued.fetch_add(1, Ordering::Relaxed)) {
            // Woken now and then, to see that it shall stop.
            while begun.elapsed() < step.at && !self.stopped() {
                std::thread::sleep((step.at.saturating_sub(begun.elapsed())).min(MAX_NAP));
            }
            if self.stopped() {
                return;
            }
            if step.write {
                self.write_one(step.blocks, &mut buf);
            } else {
                self.check(step.blocks, &mut buf);
            }
        }
    }

    fn write_one(&self, place: Blocks, buf: &mut Aligned) {
        let claim = self.disk.claim(place);
        let result = self.disk.prepare(&claim, buf).and_then(|seq| {
            let start = Instant::now();
            self.disk.write(&claim, buf, seq)?;
            if self.options.log {
                lock(&self.unflushed).push((place, seq));
            }
            Ok(start.elapsed())
        });
        drop(claim);
        match result {
            Ok(latency) => lock(&self.meters).each(|c| {
                c.writes += 1;
                c.bytes += place.count * BLOCK as u64;
                c.latency.add(latency);
            }),
            Err(error) => self.failed("write", &error),
        }
    }

    fn flush(&self) {
        // Only what was answered before the flush began is covered by it.
        let covered = std::mem::take(&mut *lock(&self.unflushed));
        match self.disk.flush() {
            Ok(()) => {
                lock(&self.meters).each(|c| c.flushes += 1);
                self.log(&covered);
            }
            Err(error) => self.failed("flush", &error),
        }
    }

    /// Tells that these writes are flushed: `F vda FIRST:COUNT:SEQ …`, in hexadecimal.
    fn log(&self, covered: &[(Blocks, u32)]) {
        if covered.is_empty() {
            return;
        }
        let mut line = format!("F {}", self.disk.name);
        for (blocks, seq) in covered {
            line += &format!(" {:x}:{:x}:{seq:x}", blocks.first, blocks.count);
        }
        self.output.send(line);
    }

    fn failed(&self, what: &str, error: &std::io::Error) {
        lock(&self.meters).each(|c| c.errors += 1);
        let line = Line::new("IOERROR").with("disk", &self.disk.name).with("request", what);
        self.complain(format!("{line} {error}"));
    }

    fn complain(&self, text: String) {
        if self.reported.fetch_add(1, Ordering::Relaxed) < MAX_REPORTED {
            self.output.send(text);
        }
    }

    /// Checks one earlier write after every `verify_every` writes.
    fn check_loop(&self) {
        let mut buf = Aligned::new(self.options.unit_bytes() as usize);
        let mut next = self.options.verify_every;
        loop {
            let done = {
                let mut done = lock(&self.completed);
                while *done < next && !self.stopped() {
                    done = self.progressed.wait(done).unwrap_or_else(PoisonError::into_inner);
                }
                *done
            };
            if self.stopped() {
                return;
            }
            // A slow disk is checked less often, not later and later.
            next = done + self.options.verify_every;
            let place = self.options.nth(mix(done ^ self.options.seed) % done);
            self.check(place, &mut buf);
        }
    }

    fn check(&self, place: Blocks, buf: &mut Aligned) {
        let claim = self.disk.claim(place);
        match self.disk.verify(&claim, buf) {
            Ok(bad) => {
                lock(&self.meters).each(|c| {
                    c.verified += place.count;
                    c.bad += bad.len() as u64;
                });
                for text in bad {
                    self.complain(format!("BAD disk={} {text}", self.disk.name));
                }
            }
            Err(error) => self.failed("read", &error),
        }
    }
}
