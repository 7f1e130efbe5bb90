//! The machine that will be cut: its disk at the beginning, and the log of all that happened to it.

use crate::cuts::Case;
use dray_guest::content::BLOCK;
use dray_guest::script::{SECTOR, Script};
use dray_testkit::guest::initramfs::Boot;
use dray_testkit::guest::tools;
use dray_testkit::power::log::Log;
use dray_testkit::power::machine::Machine;
use dray_testkit::power::promises::{Notes, Promises};
use dray_testkit::power::{cut, disk};
use serde_json::{Value, json};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The images: name, blocks, seeded blocks, and whether it grows, which is beyond its seeded blocks.
const IMAGES: [(&str, u64, u64, bool); 2] =
    [("disk.img", 1024, 768, false), ("grow.img", 768, 256, true)];
/// Bytes a second: a migration lasts some seconds.
const RATE: u64 = 1 << 20;
/// Time before and after the migration, and between two requests of a lane, in milliseconds.
const ASIDE: u64 = 400;
const PAUSE: u64 = 4;

/// The first request of a client's second life.
const SECOND: u64 = 1 << 20;

/// How the images move.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// With which strategy.
    pub strategy: &'static str,
    /// Whose agent is killed and started again, in which phase, how often and after what pause.
    pub restart: Option<&'static str>,
}

/// A recording.
pub struct Recording {
    /// The disk at the beginning.
    pub base: PathBuf,
    log_path: PathBuf,
    /// What happened to it.
    pub log: Log,
    /// What its client wrote down.
    pub notes: Notes,
    seed: u64,
    /// The life before this one, if it began with a power cut.
    before: Option<Before>,
}

/// What was recorded before the power was cut for the first time.
struct Before {
    log_path: PathBuf,
    notes: Notes,
    at: usize,
}

impl Recording {
    /// Lets a machine move its images.
    pub fn make(dir: &Path, boot: &Boot, way: Way, seed: u64) -> io::Result<Self> {
        let (base, disk, log) = (dir.join("base"), dir.join("disk"), dir.join("log"));
        make_disk(dir, &base, seed)?;
        cut::copy_sparse(&base, &disk)?;
        record(&disk, &log, boot, &dir.join("recorded"), &order("move", way, 0, seed))?;
        Self::read(base, log, seed, None)
    }

    /// Cuts the power, and lets the machine and the clients go on on what is left.
    pub fn go_on(&self, dir: &Path, boot: &Boot, case: &Case, way: Way) -> io::Result<Self> {
        let (base, disk, log) = (dir.join("base-2"), dir.join("disk"), dir.join("log-2"));
        case.cut.apply(&self.log, &self.base, &base)?;
        cut::copy_sparse(&base, &disk)?;
        let order = order("go-on", way, SECOND, self.seed);
        record(&disk, &log, boot, &dir.join("recorded"), &order)?;
        Self::read(base, log, self.seed, Some((self.log_path.clone(), case.cut.at)))
    }

    /// Opens one that was kept.
    pub fn open(kept: &Path) -> io::Result<Self> {
        let about: Value = serde_json::from_slice(&fs::read(kept.join("recording.json"))?)?;
        let seed = about["seed"].as_u64().unwrap_or(0);
        let before = about["before"].as_u64().map(|at| (kept.join("log-before"), at as usize));
        Self::read(kept.join("base"), kept.join("log"), seed, before)
    }

    /// Keeps it in a folder.
    pub fn keep(&self, kept: &Path) -> io::Result<()> {
        cut::copy_sparse(&self.base, &kept.join("base"))?;
        cut::copy_sparse(&self.log_path, &kept.join("log"))?;
        if let Some(before) = &self.before {
            cut::copy_sparse(&before.log_path, &kept.join("log-before"))?;
        }
        let before = self.before.as_ref().map(|before| before.at);
        let about = json!({"seed": self.seed, "before": before});
        fs::write(kept.join("recording.json"), about.to_string())
    }

    fn read(
        base: PathBuf,
        log_path: PathBuf,
        seed: u64,
        before: Option<(PathBuf, usize)>,
    ) -> io::Result<Self> {
        let log = Log::open(&log_path)?;
        let notes = Notes::read(&log, &disk::notes())?;
        let before = before.map(|(log_path, at)| {
            let notes = Notes::read(&Log::open(&log_path)?, &disk::notes())?;
            Ok::<_, io::Error>(Before { log_path, notes, at })
        });
        Ok(Self { base, log_path, log, notes, seed, before: before.transpose()? })
    }

    /// Whether it began with a power cut.
    pub fn goes_on(&self) -> bool {
        self.before.is_some()
    }

