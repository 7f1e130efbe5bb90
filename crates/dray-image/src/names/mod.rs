//! The names an image file has while it is not simply the image: partial and replica (I1).
//!
//! Locks die with the agent, so the file's name says who owns it. An incomplete image at a target
//! is `.NAME.dray-partial`, mode 0000 (`.NAME.dray-seed` while it is read from backups, before any
//! migration); after the handover the source's file is
//! `.NAME.dray-replica-EPOCH`, mode 0000. The active layer of a chain that moves flattened is
//! `.NAME.dray-chain` while newer writes are in `.NAME.dray-flat-ID`, both mode 0000. Whatever was asked is done in single steps, each durable
//! before the next, and can be asked again after a crash between any two; no step ever replaces a
//! file. Block devices have no names: see [`device`](crate::device).

mod step;

use crate::{Error, ErrorKind, Result};
use dray_files::files::{Files, RealFiles};
use dray_types::{Epoch, ImageId};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use step::{Step, fail, sync};
pub use step::{file_mode, sync_dir};
pub use step::{open_closed, open_closed_at};

const PARTIAL_SUFFIX: &str = ".dray-partial";
const SEED_SUFFIX: &str = ".dray-seed";
const REPLICA_SUFFIX: &str = ".dray-replica-";
const CHAIN_SUFFIX: &str = ".dray-chain";
const OVERLAY_SUFFIX: &str = ".dray-flat-";
/// Longest file name that the usual file systems take.
const MAX_NAME: usize = 255;
/// Digits of the largest epoch.
const EPOCH_DIGITS: usize = 20;
/// Symbolic links followed before giving up, as the kernel does.
const MAX_LINKS: usize = 40;

/// An image file by its configured name, and the names it can have instead.
#[derive(Clone, Debug)]
pub struct ImageNames {
    files: Arc<dyn Files>,
    dir: PathBuf,
    name: OsString,
}

impl PartialEq for ImageNames {
    fn eq(&self, other: &Self) -> bool {
        (&self.dir, &self.name) == (&other.dir, &other.name)
    }
}

/// Which of its names an image has just now.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Found {
    /// A file has the configured name.
    pub image: bool,
    /// There is an incomplete image.
    pub partial: bool,
    /// Epochs of the replicas, in ascending order.
    pub replicas: Vec<Epoch>,
}

/// What a file is by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetAside {
    /// The copy of an image that another host owns.
    Replica,
    /// An image that has not arrived whole.
    Partial,
}

/// What the name says of a file that dray has set aside; none for any other name.
pub fn set_aside(path: &Path) -> Option<SetAside> {
    let name = path.file_name()?.to_str()?.strip_prefix('.')?;
    if name.ends_with(PARTIAL_SUFFIX) || name.ends_with(SEED_SUFFIX) {
        return Some(SetAside::Partial);
    }
    let (image, epoch) = name.rsplit_once(REPLICA_SUFFIX)?;
    let is_epoch = !epoch.is_empty() && epoch.bytes().all(|digit| digit.is_ascii_digit());
    (!image.is_empty() && is_epoch).then_some(SetAside::Replica)
}

impl ImageNames {
    /// The names of the image configured as `path`, which need not exist. Symbolic links are
    /// followed: it is the file itself whose name has to change.
    ///
    /// # Errors
    /// `Invalid` when `path` is no file name, or one too long to be changed.
    pub fn of(path: &Path) -> Result<Self> {
        Self::among(&(Arc::new(RealFiles) as Arc<dyn Files>), path)
    }

