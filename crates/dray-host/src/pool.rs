//! Paths that come from outside, held inside the directories an operator named (I7).

use dray_files::folders::{self, Exchangeable};
use dray_types::ErrorKind;
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Longest name of an image. Its partial and replica names are longer and must still fit into the
/// 255 bytes of a file name.
pub const MAX_NAME: usize = 200;

/// Why a path or name is not used, with what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathError {
    /// What sort of failure.
    pub kind: ErrorKind,
    /// What failed, and why.
    pub why: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl PathError {
    /// One without a hint.
    pub fn new(kind: ErrorKind, why: impl Into<String>) -> Self {
        Self { kind, why: why.into(), hint: None }
    }

    /// The same error with what to do about it.
    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for PathError {}

/// What is in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PoolKind {
    /// Files, which dray makes and removes.
    #[default]
    Files,
    /// Block devices, or links to them, which the operator makes and removes.
    Devices,
}

/// How the agent reads and writes the images of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PoolIo {
    /// Through the host's page cache.
    #[default]
    Buffered,
    /// Round it (`O_DIRECT`): every read and write is one of the disk.
    Direct,
}

/// A directory that images may be in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// What peers call it.
    pub name: String,
    /// The directory.
    pub path: PathBuf,
    /// What is in it.
    pub kind: PoolKind,
    /// How its images are read and written.
    pub io: PoolIo,
    /// Images in pools of one domain may be told what the others hold. None: each only what is its own.
    pub reuse_domain: Option<String>,
}

/// Checks the name of an image or pool: one path component of harmless characters.
///
/// # Errors
/// What is wrong with it.
pub fn check_name(name: &str) -> Result<(), PathError> {
    let error = |why: &str| {
        let why = format!("'{}' is not a name: {why}", shown(name));
        let hint = "use letters, digits, dots, hyphens and underscores";
        Err(PathError::new(ErrorKind::Invalid, why).hint(hint))
    };
    if name.is_empty() {
        return error("it is empty");
    }
    if name.len() > MAX_NAME {
        return error("it is longer than 200 bytes");
    }
    if name.starts_with('.') {
        return error("it begins with a dot");
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return error("it may contain only letters, digits, '.', '_' and '-'");
    }
    Ok(())
}

/// A name from outside as it may stand in a message: short and printable.
fn shown(name: &str) -> String {
    name.chars().take(40).flat_map(char::escape_default).collect()
}

impl Pool {
    /// The path of the image `name` in this pool. The image need not exist; a symbolic link must
    /// lead to something inside the pool. In a pool of devices it is an existing device, or a link
    /// to one as LVM makes them; the link's path is given, for it stays the same.
    ///
    /// # Errors
    /// A name that is not one, a pool that is not there, a link that leads out, a name that is no
    /// device in a pool of them.
    pub fn image_path(&self, name: &str) -> Result<PathBuf, PathError> {
        check_name(name)?;
        let pool = self.path.canonicalize().map_err(|why| {
            let why = format!("use pool '{}' at {}: {why}", self.name, self.path.display());
            PathError::new(ErrorKind::Denied, why)
                .hint("create the directory or correct [[pool]] path")
        })?;
        self.check_folders()?;
        let path = pool.join(name);
        if self.kind == PoolKind::Devices {
            return self.device(path);
        }
        match path.symlink_metadata() {
            Ok(meta) if meta.file_type().is_symlink() => self.followed(&pool, &path),
            Ok(_) => Ok(path),
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => Ok(path),
            Err(why) => {
                Err(PathError::new(ErrorKind::Io, format!("look at {}: {why}", path.display())))
            }
        }
    }

