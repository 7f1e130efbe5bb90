//! One image file on its way into a tool of QEMU's. The tool gets no path: the agent opens the file, looks
//! whether it may be given, locks it where it is written, and serves it through a socket whose other end
//! the tool is handed.

use super::barred::{Barred, refuse_header};
use dray_config::Config;
use dray_files::files::Place;
use dray_host::pool::Pool;
use dray_image::{FileId, FileImage, FileOptions, Hold, Image, QemuLocks, names};
use dray_nbd::{Server, ServerHandle};
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
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
/// With it a file is found and can be looked at, and is not opened.
const PLACE: i32 = rustix::fs::OFlags::PATH.bits() as i32;

/// Says which files may be given to a tool.
pub trait Admits: Send + Sync {
    /// Refuses a file; `path` is where it was found. `file` may be one that can only be looked at (`O_PATH`).
    ///
    /// # Errors
    /// Why.
    fn admit(&self, path: &Path, file: &File) -> io::Result<()>;
}

impl Admits for Config {
    fn admit(&self, path: &Path, file: &File) -> io::Result<()> {
        self.pools.admit(path, file)
    }
}

impl Admits for Vec<Pool> {
    /// What lies in a pool of this host. The file that is open decides, not what lies at its path by now.
    fn admit(&self, path: &Path, file: &File) -> io::Result<()> {
        let opened = file.metadata()?;
        // Links lead to a device, and its pool is theirs.
        let place = match opened.file_type().is_block_device() {
            false => std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?,
            true => path.to_owned(),
        };
        let is_there =
            std::fs::metadata(&place).is_ok_and(|now| FileId::of(&now) == FileId::of(&opened));
        match is_there && self.iter().any(|pool| pool.contains(&place)) {
            true => Ok(()),
            false => Err(Barred::outside(path)),
        }
    }
}

