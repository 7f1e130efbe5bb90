//! Somebody who was let in once, and may not any more: the certificate was revoked, or the configuration changed.

use crate::attacker::{Attacker, lab};
use crate::lab::{ALL_RIGHTS, Lab, run, wait_for};
use crate::remote::Remote;
use dray_net::{BlockingStream, NetErrorKind};
use dray_types::ErrorKind;
use dray_wire::StreamKind;
use dray_wire::request::{Reply, Request};
use std::io;
use std::process::Command;
use std::time::Duration;

/// The agent reads its certificates again within 5 s.
const SOON: Duration = Duration::from_secs(15);

/// Whether the agent has ended this stream, which it would otherwise wait on; waits for it for a second.
fn has_ended(stream: &mut BlockingStream) -> bool {
    stream.limit_waits(Duration::from_secs(1)).unwrap();
    !stream.read_all_or_end(&mut [0]).is_err_and(|why| why.kind() == io::ErrorKind::WouldBlock)
}

fn change(lab: &Lab, from: &str, to: &str) {
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(lab.a.config(), text.replace(from, to)).unwrap();
}

/// The authority revokes the certificates of `name`; hosta gets the list.
fn revoke(lab: &Lab, name: &str) {
    let pki = lab.dir.path().join("pki");
    let dray = || Command::new(crate::lab::DRAY);
    let said = run(dray().args(["pki", "revoke", name, "--dir"]).arg(&pki));
    assert!(
        said.starts_with("revoked 2 certificates; copy ") && said.contains("ca-crl.pem"),
        "{said}"
    );
    let again = run(dray().args(["pki", "revoke", name, "--dir"]).arg(&pki));
    assert!(again.starts_with("they were revoked before"), "{again}");
    std::fs::copy(pki.join("ca-crl.pem"), pki.join("hosta/ca-crl.pem")).unwrap();
}

#[test]
fn a_host_whose_certificates_are_revoked_is_cut_off_and_stays_outside() {
    let lab = lab(ALL_RIGHTS, "");
    let (attacker, other) = (Attacker::new(&lab, "hostb"), Attacker::new(&lab, "hosta"));
    let mut stream = attacker.open_blocking(&lab.a, StreamKind::Replica).unwrap();
    assert!(!has_ended(&mut stream));
    revoke(&lab, "hostb");
    wait_for("the end of what it has open", SOON, || has_ended(&mut stream)).unwrap();
    let why = attacker.ask(&lab.a, &Request::Identify).unwrap_err();
    assert!(why.kind == NetErrorKind::Certificate && why.what.contains("revoked"), "{why}");
    // One that is good is heard: it has no [[peer]], and is told that.
    let why = other.ask(&lab.a, &Request::Identify).unwrap_err();
    assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Denied), "{why}");
}

#[test]
fn a_peer_that_loses_a_right_or_its_entry_loses_what_it_has_open() {
    let lab = lab(ALL_RIGHTS, "");
    let attacker = Attacker::new(&lab, "hostb");
    let mut stream = attacker.open_blocking(&lab.a, StreamKind::Replica).unwrap();
    assert_eq!(run_reload(&lab), (0, "nothing has changed in the configuration\n".to_owned()));
    // A file with an error changes nothing.
    change(&lab, ALL_RIGHTS, "rights = [\"receive\", \"everything\"]");
    let (code, said) = run_reload(&lab);
    assert!(
        code == 4 && said.contains("'everything'") && said.contains("goes on with what it had"),
        "{code} {said}"
    );
    assert!(!has_ended(&mut stream));
    change(&lab, "rights = [\"receive\", \"everything\"]", "rights = [\"receive\"]");
    let (code, said) = run_reload(&lab);
    assert_eq!(code, 0, "{said}");
    assert!(said.starts_with("peer hostb has changed\n1 connection of a peer"), "{said}");
    assert!(has_ended(&mut stream));
    let why = attacker.open(&lab.a, StreamKind::Replica, None).unwrap_err();
    assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Denied), "{why}");
    assert!(matches!(attacker.ask(&lab.a, &Request::Identify), Ok(Reply::Identity { .. })));
    // The same by SIGHUP; what needs a restart is said, and not done.
    change(&lab, "name = \"hostb\"", "name = \"hostx\"");
    change(&lab, "[[pool]]", "[limits]\ndata_streams = 3\n[[pool]]");
    lab.a.signal("HUP");
    let done =
        || lab.a.log().contains("configuration: [limits] has changed, which needs a restart");
    wait_for("the reload", SOON, done).unwrap();
    let why = attacker.ask(&lab.a, &Request::Identify).unwrap_err();
    assert!(why.what.contains("'hostb' is not a configured peer"), "{why}");
}

/// Its exit code, and what it says.
fn run_reload(lab: &Lab) -> (i32, String) {
    let output = lab.a.dray(&["reload"]);
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}

#[test]
fn a_remote_client_that_may_less_is_cut_off_and_gets_what_it_may() {
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    drop(tcp);
    let client = |name: &str| format!("[[nbd.client]]\nname = \"{name}\"\nwrite = [\"vm1\"]\n");
    let nbd = format!("[nbd]\ntcp = \"{address}\"\n{}{}", client("hostb"), client("hosta"));
    let lab = Lab::with(|_, text| if text.contains("hosta/run") { text + &nbd } else { text });
    let mut lab = lab;
    lab.a.start();
    run(Command::new("truncate").args(["-s", "1M"]).arg(lab.a.pool().join("vm1")));
    lab.a.add("vm1");
    let open = |name: &str| {
        let mut client = Remote::connect(&lab, name, &address).unwrap();
        (client.go("vm1").unwrap(), client)
    };
    let (mine, mut attacker) = open("hostb");
    let (others, mut other) = open("hosta");
    assert_eq!((mine, others), (Ok(false), Ok(false)));
    assert_eq!((attacker.write().unwrap(), other.write().unwrap()), (0, 0));
    change(&lab, &client("hostb"), &client("hostb").replace("write", "read"));
    let (code, said) = run_reload(&lab);
    assert_eq!((code, said.as_str()), (0, "nbd.client hostb has changed\n"));
    assert!(attacker.write().is_err(), "the connection is cut");
    assert_eq!(other.write().unwrap(), 0);
    let (read_only, mut reader) = open("hostb");
    assert_eq!((read_only, reader.write().unwrap()), (Ok(true), 1));
    revoke(&lab, "hostb");
    wait_for("the end of it", SOON, || reader.write().is_err()).unwrap();
    assert!(Remote::connect(&lab, "hostb", &address).and_then(|mut it| it.list()).is_err());
    assert_eq!(other.write().unwrap(), 0);
}
