//! Errors from the agent, and agents that are not there.

use crate::fake::{Fake, dray, finish};
use dray_api::ErrorKind;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

/// The documented codes: a change here breaks somebody's script.
const CODES: [(&str, i32); 14] = [
    ("internal", 1),
    ("agent-unreachable", 3),
    ("invalid", 4),
    ("not-found", 5),
    ("conflict", 6),
    ("denied", 7),
    ("peer", 8),
    ("hypervisor", 9),
    ("no-space", 10),
    ("io", 11),
    ("cancelled", 12),
    ("verification", 13),
    ("unsupported", 14),
    ("data-at-risk", 15),
];

#[test]
fn every_kind_of_error_has_its_exit_code() {
    let fake = Fake::start();
    assert_eq!(CODES.len(), ErrorKind::ALL.len());
    for (kind, code) in CODES {
        let name = format!("fail-{kind}");
        let ran = fake.run(&["unstall", &name]);
        assert_eq!(ran.code, code, "{kind}");
        let text = format!("dray: cannot do this to {name}: the test asked for it\n");
        assert_eq!(ran.err, text + "hint: ask for something else\n");
        assert!(ran.out.is_empty());
    }
}

#[test]
fn each_fault_of_a_repository_is_printed_once() {
    let fake = Fake::start();
    let fault = |nth| format!("vm1-root generation {nth}: piece 7: it is gone");
    let one = fake.run(&["verify", "damaged"]);
    let said = format!("dray: 1 fault in repository 'damaged': {}\n", fault(3));
    assert_eq!((one.code, &one.out[..]), (13, ""));
    assert_eq!(one.err, said + "hint: restore from another backup\n");
    let two = fake.run(&["verify", "lost"]);
    assert_eq!((two.code, two.out), (13, format!("{}\n{}\n", fault(3), fault(4))));
    assert!(two.err.starts_with("dray: 2 faults in repository 'lost': they are listed above\n"));
    let json = fake.run(&["--json", "verify", "lost"]);
    let all: Value = serde_json::from_str(json.out.lines().next().unwrap()).unwrap();
    assert_eq!(all["damaged"], serde_json::json!([fault(3), fault(4)]));
}

#[test]
fn with_json_the_last_line_is_the_error() {
    let fake = Fake::start();
    for (kind, result) in [("peer", "failed"), ("cancelled", "cancelled")] {
        let ran = fake.run(&["--json", "watch", &format!("fail-{kind}")]);
        let last: Value = serde_json::from_str(ran.out.lines().last().unwrap()).unwrap();
        assert_eq!(last["result"], result);
        assert_eq!(last["error"]["kind"], kind);
        assert!(last["error"]["why"].is_string());
        assert!(ran.err.starts_with("dray: "));
    }
}

#[test]
fn no_agent_is_a_clear_error() {
    let ran = finish(dray(&["--socket", "/nonexistent/api.sock", "status"]).output().unwrap());
    assert_eq!(ran.code, 3);
    assert!(
        ran.err.starts_with("dray: cannot reach the agent on /nonexistent/api.sock: there is no")
    );
    assert!(ran.err.contains("\nhint: start the agent (`dray agent`)"), "{}", ran.err);
}

/// An agent that reads the request, answers with `answer` and hangs up.
fn answered_with(answer: &'static [u8]) -> crate::fake::Ran {
    let dir = tempfile::TempDir::with_prefix("dray-cli-").unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).unwrap() > 0);
        stream.write_all(answer).unwrap();
    });
    let ran = finish(dray(&["--socket", path.to_str().unwrap(), "status"]).output().unwrap());
    agent.join().unwrap();
    ran
}

#[test]
fn an_agent_that_dies_or_talks_nonsense_is_a_clear_error() {
    let died = answered_with(b"");
    assert_eq!(died.code, 3);
    assert!(died.err.contains("lost the connection to the agent: the agent closed the connection"));
    let half = answered_with(b"{\"result\":[");
    assert_eq!(half.code, 3);
    for nonsense in [&b"hello\n"[..], b"{\"result\":5}\n", b"{\"event\":\"party\"}\n", b"{}\n"] {
        let ran = answered_with(nonsense);
        assert_eq!(ran.code, 14, "{}", ran.err);
        assert!(ran.err.contains("cannot read the agent's answer"), "{}", ran.err);
    }
}

/// Sends bytes to the agent and reads its answer.
fn raw(request: &[u8]) -> String {
    let fake = Fake::start();
    let mut stream = UnixStream::connect(fake.socket()).unwrap();
    stream.write_all(request).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(fake.seen().is_empty(), !answer.contains("\"result\""));
    answer
}

#[test]
fn the_agent_refuses_what_it_cannot_read() {
    let kind = |request: &[u8]| {
        let answer: Value = serde_json::from_str(&raw(request)).unwrap();
        answer["error"]["kind"].as_str().unwrap().to_owned()
    };
    assert_eq!(kind(b"hello\n"), "invalid");
    assert_eq!(kind(b"{\"command\":\"images\"}\n"), "unsupported");
    assert_eq!(kind(b"{\"version\":2,\"command\":\"images\"}\n"), "unsupported");
    assert_eq!(kind(b"{\"version\":1,\"command\":\"dance\"}\n"), "invalid");
    assert_eq!(kind(b"{\"version\":1,\"command\":{\"cancel\":{\"discrad\":true}}}\n"), "invalid");
    assert_eq!(kind(&vec![b' '; (1 << 20) + 1]), "invalid");
    assert_eq!(raw(b""), "");
}

#[test]
fn a_half_closed_client_still_gets_its_answer() {
    let answer: Value =
        serde_json::from_str(&raw(b"{\"version\":1,\"command\":\"images\"}\n")).unwrap();
    assert_eq!(answer["result"].as_array().unwrap().len(), 5);
}
