//! `dray sim` and `dray trace`: no agent, small traces.

use crate::fake::{Ran, dray, finish};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn run(args: &[&str]) -> Ran {
    finish(dray(args).output().unwrap())
}

fn json(args: &[&str]) -> Value {
    let ran = run(&[&["--json", "--quiet"], args].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    serde_json::from_str(ran.out.lines().last().unwrap()).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Four minutes of a generated load in a file.
fn trace(dir: &Path) -> PathBuf {
    let file = dir.join("web.csv.zst");
    let ran = run(&["trace", "generate", "web", "--seconds", "240", "-o", text(&file)]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains(" records of a web on a disk of 8 GiB in "), "{}", ran.out);
    file
}

#[test]
fn one_simulated_migration() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let (file, svg) = (trace(dir.path()), dir.path().join("p.svg"));
    let small = ["--disk", "8GiB", "--memory", "64MiB", "--bandwidth", "1Gbit"];
    let base = [&["sim", text(&file), "--svg", text(&svg), "--start", "60"][..], &small].concat();
    let found = json(&base);
    assert_eq!((&found["trace"], &found["strategy"]), (&"web".into(), &"hybrid".into()));
    let outcome = &found["runs"][0];
    assert_eq!(outcome["start_ns"], 60_000_000_000u64);
    assert_eq!(outcome["first_bytes"], 8u64 << 30);
    assert_eq!(outcome["failed"], Value::Null);
    assert_eq!(found, json(&base), "equal seeds, equal outcomes");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("web, hybrid, workload-aware"));
    let ran = run(&base);
    for wanted in ["web: 8 GiB and 64 MiB of memory", "extra traffic", "remote reads", "downtime"] {
        assert!(ran.out.contains(wanted), "{wanted}: {}", ran.out);
    }
}

#[test]
fn comparisons_and_chunks() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let file = trace(dir.path());
    let small = ["--disk", "8GiB", "--memory", "64MiB", "--starts", "2"];
    let found =
        json(&[&["sim", "compare", text(&file), "--bandwidth", "1Gbit"][..], &small].concat());
    let rows = found["rows"].as_array().unwrap();
    let models: Vec<_> = rows.iter().map(|row| row["strategy"].as_str().unwrap()).collect();
    assert_eq!(models, ["pre-copy", "hybrid", "post-copy"]);
    assert!(rows.iter().all(|row| row["sequential"]["runs"] == 2 && row["ordered"]["failed"] == 0));
    assert_eq!(rows[2]["sequential"]["extra_bytes"], 0.0);
    assert!(rows[2]["sequential"]["remote_reads"].as_f64().unwrap() > 0.0);
    let found =
        json(&[&["sim", "chunks", text(&file), "--bandwidth", "1Gbit"][..], &small].concat());
    assert_eq!(found["rows"][0]["fixed"].as_array().unwrap().len(), 12);
    assert!(found["rows"][0]["selected"]["gain_percent"].is_number());
}

/// Twenty seconds of a guest whose disk would take longer through the engine's windows over 50 ms.
#[test]
fn a_short_trace_needs_no_options() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let file = dir.path().join("short.csv.zst");
    let ran = run(&["trace", "generate", "web", "--seconds", "20", "-o", text(&file)]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let once = json(&["sim", text(&file)]);
    assert_eq!(once["delay_ns"], 10_000_000);
    assert!(once["runs"][0]["total_ns"].as_u64().unwrap() < 20_000_000_000);
    let compared = json(&["sim", "compare", text(&file), "--starts", "1"]);
    assert_eq!(compared["rows"][1]["delay_ns"], 10_000_000);
    let chunks = json(&["sim", "chunks", text(&file), "--starts", "1"]);
    assert_eq!(chunks["rows"][0]["delay_ns"], 10_000_000);
    let shown = run(&["sim", text(&file)]).out;
    assert!(shown.contains(", 10 ms\n") && shown.contains("mixture of 128 KiB"), "{shown}");
    assert_eq!(run(&["sim", text(&file), "--delay", "50"]).code, 4, "a given one stays");
}

#[test]
fn an_analysis() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let file = trace(dir.path());
    let found = json(&["trace", "analyse", text(&file), "--starts", "2"]);
    let seen = found["reads"]["seen_1m"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&seen));
    assert!(found["writes"]["fresh"]["p90_bytes"].as_f64().unwrap() > 0.0);
    let ran = run(&["trace", "analyse", text(&file), "--starts", "2"]);
    for wanted in ["512-byte blocks seen before", "rank correlation, 4 MiB", "MB/s"] {
        assert!(ran.out.contains(wanted), "{wanted}: {}", ran.out);
    }
}

#[test]
fn what_cannot_be_simulated_is_said_clearly() {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let none = run(&["sim", "/nowhere/t.csv"]);
    assert_eq!(none.code, 5);
    assert!(
        none.err.starts_with("dray: cannot use the trace: /nowhere/t.csv: cannot open"),
        "{}",
        none.err
    );
    let bad = dir.path().join("bad.csv");
    std::fs::write(&bad, "time_s,op,offset,length\n0.1,W,0,4096\n0.2,X,0,4096\n").unwrap();
    let ran = run(&["sim", text(&bad)]);
    assert_eq!(ran.code, 4);
    assert!(ran.err.contains("bad.csv, line 3: 'X' is neither R nor W\nhint: "), "{}", ran.err);
    let file = trace(dir.path());
    let cut = dir.path().join("cut.csv.zst");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let ran = run(&["sim", text(&cut)]);
    assert_eq!(ran.code, 4, "{}", ran.err);
    assert!(ran.err.contains("the compressed data end in the middle\nhint: "), "{}", ran.err);
    let late = run(&["sim", text(&file), "--start", "1000"]);
    assert_eq!(late.code, 4);
    assert!(late.err.contains("the trace ends after 239 s, before --start\n"), "{}", late.err);
    let slow = run(&["sim", text(&file), "--bandwidth", "1Mbit"]);
    assert_eq!(slow.code, 4);
    assert!(slow.err.contains("the trace ends after 239 s"), "{}", slow.err);
    let small = run(&["sim", text(&file), "--disk", "1GiB"]);
    assert_eq!(small.code, 4);
    assert!(small.err.contains("hint: give a larger --disk"), "{}", small.err);
    assert_eq!(run(&["sim"]).code, 2);
    assert_eq!(run(&["sim", text(&file), "--strategy", "fast"]).code, 2);
    let skew = ["trace", "generate", "web", "--seconds", "1", "-o", text(&bad), "--skew", "99"];
    assert_eq!(run(&skew).code, 4);
}
