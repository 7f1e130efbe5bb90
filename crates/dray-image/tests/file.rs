//! Files and devices as images, buffered and direct, against a model in memory.

use dray_image::layers::{Delay, Fault, Faults, Layered, Op, Recording, When};
use dray_image::runs::{self, ZeroMask};
use dray_image::{
    Attempt, ErrorKind, Extent, ExtentKind, FileImage, FileOptions, Image, ImageFile, ZeroMode,
};
use dray_types::{BlockRange, BlockSet};
use proptest::prelude::*;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

struct Fixture {
    dir: tempfile::TempDir,
    path: PathBuf,
}

fn file(len: u64) -> Fixture {
    let dir = tempfile::Builder::new().prefix("image-file-").tempdir().unwrap();
    let path = dir.path().join("image.raw");
    File::create(&path).unwrap().set_len(len).unwrap();
    Fixture { dir, path }
}

fn open(fixture: &Fixture, direct: bool, export_len: u64) -> FileImage {
    assert!(fixture.dir.path().exists());
    let options = FileOptions { write: true, direct, export_len: Some(export_len) };
    FileImage::open(&fixture.path, options).unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8, bool),
    Zero(u64, usize, bool),
    Discard(u64, usize),
    Read(u64, usize),
}

const SPAN: u64 = 100_000;

fn place() -> impl Strategy<Value = (u64, usize)> {
    let exact = (0..SPAN, 0..20_000usize);
    let aligned = (0..24u64, 1..5usize).prop_map(|(at, len)| (at * 4096, len * 4096));
    let sectors = (0..190u64, 1..40usize).prop_map(|(at, len)| (at * 512, len * 512));
    prop_oneof![exact, aligned, sectors]
        .prop_map(|(at, len)| (at, len.min((SPAN - at.min(SPAN)) as usize)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (place(), 1..255u8, any::<bool>())
            .prop_map(|((at, len), b, fua)| Step::Write(at, len, b, fua)),
        (place(), any::<bool>()).prop_map(|((at, len), keep)| Step::Zero(at, len, keep)),
        place().prop_map(|(at, len)| Step::Discard(at, len)),
        place().prop_map(|(at, len)| Step::Read(at, len)),
    ]
}

fn run(image: &FileImage, steps: &[Step]) {
    let mut model = vec![0u8; SPAN as usize];
    for step in steps {
        match *step {
            Step::Write(at, len, byte, fua) => {
                image.write_at(&vec![byte; len], at, fua).unwrap();
                model[at as usize..at as usize + len].fill(byte);
            }
            Step::Zero(at, len, keep) => {
                let mode = if keep { ZeroMode::KeepAllocated } else { ZeroMode::MayUnmap };
                image.zero(at, len as u64, mode, false).unwrap();
                model[at as usize..at as usize + len].fill(0);
            }
            Step::Discard(at, len) => {
                image.discard(at, len as u64, true).unwrap();
                model[at as usize..at as usize + len].fill(0);
            }
            Step::Read(at, len) => {
                let wanted = &model[at as usize..at as usize + len];
                let mut buf = vec![0xee; len];
                image.read_at(&mut buf, at).unwrap();
                assert!(buf == wanted, "a read differs");
                buf.fill(0xee);
                if image.try_read_at(&mut buf, at).unwrap() == Attempt::Done {
                    assert!(buf == wanted, "a read that must not wait differs");
                }
            }
        }
    }
    let mut all = vec![0; SPAN as usize];
    image.read_at(&mut all, 0).unwrap();
    assert!(all == model, "the image differs at the end");
    check_extents(image, &model);
}

fn check_extents(image: &FileImage, model: &[u8]) {
    let extents = image.extents(0, SPAN, 1000).unwrap();
    assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), SPAN);
    let mut at = 0;
    for Extent { len, kind } in extents {
        let part = &model[at..at + len as usize];
        assert!(kind == ExtentKind::Data || runs::is_zero(part), "data in a hole");
        at += len as usize;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn a_growing_file_behaves_like_memory(
        steps in prop::collection::vec(step(), 1..24), direct: bool, len in 0..SPAN,
    ) {
        let fixture = file(len);
        run(&open(&fixture, direct, SPAN), &steps);
    }

    #[test]
    fn zero_blocks_are_found(blocks in prop::collection::vec(0..3u8, 0..256), tail in 0..4096usize) {
        let mut data: Vec<u8> = blocks.iter().flat_map(|&b| {
            let mut block = [0; 4096];
            block[usize::from(b) * 2047] = u8::from(b > 0);
            block
        }).collect();
        data.truncate(data.len().saturating_sub(tail));
        let mask = runs::zero_bitmap(&data);
        for (nth, block) in data.chunks(4096).enumerate() {
            let marked = mask[nth / 64] >> (nth % 64) & 1 == 1;
            prop_assert_eq!(marked, block.iter().all(|&b| b == 0));
        }
    }
}