    /// The same among these files.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn among(files: &Arc<dyn Files>, path: &Path) -> Result<Self> {
        let invalid = |why: &str| {
            Error::new(ErrorKind::Invalid, format!("using image path {}", path.display()), why)
        };
        let mut real = path.to_owned();
        let mut links = 0;
        while let Some(link) = files.link(&real) {
            real = real.parent().unwrap_or(Path::new("/")).join(link);
            links += 1;
            if links > MAX_LINKS {
                return Err(invalid("too many symbolic links"));
            }
        }
        let name = real.file_name().ok_or_else(|| invalid("it names no file"))?.to_owned();
        if name.len() + 1 + REPLICA_SUFFIX.len() + EPOCH_DIGITS > MAX_NAME {
            return Err(invalid("the file name is too long"));
        }
        let dir = match real.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok(Self { files: Arc::clone(files), dir, name })
    }

    /// The image under its own name.
    pub fn image(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    fn hidden(&self, suffix: &str) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(suffix);
        self.dir.join(name)
    }

    /// The incomplete image.
    pub fn partial(&self) -> PathBuf {
        self.hidden(PARTIAL_SUFFIX)
    }

    /// The file into which a replica is read from backups.
    pub fn seed(&self) -> PathBuf {
        self.hidden(SEED_SUFFIX)
    }

    /// The replica that was left behind when epoch `epoch` began elsewhere.
    pub fn replica(&self, epoch: Epoch) -> PathBuf {
        self.hidden(&format!("{REPLICA_SUFFIX}{}", epoch.0))
    }

    /// The active layer of a chain that is frozen: what was written since is in the overlay.
    pub fn chain(&self) -> PathBuf {
        self.hidden(CHAIN_SUFFIX)
    }

    /// The overlay of the image with this id. Its name says whose it is: it may be left behind with a
    /// replica while the same name is in use again.
    pub fn overlay(&self, id: ImageId) -> PathBuf {
        self.hidden(&format!("{OVERLAY_SUFFIX}{:016x}", id.0 as u64))
    }

    /// Makes the overlay of the image with this id, `len` bytes of hole, and opens it.
    ///
    /// # Errors
    /// `InUse` when it exists already.
    pub fn create_overlay(&self, id: ImageId, len: u64) -> Result<File> {
        self.create_hole(&self.overlay(id), len)?;
        open_closed(&self.overlay(id), true)
    }

    /// Opens the overlay of the image with this id for reading and writing.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn open_overlay(&self, id: ImageId) -> Result<File> {
        open_closed(&self.overlay(id), true)
    }

    /// Removes the overlay of the image with this id, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_overlay(&self, id: ImageId) -> Result<()> {
        self.remove(self.overlay(id))
    }

    /// Makes an empty file that is to become the active layer of a chain and has not everything yet.
    ///
    /// # Errors
    /// `InUse` when there is one already, or when a file has the image's name.
    pub fn create_chain(&self) -> Result<File> {
        self.create_closed(&self.chain(), 0)?;
        open_closed(&self.chain(), true)
    }

    /// Removes the active layer that has not everything, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_chain(&self) -> Result<()> {
        self.remove(self.chain())
    }

    /// The active layer loses its name: what is in it is no longer all.
    ///
    /// # Errors
    /// `NotFound` without an image, `InUse` when another chain is frozen under the name.
    pub fn freeze_chain(&self) -> Result<()> {
        self.run(self.closing(self.image(), self.chain())?)
    }

    /// The active layer has everything again, and gets its name and `mode`.
    ///
    /// # Errors
    /// `NotFound` without a frozen chain, `InUse` when another file has the name.
    pub fn thaw_chain(&self, mode: u32) -> Result<()> {
        self.run(self.naming(self.chain(), mode)?)
    }

    /// The frozen active layer belongs, with its overlay, to the replica of `epoch`.
    ///
    /// # Errors
    /// `NotFound` without a frozen chain, `InUse` when there is such a replica already.
    pub fn retire_chain(&self, epoch: Epoch) -> Result<()> {
        self.run(self.moving(self.chain(), self.replica(epoch))?)
    }

    /// Undoes [`retire_chain`](Self::retire_chain).
    ///
    /// # Errors
    /// `NotFound` without such a replica, `InUse` when another chain is frozen under the name.
    pub fn restore_chain(&self, epoch: Epoch) -> Result<()> {
        self.run(self.moving(self.replica(epoch), self.chain())?)
    }

    /// What is there.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn found(&self) -> Result<Found> {
        let mut found = Found {
            image: self.exists(&self.image())?,
            partial: self.exists(&self.partial())?,
            replicas: Vec::new(),
        };
        let prefix = self.hidden(REPLICA_SUFFIX);
        let prefix = prefix.file_name().unwrap_or_default().as_encoded_bytes().to_owned();
        let inside = self.files.list(&self.dir);
        for path in inside.map_err(|e| fail("reading directory", &self.dir, e))? {
            let name = path.file_name().unwrap_or_default();
            let epoch = name.as_encoded_bytes().strip_prefix(&prefix[..]);
            let epoch = epoch.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
            found.replicas.extend(epoch.map(Epoch));
        }
        found.replicas.sort_unstable();
        Ok(found)
    }

    /// Makes the incomplete image, `len` bytes of hole.
    ///
    /// # Errors
    /// `InUse` when it exists already, or when a file has the image's name.
    pub fn create_partial(&self, len: u64) -> Result<()> {
        self.create_closed(&self.partial(), len)
    }

    /// Makes the file into which a replica is read, `len` bytes of hole, and opens it.
    ///
    /// # Errors
    /// `InUse` when it exists already, or when a file has the image's name.
    pub fn create_seed(&self, len: u64) -> Result<File> {
        self.create_closed(&self.seed(), len)?;
        open_closed(&self.seed(), true)
    }

    fn create_closed(&self, path: &Path, len: u64) -> Result<()> {
        self.refuse_existing(&self.image())?;
        self.create_hole(path, len)
    }

    fn create_hole(&self, path: &Path, len: u64) -> Result<()> {
        let file = self.files.create_closed(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => self.taken(path),
            _ => fail("creating", path, e),
        })?;
        let made = file.set_len(len).and_then(|()| file.sync());
        let made = made.map_err(|e| fail("creating", path, e));
        made.and_then(|()| self.sync()).inspect_err(|_| {
            // Half made it would be in the way of the next try.
            let _ = self.files.remove(path);
        })
    }

    fn sync(&self) -> Result<()> {
        sync(&*self.files, &self.dir)
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        self.files.exists(path).map_err(|e| fail("examining", path, e))
    }

    /// Opens the incomplete image for reading and writing.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn open_partial(&self) -> Result<File> {
        open_closed(&self.partial(), true)
    }

    /// Opens the file into which a replica is read.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn open_seed(&self) -> Result<File> {
        open_closed(&self.seed(), true)
    }

    /// What was read becomes the replica of `epoch`.
    ///
    /// # Errors
    /// `NotFound` when nothing was read, `InUse` when there is such a replica.
    pub fn finish_seed(&self, epoch: Epoch) -> Result<()> {
        self.run(self.moving(self.seed(), self.replica(epoch))?)
    }

    /// Removes the file into which a replica was being read, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_seed(&self) -> Result<()> {
        self.remove(self.seed())
    }

    /// Opens the replica of `epoch`; for writing only when it may become the image again.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn open_replica(&self, epoch: Epoch, write: bool) -> Result<File> {
        open_closed(&self.replica(epoch), write)
    }

    /// The complete image gets its name and `mode`.
    ///
    /// # Errors
    /// `NotFound` without an incomplete image, `InUse` when another file has the name.
    pub fn finish_partial(&self, mode: u32) -> Result<()> {
        self.run(self.naming(self.partial(), mode)?)
    }

    /// The image loses its name: it belongs to the owner of `epoch` now.
    ///
    /// # Errors
    /// `NotFound` without an image, `InUse` when there is such a replica already.
    pub fn make_replica(&self, epoch: Epoch) -> Result<()> {
        self.run(self.hiding(epoch)?)
    }

    /// The replica of `epoch` gets the image's name back.
    ///
    /// # Errors
    /// `NotFound` without such a replica, `InUse` when another file has the name.
    pub fn restore_replica(&self, epoch: Epoch, mode: u32) -> Result<()> {
        self.run(self.naming(self.replica(epoch), mode)?)
    }

    /// The replica of `epoch` becomes the incomplete image that a migration back completes.
    ///
    /// # Errors
    /// `NotFound` without such a replica, `InUse` when there is an incomplete image already.
    pub fn begin_return(&self, epoch: Epoch) -> Result<()> {
        self.run(self.moving(self.replica(epoch), self.partial())?)
    }

    /// Undoes [`begin_return`](Self::begin_return).
    ///
    /// # Errors
    /// `NotFound` without an incomplete image, `InUse` when there is such a replica.
    pub fn end_return(&self, epoch: Epoch) -> Result<()> {
        self.run(self.moving(self.partial(), self.replica(epoch))?)
    }

    /// Removes the incomplete image, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_partial(&self) -> Result<()> {
        self.remove(self.partial())
    }

    /// Removes the replica of `epoch`, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_replica(&self, epoch: Epoch) -> Result<()> {
        self.remove(self.replica(epoch))
    }

    fn remove(&self, path: PathBuf) -> Result<()> {
        let steps = if self.exists(&path)? { vec![Step::Remove(path)] } else { Vec::new() };
        self.run(steps)
    }

    fn run(&self, steps: Vec<Step>) -> Result<()> {
        // A step may have been done just before a crash without being durable.
        self.sync()?;
        steps.iter().try_for_each(|step| step.run(&*self.files, &self.dir))
    }

    /// Steps that give the file at `from` the image's name. The mode comes first: under its own
    /// name the file is never anything but usable.
    fn naming(&self, from: PathBuf, mode: u32) -> Result<Vec<Step>> {
        let to = self.image();
        match (self.exists(&from)?, self.exists(&to)?) {
            (true, false) => Ok(vec![Step::SetMode(from.clone(), mode), Step::Rename(from, to)]),
            (false, true) => Ok(vec![Step::SetMode(to, mode)]),
            (true, true) => Err(self.taken(&to)),
            (false, false) => Err(self.absent(&from)),
        }
    }

    /// Steps that take the image's name away. The name comes first: it is what others go by.
    fn hiding(&self, epoch: Epoch) -> Result<Vec<Step>> {
        self.closing(self.image(), self.replica(epoch))
    }

    fn closing(&self, from: PathBuf, to: PathBuf) -> Result<Vec<Step>> {
        let close = Step::SetMode(to.clone(), 0);
        match (self.exists(&from)?, self.exists(&to)?) {
            (true, false) => Ok(vec![Step::Rename(from, to), close]),
            (false, true) => Ok(vec![close]),
            (true, true) => Err(self.taken(&to)),
            (false, false) => Err(self.absent(&from)),
        }
    }

    /// Steps from one hidden name to another; the mode stays.
    fn moving(&self, from: PathBuf, to: PathBuf) -> Result<Vec<Step>> {
        match (self.exists(&from)?, self.exists(&to)?) {
            (true, false) => Ok(vec![Step::Rename(from, to)]),
            (false, true) => Ok(Vec::new()),
            (true, true) => Err(self.taken(&to)),
            (false, false) => Err(self.absent(&from)),
        }
    }

    fn refuse_existing(&self, path: &Path) -> Result<()> {
        if self.exists(path)? { Err(self.taken(path)) } else { Ok(()) }
    }

    fn context(&self) -> String {
        format!("naming image {}", self.image().display())
    }

    fn taken(&self, path: &Path) -> Error {
        let why = format!("{} exists already; move it away", shown(path));
        Error::new(ErrorKind::InUse, self.context(), &why)
    }

    fn absent(&self, path: &Path) -> Error {
        let why = format!("there is no {}", shown(path));
        Error::new(ErrorKind::NotFound, self.context(), &why)
    }
}

