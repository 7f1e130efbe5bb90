//! The content of a file: what a process sees, what is durable, and what is between the two.

use super::state::{Random, When};

/// Bytes that reach the disk together or not at all.
const SECTOR: usize = 512;
/// Bytes that the system keeps in memory together.
const PAGE: usize = 4096;

#[derive(Clone)]
pub(super) enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Len(usize),
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Len(len) => content.resize(*len, 0),
            Self::Write { at, bytes } => put(content, *at, bytes),
        }
    }
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    content.resize(content.len().max(at + bytes.len()), 0);
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

#[derive(Clone, Default)]
pub(super) struct Inode {
    pub(super) live: Vec<u8>,
    pub(super) durable: Vec<u8>,
    /// Since the last sync.
    pub(super) pending: Vec<Change>,
    /// Up to here there is room.
    pub(super) room: usize,
    pub(super) mode: u32,
    /// The number that the file system shows of it.
    pub(super) shown: u64,
    /// When its content was last changed, or was said to be.
    pub(super) changed: When,
    /// When anything of it was: its content, its name or its mode.
    pub(super) touched: When,
    /// The sectors that each failed sync has lost.
    pub(super) failed_syncs: Vec<Vec<u64>>,
    /// What they lost may still be seen, until the system needs the memory.
    may_forget: bool,
}

impl Inode {
    /// An empty file, made at `now`.
    pub(super) fn new(mode: u32, shown: u64, now: When) -> Self {
        Self { mode, shown, changed: now, touched: now, ..Self::default() }
    }

    pub(super) fn change(&mut self, change: Change, now: When) {
        change.apply(&mut self.live);
        self.room = self.room.max(self.live.len());
        (self.changed, self.touched) = (now, now);
        self.pending.push(change);
    }

    /// A hole at the end takes no room; cutting off gives back all that lies behind, also what was only
    /// reserved.
    pub(super) fn set_len(&mut self, len: usize, now: When) {
        let room = if len <= self.live.len() { self.room.min(len) } else { self.room };
        self.change(Change::Len(len), now);
        self.room = room;
    }

    pub(super) fn sync(&mut self) {
        self.pending.drain(..).for_each(|change| change.apply(&mut self.durable));
    }

    /// What has reached the disk, and what never will: a sync has failed, or the power.
    fn lose(&mut self, random: &mut Random) {
        for change in self.pending.drain(..) {
            match change {
                Change::Len(_) if random.coin() => change.apply(&mut self.durable),
                Change::Len(_) => {}
                Change::Write { at, bytes } => tear(&mut self.durable, at, &bytes, random),
            }
        }
    }

    /// What a power cut leaves.
    pub(super) fn cut(&mut self, random: &mut Random) {
        self.lose(random);
        self.live.clone_from(&self.durable);
        self.may_forget = false;
    }

    /// What a failed sync leaves: the system calls what was written clean, on the disk or not, and may
    /// drop it and read what the disk has.
    pub(super) fn fail_sync(&mut self, random: &mut Random) {
        let mut wanted = self.durable.clone();
        self.pending.iter().for_each(|change| change.apply(&mut wanted));
        self.lose(random);
        let lost = differing(&wanted, &self.durable);
        self.may_forget |= !lost.is_empty();
        self.failed_syncs.push(lost);
        // Often all or nothing, else any pages.
        match random.below(3) {
            0 => {}
            1 => self.forget_lost_if(|| true),
            _ => self.forget_lost_if(|| random.coin()),
        }
    }

    /// Time has passed: perhaps nothing of what was lost is seen any more.
    pub(super) fn forget_lost(&mut self, random: &mut Random) {
        if self.may_forget && random.coin() {
            self.forget_lost_if(|| true);
            self.may_forget = false;
        }
    }

    /// Pages go for which `goes` says so, and what is read instead is on the disk. What was written since
    /// stays, and so does the length.
    fn forget_lost_if(&mut self, mut goes: impl FnMut() -> bool) {
        let mut disk = self.durable.clone();
        disk.resize(self.live.len(), 0);
        for from in (0..disk.len()).step_by(PAGE) {
            let page = from..(from + PAGE).min(disk.len());
            if goes() {
                self.live[page.clone()].copy_from_slice(&disk[page]);
            }
        }
        self.pending.iter().for_each(|change| change.apply(&mut self.live));
    }
}

/// The sectors in which two contents differ.
fn differing(one: &[u8], other: &[u8]) -> Vec<u64> {
    let byte = |of: &[u8], at: usize| of.get(at).copied().unwrap_or(0);
    let end = one.len().max(other.len());
    let differs = |sector: &usize| {
        let bytes = sector * SECTOR..((sector + 1) * SECTOR).min(end);
        bytes.into_iter().any(|at| byte(one, at) != byte(other, at))
    };
    (0..end.div_ceil(SECTOR)).filter(differs).map(|sector| sector as u64).collect()
}

/// Any sectors of a write reach the disk.
fn tear(left: &mut Vec<u8>, at: usize, bytes: &[u8], random: &mut Random) {
    // Often all or nothing, as on a real disk; else any of them.
    let (all, none) = (random.below(4) == 0, random.below(4) == 0);
    let mut from = 0;
    while from < bytes.len() {
        let to = (from + SECTOR - (at + from) % SECTOR).min(bytes.len());
        if all || !none && random.coin() {
            put(left, at + from, &bytes[from..to]);
        }
        from = to;
    }
}
