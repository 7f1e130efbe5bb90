//! Write intents: which 64 MiB regions were written into while a migration tracked them. After an
//! unclean stop the tracker's memory is gone, and these regions are not trusted.
//!
//! The list is a file of fixed length, made as a whole before anything is tracked: a head and a byte
//! for each region of each image. A region is opened by writing its byte where it is, which needs no
//! room on the disk. A list that is absent, damaged or of other images proves nothing, and then every
//! region counts as open: so where a byte cannot be written the list goes, and the guest's write goes
//! on. The bytes are described in `docs/reference/formats.md`.

use dray_files::StatePath;
use dray_files::files::StateFile;
use dray_image::{INTENT_REGION_BYTES, IntentLog};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// Blocks of one region.
const REGION_BLOCKS: u64 = INTENT_REGION_BYTES / BLOCK_SIZE;
/// Name of a source's list in the migration's folder.
pub const SOURCE_INTENTS: &str = "intents";
const MAGIC: &[u8; 8] = b"DRAYINTS";
const VERSION: u32 = 1;
/// A region into which nothing was written. Not zero: a block that a file system has lost reads as
/// zeros.
const UNTOUCHED: u8 = b'.';
/// A region that is open; whatever is not [`UNTOUCHED`] counts as that.
const OPEN: u8 = b'w';
/// Longest list: 16 million regions are a petabyte.
const MAX_LEN: u64 = 16 << 20;
/// Pause between tries to note a region when not even the list can be removed.
const PAUSE: Duration = Duration::from_secs(1);

/// The durable list of open regions of all images of a migration.
pub struct Intents {
    path: StatePath,
    /// Regions of each image.
    regions: Vec<u64>,
    head: Vec<u8>,
    list: Mutex<List>,
    /// Per image, the blocks of regions that an earlier process left open.
    inherited: Vec<BlockSet>,
}

/// What is in the file.
struct List {
    /// None when there is no list: every region counts as open after this process.
    file: Option<Box<dyn StateFile>>,
    /// Where there is none: it is certain that a restart finds none either.
    gone: bool,
    /// A byte for each region, and before those of each image one for what lies behind its end.
    bytes: Vec<u8>,
    /// What went wrong, for the operator.
    trouble: Option<Trouble>,
}

/// What went wrong with a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// There is none any more: after an unclean stop everything is compared or sent again.
    Gone(String),
    /// A guest's write waits, because neither could its region be noted nor the list be removed.
    Held(String),
}

impl Intents {
    /// Opens the list at `path` for images of these lengths in bytes. A `new` one, of which nothing
    /// was tracked before, is made; that it cannot be is no failure: there is none then.
    pub fn open(path: &StatePath, lens: &[u64], new: bool) -> Arc<Self> {
        let regions: Vec<_> = lens.iter().map(|len| len.div_ceil(INTENT_REGION_BYTES)).collect();
        let head = head(&regions);
        let (list, all) = match read(path, &head, &regions) {
            Ok((file, bytes)) => (List::of(file, bytes), false),
            Err(_) if new => {
                (make(path, &head, &regions).unwrap_or_else(|why| none(path, why)), false)
            }
            Err(why) => (none(path, why), true),
        };
        if let Some(Trouble::Gone(why) | Trouble::Held(why)) = &list.trouble {
            tracing::warn!(list = %path.display(), %why, "write intents are not kept");
        }
        let mut this = Self {
            path: path.clone(),
            regions,
            head,
            list: Mutex::new(list),
            inherited: Vec::new(),
        };
        this.inherited = match all {
            true => {
                lens.iter().map(|&len| [BlockRange::whole(len)].into_iter().collect()).collect()
            }
            false if this.lock().file.is_none() => vec![BlockSet::new(); lens.len()],
            false => (0..lens.len()).map(|ix| this.open_blocks(ix, lens[ix])).collect(),
        };
        Arc::new(this)
    }

