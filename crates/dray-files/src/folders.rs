//! Whether other users could put something else in the place of a file, while the agent, who may be root, looks at it
//! and opens it. What they need for that is to write to its folder, or to one of those that lead there.

use std::fmt;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Group and others may write.
const WRITE: u32 = 0o022;
/// Whoever may write changes only what is his own.
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;

/// A folder in which others could exchange what is not theirs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchangeable {
    folder: PathBuf,
    who: Who,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// The user with this number owns it.
    Owner(u32),
    /// The users of the group with this number may write to it.
    Group(u32),
    /// Every user may.
    All,
}

impl Exchangeable {
    /// What its operator can do about it.
    pub fn hint(&self) -> String {
        let folder = self.folder.display();
        match self.who {
            Who::Owner(_) => format!("chown root {folder}"),
            Who::Group(_) | Who::All => format!("chmod go-w {folder}"),
        }
    }
}

impl fmt::Display for Exchangeable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let folder = self.folder.display();
        match self.who {
            Who::Owner(user) => write!(f, "user {user} owns {folder}")?,
            Who::Group(group) => write!(f, "group {group} may write to {folder}")?,
            Who::All => write!(f, "every user may write to {folder}")?,
        }
        f.write_str(", and could exchange files below it under the agent's hands")
    }
}

impl std::error::Error for Exchangeable {}

/// Refuses a folder in which another user could exchange what is not his own: the folder itself, or one of those that
/// lead to it, links followed. One that is not there is none.
///
/// # Errors
/// An [`Exchangeable`], or what the file system reports.
pub fn check(folder: &Path) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let real = match folder.canonicalize() {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
        real => real?,
    };
    // Whoever may write where a link lies exchanges the link.
    for part in real.ancestors().chain(folder.ancestors()) {
        if part.as_os_str().is_empty() {
            continue;
        }
        if let Some(who) = who_else(&part.metadata()?, own) {
            return Err(io::Error::other(Exchangeable { folder: part.to_owned(), who }));
        }
    }
    Ok(())
}

/// The same for the folder of a file.
///
/// # Errors
/// As [`check`].
pub fn check_of(file: &Path) -> io::Result<()> {
    file.parent().map_or(Ok(()), check)
}

fn who_else(folder: &Metadata, own: u32) -> Option<Who> {
    if folder.uid() != ROOT && folder.uid() != own {
        return Some(Who::Owner(folder.uid()));
    }
    let mode = folder.permissions().mode();
    match (mode & STICKY != 0, mode & WRITE) {
        (true, _) | (_, 0) => None,
        (false, 0o020) => Some(Who::Group(folder.gid())),
        _ => Some(Who::All),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, create_dir, set_permissions};
    use std::os::unix::fs::symlink;

    fn refused(path: &Path) -> Option<String> {
        let why = check(path).err()?;
        let why = why.get_ref()?.downcast_ref::<Exchangeable>()?;
        Some(format!("{why}; {}", why.hint()))
    }

    #[test]
    fn folders_to_which_others_write_are_refused_and_what_lies_below_them() {
        let dir = tempfile::tempdir().unwrap();
        let (open, pool) = (dir.path().join("open"), dir.path().join("open/pool"));
        create_dir(&open).unwrap();
        create_dir(&pool).unwrap();
        for (mode, who) in [
            (0o755, None),
            (0o777, Some("every user may write to")),
            (0o757, Some("every user may write to")),
            (0o775, Some("may write to")),
            (0o1777, None),
            (0o700, None),
        ] {
            set_permissions(&open, Permissions::from_mode(mode)).unwrap();
            for path in [&open, &pool] {
                let why = refused(path);
                assert_eq!(why.is_some(), who.is_some(), "{mode:o}: {why:?}");
                if let (Some(why), Some(who)) = (why, who) {
                    let hint = format!("; chmod go-w {}", open.display());
                    assert!(why.contains(who) && why.ends_with(&hint), "{why}");
                }
            }
        }
        assert!(refused(&dir.path().join("none")).is_none());
    }

    #[test]
    fn a_link_is_as_safe_as_where_it_lies_and_where_it_leads() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["open", "closed"] {
            create_dir(at(name)).unwrap();
            create_dir(at(name).join("pool")).unwrap();
        }
        symlink(at("closed/pool"), at("open/link")).unwrap();
        symlink(at("open/pool"), at("closed/link")).unwrap();
        assert!(refused(&at("open/link")).is_none() && refused(&at("closed/link")).is_none());
        set_permissions(at("open"), Permissions::from_mode(0o777)).unwrap();
        assert!(refused(&at("open/link")).is_some(), "others could lead it elsewhere");
        assert!(refused(&at("closed/link")).is_some(), "it leads to where others write");
        assert!(refused(&at("closed/pool")).is_none());
    }

    #[test]
    fn what_another_user_owns_is_his_to_exchange() {
        let dir = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let meta = dir.path().metadata().unwrap();
        assert_eq!(who_else(&meta, own), None);
        if own != ROOT {
            println!("SKIP: only root gives folders away");
            return;
        }
        std::os::unix::fs::chown(dir.path(), Some(4242), None).unwrap();
        let why = refused(dir.path()).unwrap();
        assert!(why.contains("user 4242 owns") && why.contains("; chown root "), "{why}");
        // The agent may be that user.
        assert_eq!(who_else(&dir.path().metadata().unwrap(), 4242), None);
    }
}
