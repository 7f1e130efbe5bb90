//! Who is let in, and what everybody else is told.

use crate::lab::{Lab, hello, raw_tls, serve};
use dray_net::pki::{self, Validity};
use dray_net::tls::{CA_CRL, CLIENT_CERT, Identity, SERVER_CERT};
use dray_net::{DialSettings, ListenSettings, NetError, NetErrorKind, Stream, dial};
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

/// The authority revokes the certificates of `host`.
fn revoke(lab: &Lab, host: &str) -> std::path::PathBuf {
    let files = [SERVER_CERT, CLIENT_CERT].map(|file| lab.host_dir(host).join(file));
    let (list, added) = pki::revoke(lab.dir.path(), &files).unwrap();
    assert_eq!(added, 2);
    assert_eq!(pki::revoke(lab.dir.path(), &files).unwrap(), (list.clone(), 0));
    list
}

/// What the other end of a connection sees within a second; none when it sees nothing.
async fn end_of(stream: Stream) -> Option<bool> {
    let read = move || {
        let mut stream = stream.into_blocking().unwrap();
        stream.limit_waits(Duration::from_secs(1)).unwrap();
        match stream.read_all_or_end(&mut [0]) {
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => None,
            ended => Some(!ended.unwrap_or(false)),
        }
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

#[tokio::test]
async fn who_is_revoked_is_cut_off_and_not_let_in_again() {
    let lab = Lab::new();
    let at_b = lab.host_dir("hostb");
    let (address, mut accepted) = lab.listen().await;
    let mut pair = async || {
        let near = lab.dial(address, StreamKind::Control).await.unwrap();
        (near, accepted.recv().await.unwrap())
    };
    // A list on which hosta is not changes nothing.
    pki::issue(lab.dir.path(), "hostc", &[]).unwrap();
    std::fs::copy(revoke(&lab, "hostc"), at_b.join(CA_CRL)).unwrap();
    let (near, _far) = pair().await;
    assert_eq!(lab.hostb.look_again(&at_b, "hostb"), []);
    assert_eq!(end_of(near).await, None);
    let (near, _far) = pair().await;
    std::fs::copy(revoke(&lab, "hosta"), at_b.join(CA_CRL)).unwrap();
    assert_eq!(lab.hostb.look_again(&at_b, "hostb"), []);
    assert_eq!(end_of(near).await, Some(true));
    let error = try_dial(&lab.hosta, "hostb", address).await;
    assert_says(&error, NetErrorKind::Certificate, &["does not accept", "it was revoked"]);
}

#[tokio::test]
async fn a_server_that_is_revoked_is_cut_off_and_not_connected_to() {
    let lab = Lab::new();
    let at_a = lab.host_dir("hosta");
    let (address, mut accepted) = lab.listen().await;
    let _near = lab.dial(address, StreamKind::Control).await.unwrap();
    let far = accepted.recv().await.unwrap();
    std::fs::copy(revoke(&lab, "hostb"), at_a.join(CA_CRL)).unwrap();
    assert_eq!(lab.hosta.look_again(&at_a, "hosta"), []);
    assert_eq!(end_of(far).await, Some(true));
    let error = try_dial(&lab.hosta, "hostb", address).await;
    assert_says(&error, NetErrorKind::Certificate, &["the certificate of hostb was revoked"]);
}

#[tokio::test]
async fn a_list_that_cannot_be_used_changes_nothing_and_an_agent_that_starts_with_it_lets_nobody_in()
 {
    let (lab, other) = (Lab::new(), Lab::new());
    let at_b = lab.host_dir("hostb");
    let (address, mut accepted) = lab.listen().await;
    let near = lab.dial(address, StreamKind::Control).await.unwrap();
    let _far = accepted.recv().await.unwrap();
    pki::issue(lab.dir.path(), "hostc", &[]).unwrap();
    std::fs::copy(revoke(&lab, "hostc"), at_b.join(CA_CRL)).unwrap();
    let own = std::fs::read(at_b.join(CA_CRL)).unwrap();
    // One of an authority of the same name and another key is only noticed by its signature.
    let forged = std::fs::read(revoke(&other, "hostb")).unwrap();
    for (list, why) in [
        (&b"nothing"[..], "it holds no PEM revocation list"),
        (&own[..own.len() / 2], "PEM"),
        (&forged, "BadSignature"),
    ] {
        std::fs::write(at_b.join(CA_CRL), list).unwrap();
        let faults = lab.hostb.look_again(&at_b, "hostb");
        assert!(faults[0].why.contains(why), "{faults:?}");
        lab.dial(address, StreamKind::Control).await.unwrap();
        let (fresh, faults) = Identity::of_host(&at_b, "hostb");
        assert!(!faults.is_empty());
        let fresh = serve(&fresh, ListenSettings::default(), |_| async {}).await;
        try_dial(&lab.hosta, "hostb", fresh).await;
    }
    assert_eq!(end_of(near).await, None);
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
