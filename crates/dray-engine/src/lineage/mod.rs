//! Generations: what an image was at which handover or backup, and which blocks have changed since.
//!
//! An image's life is a line of generations, each with a random id. A handover closes the one that
//! is open: what the source keeps is a replica of exactly that generation, and the target opens the
//! next. A backup does so as well: what it holds is exactly that generation, and the owner opens the
//! next. With every closed generation goes the set of blocks that were written during it, so a
//! replica of generation `r` is right for every block outside the union of the sets after `r`
//! (SnapMig's `changed[g > r]`).
//!
//! A set may name too much and never too little: a block it does not name is not sent. So a write's
//! 64 MiB region is durably open before the write, and after an unclean stop everything in an open
//! region counts as written. A region is closed when a durable set names what was written in it.
//! Pure, like everything here; the records are in the agent's file per image.

mod merge;

use dray_types::Ancestor;
use dray_types::{BlockRange, BlockSet, GenerationId};
pub use merge::MERGED;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Closed generations that are remembered at most; older replicas are copied in full.
pub const MAX_PAST: usize = dray_wire::request::MAX_ANCESTORS;
/// Bytes that the encoded changed sets of one image may take: it crosses the wire at a handover.
/// Sets of 1 TiB of blocks written at random take 32 MiB.
pub const MAX_CHANGED_BYTES: usize = 64 << 20;

/// Why a generation was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Reason {
    /// The image was handed over to another host.
    Handover,
    /// A backup was made of it, or at least begun.
    Backup,
}

/// A generation that is closed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Generation {
    /// Its id and number.
    pub at: Ancestor,
    /// Why it was closed.
    pub reason: Reason,
    /// The host that owned the image then; after a handover it kept a replica.
    pub host: String,
    /// When it was closed, in milliseconds since 1970.
    pub closed_unix_ms: u64,
    /// Blocks written during it. Of the first generation that is remembered nobody needs to know.
    pub changed: BlockSet,
}

impl Generation {
    fn is_handover(&self) -> bool {
        self.reason == Reason::Handover
    }
}

/// The line of an image up to its open generation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Lineage {
    /// The closed generations, oldest first, each the parent of the next.
    past: Vec<Generation>,
    /// The open one.
    open: Ancestor,
}

/// Why a replica cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// The line has another generation in this place: both copies were written independently.
    Diverged {
        /// The place.
        number: u64,
    },
    /// It is older than what is remembered of the line, or was merged into a later one.
    Forgotten {
        /// Its place.
        number: u64,
    },
    /// It is not behind the owner but ahead.
    Ahead {
        /// Its place.
        number: u64,
    },
}

impl std::error::Error for Unfit {}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Diverged { number } => write!(
                f,
                "its lineage has diverged: generation {number} there and generation {number} here \
                 are not the same"
            ),
            Self::Forgotten { number } => {
                write!(f, "its generation {number} is not remembered of the image any more")
            }
            Self::Ahead { number } => {
                write!(f, "its generation {number} is none of the image's earlier ones")
            }
        }
    }
}

/// Whether a replica can be brought up to date: its generation must be one of the `ancestors`, the
/// closed generations of the owner in ascending order.
///
/// # Errors
/// Why not.
pub fn fits(ancestors: &[Ancestor], replica: Ancestor) -> Result<(), Unfit> {
    let number = replica.number;
    match ancestors.iter().find(|ancestor| ancestor.number == number) {
        Some(known) if known.id == replica.id => Ok(()),
        Some(_) => Err(Unfit::Diverged { number }),
        None if ancestors.last().is_some_and(|last| number > last.number) => {
            Err(Unfit::Ahead { number })
        }
        None => Err(Unfit::Forgotten { number }),
    }
}

impl Lineage {
    /// A new line: nothing is known of what the image was before.
    pub fn new(id: GenerationId) -> Self {
        Self { past: Vec::new(), open: Ancestor { id, number: 1 } }
    }