/// Opens an image file that is to be given to a tool, and looks at it. What may not be given is not opened: that may
/// wait, as at a pipe, or do something to a device.
///
/// # Errors
/// What opening reports, or why it is not given.
pub fn open(path: &Path, format: &str, write: bool, admits: &dyn Admits) -> io::Result<File> {
    let failed = |why: io::Error| match why.get_ref() {
        Some(_) => why,
        None => io::Error::new(why.kind(), format!("open {}: {why}", path.display())),
    };
    let place = File::options().read(true).custom_flags(PLACE).open(path).map_err(failed)?;
    let meta = place.metadata().map_err(failed)?;
    if !meta.is_file() && !meta.file_type().is_block_device() {
        let why = format!("{} is neither a file nor a block device", path.display());
        return Err(io::Error::other(why));
    }
    admits.admit(path, &place).map_err(failed)?;
    // What was looked at, whatever is at the path by now.
    let same = Place::of_open(&place)?;
    let file = match meta.permissions().mode() & 0o777 {
        0 => names::open_closed_at(&same, path, write).map_err(io::Error::other)?,
        _ => same.open(File::options().read(true).write(write)).map_err(failed)?,
    };
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
    /// Serves an open file. With `write` nobody else writes to it. The tool sees `export_len` bytes, which the
    /// file may come to have; without it as many as it has now.
    ///
    /// # Errors
    /// Somebody else has it locked, or what the system reports.
    pub fn serve(
        file: File,
        path: &Path,
        write: bool,
        export_len: Option<u64>,
    ) -> io::Result<Self> {
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
    Layer::serve(file, &path, false, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat::barred::chain_error;
    use dray_host::pool::{Pool, PoolIo, PoolKind};
    use dray_types::ErrorKind;
    use std::os::unix::fs::symlink;

    /// A host with one pool.
    struct Host {
        dir: tempfile::TempDir,
        pools: Vec<Pool>,
    }

    impl Host {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("pool");
            std::fs::create_dir(&path).unwrap();
            for name in ["pool/image", "secret"] {
                std::fs::write(dir.path().join(name), [7; 512]).unwrap();
            }
            let (kind, io) = (PoolKind::Files, PoolIo::Buffered);
            let pools = vec![Pool { name: "pool".into(), path, kind, io, reuse_domain: None }];
            Self { dir, pools }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn opens(&self, name: &str) -> io::Result<File> {
            open(&self.path(name), "raw", false, &self.pools)
        }
    }

    #[test]
    fn a_tool_gets_what_lies_in_a_pool() {
        let host = Host::new();
        symlink("image", host.path("pool/in")).unwrap();
        symlink("../secret", host.path("pool/out")).unwrap();
        symlink("pool/image", host.path("into")).unwrap();
        for name in ["pool/image", "pool/in", "into", "pool/../pool/image"] {
            host.opens(name).unwrap();
        }
        for name in ["secret", "pool/out", "pool/../secret"] {
            let why = host.opens(name).unwrap_err();
            assert_eq!(chain_error("cannot", &why).kind, ErrorKind::Denied, "{name}: {why}");
        }
        let why = host.opens("pool").unwrap_err().to_string();
        assert!(why.contains("neither a file nor a block device"), "{why}");
        let why = host.opens("pool/none").unwrap_err().to_string();
        assert!(why.contains("pool/none"), "{why}");
    }

    /// The file that is open decides, not the name.
    #[test]
    fn a_name_that_leads_elsewhere_by_now_does_not_help() {
        let host = Host::new();
        let secret = File::open(host.path("secret")).unwrap();
        assert!(host.pools.admit(&host.path("pool/image"), &secret).is_err());
        let image = File::open(host.path("pool/image")).unwrap();
        std::fs::rename(host.path("pool/image"), host.path("pool/moved")).unwrap();
        host.pools.admit(&host.path("pool/image"), &image).unwrap();
        std::fs::rename(host.path("pool/moved"), host.path("away")).unwrap();
        assert!(host.pools.admit(&host.path("pool/image"), &image).is_err());
    }

    /// Looks as a pool does, and meanwhile the file at the path becomes a pipe.
    struct Swaps<'a>(&'a Host);

    impl Admits for Swaps<'_> {
        fn admit(&self, path: &Path, file: &File) -> io::Result<()> {
            let flags = rustix::fs::fcntl_getfl(file)?;
            assert!(flags.contains(rustix::fs::OFlags::PATH), "opened before it may be: {flags:?}");
            self.0.pools.admit(path, file)?;
            std::fs::rename(path, self.0.path("pool/moved"))?;
            let pipe = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, path, pipe, 0o600.into(), 0)?;
            Ok(())
        }
    }

    #[test]
    fn what_was_looked_at_is_opened_and_nothing_before() {
        for mode in [0o600, 0] {
            let host = Host::new();
            let path = host.path("pool/image");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let file = open(&path, "raw", true, &Swaps(&host)).unwrap();
            let now = std::fs::metadata(host.path("pool/moved")).unwrap();
            assert!(FileId::of(&file.metadata().unwrap()) == FileId::of(&now));
            let why = host.opens("pool/image").unwrap_err().to_string();
            assert!(why.contains("neither a file nor a block device"), "{why}");
        }
    }

    /// While its disk is still on it, QEMU may make an image longer: what is there then is read, up to the length that
    /// the tool sees.
    #[test]
    fn a_tool_reads_what_comes_after_the_end() {
        use dray_nbd::client::{Client, Wish};
        use std::io::Write;
        let host = Host::new();
        let mut layer = Layer::serve(
            host.opens("pool/image").unwrap(),
            &host.path("pool/image"),
            false,
            Some(8192),
        )
        .unwrap();
        let client = Client::on(layer.socket().unwrap(), &Wish::new(EXPORT)).unwrap();
        assert_eq!(client.len(), 8192);
        let mut file = File::options().append(true).open(host.path("pool/image")).unwrap();
        file.write_all(&[9; 512]).unwrap();
        let mut seen = [0; 1536];
        client.read(0, &mut seen).unwrap();
        let expected = [[7; 512], [9; 512], [0; 512]].concat();
        assert!(seen[..] == expected[..]);
    }
}
