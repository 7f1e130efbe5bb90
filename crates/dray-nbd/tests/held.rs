//! Who asks for an export, and clients that are held because it cannot be had yet.

mod support;

use dray_image::Image;
use dray_nbd::{Server, ServerHandle, Tls};
use dray_serve::{Client, ExportError, ExportInfo, Exports, Process};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use support::memory::Memory;
use support::raw::{self, GO, info, meta};
use support::until;

/// Long enough for any machine; only a failing test ever waits so long.
const SOON: Duration = Duration::from_secs(20);
const POLICY: u32 = 1 << 31 | 2;

type Answer = Result<(), ExportError>;

/// One export with a registry that can make up its mind.
struct Gate {
    answer: Mutex<Answer>,
    /// `open` does not come back while this is set.
    stuck: Mutex<bool>,
    freed: Condvar,
    asked: AtomicUsize,
    seen: Mutex<Vec<(&'static str, Client)>>,
    image: Arc<dyn Image>,
}

impl Gate {
    fn new(answer: Answer) -> Arc<Self> {
        Arc::new(Self {
            answer: Mutex::new(answer),
            stuck: Mutex::new(false),
            freed: Condvar::new(),
            asked: AtomicUsize::new(0),
            seen: Mutex::default(),
            image: Arc::new(Memory::new(4096)),
        })
    }

    fn answer(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    fn stick(&self, stuck: bool) {
        *self.stuck.lock().unwrap() = stuck;
        self.freed.notify_all();
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Exports for Gate {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo::new("")]
    }

    fn open(&self, _: &str, client: &Client) -> Result<Arc<dyn Image>, ExportError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.seen.lock().unwrap().push(("open", *client));
        drop(self.freed.wait_while(self.stuck.lock().unwrap(), |stuck| *stuck).unwrap());
        self.answer.lock().unwrap().clone().map(|()| Arc::clone(&self.image))
    }

    fn attached(&self, _: &str, client: &Client, _: usize) {
        self.seen.lock().unwrap().push(("attached", *client));
    }

    fn detached(&self, _: &str, client: &Client, _: usize) {
        self.seen.lock().unwrap().push(("detached", *client));
    }
}

struct Host {
    gate: Arc<Gate>,
    handle: ServerHandle,
    server: Server,
    dir: tempfile::TempDir,
}

fn host(answer: Answer) -> Host {
    let dir = tempfile::Builder::new().prefix("nbd-test").tempdir().unwrap();
    let gate = Gate::new(answer);
    let server = Server::new(Arc::clone(&gate) as Arc<dyn Exports>);
    let handle = server.bind_unix(&dir.path().join("nbd.sock"), 0o660, None).unwrap();
    Host { gate, handle, server, dir }
}

impl Host {
    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn client(&self) -> raw::Client {
        raw::Client::connect(&self.socket())
    }
}

fn not_yet() -> Answer {
    Err(ExportError::NotYet("pool 'vms' is not mounted".to_owned()))
}

#[test]
fn the_registry_is_told_which_process_asks() {
    let host = host(Ok(()));
    drop(host.client().go_simple());
    let seen = || host.gate.seen.lock().unwrap().clone();
    until("detached", || seen().iter().any(|(what, _)| *what == "detached"));
    let own = Client {
        process: Process::find(std::process::id()),
        user: Some(rustix::process::geteuid().as_raw()),
    };
    assert!(own.process.is_some());
    assert!(seen().iter().all(|(_, client)| *client == own), "{:?}", seen());
    assert!(seen().iter().any(|(what, _)| *what == "attached"));

    host.gate.seen.lock().unwrap().clear();
    let handle = host.server.bind_tcp("127.0.0.1:0".parse().unwrap(), Tls::Off).unwrap();
    let mut stream = std::net::TcpStream::connect(handle.local_addr().unwrap()).unwrap();
    let go = [b"\0\0\0\x03IHAVEOPT".as_slice(), &GO.to_be_bytes(), &[0, 0, 0, 6, 0, 0, 0, 0, 0, 0]];
    std::io::Write::write_all(&mut stream, &go.concat()).unwrap();
    until("attached", || seen().iter().any(|(what, _)| *what == "attached"));
    assert!(seen().iter().all(|(_, client)| *client == Client::default()));
}

#[test]
fn a_client_is_held_until_the_export_can_be_had() {
    let host = host(not_yet());
    let mut client = host.client();
    assert_eq!(client.verdict(8, &[]), 1);
    client.send_option(10, &meta("", &["base:allocation"]));
    until("asked again", || host.gate.asked() >= 3);
    host.gate.answer(Ok(()));
    assert_eq!((client.answer().kind, client.answer().kind), (4, 1));
    client.go_simple();
}

#[test]
fn a_refusal_ends_the_wait_and_is_told() {
    let host = host(not_yet());
    let mut client = host.client();
    client.send_option(GO, &info("", &[]));
    until("asked again", || host.gate.asked() >= 2);
    host.gate.answer(Err(ExportError::Refused("it was handed over".to_owned())));
    let answer = client.answer();
    assert_eq!(answer.kind, POLICY);
    assert_eq!(answer.payload, b"export refused: it was handed over");
    // Refused at once from the first.
    let before = host.gate.asked();
    assert_eq!(client.verdict(GO, &info("", &[])), POLICY);
    assert_eq!(host.gate.asked(), before + 1);
}

#[test]
fn a_client_that_is_held_keeps_nobody_from_leaving_and_is_told_nothing() {
    let host = host(not_yet());
    let mut held: Vec<raw::Client> = (0..8).map(|_| host.client()).collect();
    held.iter_mut().for_each(|client| client.send_option(GO, &info("", &[])));
    until("all asked", || host.gate.asked() >= 8);
    let begin = Instant::now();
    assert_eq!(host.handle.shutdown_within(SOON), 0);
    assert!(begin.elapsed() < SOON / 2);
    for client in &mut held {
        let mut said = Vec::new();
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut said);
        assert_eq!(said, b"");
    }
}

