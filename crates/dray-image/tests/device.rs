//! Block devices, as loop devices. Without root or a free loop device the tests say that they are
//! skipped.

use dray_image::{DeviceMark, DeviceState, FileImage, FileOptions, Image, ImageFile, ZeroMode};
use dray_types::Epoch;
use std::path::{Path, PathBuf};
use std::process::Command;

const LEN: u64 = 4 << 20;

struct Loop {
    device: PathBuf,
    dir: tempfile::TempDir,
}

impl Loop {
    fn new() -> Option<Self> {
        Self::with_sectors(512, LEN)
    }

    /// A device of `len` bytes that takes nothing smaller than `sector` bytes.
    fn with_sectors(sector: u32, len: u64) -> Option<Self> {
        let dir = tempfile::Builder::new().prefix("image-device-").tempdir().unwrap();
        let file = dir.path().join("backing");
        std::fs::write(&file, vec![7; len as usize]).unwrap();
        let sector = sector.to_string();
        let made =
            Command::new("losetup").args(["--find", "--show", "-b", &sector]).arg(&file).output();
        match made {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).unwrap().trim_end().into();
                Some(Self { device, dir })
            }
            other => {
                let why = other.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
                println!("SKIPPED: no loop device: {why:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("-d").arg(&self.device).status();
        assert!(status.is_ok_and(|status| status.success()), "a loop device is left behind");
    }
}

/// Where the device's file system is mounted.
struct Mounted(PathBuf);

impl Mounted {
    fn new(device: &Loop) -> Option<Self> {
        let place = device.dir.path().join("mounted");
        std::fs::create_dir(&place).unwrap();
        let mounted = Command::new("mount").args([&device.device, &place]).status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(place));
        }
        println!("SKIPPED: nothing can be mounted");
        None
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "a mount is left behind");
    }
}

fn open(device: &Path, direct: bool) -> FileImage {
    let options = FileOptions { write: true, direct, export_len: None };
    FileImage::open(device, options).unwrap()
}

#[test]
fn a_device_is_read_written_and_zeroed() {
    let Some(device) = Loop::new() else { return };
    for direct in [false, true] {
        let image = open(&device.device, direct);
        assert_eq!((image.geometry().len, image.allocated_bytes().unwrap()), (LEN, LEN));
        let mut model = vec![0; LEN as usize];
        image.read_at(&mut model, 0).unwrap();
        for (offset, len) in [(4096, 8192), (512, 512), (1001, 3), (LEN - 700, 700)] {
            image.write_at(&vec![5; len as usize], offset, true).unwrap();
            model[offset as usize..(offset + len) as usize].fill(5);
        }
        image.zero(0, 4097, ZeroMode::KeepAllocated, false).unwrap();
        model[..4097].fill(0);
        image.zero(1 << 20, 1 << 20, ZeroMode::MayUnmap, true).unwrap();
        model[1 << 20..2 << 20].fill(0);
        image.discard(2 << 20, 5000, false).unwrap();
        model[2 << 20..(2 << 20) + 5000].fill(0);
        image.flush().unwrap();
        let mut found = vec![1; LEN as usize];
        image.read_at(&mut found, 0).unwrap();
        assert!(found == model, "direct: {direct}");
        let again = open(&device.device, !direct);
        again.read_at(&mut found, 0).unwrap();
        assert!(found == model, "direct: {direct}, read the other way");
        assert!(image.read_at(&mut [0; 2], LEN - 1).is_err());
    }
}

#[test]
fn a_replica_is_marked_and_read_only_until_it_is_the_image_again() {
    let Some(device) = Loop::new() else { return };
    let mark = DeviceMark::of(device.dir.path(), &device.device);
    assert_eq!(mark.get().unwrap(), None);
    mark.set(DeviceState::Partial).unwrap();
    assert_eq!(mark.get().unwrap(), Some(DeviceState::Partial));
    assert!(!mark.is_read_only().unwrap());
    for _ in 0..2 {
        mark.set(DeviceState::Replica(Epoch(12))).unwrap();
        assert_eq!(mark.get().unwrap(), Some(DeviceState::Replica(Epoch(12))));
        assert!(mark.is_read_only().unwrap());
    }
    let writer =
        FileImage::open(&device.device, FileOptions { write: true, ..FileOptions::default() });
    assert!(writer.and_then(|image| image.write_at(&[1; 512], 0, true)).is_err());
    for _ in 0..2 {
        mark.clear().unwrap();
        assert_eq!(mark.get().unwrap(), None);
        assert!(!mark.is_read_only().unwrap());
    }
    open(&device.device, false).write_at(&[1; 512], 0, true).unwrap();
}

#[test]
fn a_damaged_marker_is_an_error() {
    let dir = tempfile::Builder::new().prefix("image-mark-").tempdir().unwrap();
    let mark = DeviceMark::of(dir.path(), Path::new("/dev/vg/disk one"));
    for text in ["", "replica\n", "replica x\n", "owner 3\n"] {
        std::fs::write(dir.path().join("device-%2fdev%2fvg%2fdisk%20one.mark"), text).unwrap();
        assert!(mark.get().is_err(), "{text:?}");
    }
}

/// A device whose sectors have 4 KiB, and a new file on its file system: a guest with smaller sectors writes to
/// both, and an image may end in the middle of one.
#[test]
fn direct_requests_fit_large_sectors() {
    let Some(device) = Loop::with_sectors(4096, 32 << 20) else { return };
    let write_all = |image: &FileImage| {
        for (offset, len) in [(0, 4096), (512, 512), (8192, 8192), (20_000, 3), (12_288, 9728)] {
            image.write_at(&vec![6; len], offset, false).unwrap();
            image.write_at(&vec![5; len], offset, true).unwrap();
            let mut read = vec![0; len];
            image.read_at(&mut read, offset).unwrap();
            assert!(read.iter().all(|byte| *byte == 5), "{offset}");
        }
    };
    write_all(&open(&device.device, true));

    let mkfs = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&device.device).status();
    assert!(mkfs.is_ok_and(|status| status.success()), "mkfs.ext4");
    let Some(mounted) = Mounted::new(&device) else { return };
    let path = mounted.0.join("image");
    std::fs::File::create(&path).unwrap();
    let options = FileOptions { write: true, direct: true, export_len: Some(22_016) };
    // Opened when it is empty, as an image that comes is.
    let image = FileImage::open(&path, options).unwrap();
    image.set_len(22_016).unwrap();
    write_all(&image);
    image.write_bulk(&[9; 22_016], 0).unwrap();
    image.sync().unwrap();
    drop(image);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 9));
}
