//! A QEMU that loses a cancel: it came just as its migration paused for the switchover, and nobody lets that go
//! on. One migration in some dozens that are cancelled at that moment does so with QEMU 7.2, so another stands
//! for it here.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::JoinHandle;

use dray_qemu::{Outgoing, Qmp};
use serde_json::{Value, json};

const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 22, \"minor\": 2, \
    \"major\": 7}, \"package\": \"\"}, \"capabilities\": []}}";

/// Whether the cancelled migration goes on when it is told to, or has ended of its own accord by then.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    WhenTold,
    Meanwhile,
}

/// What QEMU answers in a migration that is at `status`.
fn answer(command: &Value, ends: Ends, status: &mut &'static str) -> Value {
    match command["execute"].as_str().unwrap_or_default() {
        "query-migrate" => json!({ "return": { "status": *status } }),
        "query-status" => {
            let running = *status == "cancelled";
            let word = if running { "running" } else { "finish-migrate" };
            json!({ "return": { "status": word, "running": running } })
        }
        "migrate_cancel" => {
            *status = "cancelling";
            json!({ "return": {} })
        }
        "migrate-continue" => {
            assert_eq!(command["arguments"]["state"], "cancelling");
            *status = "cancelled";
            match ends {
                Ends::WhenTold => json!({ "return": {} }),
                Ends::Meanwhile => json!({ "error": { "desc": "not in expected state" } }),
            }
        }
        _ => json!({ "return": {} }),
    }
}

/// Serves one connection until it is closed; the commands that it was given.
fn serve(path: &Path, ends: Ends) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).expect("bind");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        writeln!(stream, "{GREETING}").expect("greet");
        let reader = BufReader::new(stream.try_clone().expect("clone"));
        let (mut status, mut heard) = ("active", Vec::new());
        for line in reader.lines().map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).expect("json");
            heard.push(command["execute"].as_str().unwrap_or_default().to_owned());
            let mut answer = answer(&command, ends, &mut status);
            answer["id"] = command["id"].clone();
            writeln!(stream, "{answer}").expect("answer");
        }
        heard
    })
}

/// The guest of a migration that is given up is back.
async fn comes_back(ends: Ends) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let socket = dir.path().join("qmp.sock");
    let server = serve(&socket, ends);
    let qmp = Qmp::connect(&socket).await.expect("qmp");
    Outgoing::attach(&qmp, true).abandon().await.expect("abandoned");
    drop(qmp);
    let heard = server.join().expect("server");
    let of = |name: &str| heard.iter().filter(|command| *command == name).count();
    assert_eq!((of("migrate_cancel"), of("migrate-continue")), (1, 1), "{heard:?}");
    assert_eq!(heard.last().map(String::as_str), Some("query-status"));
}

#[tokio::test]
async fn a_cancel_that_qemu_has_lost_brings_the_guest_back() {
    comes_back(Ends::WhenTold).await;
}

#[tokio::test]
async fn a_cancel_that_takes_its_time_brings_the_guest_back() {
    comes_back(Ends::Meanwhile).await;
}
