//! What the tests with a real QEMU share: dray's own NBD server for a file, and locks as QEMU sees
//! them.

pub mod bench;
pub mod idle;
pub mod locks;
pub mod pair;
pub mod proxy;
pub mod walk;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dray_image::layers::{Fault, Faults, Layered, Op, When};
use dray_image::{Disk, ErrorKind, Fetcher, FileImage, FileOptions, Image, PresentLog};
use dray_nbd::{Server, ServerHandle};
use dray_qemu::NbdExport;
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use dray_types::{BlockRange, BlockSet};

/// How much larger than its file a growing image is exported.
const ROOM: u64 = 1 << 30;
const EXPORT: &str = "disk";

/// One file, served as an agent does; a qcow2 file may grow. Takes no locks.
pub struct NbdServer {
    disk: Arc<Disk>,
    file: PathBuf,
    handle: ServerHandle,
    socket: PathBuf,
}

fn open(file: &Path) -> FileImage {
    let grows = file.extension().is_some_and(|e| e == "qcow2");
    let len = std::fs::metadata(file).expect("metadata").len();
    let export_len = grows.then_some(len + ROOM);
    let options = FileOptions { write: true, export_len, ..FileOptions::default() };
    FileImage::open(file, options).expect("open the image")
}

/// Stands for the source's image and the present log.
struct Source(Arc<dyn Image>);

impl Fetcher for Source {
    fn demand(&self, _: BlockRange) {}

    fn peek(&self, offset: u64, buf: &mut [u8]) -> dray_image::Result<()> {
        self.0.read_at(buf, offset)
    }
}

impl PresentLog for Source {
    fn note(&self, _run: dray_types::BlockRange) -> dray_image::Result<()> {
        Ok(())
    }

    fn record(&self, _: &BlockSet) -> dray_image::Result<()> {
        Ok(())
    }

    fn forget_notes(&self) -> dray_image::Result<()> {
        Ok(())
    }
}

struct One(Arc<Disk>);

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo::new(EXPORT)]
    }

    fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        if name == EXPORT { Ok(self.0.clone()) } else { Err(ExportError::unknown(name)) }
    }
}

impl NbdServer {
    /// Starts serving.
    pub fn start(file: &Path, socket: &Path) -> Self {
        Self::serve(Arc::new(open(file)), file, socket)
    }

    /// Starts serving a file whose flushes fail.
    pub fn start_failing(file: &Path, socket: &Path) -> Self {
        let faults = Faults::new();
        let (name, kind) = ("no flush".to_owned(), ErrorKind::Io);
        faults.arm(Fault { name, op: Op::Flush, when: When::Always, kind });
        Self::serve(Arc::new(Layered::new(Arc::new(open(file)), faults)), file, socket)
    }

    fn serve(image: Arc<dyn Image>, file: &Path, socket: &Path) -> Self {
        let disk = Disk::new(image);
        let server = Server::new(Arc::new(One(disk.clone())));
        let handle = server.bind_unix(socket, 0o600, None).expect("bind");
        Self { disk, file: file.to_owned(), handle, socket: socket.to_owned() }
    }

    /// Starts serving at a target before the handover: reads are answered from the file, as from the
    /// source, and writes are refused.
    pub fn start_incoming(file: &Path, socket: &Path) -> Self {
        let server = Self::start(file, socket);
        server.disk.begin_incoming(Arc::new(Source(server.disk.backing().clone())));
        server
    }

    /// The handover: this side owns the image, and nothing of it is missing.
    pub fn take_over(&self) {
        let source = Arc::new(Source(self.disk.backing().clone()));
        self.disk.serve_with_missing(BlockSet::new(), &BlockSet::new(), source.clone(), source);
    }

    /// The export as QEMU is told of it.
    pub fn export(&self) -> NbdExport {
        NbdExport { socket: self.socket.clone(), name: EXPORT.into(), reconnect_delay: 30 }
    }

    /// The file becomes as long as its export, as an agent makes it before a release.
    pub fn make_room(&self) {
        let file = std::fs::File::options().write(true).open(&self.file).expect("open");
        if file.metadata().expect("metadata").is_file() {
            file.set_len(self.disk.geometry().len).expect("room");
        }
    }

    /// What is served.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Waits until QEMU has hung up: it does so a moment after it has deleted its node.
    pub fn wait_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.handle.connections(EXPORT) > 0 {
            assert!(Instant::now() < deadline, "qemu is still connected");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether a range of a file is a hole.
pub fn is_hole(path: &Path, offset: u64, length: u64) -> bool {
    use rustix::fs::{SeekFrom, seek};
    let file = std::fs::File::open(path).expect("open");
    match seek(&file, SeekFrom::Data(offset)) {
        Ok(data) => data >= offset + length,
        Err(rustix::io::Errno::NXIO) => true,
        Err(error) => panic!("seek: {error}"),
    }
}

/// The bytes a file occupies.
pub fn allocated(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("metadata").blocks() * 512
}
