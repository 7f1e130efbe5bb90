//! Who else touches a file while its lock changes hands. For some milliseconds of each release and of each
//! adoption neither QEMU nor dray holds QEMU's locks on the file, so another program can take them, write and let
//! them go again. Nothing that QEMU or dray keeps would tell of that write. The kernel does: it names the process
//! that opened a file or wrote to it (`fanotify`).
//!
//! A program can write without such an event of the write itself: through a memory map, or with Linux AIO. It
//! has opened the file to do so, which counts as well. One that opened the file before the exchange
//! began, waited for the lock, and then writes in one of these two ways is not seen.

use dray_host::registry::Entry;
use nix::errno::Errno;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;

/// Watches one file from when it is made. The kernel keeps at most 16,384 events, and merges equal ones of a
/// process that follow each other; more count as a stranger.
pub struct Watch {
    events: Fanotify,
    /// Whose doing is known: dray's, which has its own record of it, and that of the QEMU that has the disk.
    known: [i32; 2],
}

/// Why the record of what was written to a file may lack something.
#[derive(Debug, PartialEq, Eq)]
pub enum Doubt {
    /// Nothing watched the file, or the kernel does not tell what it saw.
    Unwatched,
    /// This process opened the file or wrote to it.
    Stranger(i32),
    /// The kernel had more to tell than it keeps.
    Overflow,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unwatched => f.write_str("nothing watched the file while its lock changed hands"),
            Self::Stranger(pid) => {
                write!(f, "process {pid} opened the file while its lock changed hands")
            }
            Self::Overflow => {
                f.write_str("too much happened to the file while its lock changed hands")
            }
        }
    }
}

impl Watch {
    /// Watches an image's file on behalf of an exchange with the QEMU `qemu`. None where that cannot be done:
    /// it needs the right `CAP_SYS_ADMIN`.
    pub fn begin(entry: &Entry, qemu: i32) -> Option<Self> {
        let file = entry.file.as_file()?.file();
        match Self::of(file, qemu) {
            Ok(watch) => Some(watch),
            Err(why) => {
                let image = entry.record().name;
                tracing::info!(image, %why, "cannot watch the file while its lock changes hands");
                None
            }
        }
    }

    fn of(file: &impl AsRawFd, qemu: i32) -> io::Result<Self> {
        let init = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let events = Fanotify::init(init, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)?;
        // The file that dray has open, whatever lies at its path by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mask = MaskFlags::FAN_OPEN | MaskFlags::FAN_MODIFY | MaskFlags::FAN_CLOSE_WRITE;
        events.mark(MarkFlags::FAN_MARK_ADD, mask, nix::fcntl::AT_FDCWD, Some(path.as_str()))?;
        Ok(Self { events, known: [std::process::id().cast_signed(), qemu] })
    }

    /// Takes what has happened since the last look.
    ///
    /// # Errors
    /// That another process may have written to the file.
    pub fn look(&self) -> Result<(), Doubt> {
        loop {
            let seen = match self.events.read_events() {
                Ok(seen) => seen,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(_) => return Err(Doubt::Unwatched),
            };
            for event in seen {
                if event.mask().contains(MaskFlags::FAN_Q_OVERFLOW) {
                    return Err(Doubt::Overflow);
                }
                if !self.known.contains(&event.pid()) {
                    return Err(Doubt::Stranger(event.pid()));
                }
            }
        }
    }
}

/// What a watch that may not have been had has seen.
///
/// # Errors
/// That another process may have written to the file.
pub fn look(watch: Option<&Watch>) -> Result<(), Doubt> {
    watch.ok_or(Doubt::Unwatched)?.look()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command, Stdio};

    /// Another process, which does `script` to the file at `$1`, after a line at its input.
    fn other(script: &str, path: &std::path::Path) -> Child {
        let script = format!("read line; {script}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).arg(path).stdin(Stdio::piped());
        shell.spawn().expect("sh")
    }

    fn let_go(mut child: Child) -> i32 {
        drop(child.stdin.take());
        child.wait().expect("sh ends");
        child.id().cast_signed()
    }

    /// What a watch sees of `script`; the process is known to it if it `is_qemu`.
    fn seen(script: &str, is_qemu: bool) -> Result<(), Doubt> {
        let file = tempfile::NamedTempFile::new().expect("file");
        let child = other(script, file.path());
        let qemu = if is_qemu { child.id().cast_signed() } else { 0 };
        let watch = Watch::of(file.as_file(), qemu).expect("needs root");
        // Dray's own doing, also by another open file.
        let own = OpenOptions::new().write(true).open(file.path()).expect("open");
        own.write_all_at(b"dray", 0).expect("write");
        watch.look().expect("nobody else");
        let_go(child);
        watch.look()
    }

    #[test]
    fn another_process_is_seen_that_opens_the_file() {
        for script in ["echo x >> \"$1\"", ": < \"$1\"", "truncate -s 5 \"$1\""] {
            let seen = seen(script, false);
            assert!(matches!(seen, Err(Doubt::Stranger(_))), "{script}: {seen:?}");
        }
    }

    #[test]
    fn another_process_is_named_that_has_the_file_open_and_writes() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let mut shell = Command::new("sh");
        shell.args(["-c", "read line; echo x >&2"]).stdin(Stdio::piped());
        let open = OpenOptions::new().write(true).open(file.path()).expect("open");
        let child = shell.stderr(open).spawn().expect("sh");
        let watch = Watch::of(file.as_file(), 0).expect("needs root");
        let pid = let_go(child);
        assert_eq!(watch.look(), Err(Doubt::Stranger(pid)));
    }

    #[test]
    fn qemu_is_no_stranger() {
        assert_eq!(seen("echo x >> \"$1\"", true), Ok(()));
    }
}