fn shown(path: &Path) -> String {
    path.file_name().unwrap_or(OsStr::new("file")).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODE: u32 = 0o640;

    #[test]
    fn a_name_says_what_a_file_is() {
        let says = |name: &str| set_aside(&Path::new("/pool").join(name));
        assert_eq!(says(".vm.raw.dray-partial"), Some(SetAside::Partial));
        assert_eq!(says(".vm.raw.dray-seed"), Some(SetAside::Partial));
        assert_eq!(says(".vm.raw.dray-replica-12"), Some(SetAside::Replica));
        for other in
            ["vm.raw", ".vm.raw", "vm.raw.dray-partial", ".vm.dray-replica-", ".vm.dray-replica-x"]
        {
            assert_eq!(says(other), None, "{other}");
        }
    }

    fn dir() -> tempfile::TempDir {
        tempfile::Builder::new().prefix("image-names-").tempdir().unwrap()
    }

    /// Runs the first `done` steps of what `plan` says, as if the agent died after them.
    fn crash_after(names: &ImageNames, plan: &dyn Fn() -> Result<Vec<Step>>, done: usize) -> bool {
        let steps = plan().unwrap();
        steps.iter().take(done).for_each(|step| step.run(&*names.files, &names.dir).unwrap());
        done <= steps.len()
    }

    #[test]
    fn every_operation_survives_a_crash_between_any_two_steps() {
        for done in 0.. {
            let dir = dir();
            let names = ImageNames::of(&dir.path().join("vm.raw")).unwrap();
            names.create_partial(8192).unwrap();
            if !crash_after(&names, &|| names.naming(names.partial(), MODE), done) {
                break;
            }
            names.finish_partial(MODE).unwrap();
            names.finish_partial(MODE).unwrap();
            assert_eq!(file_mode(&names.image()).unwrap(), MODE);
            assert_eq!(names.found().unwrap(), Found { image: true, ..Found::default() });

            let epoch = Epoch(7);
            crash_after(&names, &|| names.hiding(epoch), done);
            names.make_replica(epoch).unwrap();
            names.make_replica(epoch).unwrap();
            assert_eq!(file_mode(&names.replica(epoch)).unwrap(), 0);
            let replicas = vec![epoch];
            assert_eq!(names.found().unwrap(), Found { replicas, ..Found::default() });

            crash_after(&names, &|| names.moving(names.replica(epoch), names.partial()), done);
            names.begin_return(epoch).unwrap();
            names.begin_return(epoch).unwrap();
            assert_eq!(names.found().unwrap(), Found { partial: true, ..Found::default() });
            assert_eq!(file_mode(&names.partial()).unwrap(), 0);
            crash_after(&names, &|| names.moving(names.partial(), names.replica(epoch)), done);
            names.end_return(epoch).unwrap();
            names.end_return(epoch).unwrap();
            assert_eq!(file_mode(&names.replica(epoch)).unwrap(), 0);

            crash_after(&names, &|| names.naming(names.replica(epoch), MODE), done);
            names.restore_replica(epoch, MODE).unwrap();
            assert_eq!(file_mode(&names.image()).unwrap(), MODE);
            assert_eq!(std::fs::metadata(names.image()).unwrap().len(), 8192);
        }
    }

    #[test]
    fn nothing_is_ever_replaced() {
        let dir = dir();
        let names = ImageNames::of(&dir.path().join("vm.raw")).unwrap();
        names.create_partial(0).unwrap();
        assert_eq!(names.create_partial(0).unwrap_err().kind, ErrorKind::InUse);
        std::fs::write(names.image(), b"someone else's").unwrap();
        let error = names.finish_partial(MODE).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InUse);
        assert!(error.to_string().ends_with("vm.raw exists already; move it away"), "{error}");
        std::fs::write(names.replica(Epoch(3)), b"older").unwrap();
        assert_eq!(names.make_replica(Epoch(3)).unwrap_err().kind, ErrorKind::InUse);
        assert_eq!(names.begin_return(Epoch(3)).unwrap_err().kind, ErrorKind::InUse);
        assert_eq!(names.end_return(Epoch(3)).unwrap_err().kind, ErrorKind::InUse);
        assert_eq!(std::fs::read(names.image()).unwrap(), b"someone else's");
        assert_eq!(std::fs::read(names.replica(Epoch(3))).unwrap(), b"older");
        names.remove_partial().unwrap();
        names.remove_partial().unwrap();
        assert_eq!(names.create_partial(0).unwrap_err().kind, ErrorKind::InUse);
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        let dir = dir();
        let names = ImageNames::of(&dir.path().join("vm.raw")).unwrap();
        assert_eq!(names.finish_partial(MODE).unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(names.make_replica(Epoch(1)).unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(names.open_partial().unwrap_err().kind, ErrorKind::NotFound);
    }

    #[test]
    fn a_link_is_followed_even_when_its_file_has_another_name_just_now() {
        let dir = dir();
        let (file, link) = (dir.path().join("real.raw"), dir.path().join("vm.raw"));
        std::fs::write(&file, b"x").unwrap();
        std::os::unix::fs::symlink("real.raw", &link).unwrap();
        let names = ImageNames::of(&link).unwrap();
        names.make_replica(Epoch(2)).unwrap();
        assert!(File::open(&link).is_err(), "the configured path can still be opened");
        assert_eq!(ImageNames::of(&link).unwrap(), names);
        assert_eq!(names.image(), file);
    }

    /// Somebody else has put it there: dray's own names are files.
    #[test]
    fn a_link_in_the_place_of_a_file_is_not_followed() {
        let dir = dir();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, b"secret").unwrap();
        let mode = |path: &Path| file_mode(path).unwrap();
        let before = mode(&secret);
        let names = ImageNames::of(&dir.path().join("vm.raw")).unwrap();
        std::os::unix::fs::symlink(&secret, names.partial()).unwrap();
        assert!(names.open_partial().is_err() && names.finish_partial(MODE).is_err());
        let options = crate::FileOptions { write: true, ..Default::default() };
        assert!(crate::FileImage::open(&names.partial(), options).is_err());
        assert_eq!(mode(&secret), before);
    }

    #[test]
    fn names_that_could_not_be_changed_are_refused_at_once() {
        let long = format!("/images/{}", "x".repeat(240));
        assert_eq!(ImageNames::of(Path::new(&long)).unwrap_err().kind, ErrorKind::Invalid);
        assert!(ImageNames::of(Path::new("/")).is_err());
    }
}
