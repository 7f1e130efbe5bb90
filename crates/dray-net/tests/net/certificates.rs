//! Who is let in, and what everybody else is told.

use crate::lab::{Lab, hello, raw_tls, serve};
use dray_net::pki::{self, Validity};
use dray_net::tls::Identity;
use dray_net::{DialSettings, ListenSettings, NetError, NetErrorKind, dial};
use dray_types::ErrorKind;
use dray_wire::StreamKind;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};
use tokio::io::AsyncReadExt;

const DAY: Duration = Duration::from_secs(86_400);

async fn try_dial(identity: &Identity, name: &str, address: SocketAddr) -> NetError {
    let address = address.to_string();
    let settings = DialSettings::default();
    let dialled = dial(identity, name, &address, StreamKind::Control, &hello(), &settings).await;
    dialled.expect_err("the connection must not be accepted")
}

fn assert_says(error: &NetError, kind: NetErrorKind, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind, kind, "{text}");
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
}

fn expired() -> Validity {
    let now = SystemTime::now();
    Validity { from: now - 20 * DAY, until: now - 3 * DAY }
}

#[tokio::test]
async fn a_known_peer_is_welcome_and_known_by_name() {
    let lab = Lab::new();
    let (near, far) = lab.pair(StreamKind::Control).await;
    assert_eq!((near.peer(), far.peer()), ("hostb", "hosta"));
    assert_eq!((near.kind(), far.kind()), (StreamKind::Control, StreamKind::Control));
    assert_eq!((near.version(), far.version()), (1, 1));
    assert_eq!((near.features(), far.features()), (far.features(), near.features()));
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused_on_both_sides() {
    let (lab, other) = (Lab::new(), Lab::new());
    let (address, _accepted) = lab.listen().await;
    let error = try_dial(&other.hosta, "hostb", address).await;
    let words = ["certificate of hostb", "another authority", "certificates of one authority"];
    assert_says(&error, NetErrorKind::Certificate, &words);
    // hosta trusts hostb, but its own certificate is of the other authority.
    let mixed = other.host_dir("hosta");
    std::fs::copy(lab.dir.path().join("ca-cert.pem"), mixed.join("ca-cert.pem")).unwrap();
    let error = try_dial(&Identity::load(&mixed).unwrap(), "hostb", address).await;
    let words = ["hostb does not accept this host's certificate", "ca-cert.pem"];
    assert_says(&error, NetErrorKind::Certificate, &words);
}

#[tokio::test]
async fn expired_certificates_are_refused_on_both_sides() {
    let lab = Lab::new();
    std::fs::rename(lab.host_dir("hosta"), lab.host_dir("good-a")).unwrap();
    let old = pki::issue_for(lab.dir.path(), "hosta", &[], expired()).unwrap();
    let (address, _accepted) = lab.listen().await;
    let error = try_dial(&Identity::load(&old).unwrap(), "hostb", address).await;
    let words = ["does not accept this host's certificate: it has expired", "clocks", "dray pki"];
    assert_says(&error, NetErrorKind::Certificate, &words);

    std::fs::rename(lab.host_dir("hostb"), lab.host_dir("good-b")).unwrap();
    let old = pki::issue_for(lab.dir.path(), "hostb", &[], expired()).unwrap();
    let server = Identity::load(&old).unwrap();
    let address = serve(&server, ListenSettings::default(), |_| async {}).await;
    let error = try_dial(&lab.hosta, "hostb", address).await;
    let words = ["the certificate of hostb expired 3 days ago", "dray pki"];
    assert_says(&error, NetErrorKind::Certificate, &words);
}

#[tokio::test]
async fn the_server_must_have_the_peers_name() {
    let lab = Lab::new();
    let (address, _accepted) = lab.listen().await;
    let error = try_dial(&lab.hosta, "hostc", address).await;
    let words = ["connect to hostc at 127.0.0.1", "is for hostb, not for 'hostc'", "[[peer]]"];
    assert_says(&error, NetErrorKind::Certificate, &words);
}

#[tokio::test]
async fn a_peer_that_is_not_configured_is_told_so() {
    let lab = Lab::new();
    let stranger = pki::issue(lab.dir.path(), "hostx", &[]).unwrap();
    let (address, mut accepted) = lab.listen().await;
    let error = try_dial(&Identity::load(&stranger).unwrap(), "hostb", address).await;
    let words = ["'hostx' is not a configured peer", "add a [[peer]]"];
    assert_says(&error, NetErrorKind::Refused(ErrorKind::Denied), &words);
    assert!(accepted.try_recv().is_err());
}

#[tokio::test]
async fn a_server_certificate_is_no_client_certificate() {
    let lab = Lab::new();
    let dir = lab.host_dir("hosta");
    std::fs::copy(dir.join("server-cert.pem"), dir.join("client-cert.pem")).unwrap();
    std::fs::copy(dir.join("server-key.pem"), dir.join("client-key.pem")).unwrap();
    let (address, _accepted) = lab.listen().await;
    let mut tls = raw_tls(&dir, address).await.unwrap();
    let refused = tls.read_u8().await.unwrap_err().to_string();
    assert!(refused.contains("received fatal alert"), "{refused}");
    let error = try_dial(&Identity::load(&dir).unwrap(), "hostb", address).await;
    assert_says(&error, NetErrorKind::Certificate, &["not accept this host's certificate"]);
}

#[tokio::test]
async fn nobody_there_is_said_so() {
    let lab = Lab::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = try_dial(&lab.hosta, "hostb", free).await;
    assert_says(&error, NetErrorKind::Unreachable, &["Connection refused", "firewall"]);
}
