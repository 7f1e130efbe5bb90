//! Formats as files, and what is said about files that are none.

use dray_trace::read::Format;
use dray_trace::{Op, Reader, Record, Rng, TraceError};
use std::io::Cursor;
use std::path::Path;

fn read(text: impl Into<Vec<u8>>) -> Result<(Format, Vec<Record>), TraceError> {
    let reader = Reader::new(Path::new("t"), Cursor::new(text.into()))?;
    let format = reader.format();
    Ok((format, reader.collect::<Result<_, _>>()?))
}

fn refused(text: impl Into<Vec<u8>>) -> String {
    let error = read(text).unwrap_err();
    assert!(error.hint.is_some(), "no hint: {error}");
    error.to_string()
}

fn record(time_ns: u64, op: Op, offset: u64, length: u64) -> Record {
    Record { time_ns, op, offset, length }
}

const CSV: &str =
    "time_s,op,offset,length\n0.000000,W,3242508288,4096\n# a note\n\n1.5,r,512,1024\r\n2,R,0,0\n";

#[test]
fn csv_plain_and_compressed() {
    let wanted =
        [record(0, Op::Write, 3_242_508_288, 4096), record(1_500_000_000, Op::Read, 512, 1024)];
    assert_eq!(read(CSV).unwrap(), (Format::Csv, wanted.to_vec()));
    let compressed = zstd::encode_all(CSV.as_bytes(), 3).unwrap();
    assert_eq!(read(compressed).unwrap(), (Format::Csv, wanted.to_vec()));
    let headless = CSV.split_once('\n').unwrap().1;
    assert_eq!(read(headless).unwrap().1, wanted);
}

const BLKPARSE: &str = "\
  8,0    1        1     0.000000000  1217  A   W 85214 + 8 <- (8,1) 83166
  8,0    1        2     0.000000512  1217  Q  WS 85214 + 8 [kjournald]
  8,0    1        3     0.000009100  1217  G  WS 85214 + 8 [kjournald]
  8,0    1        4     0.000012000  1217  D  WS 85214 + 8 [kjournald]
  8,0    1        5     0.000500000     0  C  WS 85214 + 8 [0]
  8,1    1        6     0.000600000  1217  Q   R 100 + 16 [cat]
  8,0    1        7     0.000700000  1217  Q FWS [kjournald]
  8,0    1        8     0.000800000  1217  Q   D 4096 + 2048 [fstrim]
  8,0    1        9     0.001000000  1217  m   N cfq1217 slice expired=0
  8,0    1       10     0.001500000  1217  Q  RA 4096 + 256 [cat]
CPU0 (8,0):
 Reads Queued:           1,      128KiB\t Writes Queued:           1,        4KiB
";

#[test]
fn blkparse_counts_each_request_once() {
    let wanted = [
        record(512, Op::Write, 85_214 * 512, 4096),
        record(1_500_000, Op::Read, 4096 * 512, 131_072),
    ];
    assert_eq!(read(BLKPARSE).unwrap(), (Format::Blktrace, wanted.to_vec()));
    // Without queued events the issued ones count, then the completed ones.
    let keep = |actions: &[&str]| -> String {
        let kept = BLKPARSE.lines().filter(|line| {
            line.split_whitespace().nth(5).is_some_and(|action| actions.contains(&action))
        });
        kept.map(|line| format!("{line}\n")).collect()
    };
    assert_eq!(read(keep(&["D", "C"])).unwrap().1, [record(12_000, Op::Write, 85_214 * 512, 4096)]);
    assert_eq!(read(keep(&["C"])).unwrap().1, [record(500_000, Op::Write, 85_214 * 512, 4096)]);
}

