//! The QMP client against things that are no QEMU, too old a QEMU, and a QEMU that dies.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use dray_qemu::{ErrorKind, Qmp};
use serde_json::{Value, json};

const SHORT: Duration = Duration::from_millis(300);

/// Serves one connection: says `lines`, then answers every command with `{}` until it is closed.
fn fake_server(path: &Path, lines: &'static [&'static str]) -> JoinHandle<()> {
    let listener = UnixListener::bind(path).expect("bind");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        for line in lines {
            stream.write_all(line.as_bytes()).expect("write");
        }
        let reader = BufReader::new(stream.try_clone().expect("clone"));
        for line in reader.lines().map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).expect("json");
            if command["execute"] == "hang" {
                continue;
            }
            if command["execute"] == "die" {
                return;
            }
            if command["execute"] == "doze" {
                std::thread::sleep(3 * SHORT);
                return;
            }
            if command["execute"] == "lie" {
                let desc = "\x1b[2Jall is well\r\n".repeat(1000);
                let answer = json!({"error": {"desc": desc}, "id": command["id"]});
                let _ = stream.write_all(format!("{answer}\r\n").as_bytes());
                continue;
            }
            let event = json!({"event": "NEVER_HEARD_OF", "data": {"command": command["execute"]},
                "timestamp": {"seconds": 5, "microseconds": 7}});
            let answer = json!({"return": {}, "id": command["id"]});
            // The client may have left already.
            let _ = stream.write_all(format!("{event}\r\n{answer}\r\n").as_bytes());
        }
    })
}

fn socket(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("qmp.sock")
}

const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 0, \"minor\": 2, \
    \"major\": 9}, \"package\": \"\"}, \"capabilities\": [\"oob\"]}}\r\n";

async fn connect_error(lines: &'static [&'static str]) -> (ErrorKind, String) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let server = fake_server(&socket(&dir), lines);
    let error = Qmp::connect_within(&socket(&dir), SHORT).await.err().expect("refused");
    server.join().expect("server");
    (error.kind(), error.to_string())
}

#[tokio::test]
async fn a_socket_that_is_no_qmp() {
    let (kind, text) = connect_error(&[]).await;
    assert_eq!(kind, ErrorKind::NotQmp);
    assert!(text.contains("sent no QMP greeting within 300ms"), "{text}");
    let (kind, text) = connect_error(&["NBDMAGIC\n"]).await;
    assert_eq!(kind, ErrorKind::NotQmp);
    assert!(text.contains("not a QMP message: \"NBDMAGIC\""), "{text}");
    let (kind, text) = connect_error(&["{\"hello\": 1}\n"]).await;
    assert_eq!(kind, ErrorKind::NotQmp);
    assert!(text.contains("did not greet as QEMU does"), "{text}");
}

#[tokio::test]
async fn a_socket_that_is_not_there() {
    let error = Qmp::connect(Path::new("/nowhere/qmp")).await.err().expect("refused");
    assert_eq!(error.kind(), ErrorKind::Connect);
    let text = error.to_string();
    assert!(text.starts_with("could not connect to /nowhere/qmp: No such file"), "{text}");
}

#[tokio::test]
async fn a_qemu_too_old() {
    let (kind, text) = connect_error(&["{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 9, \
        \"minor\": 1, \"major\": 7}}, \"capabilities\": []}}\r\n"])
    .await;
    assert_eq!(kind, ErrorKind::TooOld);
    assert!(text.ends_with("QEMU 7.1.9 is too old: 7.2.0 or newer is needed"), "{text}");
}

#[tokio::test]
async fn unknown_events_timeouts_and_the_end() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let server = fake_server(&socket(&dir), &[GREETING]);
    let qmp = Qmp::connect(&socket(&dir)).await.expect("connect");
    assert_eq!(qmp.version().to_string(), "9.2.0");
    assert_eq!(qmp.pid(), Some(std::process::id() as i32));
    let mut events = qmp.events();
    qmp.execute("query-status", Value::Null).await.expect("an unknown event is no error");
    let event = events.next().await.expect("event");
    assert_eq!(
        (event.name.as_str(), &event.data["command"]),
        ("NEVER_HEARD_OF", &json!("query-status"))
    );
    assert_eq!(event.at, Duration::from_micros(5_000_007));
    let error = qmp.execute_within("hang", Value::Null, SHORT).await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    qmp.execute("query-status", Value::Null).await.expect("the next command works");
    let text = qmp.execute("lie", Value::Null).await.expect_err("refused").to_string();
    assert!(text.len() <= 1024 && !text.contains(char::is_control), "{text:?}");
    let error = qmp.execute("die", Value::Null).await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(!qmp.is_open());
    let again = qmp.execute("query-status", Value::Null).await.expect_err("closed");
    assert_eq!(again.kind(), ErrorKind::Closed);
    events.next().await.expect("an event sent before the end is still there");
    assert_eq!(events.next().await.expect_err("closed").kind(), ErrorKind::Closed);
    server.join().expect("server");
}

/// Half a command stays on the connection: nothing may follow it.
#[tokio::test]
async fn a_command_that_was_given_up_half_written_is_the_last_one() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let server = fake_server(&socket(&dir), &[GREETING]);
    let qmp = Qmp::connect(&socket(&dir)).await.expect("connect");
    let error = qmp.execute_within("doze", Value::Null, Duration::ZERO).await.expect_err("asleep");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let long = json!({ "text": "x".repeat(8 << 20) });
    let error = qmp.execute_within("eval", long, SHORT).await.expect_err("nobody reads it");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let error = qmp.execute("query-status", Value::Null).await.expect_err("half a command");
    assert_eq!(error.kind(), ErrorKind::Closed);
    server.join().expect("server");
}
