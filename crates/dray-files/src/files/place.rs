//! A file before it is open: what is done with it later is done with this one, whatever its name leads to by then.

use rustix::fs::{Mode, OFlags, open};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The file that a name leads to, which whoever has this may not be allowed to open.
#[derive(Debug)]
pub struct Place(OwnedFd);

impl Place {
    /// What is at `path`, which is no link.
    ///
    /// # Errors
    /// What the system reports; that it is a link.
    pub fn of(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let place = Self(open(path, flags, Mode::empty())?);
        match place.meta()?.is_symlink() {
            true => Err(rustix::io::Errno::LOOP.into()),
            false => Ok(place),
        }
    }

    /// What is open.
    ///
    /// # Errors
    /// What the system reports.
    pub fn of_open(file: &File) -> io::Result<Self> {
        Ok(Self(file.try_clone()?.into()))
    }

    fn meta(&self) -> io::Result<std::fs::Metadata> {
        File::from(self.0.try_clone()?).metadata()
    }

    /// Opens it.
    ///
    /// # Errors
    /// What the system reports.
    pub fn open(&self, options: &OpenOptions) -> io::Result<File> {
        options.open(self.link())
    }

    /// Sets its permission bits.
    ///
    /// # Errors
    /// What the system reports.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        std::fs::set_permissions(self.link(), Permissions::from_mode(mode))
    }

    /// A name that leads to it for as long as it is there.
    fn link(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_exchanged_meanwhile_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, secret) = (dir.path().join("image"), dir.path().join("secret"));
        std::fs::write(&path, "image").unwrap();
        std::fs::write(&secret, "secret").unwrap();
        std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        let place = Place::of(&path).unwrap();
        std::fs::rename(&path, dir.path().join("away")).unwrap();
        symlink(&secret, &path).unwrap();
        place.set_mode(0o640).unwrap();
        let mut text = String::new();
        place.open(File::options().read(true)).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "image");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&secret), mode(&dir.path().join("away"))), (0o600, 0o640));
        let why = Place::of(&path).unwrap_err();
        assert_eq!(why.raw_os_error(), Some(40), "{why}");
    }
}
