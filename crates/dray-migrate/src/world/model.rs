//! What a guest knows of one of its disks: what it has written, what it was told, and so what it may find.

use dray_types::{BLOCK_SIZE, BlockRange};

/// Bytes that reach a disk together or not at all.
pub const SECTOR: u64 = 512;

/// What may be in a sector.
#[derive(Clone)]
struct Sector {
    /// What a read may find.
    current: Vec<u64>,
    /// What may be there after a power cut.
    durable: Vec<u64>,
    /// It was written before a sync that failed, and not flushed: nobody knows any more, until it is
    /// written again.
    in_doubt: bool,
    /// A write to it has failed, perhaps in the middle.
    is_torn: bool,
    /// It was written since the guest came to the target, and whether that was flushed there.
    here: bool,
    kept: bool,
}

impl Sector {
    /// Whether it can hold these bytes.
    fn may_hold(&self, bytes: &[u8]) -> bool {
        let same = |value: &u64| bytes_of(*value, 1) == bytes;
        let torn = || {
            let all: Vec<_> = self.current.iter().map(|value| bytes_of(*value, 1)).collect();
            bytes.iter().enumerate().all(|(at, byte)| all.iter().any(|held| held[at] == *byte))
        };
        self.current.iter().any(same) || self.is_torn && torn()
    }
}

/// One disk of the guest.
#[derive(Clone)]
pub struct Model {
    sectors: Vec<Sector>,
    /// A sync has failed and lost writes, and no flush has said so.
    owed: bool,
}

impl Model {
    /// A disk of which each sector holds its number in `held`.
    pub fn new(held: Vec<u64>) -> Self {
        let sector = |value| Sector {
            current: vec![value],
            durable: vec![value],
            in_doubt: false,
            is_torn: false,
            here: false,
            kept: false,
        };
        Self { sectors: held.into_iter().map(sector).collect(), owed: false }
    }

    /// The guest has written sectors, or tried to.
    pub fn written(&mut self, at: u64, count: u64, value: u64, ok: bool) {
        for sector in &mut self.sectors[at as usize..(at + count) as usize] {
            if ok {
                sector.current.clear();
            }
            (sector.in_doubt, sector.is_torn) = (sector.in_doubt && !ok, !ok);
            sector.current.push(value);
            sector.durable.push(value);
            if ok {
                (sector.here, sector.kept) = (true, false);
            }
        }
    }

    /// What a flush has answered.
    ///
    /// # Panics
    /// When it says that all is durable, and the guest was never told of what is lost.
    pub fn flushed(&mut self, ok: bool, who: &str) {
        if !ok {
            self.owed = false;
            return;
        }
        assert!(!self.owed, "{who}: a sync has lost writes, and a flush says that all is durable");
        for sector in &mut self.sectors {
            sector.durable.clone_from(&sector.current);
            sector.kept = sector.here;
        }
    }

    /// The guest goes on at another host: what it has written so far is durable somewhere.
    ///
    /// # Panics
    /// When it was not told of what is lost: nobody would tell it there.
    pub fn moved(&mut self, who: &str) {
        assert!(!self.owed, "{who}: it has moved, and was not told that a sync has lost writes");
        for sector in &mut self.sectors {
            sector.durable.clone_from(&sector.current);
            (sector.here, sector.kept) = (false, false);
        }
    }

    /// A claim has made zeros of these blocks, or perhaps of any that the guest has not flushed at the
    /// target.
    ///
    /// # Panics
    /// When it had flushed one of them.
    pub fn lost(&mut self, blocks: Option<BlockRange>, who: &str) {
        let per_block = BLOCK_SIZE / SECTOR;
        for (nth, sector) in self.sectors.iter_mut().enumerate() {
            let named =
                blocks.map(|blocks| blocks.contains(BlockRange::new(nth as u64 / per_block, 1)));
            assert!(
                named != Some(true) || !sector.kept,
                "{who}: flushed sector {nth} was given up"
            );
            if named.unwrap_or(!sector.kept) {
                sector.current.push(0);
                sector.durable.push(0);
            }
        }
    }

    /// A sync has failed, and lost these sectors. Of what is not flushed nobody knows any more what is
    /// there; what was flushed is.
    pub fn sync_failed(&mut self, lost: &[u64]) {
        let is_lost = |&nth: &u64| {
            let sector = self.sectors.get(nth as usize);
            sector.is_some_and(|sector| sector.current != sector.durable)
        };
        self.owed |= lost.iter().any(is_lost);
        for sector in self.sectors.iter_mut().filter(|sector| sector.current != sector.durable) {
            sector.current.clone_from(&sector.durable);
            (sector.in_doubt, sector.here) = (true, sector.kept);
        }
    }

    /// The host that had the guest has lost power: the guest knows by that.
    pub fn cut(&mut self) {
        self.owed = false;
        for sector in &mut self.sectors {
            sector.current.clone_from(&sector.durable);
            sector.here = sector.kept;
        }
    }

    /// What a read has found.
    ///
    /// # Panics
    /// When it can have come from nowhere.
    pub fn found(&mut self, at: u64, bytes: &[u8], who: &str) {
        let sectors = self.sectors[at as usize..].iter_mut().zip(bytes.chunks(SECTOR as usize));
        for (nth, (sector, bytes)) in sectors.enumerate() {
            let value = bytes[..8].try_into().map_or(u64::MAX, u64::from_le_bytes);
            assert!(
                sector.may_hold(bytes),
                "{who}: sector {} holds {value}, not one of {:?}",
                at + nth as u64,
                sector.current
            );
            if sector.in_doubt || sector.is_torn {
                continue;
            }
            if sector.durable == sector.current {
                sector.durable = vec![value];
            }
            sector.current = vec![value];
        }
    }
}

/// The bytes of sectors that hold a value.
pub fn bytes_of(value: u64, count: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((count * SECTOR / 8) as usize)
}
