//! The client, against this crate's server, QEMU's, and servers that misbehave.

mod support;

use dray_nbd::client::{Client, ClientError, Wish};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;
use support::{Fixture, have, noise};

const MIB: u64 = 1 << 20;

fn client(fixture: &Fixture) -> Client {
    Client::connect(&fixture.socket(), &Wish::new("")).unwrap()
}

#[test]
fn what_is_written_is_read_by_many_threads_at_once() {
    let fixture = Fixture::with_file(64 * MIB);
    let client = client(&fixture);
    assert_eq!(client.len(), 64 * MIB);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = &client;
            scope.spawn(move || {
                let (at, data) = (thread * 8 * MIB, noise(4 * MIB as usize + 512, thread));
                client.write(at, &data).unwrap();
                let mut back = vec![1; data.len()];
                client.read(at, &mut back).unwrap();
                assert!(back == data, "thread {thread} read something else");
            });
        }
    });
    client.flush().unwrap();
    drop(client);
    let file = std::fs::read(fixture.file()).unwrap();
    assert!(file[8 * MIB as usize..][..4096] == noise(4096, 1));
}

#[test]
fn zeroing_and_block_status_agree() {
    let fixture = Fixture::with_file(8 * MIB);
    let client = client(&fixture);
    client.write(0, &noise(8 * MIB as usize, 3)).unwrap();
    client.write_zeroes(2 * MIB, 3 * MIB, true).unwrap();
    let seen = client.status("base:allocation", MIB, 6 * MIB).unwrap();
    let seen: Vec<_> = seen.iter().map(|e| (e.offset / MIB, e.len / MIB, e.flags)).collect();
    assert_eq!(seen, [(1, 1, 0), (2, 3, 3), (5, 2, 0)]);
}

#[test]
fn refusals_are_clear_and_leave_the_connection() {
    let fixture = Fixture::with_file(MIB);
    let client = client(&fixture);
    let outside = client.read(MIB - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(outside.to_string(), "2 bytes at 1048575 are not in an export of 1048576 bytes");
    assert!(matches!(client.status("qemu:other", 0, 1), Err(ClientError::Context(_))));
    client.read(0, &mut [0; 2]).unwrap();

    let unknown = Client::connect(&fixture.socket(), &Wish::new("nothing")).unwrap_err();
    assert!(unknown.to_string().contains("no export named 'nothing'"), "{unknown}");
    let contexts = vec!["qemu:dirty-bitmap:b0".to_owned()];
    let wish = Wish { contexts, ..Wish::new("") };
    let context = Client::connect(&fixture.socket(), &wish).unwrap_err();
    assert!(context.to_string().contains("qemu:dirty-bitmap:b0"), "{context}");
    let nobody = Client::connect(Path::new("/nonexistent/sock"), &wish).unwrap_err();
    assert!(matches!(nobody, ClientError::Connect { .. }));
}

#[test]
fn an_end_of_the_server_reaches_all_who_wait_and_who_come_later() {
    let fixture = Fixture::with_file(MIB);
    let client = client(&fixture);
    fixture.handle.shutdown_within(Duration::from_secs(1));
    let error = client.read(0, &mut [0; 512]).unwrap_err();
    assert!(error.ends_connection(), "{error}");
    assert!(client.broken().is_some());
}

/// A server of canned bytes: `talk` gets the connection after the export was granted.
fn canned(talk: impl FnOnce(&mut std::os::unix::net::UnixStream) + Send + 'static) -> Client {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        let answer = |option: u32, kind: u32, payload: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
            for number in [option, kind, payload.len() as u32] {
                bytes.extend_from_slice(&number.to_be_bytes());
            }
            [&bytes[..], payload].concat()
        };
        // Structured replies, no context, then the export of 1 MiB.
        stream.read_exact(&mut [0; 16]).unwrap();
        stream.write_all(&answer(8, 1, &[])).unwrap();
        stream.read_exact(&mut [0; 22]).unwrap();
        let export = [&[0, 0][..], &MIB.to_be_bytes(), &[0, 1]].concat();
        stream.write_all(&answer(7, 3, &export)).unwrap();
        stream.write_all(&answer(7, 1, &[])).unwrap();
        stream.read_exact(&mut [0; 28]).unwrap();
        talk(&mut stream);
    });
    let patience = Some(Duration::from_millis(300));
    let wish = Wish { contexts: Vec::new(), patience, ..Wish::new("") };
    Client::connect(&path, &wish).unwrap()
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = 0x668e_33efu32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    [&bytes[..], payload].concat()
}

fn data(at: u64, bytes: &[u8]) -> Vec<u8> {
    [&at.to_be_bytes()[..], bytes].concat()
}