#[test]
fn what_follows_the_image_in_its_file_is_left_alone() {
    for direct in [false, true] {
        let fixture = file(SPAN);
        std::fs::write(&fixture.path, vec![5; 2 * SPAN as usize]).unwrap();
        let image = open(&fixture, direct, SPAN);
        assert_eq!(image.geometry().len, SPAN);
        image.discard(0, SPAN, true).unwrap();
        image.zero(0, SPAN, ZeroMode::KeepAllocated, true).unwrap();
        image.write_at(&vec![6; SPAN as usize], 0, true).unwrap();
        assert_eq!(image.extents(0, SPAN, 10).unwrap().len(), 1);
        let late = image.write_at(&[1; 512], SPAN - 511, false);
        assert_eq!(late.unwrap_err().kind, ErrorKind::OutOfRange);
        drop(image);
        let all = std::fs::read(&fixture.path).unwrap();
        let (image, rest) = all.split_at(SPAN as usize);
        assert!(image.iter().all(|&byte| byte == 6) && rest.iter().all(|&byte| byte == 5));
        assert_eq!(rest.len() as u64, SPAN);
    }
}

#[test]
fn past_the_end_zeros_cost_nothing_and_writes_extend() {
    const TIB: u64 = 1 << 40;
    let fixture = file(1000);
    let image = open(&fixture, false, TIB);
    assert_eq!(image.geometry().len, TIB);
    image.discard(500, TIB - 500, true).unwrap();
    image.zero(0, TIB, ZeroMode::KeepAllocated, false).unwrap();
    assert_eq!(std::fs::metadata(&fixture.path).unwrap().len(), 1000);
    let hole = Extent { len: TIB - 8192, kind: ExtentKind::Hole };
    assert_eq!(image.extents(8192, TIB - 8192, 10).unwrap(), [hole]);
    let mut buf = [1; 100];
    assert_eq!(image.try_read_at(&mut buf, TIB / 2).unwrap(), Attempt::Done);
    assert_eq!(buf, [0; 100]);
    image.write_at(&[5; 10], 1 << 30, false).unwrap();
    assert_eq!(std::fs::metadata(&fixture.path).unwrap().len(), (1 << 30) + 10);
    assert!(image.allocated_bytes().unwrap() < 1 << 20);
    image.set_len(0).unwrap();
    image.read_at(&mut buf, 1 << 30).unwrap();
    assert_eq!(buf, [0; 100]);
}

#[test]
fn holes_are_punched_and_space_given_back() {
    let fixture = file(4 << 20);
    let image = open(&fixture, false, 4 << 20);
    image.write_at(&vec![9; 4 << 20], 0, true).unwrap();
    assert!(image.allocated_bytes().unwrap() >= 4 << 20);
    image.start_writeback(0, 4 << 20).unwrap();
    image.forget_cached(0, 4 << 20).unwrap();
    image.prefetch(1 << 20, 100).unwrap();
    image.zero(1 << 20, 1 << 20, ZeroMode::MayUnmap, false).unwrap();
    image.discard(3 << 20, 1 << 20, false).unwrap();
    assert!(image.allocated_bytes().unwrap() <= 2 << 20);
    let kinds: Vec<_> = image.extents(0, 4 << 20, 9).unwrap().iter().map(|e| e.kind).collect();
    assert_eq!(kinds, [ExtentKind::Data, ExtentKind::Hole, ExtentKind::Data, ExtentKind::Hole]);
    let wanted: BlockSet =
        [BlockRange::new(0, 256), BlockRange::new(512, 256)].into_iter().collect();
    assert_eq!(runs::data_blocks(&image, BlockRange::whole(4 << 20)).unwrap(), wanted);
}