#[test]
fn a_client_that_leaves_while_it_is_held_gives_its_place_back() {
    let host = host(not_yet());
    let mut client = host.client();
    client.send_option(GO, &info("", &[]));
    // More than the server will look at: it must notice all the same.
    client.send_option(3, &[]);
    until("asked", || host.gate.asked() >= 1);
    assert_eq!(host.handle.open_connections(), 1);
    drop(client);
    until("its end", || host.handle.open_connections() == 0);
}

#[test]
fn a_client_of_an_export_that_is_withdrawn_is_ended_and_refused_when_it_comes_back() {
    let host = host(Ok(()));
    let mut client = host.client().go_simple();
    host.gate.answer(Err(ExportError::Refused("it was handed over".to_owned())));
    client.request(0, raw::FLUSH, 1, 0, 0);
    assert_eq!(client.reply().errno(), 0, "who is attached stays so until it is ended");
    assert_eq!(host.handle.disconnect("", SOON), 0);
    assert!(client.is_closed());
    assert_eq!(host.client().verdict(GO, &info("", &[])), POLICY);
}

/// The answer may be a refusal that comes of leaving, and clients take it for the last word.
#[test]
fn a_client_in_the_middle_of_a_negotiation_is_cut_without_an_answer() {
    for answer in [Ok(()), Err(ExportError::unknown("gone")), not_yet()] {
        let host = host(answer);
        host.gate.stick(true);
        let mut client = host.client();
        client.send_option(GO, &info("", &[]));
        client.send_option(3, &[]);
        until("asked", || host.gate.asked() == 1);
        let mut idle = host.client();
        std::thread::scope(|scope| {
            let shutdown = scope.spawn(|| host.handle.shutdown_within(SOON));
            assert!(idle.is_closed());
            host.handle.open_connections(); // All have been told: that took their lock.
            host.gate.stick(false);
            assert_eq!(shutdown.join().unwrap(), 0);
        });
        let mut said = Vec::new();
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut said);
        assert_eq!(said, b"");
        let seen = host.gate.seen.lock().unwrap();
        assert!(seen.iter().all(|(what, _)| *what == "open"), "{seen:?}");
    }
}
