//! Hosts that speak another version of the protocol: both versions are named, and what to do.

use crate::case::{Case, DATA, IMAGE};
use crate::lab::Lab;
use crate::moves::SLOW;
use crate::refusals::{MIGRATE, nothing_happened, refused};
use dray_net::tls::{CA_CERT, CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, Stream,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The software on the other side is too old or too new.
const UNSUPPORTED: i32 = 14;
/// Lowest and highest version of software to come.
const NEWER: [u16; 2] = [9, 12];
/// The same of software before the first release.
const OLDER: [u16; 2] = [0, 0];
/// Bytes of a hello before its body; the last two are the body's length.
const PREFACE: usize = 12;

/// A hello or its answer with a body that this version does not know.
fn hello(versions: [u16; 2]) -> Vec<u8> {
    let mut bytes = b"dray".to_vec();
    bytes.extend(versions.iter().flat_map(|version| version.to_le_bytes()));
    bytes.extend([1, 0, 4, 0]);
    bytes.extend(b"????");
    bytes
}

fn key(path: &Path) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_file(path).unwrap()
}

fn certs(path: &Path) -> Vec<CertificateDer<'static>> {
    vec![CertificateDer::from_pem_file(path).unwrap()]
}

/// Somebody with hostb's certificate and address who speaks other versions.
struct Fake {
    stop: Arc<AtomicBool>,
    address: String,
    thread: Option<JoinHandle<()>>,
}

impl Fake {
    fn start(lab: &Lab, versions: [u16; 2]) -> Self {
        let dir = lab.dir.path().join("pki/hostb");
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(certs(&dir.join(SERVER_CERT)), key(&dir.join(SERVER_KEY)))
            .unwrap();
        let (config, address) = (Arc::new(config), lab.b.address.clone());
        let listener = TcpListener::bind(&address).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for tcp in listener.incoming().flatten() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                answer(tcp, &config, versions);
            }
        });
        Self { stop, address, thread: Some(thread) }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes it; it may be awake already.
        let _ = TcpStream::connect(&self.address);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Reads a hello and answers it; whoever hangs up before has other reasons.
fn answer(mut tcp: TcpStream, config: &Arc<ServerConfig>, versions: [u16; 2]) {
    let mut connection = ServerConnection::new(Arc::clone(config)).unwrap();
    let mut tls = Stream::new(&mut connection, &mut tcp);
    let mut preface = [0; PREFACE];
    if tls.read_exact(&mut preface).is_ok() {
        let _ = tls.write_all(&hello(versions)).and_then(|()| tls.flush());
        let _ = tls.read(&mut [0; 4096]);
    }
}

fn is_refused(versions: [u16; 2], words: &str) {
    let mut case = Case::begin_small(Lab::new());
    case.lab.b.kill();
    let fake = Fake::start(&case.lab, versions);
    let all = [words, "this agent 1 to 1", "upgrade the older agent", "hostb"];
    refused(&case.lab.a, &MIGRATE, UNSUPPORTED, &all);
    drop(fake);
    case.lab.b.start();
    nothing_happened(&case);
}

#[test]
fn a_target_that_is_too_new_is_refused() {
    is_refused(NEWER, "the peer speaks 9 to 12");
}

#[test]
fn a_target_that_is_too_old_is_refused() {
    is_refused(OLDER, "the peer speaks 0 to 0");
}

/// The target's agent is replaced by another version in the middle of a copy, and later put back.
#[test]
fn a_target_that_is_replaced_by_another_version_ends_the_migration_and_not_the_guest() {
    let limits = "\n[limits]\nlink_dead_seconds = 1\nlink_timeout_seconds = 3\n";
    let mut case = Case::begin_small(Lab::with(|_, config| config + limits));
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 4).unwrap();
    case.lab.b.kill();
    let fake = Fake::start(&case.lab, NEWER);
    refused(
        &case.lab.a,
        &["watch"],
        UNSUPPORTED,
        &["the peer speaks 9 to 12", "this agent 1 to 1"],
    );
    assert_eq!(case.guest.complaint(), None);
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    drop(fake);
    case.lab.b.start();
    assert!(case.lab.a.dray(&["resume"]).status.success());
    case.await_end().unwrap();
    case.end().unwrap();
}

/// What the agent at the target answers to such a source.
fn answer_to(lab: &Lab, versions: [u16; 2]) -> String {
    let dir = lab.dir.path().join("pki/hosta");
    let mut roots = RootCertStore::empty();
    roots.add(certs(&dir.join(CA_CERT)).remove(0)).unwrap();
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(certs(&dir.join(CLIENT_CERT)), key(&dir.join(CLIENT_KEY)))
        .unwrap();
    let name = ServerName::try_from("hostb").unwrap();
    let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut tcp = TcpStream::connect(&lab.b.address).unwrap();
    let mut tls = Stream::new(&mut connection, &mut tcp);
    tls.write_all(&hello(versions)).unwrap();
    let mut said = Vec::new();
    tls.read_to_end(&mut said).unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn a_source_of_another_version_is_told_so() {
    let case = Case::begin_small(Lab::new());
    let too_new = answer_to(&case.lab, NEWER);
    assert!(too_new.contains("the peer speaks 9 to 12, this agent 1 to 1"), "{too_new}");
    assert!(too_new.contains("upgrade the older agent"), "{too_new}");
    let too_old = answer_to(&case.lab, OLDER);
    assert!(too_old.contains("the peer speaks 0 to 0, this agent 1 to 1"), "{too_old}");
    nothing_happened(&case);
}
