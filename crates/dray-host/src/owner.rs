//! To whom the file of an image belongs. It travels by name, because hosts number their users differently; whoever
//! runs the VM at the target can then open the file when dray gives it back.

use dray_wire::request::FileOwner;
use nix::unistd::{Gid, Group, Uid, User};
use rustix::fs::{Gid as RawGid, Mode, OFlags, Uid as RawUid};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bits of a mode that travel: nobody executes an image, and only its owner and its group write it.
const MODE_BITS: u32 = 0o664;
/// What its owner may always do.
const OWN_BITS: u32 = 0o600;

/// A user and a group of this host, and what the mode of their file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Owner {
    /// Number of the user.
    pub user: u32,
    /// Number of the group.
    pub group: u32,
    /// Permission bits.
    pub mode: u32,
}

impl Owner {
    /// Whether a file in the folder of `path` can be given to it. Tried with a file that has no name, where the file
    /// system makes such files.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn check_below(self, path: &Path) -> io::Result<()> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(folder, flags, Mode::empty()) {
            Ok(file) => self.give(&file),
            Err(_) => Ok(()),
        }
    }

    /// Gives an open file to it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn give(self, file: impl AsFd) -> io::Result<()> {
        let (user, group) = (RawUid::from_raw(self.user), RawGid::from_raw(self.group));
        Ok(rustix::fs::fchown(file, Some(user), Some(group))?)
    }
}

/// The owner and mode of a file, by name; numbers without a name as digits.
///
/// # Errors
/// What the system reports.
pub fn of_file(path: &Path) -> io::Result<FileOwner> {
    let meta = path.metadata()?;
    let user = User::from_uid(Uid::from_raw(meta.uid()))?;
    let group = Group::from_gid(Gid::from_raw(meta.gid()))?;
    Ok(FileOwner {
        user: user.map_or_else(|| meta.uid().to_string(), |user| user.name),
        group: group.map_or_else(|| meta.gid().to_string(), |group| group.name),
        mode: mode(meta.mode()),
    })
}

/// The user with whose rights a process of this host opens files, by name; digits for one without a name.
pub fn of_process(pid: i32) -> Option<String> {
    let user = crate::process::user_of(pid)?;
    let named = User::from_uid(Uid::from_raw(user)).ok().flatten();
    Some(named.map_or_else(|| user.to_string(), |user| user.name))
}

/// `USER` or `USER:GROUP`, as an operator writes it; `mode` is that of the file. Without a group it is the user's own.
pub fn parse(text: &str, mode: u32) -> FileOwner {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    FileOwner { user: user.to_owned(), group: group.to_owned(), mode }
}

/// The bits of a mode that a file gets which comes from another host.
fn mode(wanted: u32) -> u32 {
    wanted & MODE_BITS | OWN_BITS
}

/// Who that is on this host.
///
/// # Errors
/// That there is no such user or group.
pub fn here(owner: &FileOwner) -> io::Result<Owner> {
    let absent = |what: &str, name: &str| {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no {what} '{name}'"))
    };
    let user = User::from_name(&owner.user)?;
    let number = user.as_ref().map(|user| user.uid.as_raw()).or_else(|| numbered(&owner.user));
    let number = number.ok_or_else(|| absent("user", &owner.user))?;
    let mode = mode(owner.mode);
    if owner.group.is_empty() {
        let group = user.map(|user| user.gid.as_raw());
        return Ok(Owner { user: number, group: group.unwrap_or(number), mode });
    }
    let group = Group::from_name(&owner.group)?.map(|group| group.gid.as_raw());
    let group = group.or_else(|| numbered(&owner.group));
    Ok(Owner { user: number, group: group.ok_or_else(|| absent("group", &owner.group))?, mode })
}

/// A user or group without a name. The last number means that nothing changes.
fn numbered(digits: &str) -> Option<u32> {
    digits.parse().ok().filter(|number| *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_go_by_name_and_numbers_without_one_as_they_are() {
        let root = parse("root", 0o640);
        assert_eq!(here(&root).unwrap(), Owner { user: 0, group: 0, mode: 0o640 });
        let named = FileOwner { user: "0".into(), group: "root".into(), mode: 0 };
        assert_eq!(here(&named).unwrap(), Owner { user: 0, group: 0, mode: 0o600 });
        let numbers = Owner { user: 4_242_424, group: 4242, mode: 0o600 };
        assert_eq!(here(&parse("4242424:4242", 0)).unwrap(), numbers);
        let none = here(&parse("nobody-is-called-so", 0)).unwrap_err();
        assert_eq!(none.to_string(), "there is no user 'nobody-is-called-so'");
        assert!(here(&parse("4294967295", 0)).is_err());
        let none = here(&parse("root:nobody-is-called-so", 0)).unwrap_err();
        assert_eq!(none.to_string(), "there is no group 'nobody-is-called-so'");
    }

    #[test]
    fn no_bit_comes_along_that_lets_others_write_or_execute() {
        assert_eq!(mode(0o6777), 0o664);
        assert_eq!(mode(0o000), 0o600);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, "").unwrap();
        let meta = path.metadata().unwrap();
        let back = here(&of_file(&path).unwrap()).unwrap();
        assert_eq!((back.user, back.group), (meta.uid(), meta.gid()));
    }
}
