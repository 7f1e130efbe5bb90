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