#[test]
fn errors_say_what_and_why() {
    let fixture = file(8192);
    let image = open(&fixture, false, 8192);
    let error = image.read_at(&mut [0; 2], 8191).unwrap_err();
    assert_eq!(error.kind, ErrorKind::OutOfRange);
    assert!(error.to_string().ends_with("(2 bytes at 8191): the image ends at 8192"), "{error}");
    let reader = FileImage::open(&fixture.path, FileOptions::default()).unwrap();
    assert!(reader.geometry().read_only);
    assert_eq!(reader.write_at(&[1], 0, false).unwrap_err().kind, ErrorKind::ReadOnly);
    assert_eq!(reader.discard(0, 1, false).unwrap_err().kind, ErrorKind::ReadOnly);
    let absent = FileImage::open(&fixture.dir.path().join("no"), FileOptions::default());
    assert_eq!(absent.err().unwrap().kind, ErrorKind::NotFound);
    let folder = FileImage::open(fixture.dir.path(), FileOptions::default());
    assert_eq!(folder.err().unwrap().kind, ErrorKind::Invalid);
    // A device that is always full.
    let full = FileImage::open(std::path::Path::new("/dev/full"), FileOptions::default());
    assert_eq!(full.err().unwrap().kind, ErrorKind::Invalid);
}

#[test]
fn runs_are_padded_and_written_with_their_zeros() {
    let fixture = file(3 * 4096 + 100);
    let image = open(&fixture, false, 3 * 4096 + 100);
    image.write_at(&vec![8; 3 * 4096 + 100], 0, false).unwrap();
    let mut buf = vec![1; 4 * 4096];
    runs::read_run(&image, BlockRange::new(0, 4), &mut buf).unwrap();
    assert!(buf[..3 * 4096 + 100].iter().all(|&b| b == 8) && runs::is_zero(&buf[3 * 4096 + 100..]));
    assert!(runs::read_run(&image, BlockRange::new(0, 4), &mut buf[1..]).is_err());

    let mut data = vec![6; 4 * 4096];
    data[4096..2 * 4096].fill(0);
    let mask = runs::zero_bitmap(&data);
    assert_eq!(mask, [2, 0, 0, 0]);
    runs::write_run(&image, BlockRange::new(0, 4), &data, &mask).unwrap();
    assert_eq!(std::fs::metadata(&fixture.path).unwrap().len(), 3 * 4096 + 100);
    let mut back = vec![0; 3 * 4096 + 100];
    image.read_at(&mut back, 0).unwrap();
    assert!(back == data[..back.len()]);
    let all: ZeroMask = [u64::MAX; 4];
    runs::write_run(&image, BlockRange::new(0, 4), &data, &all).unwrap();
    assert!(runs::data_blocks(&image, BlockRange::new(0, 4)).unwrap().len() <= 1);
    image.read_at(&mut back, 0).unwrap();
    assert!(runs::is_zero(&back));
}

#[test]
fn layers_fail_record_and_delay_what_they_are_told_to() {
    let fixture = file(1 << 20);
    let recording =
        Arc::new(Layered::new(Arc::new(open(&fixture, false, 1 << 20)), Recording::new(2)));
    let slow = Layered::new(
        Arc::clone(&recording) as _,
        Delay::new().with(Op::Flush, Duration::from_millis(5)),
    );
    let image = Layered::new(Arc::new(slow), Faults::new());
    let fault =
        |name: &str, op, when| Fault { name: name.to_owned(), op, when, kind: ErrorKind::NoSpace };
    image.layer().arm(fault("second write", Op::Write, When::Nth(2)));
    image.layer().arm(fault("bad place", Op::Read, When::Touching(4096..8192)));
    image.write_at(&[1; 10], 0, true).unwrap();
    let error = image.write_at(&[1; 10], 0, false).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace);
    assert_eq!(error.to_string(), "write of 10 bytes at 0: fault 'second write'");
    image.write_at(&[1; 10], 0, false).unwrap();
    image.read_at(&mut [0; 4096], 0).unwrap();
    assert!(image.read_at(&mut [0; 4097], 0).is_err());
    image.layer().disarm("bad place");
    image.read_at(&mut [0; 4097], 0).unwrap();
    let began = std::time::Instant::now();
    image.flush().unwrap();
    assert!(began.elapsed() >= Duration::from_millis(5));
    assert_eq!(recording.layer().dropped(), 3);
    let seen = recording.layer().take();
    assert_eq!(
        seen.iter().map(|r| (r.op, r.fua)).collect::<Vec<_>>(),
        [(Op::Write, true), (Op::Write, false)]
    );
    let outcomes = |seed| {
        let faults = Layered::new(Arc::clone(&recording) as _, Faults::new());
        faults.layer().arm(fault("sometimes", Op::Read, When::OneIn { n: 3, seed }));
        (0..64).map(|_| faults.read_at(&mut [0; 1], 0).is_ok()).collect::<Vec<_>>()
    };
    assert_eq!(outcomes(5), outcomes(5));
    assert_ne!(outcomes(5), outcomes(6));
}
