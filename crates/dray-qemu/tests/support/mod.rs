//! What the tests with a real QEMU share: an NBD server for a file, and locks as QEMU sees them.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod locks;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dray_qemu::NbdExport;

/// An nbdkit serving one file under any export name. It takes no locks on it.
pub struct NbdServer {
    child: Child,
    socket: PathBuf,
}

impl NbdServer {
    /// Starts serving.
    pub fn start(file: &Path, socket: &Path) -> Self {
        let child = Command::new("nbdkit")
            .args(["--foreground", "--unix"])
            .arg(socket)
            .arg("file")
            .arg(file)
            .stdin(Stdio::null())
            .spawn()
            .expect("nbdkit");
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            assert!(Instant::now() < deadline, "nbdkit did not start");
            std::thread::sleep(Duration::from_millis(2));
        }
        Self { child, socket: socket.to_owned() }
    }

    /// The export as QEMU is told of it.
    pub fn export(&self) -> NbdExport {
        NbdExport { socket: self.socket.clone(), name: "disk".into(), reconnect_delay: 30 }
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        // Left behind by a killed server.
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        // Fails only when it was killed before.
        let _ = self.child.kill();
        let _ = self.child.wait();
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
