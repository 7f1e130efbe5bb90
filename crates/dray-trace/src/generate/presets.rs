//! The five servers of the scheduling paper (its table 2).
//!
//! The paper gives numbers of its traces for few things: disks and memory of all five (table 2), the
//! mean write rates of the file server (16.7 MB/s) and the mail server (2.5 MB/s) in section 6, and
//! the file server's locality in section 3. Those are met here, and a test holds them. Everything
//! else follows its words (reads of the Java server are too few to have locality, and so on) or is
//! a choice, marked as one.

use super::{Layout, LoadSpec, Stream};
use dray_types::Why;
use std::fmt;
use std::str::FromStr;

/// A kind of server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Load {
    /// Many files, written, read and replaced: dbench.
    FileServer,
    /// A mail store: Exchange.
    Mail,
    /// Business logic in memory: SPECjbb.
    Java,
    /// Pages, read by popularity: SPECweb.
    Web,
    /// Transactions: MySQL.
    Database,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Of a rate in the paper's units: bytes in MB/s.
const MB: f64 = 1e6;

impl Load {
    /// All presets.
    pub const ALL: [Self; 5] =
        [Self::FileServer, Self::Mail, Self::Java, Self::Web, Self::Database];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FileServer => "file-server",
            Self::Mail => "mail",
            Self::Java => "java",
            Self::Web => "web",
            Self::Database => "database",
        }
    }

    /// What it does, with the paper's rates.
    pub fn spec(self) -> LoadSpec {
        match self {
            Self::FileServer => file_server(),
            Self::Mail => mail(),
            Self::Java => java(),
            Self::Web => web(),
            Self::Database => database(),
        }
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Load {
    type Err = Why;

    fn from_str(text: &str) -> Result<Self, Why> {
        let found = Self::ALL.into_iter().find(|load| load.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Why::from(format!("'{text}' is not a load; use one of {names}"))
        })
    }
}

/// Figures 2 to 4 and section 6; the read rate is a choice. The unused part of each group is what
/// lets random blocks lie far from written ones (figure 3).
fn file_server() -> LoadSpec {
    LoadSpec {
        layout: Layout { disk: 8 * GIB, group: 192 * MIB, used: 87 * MIB, fringe: 34 * MIB },
        memory: 256 * MIB,
        reads: Stream {
            rate: 2.0 * MB,
            sizes: vec![(4 * KIB, 2), (16 * KIB, 3), (32 * KIB, 4)],
            extent: 64 * KIB,
            stable: 330 * MIB,
            stable_share: 0.6,
            moving: 32 * MIB,
            fresh: 0.1 * MB,
            rest: 3600.0,
            outside: 0.02,
            skew: 0.4,
            log: 0,
            log_share: 0.0,
        },
        writes: Stream {
            rate: 16.7 * MB,
            sizes: vec![(4 * KIB, 4), (16 * KIB, 3), (64 * KIB, 3)],
            extent: 192 * KIB,
            stable: 32 * MIB,
            stable_share: 0.2,
            moving: 176 * MIB,
            fresh: 0.38 * MB,
            rest: 3600.0,
            outside: 0.064,
            skew: 0.6,
            log: 32 * MIB,
            log_share: 0.2,
        },
    }
}

/// Write rate of the paper. A store of 8 KiB pages, of which mailboxes in use are touched in small
/// places, and a log.
fn mail() -> LoadSpec {
    LoadSpec {
        layout: Layout { disk: 24 * GIB, group: 512 * MIB, used: 192 * MIB, fringe: 64 * MIB },
        memory: GIB,
        reads: Stream {
            rate: 2.5 * MB,
            sizes: vec![(8 * KIB, 6), (32 * KIB, 1)],
            extent: 128 * KIB,
            stable: 512 * MIB,
            stable_share: 0.7,
            moving: 256 * MIB,
            fresh: 0.12 * MB,
            rest: 3600.0,
            outside: 0.01,
            skew: 0.7,
            log: 0,
            log_share: 0.0,
        },
        writes: Stream {
            rate: 2.5 * MB,
            sizes: vec![(4 * KIB, 2), (8 * KIB, 6), (32 * KIB, 1)],
            extent: 128 * KIB,
            stable: 384 * MIB,
            stable_share: 0.5,
            moving: 192 * MIB,
            fresh: 0.3 * MB,
            rest: 3600.0,
            outside: 0.03,
            skew: 0.8,
            log: 128 * MIB,
            log_share: 0.3,
        },
    }
}

