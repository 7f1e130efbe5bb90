//! `dray trace record`: a real agent, a real client that does known requests, and a trace that must
//! say the same.

use crate::case::IMAGE;
use crate::guest::BLOCK;
use crate::lab::{DRAY, Lab, run, wait_for};
use crate::moves::result;
use crate::nbd::{Client, FLUSH, READ, TRIM, WRITE, ZERO};
use crate::orders::{BLOCKS, full_lab};
use dray_trace::{Op, Reader, Record};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A recording under way.
struct Recording {
    child: Child,
    file: PathBuf,
    began: Instant,
}

impl Recording {
    /// Starts, and waits until the agent has agreed.
    fn start(lab: &Lab, name: &str, more: &[&str]) -> Self {
        let file = lab.dir.path().join(name);
        let mut command = Command::new(DRAY);
        command.arg("--socket").arg(lab.a.api()).args(["--json", "trace", "record", IMAGE, "-o"]);
        command.arg(&file).args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (began, child) = (Instant::now(), command.spawn().unwrap());
        wait_for("the recording", Duration::from_secs(20), || file.exists()).unwrap();
        Self { child, file, began }
    }

    fn interrupt(self) -> Output {
        run(Command::new("kill").args(["-INT", &self.child.id().to_string()]));
        self.end()
    }

    fn end(self) -> Output {
        let output = self.child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output
    }
}

/// What a request must look like in a trace: operation, offset, length.
type Line = (char, u64, u64);

/// Does requests of every kind, some of them not aligned to anything; what was done.
fn use_disk(socket: &Path) -> Vec<Line> {
    let mut client = Client::connect(socket, IMAGE).unwrap();
    let mut done = Vec::new();
    let mut state = 1_u64;
    for nth in 0..600_u64 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let offset = (state >> 33) % ((BLOCKS - 32) * BLOCK / 512) * 512;
        let len = (1 + (state >> 20) % 128) * 512;
        let (kind, op) = match nth % 12 {
            0..5 => (WRITE, 'W'),
            5..10 => (READ, 'R'),
            10 => (ZERO, 'W'),
            _ => (TRIM, 'W'),
        };
        let data = if kind == WRITE { vec![nth as u8; len as usize] } else { Vec::new() };
        client.request(kind, offset, len as u32, &data, &|| true).unwrap();
        done.push((op, offset, len));
    }
    client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    done
}

/// The records of a trace, and the time of the last one in seconds.
fn read(file: &Path) -> (Vec<Line>, f64) {
    let (mut records, mut last) = (Vec::new(), 0);
    for record in Reader::open(file).unwrap() {
        let Record { time_ns, op, offset, length } = record.unwrap();
        assert!(time_ns >= last, "{time_ns} comes after {last}");
        last = time_ns;
        records.push((if op == Op::Read { 'R' } else { 'W' }, offset, length));
    }
    (records, last as f64 / 1e9)
}

#[test]
fn the_trace_is_what_the_client_did_and_the_simulator_takes_it() {
    let lab = full_lab();
    let recording = Recording::start(&lab, "a.csv", &[]);
    let second = lab.a.dray(&["trace", "record", IMAGE, "-o", "/dev/null"]);
    assert_eq!(second.status.code(), Some(6), "one at a time: {second:?}");
    let (began, file) = (recording.began, recording.file.clone());
    let done = use_disk(&lab.a.nbd());
    let told = result(&recording.interrupt());
    assert_eq!(told["accesses"], done.len(), "{told}");
    assert_eq!((&told["missed"], &told["end"]), (&0.into(), &"stopped".into()), "{told}");
    let (records, last) = read(&file);
    assert!(records == done, "{} records of {} requests", records.len(), done.len());
    assert!(last > 0.0 && last <= began.elapsed().as_secs_f64(), "{last}");
    // Nothing of it is left at the agent: the next one begins at once, and takes only what it sees.
    let again = Recording::start(&lab, "b.csv.zst", &["--duration", "1500ms"]);
    let file = again.file.clone();
    let more = use_disk(&lab.a.nbd());
    let told = result(&again.end());
    assert_eq!((&told["end"], &told["disk"]), (&"duration".into(), &(BLOCKS * BLOCK).into()));
    let (records, last) = read(&file);
    assert!(more.starts_with(&records) && !records.is_empty(), "{told}");
    assert!(last <= 1.6, "{last}");
    // A link that moves the disk in the fraction of a second that the trace lasts.
    let sim = ["sim", "--delay", "0", "--bandwidth", "10Gbit"];
    for command in [&sim[..], &["trace", "analyse"]] {
        let mut run = Command::new(DRAY);
        let output = run.args(command).arg(&file).args(["--disk", "32MiB", "--memory", "1MiB"]);
        let output = output.output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}

#[test]
fn it_ends_with_the_image_and_refuses_what_is_not_served() {
    let lab = full_lab();
    let unknown = lab.a.dray(&["trace", "record", "other", "-o", "/dev/null"]);
    assert_eq!(unknown.status.code(), Some(5), "{unknown:?}");
    let kept = lab.dir.path().join("kept");
    std::fs::write(&kept, "old").unwrap();
    let refused = lab.b.dray(&["trace", "record", IMAGE, "-o", kept.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(5), "{refused:?}");
    assert_eq!(std::fs::read(&kept).unwrap(), b"old", "nothing was recorded");
    let recording = Recording::start(&lab, "a.csv", &[]);
    let file = recording.file.clone();
    let done = use_disk(&lab.a.nbd());
    let moved = lab.a.dray(&["migrate", "--image", IMAGE, "--to", "hostb"]);
    assert!(moved.status.success(), "{moved:?}");
    let told = result(&recording.end());
    assert_eq!((&told["end"], &told["missed"]), (&"gone".into(), &0.into()), "{told}");
    assert!(read(&file).0 == done, "the migration's own accesses are not the guest's");
}