    /// Refuses a pool in which other users could exchange what is not theirs. One that is not there is none.
    ///
    /// # Errors
    /// Who could, and what to do about it.
    pub fn check_folders(&self) -> Result<(), PathError> {
        let Err(why) = folders::check(&self.path) else { return Ok(()) };
        let open = why.get_ref().and_then(|why| why.downcast_ref::<Exchangeable>());
        let hint = open.map_or_else(String::new, Exchangeable::hint);
        let why = format!("use pool '{}': {why}", self.name);
        Err(PathError::new(ErrorKind::Denied, why).hint(hint))
    }

    fn device(&self, path: PathBuf) -> Result<PathBuf, PathError> {
        match path.metadata() {
            Ok(meta) if meta.file_type().is_block_device() => Ok(path),
            Err(why) if why.kind() != std::io::ErrorKind::NotFound => {
                Err(PathError::new(ErrorKind::Io, format!("look at {}: {why}", path.display())))
            }
            _ => {
                let why = format!("there is no device {}", path.display());
                let hint = "make it first, or name another one with --name HERE=THERE";
                Err(PathError::new(ErrorKind::NotFound, why).hint(hint))
            }
        }
    }

    /// Whether an absolute path lies inside the pool, links followed; in a pool of devices the last
    /// link is the device's name there, wherever it leads.
    pub fn contains(&self, path: &Path) -> bool {
        if self.kind == PoolKind::Devices {
            let dirs = (self.path.canonicalize(), path.parent().map(Path::canonicalize));
            return matches!(dirs, (Ok(pool), Some(Ok(dir))) if pool == dir)
                && path.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
        }
        match (self.path.canonicalize(), path.canonicalize()) {
            (Ok(pool), Ok(path)) => path.starts_with(pool) && path != self.path,
            _ => false,
        }
    }

    /// Whether the directory of `path`, links followed, is the pool's or below it. The file itself
    /// need not exist.
    pub fn holds(&self, path: &Path) -> bool {
        let dir = path.parent().map(Path::canonicalize);
        match (self.path.canonicalize(), dir) {
            (Ok(pool), Some(Ok(dir))) => dir.starts_with(pool),
            _ => false,
        }
    }

    fn followed(&self, pool: &Path, link: &Path) -> Result<PathBuf, PathError> {
        match link.canonicalize() {
            Ok(real) if real.starts_with(pool) && real != pool => Ok(real),
            Ok(_) => {
                let (link, pool) = (link.display(), &self.name);
                let why = format!("use {link}: it is a link that leads out of pool '{pool}'");
                Err(PathError::new(ErrorKind::Denied, why).hint("move the file into the pool"))
            }
            Err(why) => {
                let why = format!("follow the link {}: {why}", link.display());
                Err(PathError::new(ErrorKind::Denied, why))
            }
        }
    }
}

