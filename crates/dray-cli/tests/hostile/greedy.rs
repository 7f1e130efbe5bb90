//! A peer or a client that takes everything that it can get.

use crate::attacker::{Attacker, lab, start};
use crate::lab::ALL_RIGHTS;
use crate::remote::{Remote, before_tls};
use dray_net::NetErrorKind;
use dray_types::ErrorKind;
use dray_wire::StreamKind;

/// Each of these streams has a thread at the agent.
#[test]
fn a_peer_cannot_open_streams_without_end() {
    let store = tempfile::tempdir().unwrap();
    let offer = format!("[backup_store]\npath = \"{}\"\n", store.path().display());
    let lab = lab(ALL_RIGHTS, &offer);
    let attacker = Attacker::new(&lab, "hostb");
    for kind in [StreamKind::Store, StreamKind::Replica] {
        let open = || attacker.open_blocking(&lab.a, kind);
        let streams: Vec<_> = (0..64).map(|_| open().unwrap()).collect();
        let why = open().err().unwrap();
        assert_eq!(why.kind, NetErrorKind::Refused(ErrorKind::Conflict), "{why}");
        assert!(why.what.contains("hostb has 64 streams to"), "{why}");
        assert!(why.what.contains("and may have 64"), "{why}");
        drop(streams);
        crate::lab::wait_for("room", std::time::Duration::from_secs(10), || open().is_ok())
            .unwrap();
    }
}

/// Who has shown no certificate cannot keep the clients of `nbd.tcp` out.
#[test]
fn strangers_do_not_take_all_places_of_remote_clients() {
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    drop(tcp);
    let mut lab = lab(ALL_RIGHTS, "");
    lab.a.stop();
    let text = std::fs::read_to_string(lab.a.config()).unwrap();
    std::fs::write(lab.a.config(), format!("{text}[nbd]\ntcp = \"{address}\"\n")).unwrap();
    start(&mut lab.a);
    let silent: Vec<_> = (0..64).map(|_| before_tls(&address).unwrap()).collect();
    assert!(before_tls(&address).is_err(), "that is the share of one address");
    drop(silent);
    let room = || before_tls(&address).is_ok();
    crate::lab::wait_for("room", std::time::Duration::from_secs(10), room).unwrap();
    // Who has shown one is no stranger, whatever else comes from its address.
    let known = |_| {
        let mut known = Remote::connect(&lab, "hostb", &address).unwrap();
        known.list().unwrap();
        known
    };
    let _known: Vec<_> = (0..64).map(known).collect();
    before_tls(&address).expect("nobody there is a stranger");
}
