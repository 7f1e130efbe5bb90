//! Bulk writes: round the page cache where that can be done, with the same result as any other.

use dray_image::{FileImage, FileOptions, Image, ImageFile};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const SPAN: usize = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    Bulk(usize, usize, u8),
    Buffered(usize, usize, u8),
    Read(usize, usize),
}

fn place() -> impl Strategy<Value = (usize, usize)> {
    let blocks = (0..256usize, 1..64usize).prop_map(|(at, len)| (at * 4096, len * 4096));
    let bytes = (0..SPAN, 1..200_000usize);
    prop_oneof![4 => blocks, 1 => bytes].prop_map(|(at, len)| (at, len.min(SPAN - at.min(SPAN))))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (place(), any::<u8>()).prop_map(|((at, len), byte)| Step::Bulk(at, len, byte)),
        1 => (place(), any::<u8>()).prop_map(|((at, len), byte)| Step::Buffered(at, len, byte)),
        2 => place().prop_map(|(at, len)| Step::Read(at, len)),
    ]
}

fn image(len: usize) -> (tempfile::TempDir, FileImage) {
    let dir = tempfile::Builder::new().prefix("image-bulk-").tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("image.raw");
    File::create(&path).unwrap().set_len(len as u64).unwrap();
    let options = FileOptions { write: true, direct: false, export_len: None };
    let image = FileImage::open(&path, options).unwrap();
    (dir, image)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn bulk_and_buffered_writes_and_reads_agree(steps in prop::collection::vec(step(), 1..60)) {
        let (_dir, image) = image(SPAN);
        let mut model = vec![0u8; SPAN];
        for step in steps {
            match step {
                Step::Bulk(at, len, byte) => {
                    image.write_bulk(&vec![byte; len], at as u64).unwrap();
                    model[at..at + len].fill(byte);
                }
                Step::Buffered(at, len, byte) => {
                    image.write_at(&vec![byte; len], at as u64, false).unwrap();
                    model[at..at + len].fill(byte);
                }
                Step::Read(at, len) => {
                    let mut buf = vec![0xee; len];
                    image.read_at(&mut buf, at as u64).unwrap();
                    prop_assert!(buf == model[at..at + len], "{len} bytes at {at} differ");
                }
            }
        }
    }
}

#[test]
fn a_part_block_at_the_end_is_written_too() {
    let len = (1 << 20) + 700;
    let (_dir, image) = image(len);
    let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
    image.write_bulk(&data, 0).unwrap();
    let mut back = vec![0; len];
    image.read_at(&mut back, 0).unwrap();
    assert!(back == data);
    assert!(image.write_bulk(&data, 1).is_err(), "past the end");
}

#[test]
fn long_runs_leave_no_pages_behind() {
    let (dir, image) = image(64 << 20);
    let data = vec![7u8; 1 << 20];
    for run in 0..64u64 {
        image.write_bulk(&data, run << 20).unwrap();
    }
    let path = dir.path().join("image.raw");
    let shown = std::process::Command::new("fincore").args(["-nbo", "PAGES"]).arg(&path).output();
    let Ok(shown) = shown else {
        return println!("SKIP: there is no fincore to look into the page cache");
    };
    if !opens_directly(&path) {
        return println!("SKIP: this file system has no direct I/O");
    }
    let pages: u64 = String::from_utf8_lossy(&shown.stdout).trim().parse().unwrap();
    assert!(pages < 1024, "{pages} pages of 16384 are cached");
}

fn opens_directly(path: &Path) -> bool {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path).is_ok()
}
