//! Writes the archive format the kernel unpacks as its initramfs (cpio, "newc" headers).

use std::collections::BTreeSet;

/// An archive in memory.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;
const ALIGN: usize = 4;

impl Archive {
    /// Adds a directory.
    pub fn directory(&mut self, name: &str) {
        self.directories.insert(name.to_owned());
        self.entry(name, DIRECTORY, (0, 0), &[]);
    }

    /// Adds the directories above a path that are not there yet.
    pub fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            if self.directories.insert(path[..at].to_owned()) {
                self.directory(&path[..at]);
            }
        }
    }

    /// Adds an executable file.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, EXECUTABLE, (0, 0), content);
    }

    /// Adds a character device.
    pub fn device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.next_inode += 1;
        let fields = [
            self.next_inode,
            mode,
            0, // uid
            0, // gid
            1, // links
            0, // mtime: equal inputs make equal archives
            content.len() as u32,
            0, // major and minor of the file system it came from
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0, // check sum, unused in this variant
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let len = self.bytes.len().next_multiple_of(ALIGN);
        self.bytes.resize(len, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn busybox_reads_it() {
        if !crate::guest::tools::available(&["busybox"]) {
            return;
        }
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/hello", b"hello world");
        let bytes = archive.finish();
        let mut child = Command::new("busybox")
            .args(["cpio", "-t"])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("busybox");
        child.stdin.take().expect("stdin").write_all(&bytes).expect("write");
        let output = child.wait_with_output().expect("wait");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "bin\nbin/hello\n");
    }
}