    /// The list at `path`, shared with whoever still writes to it: a disk goes on tracking after its
    /// migration was abandoned, and two writers of one list would overwrite each other.
    pub fn shared(path: &StatePath, lens: &[u64], new: bool) -> Arc<Self> {
        static OPEN: Mutex<BTreeMap<PathBuf, Weak<Intents>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock();
        open.retain(|_, list| list.strong_count() > 0);
        if let Some(list) = open.get(path.path()).and_then(Weak::upgrade) {
            return list;
        }
        let list = Self::open(path, lens, new);
        open.insert(path.path().to_owned(), Arc::downgrade(&list));
        list
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock()
    }

    /// Where the byte of an image's region is, or of what lies behind its last one.
    fn place(&self, image: usize, region: Option<u64>) -> usize {
        let before: u64 = self.regions.iter().take(image).map(|regions| regions + 1).sum();
        (before + region.map_or(0, |region| region + 1)) as usize
    }

    /// Where it is noted that a region of an image is open.
    fn place_of(&self, image: u16, region: u64) -> usize {
        let image = usize::from(image);
        let within = self.regions.get(image).is_some_and(|&regions| region < regions);
        self.place(image, within.then_some(region))
    }

    fn open_blocks(&self, image: usize, len: u64) -> BlockSet {
        let (open, whole) = (self.regions(image), BlockRange::whole(len));
        let behind = self.lock().bytes.get(self.place(image, None)).copied() != Some(UNTOUCHED);
        let region =
            |region: u64| BlockRange::new(region * REGION_BLOCKS, REGION_BLOCKS).intersect(whole);
        match behind {
            true => [whole].into_iter().collect(),
            false => open.into_iter().map(region).collect(),
        }
    }

    /// Per image, the blocks of regions that an earlier process left open.
    pub fn inherited_regions(&self) -> Vec<BlockSet> {
        self.inherited.clone()
    }

    /// The regions of an image that are open, whoever opened them; all when nobody can tell.
    pub fn regions(&self, image: usize) -> Vec<u64> {
        let list = self.lock();
        let all = 0..self.regions.get(image).copied().unwrap_or(0);
        let is_open = |region: &u64| {
            let byte = list.bytes.get(self.place(image, Some(*region)));
            list.file.is_none() || byte != Some(&UNTOUCHED)
        };
        all.filter(is_open).collect()
    }

    /// What went wrong, if something did.
    pub fn trouble(&self) -> Option<Trouble> {
        self.lock().trouble.clone()
    }

    /// Notes durably that nobody knows which regions of an image were written into: from the next start on
    /// all of them count as open.
    ///
    /// # Errors
    /// What the file system reports, when not even the list can be removed.
    pub fn distrust(&self, image: usize) -> io::Result<()> {
        let at = self.place(image, None);
        self.try_add(&mut self.lock(), at)
    }

    /// Notes durably that a region is written into, or that nobody knows which ones are. Waits as
    /// long as neither is possible: a restart would believe that the region is as it was.
    fn add(&self, image: u16, region: u64) {
        let at = self.place_of(image, region);
        loop {
            let mut list = self.lock();
            let Err(why) = self.try_add(&mut list, at) else { return };
            let why = why.to_string();
            if list.trouble != Some(Trouble::Held(why.clone())) {
                tracing::error!(list = %self.path.display(), why, "a guest's write waits");
            }
            list.trouble = Some(Trouble::Held(why));
            drop(list);
            std::thread::sleep(PAUSE);
        }
    }

    fn try_add(&self, list: &mut List, at: usize) -> io::Result<()> {
        let Some(file) = &list.file else {
            list.gone = list.gone || self.path.remove().is_ok();
            let gone = list.gone.then_some(());
            return gone.ok_or_else(|| io::Error::other("the list cannot be removed"));
        };
        if list.bytes.get(at).is_some_and(|&byte| byte != UNTOUCHED) {
            return Ok(());
        }
        let offset = (self.head.len() + at) as u64;
        let written = file.write_at(&[OPEN], offset).and_then(|()| file.sync());
        let Err(why) = written else {
            list.trouble = None;
            if let Some(byte) = list.bytes.get_mut(at) {
                *byte = OPEN;
            }
            return Ok(());
        };
        // Cut off it proves as little as if it were gone.
        let cut = || file.set_len(0).and_then(|()| file.sync());
        if self.path.remove().or_else(|_| cut()).is_err() {
            return Err(why);
        }
        tracing::warn!(list = %self.path.display(), %why, "write intents are not kept any more");
        *list = List::none(true, why);
        Ok(())
    }