    /// The line of the next owner: `past` as the source closed it, and a generation of its own.
    /// Without a past it is a new line. None when the numbers do not ascend (I7).
    pub fn after(past: Vec<Generation>, id: GenerationId) -> Option<Self> {
        let ascending = past.windows(2).all(|two| two[0].at.number < two[1].at.number);
        let last = past.last().map_or(0, |last| last.at.number);
        let number = last.checked_add(1)?;
        let bounded = past.len() <= MAX_PAST;
        (ascending && bounded).then_some(Self { past, open: Ancestor { id, number } })
    }

    /// The open generation.
    pub fn open(&self) -> Ancestor {
        self.open
    }

    /// The closed generations, oldest first.
    pub fn past(&self) -> &[Generation] {
        &self.past
    }

    /// The closed generations' ids and numbers, oldest first.
    pub fn ancestors(&self) -> Vec<Ancestor> {
        self.past.iter().map(|generation| generation.at).collect()
    }

    /// Whether anybody can have a replica that a changed set is needed for.
    pub fn has_past(&self) -> bool {
        !self.past.is_empty()
    }

    /// The past as it is when the open generation, in which `changed` was written, is closed by a
    /// handover away from `host`. The oldest generations are left out when there are too many, or
    /// their sets take too much.
    pub fn closed(&self, changed: BlockSet, host: &str, now_unix_ms: u64) -> Vec<Generation> {
        self.close(Reason::Handover, changed, host, now_unix_ms)
    }

    /// The line when the open generation, in which `changed` was written, is closed by a backup on
    /// `host`, which goes on with generation `next`. Where the line gets long, earlier backups are merged
    /// into what came after them, but none of the `held`. None when the numbers are used up.
    pub fn turned(
        &self,
        changed: BlockSet,
        host: &str,
        now_unix_ms: u64,
        next: GenerationId,
        held: &[GenerationId],
    ) -> Option<Self> {
        let mut past = self.close(Reason::Backup, changed, host, now_unix_ms);
        merge::merge(&mut past, held, now_unix_ms);
        Self::after(past, next)
    }

    fn close(
        &self,
        reason: Reason,
        changed: BlockSet,
        host: &str,
        now_unix_ms: u64,
    ) -> Vec<Generation> {
        let mut past = self.past.clone();
        past.push(Generation {
            at: self.open,
            reason,
            host: host.to_owned(),
            closed_unix_ms: now_unix_ms,
            // Nobody can have a parent of the first generation.
            changed: if self.past.is_empty() { BlockSet::new() } else { changed },
        });
        let mut bytes = 0;
        let mut keep = 0;
        for generation in past.iter().rev().take(MAX_PAST) {
            keep += 1;
            // The set of the oldest one that is kept is needed by none of those.
            bytes += generation.changed.encode().len();
            if bytes > MAX_CHANGED_BYTES {
                break;
            }
        }
        past.drain(..past.len() - keep);
        if let Some(first) = past.first_mut() {
            first.changed = BlockSet::new();
        }
        past
    }

    /// The blocks in which the image may differ from a replica of `base`, given what was written in
    /// the open generation; none when `base` is no ancestor.
    pub fn changed_since(&self, base: GenerationId, open: &BlockSet) -> Option<BlockSet> {
        let at = self.past.iter().position(|generation| generation.at.id == base)?;
        let mut changed = open.clone();
        self.past[at + 1..].iter().for_each(|generation| changed.union_with(&generation.changed));
        Some(changed)
    }
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Its number in its file system, which gives that of a file that is gone to the next one that is made.
    pub inode: u64,
    /// When it was made: seconds since 1970, and nanoseconds; none where the file system does not tell.
    pub birth: Option<(i64, i64)>,
}

impl FileIdentity {
    /// Whether it is the same file. Without both times of birth the number alone tells.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let born_apart = self.birth.zip(other.birth).is_some_and(|(one, other)| one != other);
        self.inode == other.inode && !born_apart
    }
}

