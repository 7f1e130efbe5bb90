//! Lists of processes in files of a fixed length, which are written in place and outlive the agent and not the host.

use crate::process::{QemuProcess, started, user_of};
use dray_files::StatePath;
use dray_files::files::BOOT_LEN;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC_LEN: usize = 8;
const COUNT_AT: usize = MAGIC_LEN + BOOT_LEN;
const LIST_AT: usize = COUNT_AT + 4;
const SUM_LEN: usize = 8;

/// One entry of a list.
pub(super) trait Row: Copy {
    /// What a file of such entries begins with.
    const MAGIC: &'static [u8; MAGIC_LEN];
    /// Bytes of an entry.
    const LEN: usize;

    /// Writes it to its place.
    fn put(self, place: &mut [u8]);

    /// Reads it.
    fn get(place: &[u8]) -> Option<Self>;
}

/// A process. Its number alone may be another's tomorrow; with its start it is nobody else's until
/// the host boots again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it was started, in clock ticks since the host booted.
    pub started: u64,
}

impl Process {
    /// Whether it has not ended.
    pub(super) fn runs(&self) -> bool {
        i32::try_from(self.pid).ok().and_then(started) == Some(self.started)
    }

    /// Whether it runs VMs, by its name.
    pub fn is_emulator(&self) -> bool {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        name.starts_with("qemu-system") || matches!(name.trim_end(), "qemu-kvm" | "kvm")
    }

    /// The QEMU behind a monitor, if it runs and answers for itself: it is one of the images' `clients`, or an emulator
    /// by its name. Otherwise a manager does.
    pub fn itself(monitor: &QemuProcess, clients: &[Self]) -> Option<Self> {
        let own = Self { pid: u32::try_from(monitor.pid).ok()?, started: monitor.started };
        (own.runs() && (clients.contains(&own) || own.is_emulator())).then_some(own)
    }

    /// Whether it is this one, of the present boot.
    pub(super) fn is(&self, qemu: &QemuProcess) -> bool {
        u32::try_from(qemu.pid) == Ok(self.pid) && qemu.started == self.started
    }

    /// The user with whose rights it opens files; none when it has ended.
    pub fn user(&self) -> Option<u32> {
        let user = user_of(i32::try_from(self.pid).ok()?)?;
        self.runs().then_some(user)
    }
}

impl Row for Process {
    const MAGIC: &'static [u8; MAGIC_LEN] = b"DRAYCLI1";
    const LEN: usize = 12;

    fn put(self, place: &mut [u8]) {
        place[..4].copy_from_slice(&self.pid.to_le_bytes());
        place[4..].copy_from_slice(&self.started.to_le_bytes());
    }

    fn get(place: &[u8]) -> Option<Self> {
        Some(Self {
            pid: u32::from_le_bytes(place[..4].try_into().ok()?),
            started: u64::from_le_bytes(place[4..].try_into().ok()?),
        })
    }
}

/// How many entries a file of `len` bytes has room for.
pub(super) const fn room_in<R: Row>(len: usize) -> usize {
    (len - LIST_AT - SUM_LEN) / R::LEN
}

/// The id of this boot; without one nobody is known to the next process.
pub(super) fn boot_id(path: &StatePath) -> [u8; BOOT_LEN] {
    path.files().boot().unwrap_or([0; BOOT_LEN])
}

/// A file of `len` bytes with these entries of this boot: as many of them as it has room for.
pub(super) fn encode<R: Row>(boot: &[u8; BOOT_LEN], known: &[R], len: usize) -> Vec<u8> {
    let sum_at = len - SUM_LEN;
    let known = &known[..known.len().min(room_in::<R>(len))];
    let mut bytes = vec![0; len];
    bytes[..MAGIC_LEN].copy_from_slice(R::MAGIC);
    bytes[MAGIC_LEN..COUNT_AT].copy_from_slice(boot);
    bytes[COUNT_AT..LIST_AT].copy_from_slice(&(known.len() as u32).to_le_bytes());
    for (place, row) in bytes[LIST_AT..sum_at].chunks_exact_mut(R::LEN).zip(known) {
        row.put(place);
    }
    let sum = xxh3_64(&bytes[..sum_at]);
    bytes[sum_at..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The entries of such a file; none when it is damaged, or of another boot.
pub(super) fn decode<R: Row>(bytes: &[u8], boot: &[u8; BOOT_LEN]) -> Option<Vec<R>> {
    let sum_at = bytes.len().checked_sub(SUM_LEN).filter(|&end| end >= LIST_AT)?;
    let whole = bytes[sum_at..] == xxh3_64(&bytes[..sum_at]).to_le_bytes();
    if !whole || !bytes.starts_with(R::MAGIC) || bytes[MAGIC_LEN..COUNT_AT] != boot[..] {
        return None;
    }
    let count = u32::from_le_bytes(bytes[COUNT_AT..LIST_AT].try_into().ok()?) as usize;
    bytes[LIST_AT..sum_at].chunks_exact(R::LEN).take(count).map(R::get).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 512;

    fn process(pid: u32) -> Process {
        Process { pid, started: 1 << 40 | u64::from(pid) }
    }

    #[test]
    fn a_list_of_another_boot_or_a_damaged_one_names_nobody() {
        let bytes = encode(&[b'a'; BOOT_LEN], &[process(1), process(2)], LEN);
        assert_eq!(decode(&bytes, &[b'a'; BOOT_LEN]), Some(vec![process(1), process(2)]));
        assert_eq!(decode::<Process>(&bytes, &[b'b'; BOOT_LEN]), None);
        for at in 0..LEN {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(decode::<Process>(&damaged, &[b'a'; BOOT_LEN]), None, "byte {at}");
        }
        assert_eq!(decode::<Process>(&bytes[..100], &[b'a'; BOOT_LEN]), None);
    }

    #[test]
    fn a_file_names_as_many_as_it_has_room_for() {
        let boot = [b'a'; BOOT_LEN];
        let all: Vec<_> = (0..100).map(process).collect();
        let known = decode::<Process>(&encode(&boot, &all, LEN), &boot).unwrap();
        assert_eq!(known, all[..room_in::<Process>(LEN)]);
    }
}