    /// Nothing is tracked any more.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn close(&self) -> io::Result<()> {
        self.path.remove()
    }
}

fn head(regions: &[u64]) -> Vec<u8> {
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.extend((regions.len() as u32).to_le_bytes());
    regions.iter().for_each(|regions| head.extend(regions.to_le_bytes()));
    head.extend(xxh3_64(&head).to_le_bytes());
    head
}

/// The bytes of a list in which no region is open.
///
/// # Errors
/// That there would be more than [`MAX_LEN`]: none is made then, and none was.
fn untouched(head: &[u8], regions: &[u64]) -> io::Result<Vec<u8>> {
    let count = regions.iter().fold(0, |sum: u64, regions| sum.saturating_add(*regions) + 1);
    if count.saturating_add(head.len() as u64) > MAX_LEN {
        return Err(io::Error::other("the images are too long for a list of write intents"));
    }
    Ok(vec![UNTOUCHED; count as usize])
}

/// A list's file, and the bytes behind its head.
type Listed = (Box<dyn StateFile>, Vec<u8>);

/// Reads a list with this head. What it says is made durable before it is believed: an earlier
/// process may have failed to, and the page cache does not tell.
fn read(path: &StatePath, head: &[u8], regions: &[u64]) -> io::Result<Listed> {
    let file = path.open()?;
    let len = head.len() + untouched(head, regions)?.len();
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "it is damaged");
    if file.len()? != len as u64 {
        return Err(damaged());
    }
    let mut bytes = file.read()?;
    if bytes[..head.len()] != *head {
        return Err(damaged());
    }
    file.write_at(&bytes, 0)?;
    file.sync()?;
    path.sync_parent()?;
    Ok((file, bytes.split_off(head.len())))
}

/// Makes a list in which no region is open.
fn make(path: &StatePath, head: &[u8], regions: &[u64]) -> io::Result<List> {
    let bytes = untouched(head, regions)?;
    Ok(List::of(path.replace(&[head, &bytes].concat())?, bytes))
}

/// There is no list, and a restart must find none.
fn none(path: &StatePath, why: io::Error) -> List {
    List::none(path.remove().is_ok(), why)
}

impl List {
    fn of(file: Box<dyn StateFile>, bytes: Vec<u8>) -> Self {
        Self { file: Some(file), gone: false, bytes, trouble: None }
    }

    fn none(gone: bool, why: io::Error) -> Self {
        let trouble = Some(Trouble::Gone(why.to_string()));
        Self { file: None, gone, bytes: Vec::new(), trouble }
    }
}

/// One image's view of the list.
pub struct IntentFile {
    intents: Arc<Intents>,
    image: u16,
}

impl IntentFile {
    /// The view of image number `image`.
    pub fn new(intents: Arc<Intents>, image: usize) -> Self {
        Self { intents, image: image as u16 }
    }

    /// Notes durably that a region is written into, or that nobody knows which ones are, and waits for nothing: for
    /// who can do without the write, and must not keep others waiting.
    ///
    /// # Errors
    /// When neither is possible: the region must not be written into.
    pub fn try_open_region(&self, region: u64) -> io::Result<()> {
        let at = self.intents.place_of(self.image, region);
        self.intents.try_add(&mut self.intents.lock(), at).map_err(io::Error::other)
    }
}

impl IntentLog for IntentFile {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        self.intents.add(self.image, region);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENS: [u64; 2] = [5 * INTENT_REGION_BYTES + 1, 3 * INTENT_REGION_BYTES];

    /// A file that cannot be written.
    #[derive(Debug)]
    struct ReadOnly;

