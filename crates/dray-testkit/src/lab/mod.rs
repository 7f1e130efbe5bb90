//! Hosts for end-to-end tests: real agents on loopback addresses of their own, with certificates
//! made on the spot, that trust each other. Dropping the lab kills the agents and removes
//! everything.
//!
//! ```no_run
//! # use dray_testkit::lab::Lab;
//! let lab = Lab::new("copy", "target/debug/dray".as_ref()).unwrap();
//! lab.host("a").start().unwrap();
//! lab.host("b").start().unwrap();
//! let images = lab.host("a").json(&["images"]).unwrap();
//! # drop(images);
//! ```

mod host;

pub use host::{Answer, Host};

use crate::guest::tools;
use crate::loopback::Loopback;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The letters of a lab's hosts; `a` is called `hosta`.
const LETTERS: [&str; 2] = ["a", "b"];

/// Where a host's agent runs.
#[derive(Clone, Debug)]
pub struct Place {
    /// The address it listens on.
    pub address: String,
    /// The words of the command that becomes the agent, before the agent's own: `ip netns exec …`.
    pub within: Vec<String>,
}

/// Hosts that know each other, none of them started.
pub struct Lab {
    hosts: Vec<Host>,
    dir: TempDir,
    _net: Option<Loopback>,
}

impl Lab {
    /// Makes certificates and configurations for two hosts that run the program `dray`.
    ///
    /// # Errors
    /// When the program does not work or there is no room for its files.
    pub fn new(name: &str, dray: &Path) -> io::Result<Self> {
        Self::with_settings(name, dray, "")
    }

    /// The same with more lines at the end of each configuration (`[limits]` …).
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn with_settings(name: &str, dray: &Path, settings: &str) -> io::Result<Self> {
        let net = Loopback::reserve()?;
        let place = |host| Place { address: net.address(host), within: Vec::new() };
        let lab = Self::at(name, dray, settings, [place(1), place(2)])?;
        Ok(Self { _net: Some(net), ..lab })
    }

    /// The same at places that somebody else has made.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn at(
        name: &str,
        dray: &Path,
        settings: &str,
        places: [Place; LETTERS.len()],
    ) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix(&format!("dray-{name}-")).tempdir()?;
        let addresses: Vec<String> = places.iter().map(|place| place.address.clone()).collect();
        make_certificates(dray, &dir.path().join("pki"), &addresses)?;
        let host = |i: usize| {
            let peers: Vec<(&str, &str)> = LETTERS
                .iter()
                .zip(&addresses)
                .enumerate()
                .filter(|(other, _)| *other != i)
                .map(|(_, (letter, address))| (*letter, address.as_str()))
                .collect();
            Host::new(dir.path(), LETTERS[i], &places[i], &peers, dray, settings)
        };
        let hosts = (0..LETTERS.len()).map(host).collect::<io::Result<_>>()?;
        Ok(Self { hosts, dir, _net: None })
    }

    /// A host by its letter.
    ///
    /// # Panics
    /// When the lab has none of this letter.
    pub fn host(&self, letter: &str) -> &Host {
        self.hosts.iter().find(|host| host.letter() == letter).expect("a host of the lab")
    }

    /// Starts all hosts' agents.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(&self) -> io::Result<()> {
        self.hosts.iter().try_for_each(Host::start)
    }

    /// Keeps logs, journals, records and the names of files in a folder, for whoever looks into a failure. What was
    /// kept there before goes.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn keep(&self, to: &Path) -> io::Result<()> {
        if to.exists() {
            fs::remove_dir_all(to)?;
        }
        fs::create_dir_all(to)?;
        for host in &self.hosts {
            let letter = host.letter();
            fs::write(to.join(format!("log-{letter}")), host.log())?;
            let (state, copy) = (host.dir().join("state"), to.join(format!("state-{letter}")));
            // Best effort: what cannot be copied is not what the failure is about.
            let _ = tools::run("cp", &["-r", text(&state), text(&copy)]);
            let listed = tools::run("ls", &["-la", "--full-time", text(&host.pool())])?;
            fs::write(to.join(format!("pool-{letter}")), listed.stdout)?;
        }
        for entry in fs::read_dir(self.dir())?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".said") || name.ends_with(".serial") {
                fs::copy(entry.path(), to.join(name))?;
            }
        }
        Ok(())
    }

    /// Where everything of the lab is; QMP sockets below it may be named to the agents.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }
}

fn make_certificates(dray: &Path, dir: &Path, addresses: &[String]) -> io::Result<()> {
    let (program, dir) = (text(dray), text(dir));
    tools::run(program, &["pki", "init", "--dir", dir])?;
    for (letter, address) in LETTERS.iter().zip(addresses) {
        let host = format!("host{letter}");
        tools::run(program, &["pki", "issue", "--dir", dir, &host, "--address", address])?;
    }
    Ok(())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of a lab are text")
}