#[test]
fn fio_iologs() {
    let two = "fio version 2 iolog\n/dev/a add\n/dev/a open\n/dev/a write 61440 4096\n\
               /dev/a wait 250 0\n/dev/b read 0 512\n/dev/a read 0 8192\n/dev/a sync\n/dev/a close\n";
    let wanted = [record(0, Op::Write, 61_440, 4096), record(250_000, Op::Read, 0, 8192)];
    assert_eq!(read(two).unwrap(), (Format::Fio(2), wanted.to_vec()));
    let three = "fio version 3 iolog\n19 f add\n198 f open\n204 f write 61440 4096\n\
                 200179 f read 774144 512\n1800234 f close\n";
    let wanted =
        [record(204_000, Op::Write, 61_440, 4096), record(200_179_000, Op::Read, 774_144, 512)];
    assert_eq!(read(three).unwrap(), (Format::Fio(3), wanted.to_vec()));
}

#[test]
fn faults_name_file_line_and_cure() {
    assert_eq!(refused("0,W,1,2\n0,W,x,2\n"), "t, line 2: 'x' is not an offset in bytes");
    assert_eq!(refused("0,W,1,2\n0,T,1,2\n"), "t, line 2: 'T' is neither R nor W");
    assert_eq!(refused("0,W,1,2\n0,W,1\n"), "t, line 2: 3 fields and not 4");
    assert_eq!(refused("0,W,1,2\nx\n"), "t, line 2: 1 field and not 4");
    assert_eq!(
        refused("0,W,1,2\n\n0,W,1,99999999999999999999\n"),
        "t, line 3: '99999999999999999999' is not a length in bytes"
    );
    assert_eq!(
        refused("0,W,18446744073709551615,2\n"),
        "t, line 1: an access at byte 18446744073709551615; disks end at 1 PiB here"
    );
    assert_eq!(refused("9,W,0,2\n1,W,0,2\n"), "t, line 2: the time goes back by 8.000 s");
    assert_eq!(refused(""), "t: there is nothing in it");
    assert_eq!(refused("hello\n"), "t: not a trace of a known format");
    assert_eq!(refused([0x07, 0x74, 0x61, 0x65, 0]), "t: not a trace of a known format");
    assert_eq!(refused([0x07, 0x65, 0x61, 0x74, 0]), "t: a binary blktrace file");
    assert_eq!(refused([0x74, 0x61, 0x65, 0x07]), "t: a binary blktrace file");
    assert_eq!(
        refused([b"0,W,1,2\n".to_vec(), vec![b'1'; 5000]].concat()),
        "t, line 2: a line of more than 4096 bytes"
    );
    let missing = Reader::open(Path::new("/nowhere/t.csv")).err().unwrap();
    assert!(missing.to_string().starts_with("/nowhere/t.csv: cannot open: "), "{missing}");
}

#[test]
fn times_of_merged_cpus_do_not_go_back() {
    let times: Vec<u64> =
        read("1,W,0,2\n0.9,W,0,2\n1.1,W,0,2\n").unwrap().1.iter().map(|r| r.time_ns).collect();
    assert_eq!(times, [1_000_000_000, 1_000_000_000, 1_100_000_000]);
}

/// Damaged copies of good files and plain noise: an answer or an error, never a panic.
#[test]
fn hostile_bytes() {
    let mut rng = Rng::new(1);
    let fio = "fio version 3 iolog\n204 f write 61440 4096\n209 f read 0 4096\n";
    let zstd = zstd::encode_all(CSV.as_bytes(), 3).unwrap();
    let seeds = [CSV.as_bytes(), BLKPARSE.as_bytes(), fio.as_bytes(), &zstd];
    let (mut good, mut bad) = (0, 0);
    for round in 0..20_000 {
        let mut bytes = seeds[round % seeds.len()].to_vec();
        for _ in 0..rng.between(1, 6) {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(4) {
                0 => bytes[at] = rng.bits() as u8,
                1 => bytes.truncate(at + 1),
                2 => bytes.insert(at, rng.pick(b"0,9.\n +-")),
                _ => drop(bytes.remove(at)),
            }
            if bytes.is_empty() {
                break;
            }
        }
        match read(bytes) {
            Ok(_) => good += 1,
            Err(_) => bad += 1,
        }
    }
    assert!(good > 1000 && bad > 1000, "{good} {bad}");
    for _ in 0..2000 {
        let len = rng.below(200) as usize;
        let noise: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
        let _ = read(noise);
    }
}
