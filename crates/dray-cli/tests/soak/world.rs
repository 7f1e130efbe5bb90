//! Two hosts, each with a network namespace, small file systems, a boot id and a wall clock of its own,
//! and the ways in which they are broken and made whole.

use dray_testkit::guest::tools;
use dray_testkit::lab::{Answer, Host, Lab, Place};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const LETTERS: [&str; 2] = ["a", "b"];
/// So many MiB have the file systems of a pool and of a state directory.
const POOL_MIB: u64 = 512;
const STATE_MIB: u64 = 32;
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// Short enough for a link that is away for seconds to matter.
const SETTINGS: &str = "[limits]\nlink_dead_seconds = 2\nlink_timeout_seconds = 15\n";
/// Becomes the agent in a mount namespace that has another boot id.
const WITHIN: &str = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
const FILLER: &str = ".soak-filler";

/// What all generations share: two namespaces with a link between them, and the clock's library.
pub struct Ground {
    dir: tempfile::TempDir,
}

/// Which directory of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Room {
    Pool,
    State,
}

/// Hosts, and what is wrong with them now.
pub struct World {
    pub lab: Lab,
    pub link_down: bool,
    /// By host: stopped (SIGSTOP), and full.
    pub paused: [bool; 2],
    pub full: [Vec<Room>; 2],
    /// By host: its agent was started in this round.
    pub restarted: [bool; 2],
    clock: [i64; 2],
    ground: PathBuf,
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn run(words: &[&str]) -> io::Result<()> {
    tools::run(words[0], &words[1..]).map(drop)
}

/// Where the logs of a failed generation are kept.
pub fn kept(seed: u64) -> PathBuf {
    crate::SOAK.kept(crate::WORKSPACE, seed)
}

impl Ground {
    /// Only in a mount namespace of one's own: names of namespaces are mounts.
    pub fn prepare() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("dray-soak-").tempdir()?;
        fs::create_dir_all("/run/netns")?;
        run(&["mount", "-t", "tmpfs", "none", "/run/netns"])?;
        for letter in LETTERS {
            run(&["ip", "netns", "add", letter])?;
        }
        run(&[
            "ip", "-n", "a", "link", "add", "veth0", "type", "veth", "peer", "name", "veth0",
            "netns", "b",
        ])?;
        for (letter, address) in LETTERS.iter().zip(ADDRESSES) {
            run(&["ip", "-n", letter, "addr", "add", &format!("{address}/24"), "dev", "veth0"])?;
            run(&["ip", "-n", letter, "link", "set", "lo", "up"])?;
            run(&["ip", "-n", letter, "link", "set", "veth0", "up"])?;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/soak/clock.c");
        let library = dir.path().join("clock.so");
        run(&["cc", "-shared", "-fPIC", "-O1", "-o", text(&library), text(&source)])?;
        Ok(Self { dir })
    }

    fn place(&self, i: usize) -> Place {
        let boot_id = self.boot_id(i);
        let within = ["ip", "netns", "exec", LETTERS[i], "sh", "-c", WITHIN, text(&boot_id)];
        Place {
            address: ADDRESSES[i].to_owned(),
            within: within.iter().map(|&word| word.to_owned()).collect(),
        }
    }

    fn boot_id(&self, i: usize) -> PathBuf {
        self.dir.path().join(format!("boot-id-{}", LETTERS[i]))
    }
}

impl World {
    /// New hosts that run, with nothing wrong with them.
    pub fn begin(ground: &Ground) -> io::Result<Self> {
        let dir = ground.dir.path().to_owned();
        for letter in LETTERS {
            fs::write(dir.join(format!("clock-{letter}")), 0i64.to_le_bytes())?;
        }
        let dray = Path::new(env!("CARGO_BIN_EXE_dray"));
        let places = [ground.place(0), ground.place(1)];
        let lab = Lab::at("soak", dray, SETTINGS, places)?;
        let world = Self {
            lab,
            link_down: false,
            paused: [false; 2],
            full: [Vec::new(), Vec::new()],
            restarted: [false; 2],
            clock: [0; 2],
            ground: dir,
        };
        for i in 0..2 {
            world.new_boot_id(i)?;
            for (room, mib) in [(Room::Pool, POOL_MIB), (Room::State, STATE_MIB)] {
                let at = world.room(i, room);
                run(&[
                    "mount",
                    "-t",
                    "tmpfs",
                    "-o",
                    &format!("size={mib}m,mode=0700"),
                    "none",
                    text(&at),
                ])?;
            }
            world.start(i)?;
        }
        Ok(world)
    }

