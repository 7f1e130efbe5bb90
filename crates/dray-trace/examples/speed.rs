//! Records a second through the generator, the writer and the reader: `speed [RECORDS]`.

use dray_trace::generate::Load;
use dray_trace::{Reader, Writer};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let records: usize = std::env::args().nth(1).map_or(Ok(5_000_000), |text| text.parse())?;
    let folder = tempfile::tempdir()?;
    let report = |what: &str, began: Instant| {
        let seconds = began.elapsed().as_secs_f64();
        println!("{what:<12} {:6.2} million records a second", records as f64 / seconds / 1e6);
    };
    let spec = Load::FileServer.spec();
    let began = Instant::now();
    let last = spec.records(1).take(records).last();
    report("generate", began);
    for name in ["trace.csv", "trace.csv.zst"] {
        let path = folder.path().join(name);
        let began = Instant::now();
        let mut writer = Writer::create(&path)?;
        for record in spec.records(1).take(records) {
            writer.write(&record)?;
        }
        writer.finish()?;
        report(&format!("write {}", &name[10..]), began);
        let began = Instant::now();
        let mut reader = Reader::open(&path)?;
        let (mut count, mut end) = (0, None);
        while let Some(record) = reader.next_record()? {
            count += 1;
            end = Some(record.offset);
        }
        assert!(count == records && end == last.map(|record| record.offset));
        report(&format!("read {}", &name[10..]), began);
    }
    Ok(())
}