/// An existing socket below one of `dirs`, links followed.
///
/// # Errors
/// That it is none, or lies elsewhere.
pub fn socket_below(dirs: &[PathBuf], path: &Path) -> Result<PathBuf, PathError> {
    let shown = path.display();
    if !path.is_absolute() {
        let why = format!("use socket {shown}: it is not an absolute path");
        return Err(PathError::new(ErrorKind::Invalid, why));
    }
    let real = path.canonicalize();
    let inside = |path: &Path| {
        dirs.iter().any(|dir| dir.canonicalize().is_ok_and(|dir| path.starts_with(dir)))
    };
    // Only what is inside is told apart from what is not there: a peer must not probe for files.
    let real = match real {
        Ok(real) if inside(&real) => real,
        Err(why)
            if path
                .parent()
                .and_then(|dir| dir.canonicalize().ok())
                .is_some_and(|d| inside(&d)) =>
        {
            return Err(PathError::new(ErrorKind::Invalid, format!("use socket {shown}: {why}")));
        }
        _ => {
            let list: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
            let why = format!("use socket {shown}: it is not below {}", list.join(" or "));
            return Err(PathError::new(ErrorKind::Invalid, why)
                .hint("move it there or add its directory to qmp_dirs"));
        }
    };
    let is_socket = real.metadata().is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket {
        return Ok(real);
    }
    Err(PathError::new(ErrorKind::Invalid, format!("use {shown}: it is not a socket")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn pool(dir: &Path) -> Pool {
        let (kind, io) = (PoolKind::Files, PoolIo::Buffered);
        Pool { name: "ssd".into(), path: dir.to_owned(), kind, io, reuse_domain: None }
    }

    #[test]
    fn only_harmless_names_are_names() {
        let dir = tempfile::tempdir().unwrap();
        let pool = pool(dir.path());
        let long = "x".repeat(201);
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "/etc/passwd",
            ".hidden",
            "a b",
            "a\0b",
            "ä",
            "a\n",
            &long,
        ] {
            assert!(pool.image_path(bad).is_err(), "{bad:?}");
        }
        let real = dir.path().canonicalize().unwrap();
        for good in ["vm1.qcow2", "a", "A-1_b.raw", &"x".repeat(200)] {
            assert_eq!(pool.image_path(good), Ok(real.join(good)));
        }
    }

    #[test]
    fn links_must_stay_inside() {
        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let pool = pool(dir.path());
        std::fs::write(outside.path().join("secret"), "").unwrap();
        std::fs::write(dir.path().join("real"), "").unwrap();
        symlink(outside.path().join("secret"), dir.path().join("out")).unwrap();
        symlink("real", dir.path().join("in")).unwrap();
        symlink("nowhere", dir.path().join("dangling")).unwrap();
        symlink(".", dir.path().join("self")).unwrap();
        let why = pool.image_path("out").unwrap_err().to_string();
        assert!(why.contains("leads out of pool 'ssd'"), "{why}");
        assert!(pool.image_path("dangling").is_err());
        assert!(pool.image_path("self").is_err());
        assert_eq!(pool.image_path("in").unwrap(), dir.path().canonicalize().unwrap().join("real"));
        assert!(pool.contains(&dir.path().join("real")));
        assert!(!pool.contains(&dir.path().join("out")));
    }

    #[test]
    fn a_pool_to_which_others_write_has_no_images() {
        let dir = tempfile::tempdir().unwrap();
        let pool = pool(dir.path());
        let mode = |mode| std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(mode));
        mode(0o777).unwrap();
        let why = pool.image_path("vm1").unwrap_err();
        assert_eq!(why.kind, ErrorKind::Denied);
        let why = why.to_string();
        assert!(why.contains("use pool 'ssd': every user may write to"), "{why}");
        assert!(why.contains("; chmod go-w "), "{why}");
        mode(0o755).unwrap();
        pool.image_path("vm1").unwrap();
    }

    #[test]
    fn a_pool_behind_a_link_is_a_pool() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("real")).unwrap();
        symlink("real", dir.path().join("link")).unwrap();
        let path = pool(&dir.path().join("link")).image_path("vm1").unwrap();
        assert_eq!(path, dir.path().canonicalize().unwrap().join("real/vm1"));
    }

    #[test]
    fn sockets_must_be_sockets_below_the_named_directories() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [dir.path().to_owned()];
        let socket = dir.path().join("vm.qmp");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        symlink(other.path().join("x"), dir.path().join("link")).unwrap();
        let _other = std::os::unix::net::UnixListener::bind(other.path().join("x")).unwrap();
        assert_eq!(socket_below(&dirs, &socket), Ok(socket.canonicalize().unwrap()));
        let why = |path: &Path| socket_below(&dirs, path).unwrap_err().to_string();
        assert!(why(&dir.path().join("file")).contains("not a socket"));
        assert!(why(&dir.path().join("none")).contains("No such file"));
        assert!(why(&dir.path().join("link")).contains("not below"));
        assert!(why(&other.path().join("x")).contains("qmp_dirs"));
        assert!(why(&other.path().join("none")).contains("not below"));
        assert!(why(Path::new("vm.qmp")).contains("absolute"));
    }
}