#[test]
fn a_read_is_made_of_data_and_holes_in_any_order() {
    let client = canned(|stream| {
        let hole = [&4096u64.to_be_bytes()[..], &4096u32.to_be_bytes()].concat();
        stream.write_all(&chunk(0, 2, 1, &hole)).unwrap();
        stream.write_all(&chunk(1, 1, 1, &data(0, &[7; 4096]))).unwrap();
        let _ = stream.read(&mut [0; 28]);
    });
    let mut into = vec![9; 8192];
    client.read(0, &mut into).unwrap();
    assert!(into == [vec![7; 4096], vec![0; 4096]].concat());
}

#[test]
fn a_server_that_lies_is_left() {
    let lies: [(&str, Vec<u8>); 7] = [
        ("data outside what was read", chunk(1, 1, 1, &data(4000, &[7; 200]))),
        ("data outside what was read", chunk(1, 1, 1, &data(u64::MAX, &[7; 200]))),
        ("read with a part missing", chunk(1, 1, 1, &data(0, &[7; 200]))),
        ("reply that nobody waits for", chunk(1, 1, 2, &data(0, &[7; 4096]))),
        ("chunk of a kind that was not asked for", chunk(1, 5, 1, &[0; 12])),
        ("wrong magic of a reply", vec![0; 64]),
        (
            "simple reply where none may be",
            [&0x6744_6698u32.to_be_bytes()[..], &[0; 4], &1u64.to_be_bytes()].concat(),
        ),
    ];
    for (why, bytes) in lies {
        let client = canned(move |stream| {
            stream.write_all(&bytes).unwrap();
            let _ = stream.read(&mut [0; 28]);
        });
        let error = client.read(0, &mut [0; 4096]).unwrap_err();
        assert_eq!(error, ClientError::Protocol(why));
    }
}

#[test]
fn an_error_is_the_servers_own_words() {
    let client = canned(|stream| {
        let error = [&5u32.to_be_bytes()[..], &[0, 8], b"bad disk"].concat();
        stream.write_all(&chunk(1, (1 << 15) | 1, 1, &error)).unwrap();
        let _ = stream.read(&mut [0; 28]);
    });
    let error = client.read(0, &mut [0; 4096]).unwrap_err();
    assert_eq!(error, ClientError::Server { errno: 5, why: "bad disk".into() });
    assert!(client.broken().is_none());
}

#[test]
fn a_silent_server_is_left_after_a_while() {
    let client = canned(|stream| drop(stream.read(&mut [0; 28])));
    let error = client.read(0, &mut [0; 4096]).unwrap_err();
    assert_eq!(error, ClientError::TooSlow(Duration::from_millis(300)));
    assert!(client.read(0, &mut [0; 4096]).unwrap_err().ends_connection());
}

/// A server of QEMU's; killed when dropped.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for(path: &Path) {
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while std::os::unix::net::UnixStream::connect(path).is_err() {
        assert!(std::time::Instant::now() < until, "{} does not listen", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn qemus_own_server_serves_a_qcow2_and_its_bitmap() {
    let name = "qemus_own_server_serves_a_qcow2_and_its_bitmap";
    if !["qemu-img", "qemu-nbd", "qemu-io"].iter().all(|program| have(name, program)) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (dir.path().join("a.qcow2"), dir.path().join("sock"));
    let image = image.to_str().unwrap();
    let run = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {output:?}");
    };
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, "64M"]);
    run("qemu-io", &["-c", "write -P 3 4M 2M", image]);
    run("qemu-img", &["bitmap", "--add", "-g", "65536", image, "day"]);
    run("qemu-io", &["-c", "write -P 5 5M 128k", image]);
    let args = ["-t", "-e", "4", "-f", "qcow2", "-B", "day", "-k", socket.to_str().unwrap(), image];
    let _daemon = Daemon(Command::new("qemu-nbd").args(args).spawn().unwrap());
    wait_for(&socket);

    let bitmap = "qemu:dirty-bitmap:day";
    let contexts = vec!["base:allocation".to_owned(), bitmap.to_owned()];
    let client = Client::connect(&socket, &Wish { contexts, ..Wish::new("") }).unwrap();
    assert_eq!(client.len(), 64 * MIB);
    let mut bytes = vec![0; 3 * MIB as usize];
    client.read(3 * MIB, &mut bytes).unwrap();
    let of = |at: u64| bytes[(at - 3 * MIB) as usize];
    assert_eq!([of(3 * MIB), of(4 * MIB), of(5 * MIB), of(5 * MIB + 131_072)], [0, 3, 5, 3]);
    let dirty = client.status(bitmap, 0, 64 * MIB).unwrap();
    let dirty: Vec<_> = dirty.iter().filter(|e| e.flags == 1).map(|e| (e.offset, e.len)).collect();
    assert_eq!(dirty, [(5 * MIB, 131_072)]);
    client.write(MIB, &noise(MIB as usize, 9)).unwrap();
    client.flush().unwrap();
    let mut back = vec![0; MIB as usize];
    client.read(MIB, &mut back).unwrap();
    assert!(back == noise(MIB as usize, 9));
}