    /// What was promised to an image's client before so many entries of the log were done, in each of
    /// its lives.
    pub fn promises(&self, script: &Script, at: usize) -> Vec<Promises> {
        let Some(before) = &self.before else {
            return vec![self.notes.promises(script, 0, at)];
        };
        vec![before.notes.promises(script, 0, before.at), self.notes.promises(script, SECOND, at)]
    }

    /// Its images: their names and what their clients do.
    pub fn images(&self) -> impl Iterator<Item = (&'static str, Script)> {
        scripts(self.seed)
    }

    /// Words that tell a machine of the images.
    pub fn order(&self) -> String {
        images(self.seed)
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flushes = self.log.entries.iter().filter(|entry| entry.flush).count();
        let marks: Vec<String> =
            self.notes.marks().map(|(at, mark)| format!("{mark} {at}")).collect();
        write!(f, "{} entries, {flushes} flushes; {}", self.log.entries.len(), marks.join(", "))
    }
}

/// Runs a machine whose disk is logged.
fn record(disk: &Path, log: &Path, boot: &Boot, console: &Path, order: &str) -> io::Result<()> {
    Machine { disk, log: Some(log), order, console }.run(boot)?;
    fs::remove_file(disk)
}

fn order(what: &str, way: Way, first: u64, seed: u64) -> String {
    let restart = way.restart.map_or(String::new(), |restart| format!("dray.restart={restart}"));
    // These send what clients write until little is left of it, so the clients have to be slower.
    let (rate, throttle) = match way.strategy {
        "pre-copy" | "mirror" | "hot-set" => (16 * RATE, "dray.throttle=aggressive"),
        _ => (RATE, ""),
    };
    format!(
        "dray.do={what} dray.first={first} dray.strategy={} {restart} dray.rate={rate} {throttle} \
         dray.aside_ms={ASIDE} dray.pause_ms={PAUSE} {}",
        way.strategy,
        images(seed)
    )
}

fn scripts(seed: u64) -> impl Iterator<Item = (&'static str, Script)> {
    (1..).zip(IMAGES).map(move |(image, (name, blocks, seeded, _))| {
        (name, Script { image, blocks, seeded, seed })
    })
}

fn images(seed: u64) -> String {
    let image = |(name, blocks, seeded, growable)| {
        let kind = if growable { "growable" } else { "fixed" };
        format!("{name}:{kind}:{blocks}:{seeded}")
    };
    let images: Vec<String> = IMAGES.map(image).into();
    format!("dray.images={} dray.seed={seed}", images.join(","))
}

/// A folder for each host, with what its agent needs, on a disk.
fn make_disk(dir: &Path, base: &Path, seed: u64) -> io::Result<()> {
    let dray = env!("CARGO_BIN_EXE_dray");
    let pki = dir.join("pki");
    tools::run(dray, &["pki", "init", "--dir", text(&pki)])?;
    let folders = ["a", "b"].map(|letter| dir.join(letter));
    for (letter, folder) in ["a", "b"].iter().zip(&folders) {
        let (name, address) = (format!("host{letter}"), address(letter));
        tools::run(dray, &["pki", "issue", &name, "--address", address, "--dir", text(&pki)])?;
        fs::create_dir_all(folder.join("pool"))?;
        fs::create_dir_all(folder.join("state"))?;
        fs::create_dir_all(folder.join("pki"))?;
        for file in fs::read_dir(pki.join(&name))? {
            let file = file?;
            fs::copy(file.path(), folder.join("pki").join(file.file_name()))?;
        }
        fs::write(folder.join("dray.toml"), config(letter))?;
    }
    for ((name, script), (_, blocks, seeded, growable)) in scripts(seed).zip(IMAGES) {
        let file = File::create(folders[0].join("pool").join(name))?;
        let blocks = if growable { seeded } else { blocks };
        file.set_len(blocks * BLOCK as u64)?;
        for sector in 0..seeded * BLOCK as u64 / SECTOR {
            file.write_all_at(&script.content(sector, None), sector * SECTOR)?;
        }
    }
    disk::make(base, [&folders[0], &folders[1]])
}

fn address(letter: &str) -> &'static str {
    if letter == "a" { "127.0.0.2" } else { "127.0.0.3" }
}

fn config(letter: &str) -> String {
    let peer = if letter == "a" { "b" } else { "a" };
    let (own, other) = (address(letter), address(peer));
    format!(
        "[agent]\nname = \"host{letter}\"\nstate_dir = \"/{letter}/state\"\n\
         run_dir = \"/run/{letter}\"\nlisten = \"{own}:7421\"\n\
         [tls]\ndir = \"/{letter}/pki\"\n\
         [[pool]]\nname = \"p\"\npath = \"/{letter}/pool\"\n\
         [[peer]]\nname = \"host{peer}\"\naddress = \"{other}:7421\"\npools = [\"p\"]\n"
    )
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}
