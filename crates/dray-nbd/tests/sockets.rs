//! Sockets and what lies around them: files, permissions, TCP, TLS, several connections.

mod support;

use dray_nbd::{Server, Tls};
use dray_serve::Exports;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use support::memory::Memory;
use support::raw::{Client, FLUSH, FUA};
use support::{Fixture, Shelf, have, noise};

#[test]
fn a_stale_socket_is_replaced_and_nothing_else_is() {
    let fixture = Fixture::with(Arc::new(Memory::new(4096)));
    let mode = std::fs::metadata(fixture.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let error = fixture.server.bind_unix(&fixture.socket(), 0o660, None).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().ends_with("somebody is listening on it"), "{error}");

    let stale = fixture.dir.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let handle = fixture.server.bind_unix(&stale, 0o600, None).unwrap();
    Client::connect(&stale).go_simple();
    drop(handle);
    assert!(!stale.exists());

    let file = fixture.dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let error = fixture.server.bind_unix(&file, 0o660, None).err().unwrap();
    assert!(error.to_string().ends_with("it exists and is not a socket"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

#[test]
fn a_flush_on_one_connection_covers_writes_on_another() {
    let fixture = Fixture::with_file(1 << 20);
    let mut clients: Vec<Client> = (0..4).map(|_| fixture.client().go_structured()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.write(if n == 3 { FUA } else { 0 }, 1, n as u64 * 8192, &noise(8192, n as u64));
    }
    assert!(clients.iter_mut().all(|client| client.reply().errno() == 0));
    clients[0].request(0, FLUSH, 2, 0, 0);
    assert_eq!(clients[0].reply().errno(), 0);
    let expected: Vec<u8> = (0..4).flat_map(|n| noise(8192, n)).collect();
    for client in &mut clients {
        assert!(client.read(0, 0, 32768) == expected);
    }
    assert!(std::fs::read(fixture.file()).unwrap()[..32768] == expected);
}

#[test]
fn tcp_without_tls_is_served() {
    if !have("tcp_without_tls_is_served", "nbdinfo") {
        return;
    }
    let shelf = Shelf::new(vec![("disk", Arc::new(Memory::new(8192)) as _)]);
    let server = Server::new(shelf as Arc<dyn Exports>);
    let handle = server.bind_tcp("127.0.0.1:0".parse().unwrap(), Tls::Off).unwrap();
    let uri = format!("nbd://{}/disk", handle.local_addr().unwrap());
    let output = std::process::Command::new("nbdinfo").args(["--size", &uri]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "8192");
}

/// A certificate for "localhost" in both forms that are needed.
fn tls_configs() -> (Arc<rustls::ServerConfig>, Arc<rustls::ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let cert = made.cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.clone()], key)
        .unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cert).unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    (Arc::new(server), Arc::new(client))
}

fn option(option: u32, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [b"IHAVEOPT", &option.to_be_bytes()[..], &len, payload].concat()
}

/// The kind of the next option reply; its payload is thrown away.
fn answer(stream: &mut impl Read) -> u32 {
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; number(16) as usize];
    stream.read_exact(&mut payload).unwrap();
    number(12)
}

#[test]
fn tls_is_required_and_carries_everything() {
    const LEN: usize = 8 << 20;
    let (server_config, client_config) = tls_configs();
    let shelf = Shelf::new(vec![("", Arc::new(Memory::new(LEN)) as _)]);
    let server = Server::new(shelf as Arc<dyn Exports>);
    let tls = Tls::Required(server_config);
    let handle = server.bind_tcp("127.0.0.1:0".parse().unwrap(), tls).unwrap();
    let mut tcp = TcpStream::connect(handle.local_addr().unwrap()).unwrap();
    tcp.read_exact(&mut [0; 18]).unwrap();
    tcp.write_all(&3u32.to_be_bytes()).unwrap();
    for refused in [3, 6, 7, 8, 9, 10, 999] {
        tcp.write_all(&option(refused, &[])).unwrap();
        assert_eq!(answer(&mut tcp), 1 << 31 | 5, "option {refused}");
    }
    tcp.write_all(&option(5, &[])).unwrap();
    assert_eq!(answer(&mut tcp), 1);
    let name = ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(client_config, name).unwrap();
    let mut stream = rustls::StreamOwned::new(session, tcp);
    stream.write_all(&option(5, &[])).unwrap();
    assert_eq!(answer(&mut stream), 1 << 31 | 3, "tls in tls");
    stream.write_all(&option(7, &support::raw::info("", &[]))).unwrap();
    while answer(&mut stream) != 1 {}

    let data = noise(5 << 20, 6);
    let write = support::raw::request(FUA, support::raw::WRITE, 1, 3, data.len() as u32);
    stream.write_all(&[write, data.clone()].concat()).unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    stream.write_all(&support::raw::request(0, 0, 2, 3, data.len() as u32)).unwrap();
    let mut back = vec![0; 16 + data.len()];
    stream.read_exact(&mut back).unwrap();
    assert!(back[16..] == data);
}

#[test]
fn bytes_slipped_in_before_tls_end_the_connection() {
    let (server_config, _) = tls_configs();
    let shelf = Shelf::new(vec![("", Arc::new(Memory::new(4096)) as _)]);
    let server = Server::new(shelf as Arc<dyn Exports>);
    let tls = Tls::Optional(server_config);
    let handle = server.bind_tcp("127.0.0.1:0".parse().unwrap(), tls).unwrap();
    let mut tcp = TcpStream::connect(handle.local_addr().unwrap()).unwrap();
    tcp.read_exact(&mut [0; 18]).unwrap();
    let injected = [&3u32.to_be_bytes()[..], &option(5, &[]), &option(8, &[])].concat();
    tcp.write_all(&injected).unwrap();
    assert_eq!(answer(&mut tcp), 1);
    let mut rest = Vec::new();
    let end = tcp.read_to_end(&mut rest);
    assert!(end.is_err() || rest.is_empty(), "nothing of the injected option is answered");
}

#[test]
fn libnbd_speaks_tls_with_us() {
    let test = "libnbd_speaks_tls_with_us";
    if !have(test, "nbdinfo") {
        return;
    }
    let (server_config, _) = tls_configs();
    let shelf = Shelf::new(vec![("", Arc::new(Memory::new(12_288)) as _)]);
    let server = Server::new(shelf as Arc<dyn Exports>);
    let tls = Tls::Required(server_config);
    let handle = server.bind_tcp("127.0.0.1:0".parse().unwrap(), tls).unwrap();
    let addr = handle.local_addr().unwrap();
    let uri = format!("nbds://{addr}/?tls-verify-peer=false");
    let output = std::process::Command::new("nbdinfo").args(["--size", &uri]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "12288", "{output:?}");
}
