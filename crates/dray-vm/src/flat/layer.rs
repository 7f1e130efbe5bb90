//! One image file on its way into a tool of QEMU's. The tool gets no path: the agent opens the file, looks
//! whether it may be given, locks it where it is written, and serves it through a socket whose other end
//! the tool is handed.

use super::barred::{Barred, refuse_header};
use dray_config::Config;
use dray_image::{FileId, FileImage, FileOptions, Hold, Image, QemuLocks, names};
use dray_nbd::{Server, ServerHandle};
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The name under which a tool asks for it.
const EXPORT: &str = "layer";
/// How long a connection may take to end of which nothing is awaited: a tool that has ended has no
/// requests, unless the storage hangs.
const GRACE: Duration = Duration::from_millis(500);
/// How often is looked whether the last write of a tool that has ended has ended.
const POLL: Duration = Duration::from_millis(2);

/// Says which files may be given to a tool.
pub trait Admits: Send + Sync {
    /// Refuses an open file; `path` is where it was opened.
    ///
    /// # Errors
    /// Why.
    fn admit(&self, path: &Path, file: &File) -> io::Result<()>;
}

impl Admits for Config {
    /// What lies in a pool of this host. The file that is open decides, not what lies at its path by now.
    fn admit(&self, path: &Path, file: &File) -> io::Result<()> {
        let real = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        let opened = file.metadata()?;
        let is_device = opened.file_type().is_block_device();
        let may = match is_device {
            false => self.pools.iter().any(|pool| pool.contains(&real)),
            // Links lead to it, and its pool is theirs.
            true => self.pools.iter().any(|pool| pool.contains(path)),
        };
        let now = std::fs::metadata(if is_device { path } else { &real })?;
        match may && FileId::of(&now) == FileId::of(&opened) {
            true => Ok(()),
            false => Err(Barred::outside(path)),
        }
    }
}

/// How a tool uses an image file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// It reads, beside whoever else has the file.
    Read,
    /// It writes, and nobody else does. The file may grow to this length.
    Write {
        /// Length of what the tool sees; none for that of the file.
        room: Option<u64>,
    },
}

/// Opens an image file that is to be given to a tool, and looks at it.
///
/// # Errors
/// What opening reports, or why it is not given.
pub fn open(path: &Path, format: &str, write: bool, admits: &dyn Admits) -> io::Result<File> {
    let failed = |why: io::Error| match why.get_ref() {
        Some(_) => why,
        None => io::Error::new(why.kind(), format!("open {}: {why}", path.display())),
    };
    let meta = std::fs::metadata(path).map_err(failed)?;
    // Opening anything else may have effects, or wait.
    if !meta.is_file() && !meta.file_type().is_block_device() {
        let why = format!("{} is neither a file nor a block device", path.display());
        return Err(io::Error::other(why));
    }
    let file = match meta.permissions().mode() & 0o777 {
        0 => names::open_closed(path, write).map_err(io::Error::other)?,
        _ => File::options().read(true).write(write).open(path).map_err(failed)?,
    };
    admits.admit(path, &file).map_err(failed)?;
    if format == "qcow2" {
        refuse_header(path, &file).map_err(failed)?;
    }
    Ok(file)
}

/// An image file that is served to a tool, until it is dropped. That waits for writes under way.
pub struct Layer {
    server: ServerHandle,
    /// The tool's end, until it is handed over.
    socket: Option<UnixStream>,
    /// Held until nothing is written any more.
    locks: Option<QemuLocks>,
}

impl Layer {
    /// Serves an open file.
    ///
    /// # Errors
    /// Somebody else has it locked, or what the system reports.
    pub fn serve(file: File, path: &Path, access: Access) -> io::Result<Self> {
        let (write, export_len) = match access {
            Access::Read => (false, None),
            Access::Write { room } => (true, room),
        };
        let locks = write.then(|| QemuLocks::take(&file, path, Hold::Owner));
        let locks = locks.transpose().map_err(io::Error::other)?;
        let options = FileOptions { write, direct: false, export_len };
        let image = FileImage::from_file(file, path, options).map_err(io::Error::other)?;
        let (ours, theirs) = UnixStream::pair()?;
        let server = Server::new(Arc::new(Only(Arc::new(image)))).serve_connected(ours)?;
        Ok(Self { server, socket: Some(theirs), locks })
    }

    /// What the tool is handed.
    ///
    /// # Errors
    /// That it was handed over already.
    pub fn socket(&mut self) -> io::Result<UnixStream> {
        self.socket.take().ok_or_else(|| io::Error::other("the image was handed over already"))
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        self.server.shutdown_within(GRACE);
        // As a killed process does not end before its writes: one that lands later would undo what the next
        // tool, or QEMU, has written.
        while self.locks.is_some() && self.server.connections(EXPORT) > 0 {
            std::thread::sleep(POLL);
        }
    }
}

/// The block node of a tool that was handed such a socket under this number.
pub fn node(number: usize, read_only: bool) -> Value {
    json!({
        "driver": "nbd", "server": {"type": "fd", "str": number.to_string()}, "export": EXPORT,
        "read-only": read_only, "discard": "unmap",
    })
}

/// The only export of a [`Layer`].
struct Only(Arc<dyn Image>);

impl Exports for Only {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { fast_zero: true, ..ExportInfo::new(EXPORT) }]
    }

    fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        match name == EXPORT {
            true => Ok(Arc::clone(&self.0)),
            false => Err(ExportError::unknown(name)),
        }
    }
}

/// Where an image's file was opened, for a tool that reads one alone.
pub fn read_alone(path: PathBuf, format: &str, admits: &dyn Admits) -> io::Result<Layer> {
    let file = open(&path, format, false, admits)?;
    Layer::serve(file, &path, Access::Read)
}
