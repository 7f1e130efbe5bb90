//! What the kernel tells of a block device, in sysfs.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where the number of sectors written is in a device's `stat`; that of sectors discarded is in a later field,
/// which kernels before 4.18 do not have.
const WRITTEN: usize = 6;
const DISCARDED: usize = 13;

/// A block device as the kernel knows it. Sectors are counted, and not requests: a request is counted after
/// whoever waits for it has been told, and a device mapper counts a flush as a request that writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its number, major and minor.
    pub number: (u32, u32),
    /// Which of all disks since the boot it is, where the kernel tells.
    pub sequence: Option<u64>,
    /// Sectors of 512 bytes that were written to it since it is there.
    pub written: u64,
    /// Sectors that were discarded.
    pub discarded: u64,
}

impl Device {
    /// The device at `path`, when what waits for it in the page cache is written.
    ///
    /// # Errors
    /// As [`Files::device`](super::Files::device).
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let meta = fs::metadata(path)?;
        if !meta.file_type().is_block_device() {
            return Err(unsupported("it is not a block device"));
        }
        fs::File::open(path)?.sync_data()?;
        let number = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        let places = Places::of(number);
        if places.read("queue/iostats")?.trim() != "1" {
            return Err(unsupported("the kernel does not count the writes to it"));
        }
        let sequence = match places.read("diskseq") {
            Ok(text) => Some(number_in(&text)?),
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            Err(why) => return Err(why),
        };
        let (written, discarded) = sectors(&fs::read_to_string(places.own.join("stat"))?)?;
        Ok(Self { number, sequence, written, discarded })
    }
}

/// Where sysfs tells of a device.
struct Places {
    /// The folder of the device itself.
    own: PathBuf,
}

impl Places {
    fn of((major, minor): (u32, u32)) -> Self {
        Self { own: PathBuf::from(format!("/sys/dev/block/{major}:{minor}")) }
    }

    /// What belongs to the whole disk, which is one folder up from a partition.
    fn read(&self, name: &str) -> io::Result<String> {
        match fs::read_to_string(self.own.join(name)) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                fs::read_to_string(self.own.join("..").join(name))
            }
            read => read,
        }
    }
}

fn unsupported(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

fn number_in(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))
}

/// The sectors that were written and discarded, in a device's `stat`.
fn sectors(stat: &str) -> io::Result<(u64, u64)> {
    let field = |nth| {
        let found = stat.split_ascii_whitespace().nth(nth);
        number_in(found.ok_or_else(|| unsupported("the kernel does not count discards"))?)
    };
    Ok((field(WRITTEN)?, field(DISCARDED)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_found_among_the_counts() {
        let stat = "  9110  109 3097928  7199  13587  33756 5880780  33350  0  10036  41118  2  0  \
                    131080  0  4043  568\n";
        assert_eq!(sectors(stat).unwrap(), (5_880_780, 131_080));
        // A kernel before 4.18, and nothing that can be understood.
        let old = "1 2 3 4 5 6 7 8 9 10 11";
        assert_eq!(sectors(old).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert!(sectors("1 2 3 4 5 6 x 8 9 10 11 12 13 14").is_err());
        assert!(sectors("").is_err());
    }

    #[test]
    fn what_is_no_device_has_no_counts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Device::at(file.path()).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(
            Device::at(Path::new("/dev/null")).unwrap_err().kind(),
            io::ErrorKind::Unsupported
        );
        let none = file.path().with_extension("none");
        assert_eq!(Device::at(&none).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
