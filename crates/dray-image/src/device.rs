//! Block devices that are not simply an image: they have no name that could be taken away, so a
//! marker file says it, and the kernel's read-only flag (I1).
//!
//! The flag does not outlive a reboot; the marker does, and [`DeviceMark::reapply`] sets the flag
//! again when the agent starts.

use crate::names::sync_dir;
use crate::{Error, ErrorKind, Result, sys};
use dray_types::Epoch;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What a marked device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceState {
    /// An incomplete image at a target.
    Partial,
    /// What was left behind when this epoch began elsewhere; read-only.
    Replica(Epoch),
}

/// The device that a marker of this file name is for.
fn decode(name: &str) -> Option<PathBuf> {
    let mut rest = name.strip_prefix("device-")?.strip_suffix(".mark")?;
    let mut path = Vec::new();
    while let Some(first) = rest.bytes().next() {
        let (byte, len) = match first {
            b'%' => (u8::from_str_radix(rest.get(1..3)?, 16).ok()?, 3),
            other => (other, 1),
        };
        path.push(byte);
        rest = rest.get(len..)?;
    }
    Some(OsString::from_vec(path).into())
}

/// The marker of one block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceMark {
    state_dir: PathBuf,
    device: PathBuf,
}

impl DeviceMark {
    /// The marker of `device`, kept in `state_dir`.
    pub fn of(state_dir: &Path, device: &Path) -> Self {
        Self { state_dir: state_dir.to_owned(), device: device.to_owned() }
    }

    fn path(&self, suffix: &str) -> PathBuf {
        let mut name = String::from("device-");
        for &byte in self.device.as_os_str().as_encoded_bytes() {
            if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.' {
                name.push(char::from(byte));
            } else {
                name.push_str(&format!("%{byte:02x}"));
            }
        }
        self.state_dir.join(name + suffix)
    }

    fn fail(&self, what: &str, source: std::io::Error) -> Error {
        Error::io(format!("{what} the marker of {}", self.device.display()), source)
    }

    /// The marker in `state_dir` of the open `device`, whatever path it was written for.
    ///
    /// # Errors
    /// What reading the directory reports.
    pub fn find(state_dir: &Path, device: &File) -> Result<Option<Self>> {
        let looking = |e| Error::io(format!("looking for markers in {}", state_dir.display()), e);
        let number = device.metadata().map_err(looking)?.rdev();
        for entry in std::fs::read_dir(state_dir).map_err(looking)? {
            let name = entry.map_err(looking)?.file_name();
            let Some(path) = name.to_str().and_then(decode) else { continue };
            let same = std::fs::metadata(&path)
                .is_ok_and(|meta| meta.file_type().is_block_device() && meta.rdev() == number);
            if same {
                return Ok(Some(Self::of(state_dir, &path)));
            }
        }
        Ok(None)
    }

    /// Where the marker is.
    pub fn file(&self) -> PathBuf {
        self.path(".mark")
    }

    /// What the device is marked as.
    ///
    /// # Errors
    /// `Invalid` for a marker that dray did not write.
    pub fn get(&self) -> Result<Option<DeviceState>> {
        let text = match std::fs::read_to_string(self.path(".mark")) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(self.fail("reading", e)),
        };
        let state = match text.trim_end().split_once(' ') {
            None if text == "partial\n" => Some(DeviceState::Partial),
            Some(("replica", epoch)) => {
                epoch.parse().ok().map(|epoch| DeviceState::Replica(Epoch(epoch)))
            }
            _ => None,
        };
        state.map(Some).ok_or_else(|| {
            let context = format!("reading the marker of {}", self.device.display());
            let why = format!("{} is damaged", self.path(".mark").display());
            Error::new(ErrorKind::Invalid, context, &why)
        })
    }

    /// Marks the device, durably, then sets or clears its read-only flag.
    ///
    /// # Errors
    /// What the system reports; it can be done again after a crash.
    pub fn set(&self, state: DeviceState) -> Result<()> {
        let text = match state {
            DeviceState::Partial => "partial\n".to_owned(),
            DeviceState::Replica(epoch) => format!("replica {}\n", epoch.0),
        };
        let (new, path) = (self.path(".new"), self.path(".mark"));
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &path)
        };
        write().map_err(|e| {
            // Half a marker is of no use, and on a full disk in the way.
            let _ = std::fs::remove_file(&new);
            self.fail("writing", e)
        })?;
        sync_dir(&self.state_dir)?;
        self.flag(matches!(state, DeviceState::Replica(_)))
    }

    /// Makes the device writable again, then removes its mark, durably.
    ///
    /// # Errors
    /// What the system reports; it can be done again after a crash.
    pub fn clear(&self) -> Result<()> {
        self.flag(false)?;
        match std::fs::remove_file(self.path(".mark")) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(self.fail("removing", e)),
            _ => sync_dir(&self.state_dir),
        }
    }

    /// Sets the read-only flag to what the mark says.
    ///
    /// # Errors
    /// What the system reports.
    pub fn reapply(&self) -> Result<()> {
        match self.get()? {
            Some(DeviceState::Replica(_)) => self.flag(true),
            _ => Ok(()),
        }
    }

    /// Whether the device's read-only flag is set.
    ///
    /// # Errors
    /// What the system reports.
    pub fn is_read_only(&self) -> Result<bool> {
        let device = File::open(&self.device).map_err(|e| self.fail("opening the device of", e))?;
        sys::device_is_read_only(&device).map_err(|e| self.fail("asking the device of", e))
    }

    fn flag(&self, read_only: bool) -> Result<()> {
        let device = File::open(&self.device).map_err(|e| self.fail("opening the device of", e))?;
        sys::set_device_read_only(&device, read_only)
            .map_err(|e| self.fail("setting the read-only flag for", e))
    }
}