    impl StateFile for ReadOnly {
        fn len(&self) -> io::Result<u64> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn read(&self) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn set_len(&self, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn sync(&self) -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
        fn touch(&self, _: (i64, i64)) -> io::Result<(i64, i64)> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    fn regions(list: &Intents) -> [Vec<u64>; 2] {
        [list.regions(0), list.regions(1)]
    }

    #[test]
    fn a_restart_finds_the_regions_that_were_opened_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("intents"));
        let list = Intents::open(&path, &LENS, true);
        assert_eq!(regions(&list), [Vec::<u64>::new(), Vec::new()]);
        IntentFile::new(Arc::clone(&list), 0).open_region(5).unwrap();
        IntentFile::new(Arc::clone(&list), 1).open_region(0).unwrap();
        assert_eq!(regions(&list), [vec![5], vec![0]]);
        assert!(list.inherited_regions().iter().all(BlockSet::is_empty));
        let list = Intents::open(&path, &LENS, false);
        assert_eq!(regions(&list), [vec![5], vec![0]]);
        let inherited = list.inherited_regions();
        assert_eq!(
            inherited[0].runs().collect::<Vec<_>>(),
            [BlockRange::new(5 * REGION_BLOCKS, 1)]
        );
        assert_eq!(inherited[1].len(), REGION_BLOCKS);
        // What lies behind the end that is known makes the whole image suspect.
        list.add(1, 3);
        let list = Intents::open(&path, &LENS, false);
        assert_eq!(list.inherited_regions()[1].len(), 3 * REGION_BLOCKS);
    }

    #[test]
    fn a_list_that_is_absent_or_damaged_proves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("intents"));
        let all = [BlockRange::whole(LENS[0]).len, BlockRange::whole(LENS[1]).len];
        let inherited = |lens: &[u64]| -> Vec<u64> {
            let list = Intents::open(&path, lens, false);
            list.inherited_regions().iter().map(BlockSet::len).collect()
        };
        assert_eq!(inherited(&LENS), all, "absent");
        drop(Intents::open(&path, &LENS, true));
        assert_eq!(inherited(&LENS), [0, 0]);
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] = 0;
            std::fs::write(&path, &bytes).unwrap();
            assert!(bytes == whole || inherited(&LENS).iter().sum::<u64>() > 0, "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(inherited(&LENS), all, "cut at {at}");
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(inherited(&[LENS[1], LENS[0]]), [all[1], all[0]], "of other images");
    }

    /// Lengths may come from a peer, or from a record that says what is not so.
    #[test]
    fn images_that_are_too_long_have_no_list_and_cost_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("intents"));
        std::fs::write(&path, "x").unwrap();
        let regions = [u64::MAX / INTENT_REGION_BYTES; 256];
        assert!(read(&path, &head(&regions), &regions).is_err());
        assert!(make(&path, &head(&regions), &regions).is_err());
        let list = Intents::open(&path, &[u64::MAX; 256], true);
        assert!(matches!(list.trouble(), Some(Trouble::Gone(_))));
        assert!(!path.exists().unwrap(), "nothing that a restart would believe");
    }

    /// No write of a guest fails or waits for it, and no restart believes what is not so.
    #[test]
    fn where_a_region_cannot_be_noted_the_list_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("intents"));
        let list = Intents::open(&path, &LENS, true);
        list.add(0, 1);
        list.lock().file = Some(Box::new(ReadOnly));
        list.add(0, 2);
        list.add(1, 1);
        assert!(matches!(list.trouble(), Some(Trouble::Gone(_))));
        assert!(!path.exists().unwrap());
        let inherited = Intents::open(&path, &LENS, false).inherited_regions();
        assert_eq!(inherited[1].len(), 3 * REGION_BLOCKS);
    }

    /// A restart would take the region for untouched: the write waits until one of both is possible.
    #[test]
    fn a_write_waits_while_neither_is_possible() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("intents"));
        let list = Intents::open(&path, &LENS, true);
        list.lock().file = Some(Box::new(ReadOnly));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let one_try = IntentFile::new(Arc::clone(&list), 0);
        assert!(one_try.try_open_region(2).is_err() && list.trouble().is_none());
        let waits = {
            let list = Arc::clone(&list);
            std::thread::spawn(move || list.add(0, 2))
        };
        while !matches!(list.trouble(), Some(Trouble::Held(_))) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!waits.is_finished());
        std::fs::remove_dir(&path).unwrap();
        waits.join().unwrap();
        assert!(one_try.try_open_region(3).is_ok());
        assert!(matches!(list.trouble(), Some(Trouble::Gone(_))));
    }
}