    pub fn host(&self, i: usize) -> &Host {
        self.lab.host(LETTERS[i])
    }

    pub fn room(&self, i: usize, room: Room) -> PathBuf {
        match room {
            Room::Pool => self.host(i).pool(),
            Room::State => self.host(i).dir().join("state"),
        }
    }

    pub fn start(&self, i: usize) -> io::Result<()> {
        let library = self.ground.join("clock.so");
        let clock = self.ground.join(format!("clock-{}", LETTERS[i]));
        self.host(i).start_with(&[("LD_PRELOAD", text(&library)), ("SOAK_CLOCK", text(&clock))])
    }

    /// As after a reboot of the host; the agent must not run.
    pub fn new_boot_id(&self, i: usize) -> io::Result<()> {
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        fs::write(self.ground.join(format!("boot-id-{}", LETTERS[i])), id)
    }

    /// The host has lost all that it had; its agent must not run.
    pub fn wipe(&self, i: usize) -> io::Result<()> {
        for room in [Room::Pool, Room::State] {
            for entry in fs::read_dir(self.room(i, room))? {
                let path = entry?.path();
                if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }?;
            }
        }
        Ok(())
    }

    /// The host's wall clock jumps.
    pub fn step_clock(&mut self, i: usize, seconds: i64) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.clock[i] += seconds;
        let path = self.ground.join(format!("clock-{}", LETTERS[i]));
        // In place: the agent has it mapped.
        let file = File::options().write(true).open(path)?;
        file.write_all_at(&self.clock[i].to_le_bytes(), 0)
    }

    pub fn set_link(&mut self, up: bool) -> io::Result<()> {
        self.link_down = !up;
        run(&["ip", "-n", "a", "link", "set", "veth0", if up { "up" } else { "down" }])
    }

    /// Leaves no room at all.
    pub fn fill(&mut self, i: usize, room: Room) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        let file = File::options()
            .create(true)
            .append(false)
            .write(true)
            .truncate(false)
            .open(self.room(i, room).join(FILLER))?;
        if !self.full[i].contains(&room) {
            self.full[i].push(room);
        }
        let mut at = file.metadata()?.len();
        let mut buf = vec![0x5a; 1 << 20];
        while !buf.is_empty() {
            match file.write_at(&buf, at) {
                Ok(written @ 1..) => at += written as u64,
                // Smaller pieces find the last gaps.
                _ => buf.truncate(if buf.len() > 4096 { buf.len() / 4 } else { 0 }),
            }
        }
        Ok(())
    }

    pub fn free(&mut self, i: usize, room: Room) -> io::Result<()> {
        self.full[i].retain(|full| *full != room);
        match fs::remove_file(self.room(i, room).join(FILLER)) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
            _ => Ok(()),
        }
    }

    /// The answer to a command, or none within `limit`: whoever asked has gone then.
    pub fn ask(&self, i: usize, args: &[&str], limit: Duration) -> io::Result<Option<Answer>> {
        self.host(i).ask(args, limit)
    }

    /// Whether nothing is wrong.
    pub fn is_whole(&self) -> bool {
        !self.link_down && self.paused == [false; 2] && self.full.iter().all(Vec::is_empty)
    }

    /// Keeps logs, journals and records for whoever looks into a failure.
    pub fn keep(&self, seed: u64, why: &str, story: &[String]) -> io::Result<()> {
        let to = kept(seed);
        self.lab.keep(&to)?;
        fs::write(to.join("story"), format!("{}\n{why}\n", story.join("\n")))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for i in 0..2 {
            // Each may have ended, or not have begun; the mount namespace takes the rest with it.
            let _ = self.host(i).kill9();
            for room in [Room::Pool, Room::State] {
                let _ = run(&["umount", "-l", text(&self.room(i, room))]);
            }
        }
        let _ = self.set_link(true);
    }
}