/// What of a file tells that nobody has written to it: a copy edited behind dray's back has another
/// length or time of change, or is another file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stamp {
    /// Length in bytes.
    pub len: u64,
    /// When its content was last changed: seconds since 1970, and nanoseconds. Anybody can set this back.
    pub changed: (i64, i64),
    /// When anything of it was, its name and mode included. Nobody can set this back.
    pub touched: (i64, i64),
    /// Which file it is.
    pub file: FileIdentity,
}

impl Stamp {
    /// Whether nobody has written to the file between this and `other`, unless they have hidden it: its name,
    /// owner or mode may have changed.
    #[must_use]
    pub fn seems_unwritten(&self, other: &Self) -> bool {
        let same = (self.len, self.changed) == (other.len, other.changed);
        same && self.file.is_same(&other.file)
    }
}

/// What of a block device tells that nobody has written to it: the kernel's own counts. Its node in the file
/// system does not tell, because a mounted file system writes without it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceStamp {
    /// The id of the host's boot: the counts begin anew with each.
    pub boot: Vec<u8>,
    /// Its number, major and minor.
    pub number: (u32, u32),
    /// Which of all disks since the boot it is, where the kernel tells.
    pub sequence: Option<u64>,
    /// Sectors of 512 bytes that were written to it.
    pub written: u64,
    /// Sectors that were discarded.
    pub discarded: u64,
}

/// How an image looked when its agent stopped in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AtStop {
    /// Its file.
    File(Stamp),
    /// Its block device.
    Device(DeviceStamp),
}

/// A record of an owner's line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LineageRecord {
    /// Everything; what came before no longer counts. All regions are closed.
    Whole {
        /// The line.
        lineage: Lineage,
        /// Blocks written in the open generation so far.
        changed: BlockSet,
    },
    /// The file that it is the line of, whatever its name.
    Of {
        /// The file.
        file: FileIdentity,
    },
    /// A region of `region_blocks` blocks may be written into from here on.
    Opened {
        /// Its number.
        region: u64,
    },
    /// The owner stopped in order: regions count as closed by the `Whole` before, and the file
    /// looked like this.
    Stopped {
        /// The file.
        stamp: Stamp,
    },
    /// The same, and the block device looked like this.
    StoppedDevice {
        /// The device.
        stamp: DeviceStamp,
    },
}

/// What the records of an owner's line tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// The line.
    pub lineage: Lineage,
    /// Blocks that may have been written in the open generation: those that are named, and all of
    /// each region that was open.
    pub changed: BlockSet,
    /// The file that it is the line of; none when that was not told.
    pub file: Option<FileIdentity>,
    /// Set after a stop in order: what looks otherwise was written by somebody else since.
    pub stopped: Option<AtStop>,
}

/// Reads records back; `region_blocks` is the size of a region. None without a `Whole`.
pub fn recover(records: &[LineageRecord], region_blocks: u64) -> Option<Recovered> {
    let mut found = None;
    let mut regions = BTreeSet::new();
    for record in records {
        match record {
            LineageRecord::Whole { lineage, changed } => {
                regions.clear();
                let (lineage, changed) = (lineage.clone(), changed.clone());
                found = Some(Recovered { lineage, changed, file: None, stopped: None });
            }
            LineageRecord::Of { file } => {
                if let Some(found) = &mut found {
                    found.file = Some(*file);
                }
            }
            LineageRecord::Opened { region } => {
                regions.insert(*region);
                if let Some(found) = &mut found {
                    found.stopped = None;
                }
            }
            LineageRecord::Stopped { stamp } => {
                if let Some(found) = &mut found {
                    found.stopped = Some(AtStop::File(*stamp));
                }
            }
            LineageRecord::StoppedDevice { stamp } => {
                if let Some(found) = &mut found {
                    found.stopped = Some(AtStop::Device(stamp.clone()));
                }
            }
        }
    }
    let mut found = found?;
    for region in regions {
        let start = region.checked_mul(region_blocks)?;
        found.changed.insert(BlockRange::new(start, region_blocks));
    }
    Some(found)
}
