//! Block devices to which images move. The devices exist already, and may hold old data.

use super::Agent;
use dray_host::record::ImageRecord;
use dray_host::refusals::{Answer, conflict, failed, no_room};
use dray_image::{DeviceMark, DeviceState, ErrorKind, FileImage, FileOptions, Image, locks};
use std::path::Path;
use std::time::{Duration, Instant};

/// A device that an earlier migration has just given back may be open for a moment.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);

impl Agent {
    /// Takes an existing device for an image that comes here: looks at it, marks it, registers it.
    /// What is on it is overwritten from here on.
    pub(super) fn take_device(&self, record: ImageRecord) -> Answer<()> {
        let mark = self.registry.mark(&record.path);
        let stale = self.check_device(&record.path, record.len)?;
        // The mark comes first: whatever happens next, nobody takes the device for an image.
        mark.set(DeviceState::Partial).map_err(failed)?;
        if let Some(stale) = stale.filter(|stale| *stale != mark) {
            stale.clear().map_err(failed)?;
        }
        let opened = self.registry.open_file(&record).map_err(failed);
        let added = opened.and_then(|file| self.registry.add(record, file).map_err(failed));
        if let Err(why) = added {
            mark.clear().map_err(failed)?;
            return Err(why);
        }
        Ok(())
    }

    /// Whether nobody uses the device, and the image fits onto it. What it was to dray before is
    /// over when no image is on it any more; its marker is returned.
    fn check_device(&self, path: &Path, len: u64) -> Answer<Option<DeviceMark>> {
        let shown = path.display();
        let file =
            std::fs::File::open(path).map_err(|why| failed(format!("open {shown}: {why}")))?;
        if let Some(entry) = self.registry.on_device(&file) {
            let name = entry.record().name;
            let hint = "name another device, or `dray images remove` it";
            return Err(conflict(format!("{shown} holds image '{name}' there")).hint(hint));
        }
        if let Some(user) = locks::probe(path).map_err(failed)? {
            let why = format!("{shown} is in use: {user}");
            return Err(conflict(why).hint("stop the program that uses it"));
        }
        let device = claim(path)?;
        let has = device.geometry().len;
        if has < len {
            let why = format!("{shown} is too small: it has {has} bytes and the image needs {len}");
            return Err(no_room(why).hint("make it larger"));
        }
        let stale = self.registry.marked(&file).map_err(failed)?;
        if stale.is_none() && self.registry.mark(path).is_read_only().map_err(failed)? {
            let hint = format!("make it writable: blockdev --setrw {shown}");
            return Err(conflict(format!("{shown} is read-only")).hint(hint));
        }
        Ok(stale.map(|(mark, _)| mark))
    }
}

/// Opens a device that nothing else has claimed.
fn claim(path: &Path) -> Answer<FileImage> {
    let until = Instant::now() + PATIENCE;
    loop {
        match FileImage::claim(path, FileOptions::default()) {
            Err(why) if why.kind == ErrorKind::InUse && Instant::now() < until => {
                std::thread::sleep(PAUSE);
            }
            Err(why) if why.kind == ErrorKind::InUse => {
                return Err(conflict(why).hint("unmount it or choose another device"));
            }
            other => return other.map_err(failed),
        }
    }
}