/// Rates are choices. Reads are so rare and so scattered that there is no locality to measure.
fn java() -> LoadSpec {
    LoadSpec {
        layout: Layout { disk: 8 * GIB, group: 128 * MIB, used: 12 * MIB, fringe: 64 * MIB },
        memory: GIB,
        reads: Stream {
            rate: 0.002 * MB,
            sizes: vec![(4 * KIB, 1)],
            extent: 64 * KIB,
            stable: 64 * KIB,
            stable_share: 0.0,
            moving: 2048 * MIB,
            fresh: 0.0,
            rest: 3600.0,
            outside: 0.3,
            skew: 0.0,
            log: 0,
            log_share: 0.0,
        },
        writes: Stream {
            rate: 0.6 * MB,
            sizes: vec![(4 * KIB, 3), (16 * KIB, 1)],
            extent: 64 * KIB,
            stable: 24 * MIB,
            stable_share: 0.5,
            moving: 16 * MIB,
            fresh: 0.04 * MB,
            rest: 3600.0,
            outside: 0.05,
            skew: 0.8,
            log: 64 * MIB,
            log_share: 0.3,
        },
    }
}

/// Rates are choices. Many pages read by popularity, little written.
fn web() -> LoadSpec {
    LoadSpec {
        layout: Layout { disk: 8 * GIB, group: 128 * MIB, used: 24 * MIB, fringe: 64 * MIB },
        memory: 512 * MIB,
        reads: Stream {
            rate: 1.5 * MB,
            sizes: vec![(4 * KIB, 1), (16 * KIB, 2), (64 * KIB, 1)],
            extent: 128 * KIB,
            stable: 320 * MIB,
            stable_share: 0.9,
            moving: 32 * MIB,
            fresh: 0.04 * MB,
            rest: 3600.0,
            outside: 0.02,
            skew: 0.8,
            log: 0,
            log_share: 0.0,
        },
        writes: Stream {
            rate: 0.4 * MB,
            sizes: vec![(4 * KIB, 3), (16 * KIB, 1)],
            extent: 64 * KIB,
            stable: 16 * MIB,
            stable_share: 0.4,
            moving: 8 * MIB,
            fresh: 0.03 * MB,
            rest: 3600.0,
            outside: 0.02,
            skew: 0.9,
            log: 64 * MIB,
            log_share: 0.4,
        },
    }
}

/// Rates are choices. Pages of 16 KiB in tables of a few gigabytes, and a redo log.
fn database() -> LoadSpec {
    LoadSpec {
        layout: Layout { disk: 10 * GIB, group: 512 * MIB, used: 160 * MIB, fringe: 64 * MIB },
        memory: 2 * GIB,
        reads: Stream {
            rate: 1.0 * MB,
            sizes: vec![(16 * KIB, 1)],
            extent: 256 * KIB,
            stable: 640 * MIB,
            stable_share: 0.95,
            moving: 32 * MIB,
            fresh: 0.03 * MB,
            rest: 3600.0,
            outside: 0.0,
            skew: 0.9,
            log: 0,
            log_share: 0.0,
        },
        writes: Stream {
            rate: 1.5 * MB,
            sizes: vec![(4 * KIB, 1), (16 * KIB, 4)],
            extent: 256 * KIB,
            stable: 384 * MIB,
            stable_share: 0.9,
            moving: 32 * MIB,
            fresh: 0.05 * MB,
            rest: 3600.0,
            outside: 0.0,
            skew: 0.9,
            log: 96 * MIB,
            log_share: 0.4,
        },
    }
}
