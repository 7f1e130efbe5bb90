//! Which life of a mounted file system a folder is in.
//!
//! ext4, XFS and F2FS make a folder in sysfs when a file system is mounted, named after its block device, and remove it
//! when it is unmounted everywhere. The number of that folder's inode is given once in a boot. Other mounts of the same
//! file system, in this mount namespace or another one, add nothing: all of them have one page cache. So the number
//! stays when an agent is restarted, also as a service, which gets a mount namespace of its own each time; the ids of
//! mounts do not. Other file systems, such as Btrfs and NFS, are not found.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File systems that are named after their block device in sysfs.
const KNOWN: [&str; 3] = ["ext4", "xfs", "f2fs"];

/// As [`Files::instance`](super::Files::instance), of this host.
pub(super) fn instance(folder: &Path) -> io::Result<Option<u64>> {
    below(Path::new("/sys"), folder)
}

fn below(sys: &Path, folder: &Path) -> io::Result<Option<u64>> {
    let device = std::fs::metadata(folder)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // The last part of where the link leads is the name of the device.
    let link = sys.join(format!("dev/block/{major}:{minor}"));
    let Some(target) = there(std::fs::read_link(link))? else { return Ok(None) };
    let Some(name) = target.file_name() else { return Ok(None) };
    let known = KNOWN.iter().map(|kind| sys.join("fs").join(kind).join(name));
    first_inode(known)
}

fn first_inode(mut paths: impl Iterator<Item = PathBuf>) -> io::Result<Option<u64>> {
    let inode = |path| there(std::fs::metadata(path)).map(|found| found.map(|it| it.ino()));
    paths.find_map(|path| inode(path).transpose()).transpose()
}

fn there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_system_is_found_by_its_device_and_known_by_its_folder_in_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let (sys, folder) = (dir.path().join("sys"), dir.path());
        assert_eq!(below(&sys, folder).unwrap(), None, "it has no block device");
        let device = std::fs::metadata(folder).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        std::fs::create_dir_all(sys.join("dev/block")).unwrap();
        symlink("../../devices/sdb/sdb1", sys.join(format!("dev/block/{major}:{minor}"))).unwrap();
        assert_eq!(below(&sys, folder).unwrap(), None, "nobody tells");
        let mounted = sys.join("fs/xfs/sdb1");
        std::fs::create_dir_all(&mounted).unwrap();
        let inode = std::fs::metadata(&mounted).unwrap().ino();
        assert_eq!(below(&sys, folder).unwrap(), Some(inode));
        assert!(below(&sys, &dir.path().join("absent")).is_err());
    }
}
