//! What the writer writes, the reader reads.

use dray_trace::analyse::Totals;
use dray_trace::generate::Load;
use dray_trace::{Reader, Record, Writer};
use std::path::Path;

#[test]
fn written_traces_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let records: Vec<Record> = Load::Web.spec().records(1).take(5000).collect();
    for name in ["t.csv", "t.csv.zst"] {
        let path = folder.path().join(name);
        let mut writer = Writer::create(&path).unwrap();
        records.iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap();
        let read: Vec<Record> = Reader::open(&path).unwrap().map(Result::unwrap).collect();
        assert_eq!(read.len(), records.len());
        for (read, wrote) in read.iter().zip(&records) {
            assert_eq!((read.op, read.offset, read.length), (wrote.op, wrote.offset, wrote.length));
            assert_eq!(read.time_ns / 1000, wrote.time_ns / 1000);
        }
    }
    let size = |name| std::fs::metadata(folder.path().join(name)).unwrap().len();
    assert!(size("t.csv.zst") * 2 < size("t.csv"));
    let error = Writer::create(Path::new("/nowhere/t.csv")).err().unwrap();
    assert!(error.to_string().starts_with("/nowhere/t.csv: cannot create: "), "{error}");
}

/// As a copy that was broken off leaves it, and as a bad medium does.
#[test]
fn a_damaged_file_is_a_bad_trace_and_no_bad_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.csv.zst");
    let mut writer = Writer::create(&path).unwrap();
    Load::Web.spec().records(1).take(200_000).for_each(|record| writer.write(&record).unwrap());
    writer.finish().unwrap();
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Reader::open(&path).and_then(Totals::of).err().unwrap()
    };
    let mut damaged = whole.clone();
    let middle = whole.len() / 2;
    damaged[middle..middle + 64].fill(0xff);
    let cut = [12, whole.len() / 2, whole.len() - 1].map(|len| refused(&whole[..len]));
    for error in cut.iter().chain([&refused(&damaged)]) {
        let text = error.to_string();
        assert!(error.source.is_none() && error.hint.is_some(), "{text}");
        assert!(text.contains("the compressed data "), "{text}");
    }
    assert!(cut[1].line.is_some_and(|line| line > 1000), "{}", cut[1]);
    assert!(cut[1].to_string().ends_with("the compressed data end in the middle"), "{}", cut[1]);
}

/// Needs real traces: DRAY_TRACES names a folder with them.
#[test]
fn real_traces_read_to_their_end() {
    let Some(folder) = std::env::var_os("DRAY_TRACES") else {
        println!("SKIP: DRAY_TRACES is not set");
        return;
    };
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "zst") {
            let totals = Totals::of(Reader::open(&path).unwrap()).unwrap();
            assert!(totals.reads.operations + totals.writes.operations > 0, "{}", path.display());
            files += 1;
        }
    }
    assert!(files > 0, "no traces in DRAY_TRACES");
}
