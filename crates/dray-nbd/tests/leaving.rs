//! A server that leaves: what has begun is answered, everything else is not, so that clients send it
//! again; and no client is told anything that would make it give up.

mod support;

use dray_image::{Disk, ErrorKind, Image};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::memory::Memory;
use support::raw::{Client, FLUSH, READ, WRITE, request};
use support::{Fixture, until};

const LEN: usize = 4 << 20;
/// Long enough for any machine; only a failing test ever waits so long.
const SOON: Duration = Duration::from_secs(20);

/// An image whose requests are stuck until its wall is lowered, also those that are done at once.
fn stuck() -> (Fixture, Arc<Memory>) {
    let image = Arc::new(Memory::new(LEN).never_warning());
    image.set_wall(LEN as u64);
    (Fixture::with(Arc::clone(&image) as Arc<dyn Image>), image)
}

fn waits(image: &Memory, requests: usize) {
    until("waiting", || image.waiting.load(Ordering::SeqCst) == requests);
}

/// Runs `then` once every connection has been told to end.
fn leave(fixture: &Fixture, then: impl FnOnce()) {
    let mut idle = fixture.client().go_simple();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| fixture.handle.shutdown_within(SOON));
        assert!(idle.is_closed());
        // All are told under one lock; this takes it.
        fixture.handle.open_connections();
        then();
        assert_eq!(shutdown.join().unwrap(), 0, "connections that had to be cut");
    });
}

/// Everything the server says before it hangs up.
fn rest(client: &mut Client) -> Vec<u8> {
    let mut rest = Vec::new();
    // A client that has sent something which nobody took is reset, after what it was sent.
    if let Err(error) = std::io::Read::read_to_end(&mut client.stream, &mut rest) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
    rest
}

#[test]
fn what_has_begun_is_answered_and_the_rest_dropped_without_an_answer() {
    let (fixture, image) = stuck();
    let mut client = fixture.client().go_simple();
    let mut bytes = request(0, READ, 1, 0, 512);
    for cookie in 2..10 {
        bytes.extend(request(0, WRITE, cookie, 8192, 512));
        bytes.extend([7; 512]);
        bytes.extend(request(0, READ, cookie + 100, 0, 512));
        bytes.extend(request(0, FLUSH, cookie + 200, 0, 0));
    }
    client.send(&bytes);
    waits(&image, 1);
    leave(&fixture, || image.set_wall(0));
    assert_eq!((client.reply().errno(), client.take(512)), (0, vec![0; 512]));
    assert_eq!(rest(&mut client), b"");
    assert_eq!(image.contents()[8192..8704], [0; 512], "a write that was not answered");
}

#[test]
fn a_request_that_fails_while_the_server_leaves_is_not_answered() {
    for structured in [false, true] {
        let (fixture, image) = stuck();
        let client = fixture.client();
        let mut client = if structured { client.go_structured() } else { client.go_simple() };
        client.write(support::raw::FUA, 1, 0, &[7; 512]);
        client.request(0, READ, 2, 0, 512);
        waits(&image, 2);
        leave(&fixture, || {
            image.fail_next(ErrorKind::Unavailable);
            image.fail_next(ErrorKind::Io);
            image.set_wall(0);
        });
        assert_eq!(rest(&mut client), b"");
    }
}

#[test]
fn a_write_of_which_only_a_part_has_come_is_dropped() {
    for len in [4096u32, 1 << 20, 64 << 20] {
        let fixture = Fixture::with(Arc::new(Memory::new(64 << 20)));
        let mut client = fixture.client().go_simple();
        client.request(0, FLUSH, 1, 0, 0);
        client.request(0, WRITE, 2, 0, len);
        client.send(&[7; 1000]);
        assert_eq!(client.reply().cookie(), 1);
        let begin = Instant::now();
        leave(&fixture, || {});
        assert!(begin.elapsed() < SOON / 2, "the rest of the payload was waited for");
        assert_eq!(rest(&mut client), b"");
    }
}

#[test]
fn nobody_waits_twice_for_a_connection_that_was_cut() {
    let (fixture, image) = stuck();
    let mut client = fixture.client().go_simple();
    client.request(0, READ, 1, 0, 512);
    waits(&image, 1);
    assert_eq!(fixture.handle.shutdown_within(Duration::from_millis(20)), 1);
    assert_eq!(rest(&mut client), b"");
    let begin = Instant::now();
    let Fixture { handle, .. } = fixture;
    drop(handle);
    assert!(begin.elapsed() < dray_nbd::limits::SHUTDOWN_GRACE / 2, "{:?}", begin.elapsed());
    image.set_wall(0);
}

/// More requests than the server takes, so that it does not look at the connection any more; then
/// the client leaves and comes back. None of them may be done after what it writes then.
#[test]
fn a_client_that_left_a_crowded_connection_is_not_overtaken_by_its_own_past() {
    let image = Arc::new(Memory::new(LEN));
    image.set_wall(1 << 20);
    let fixture = Fixture::with(Arc::clone(&image) as Arc<dyn Image>);
    let mut client = fixture.client().go_simple();
    for cookie in 0..dray_serve::limits::MAX_DEFERRED as u64 + 8 {
        client.write(0, cookie, 0, &[1; 4096]);
    }
    waits(&image, dray_serve::limits::MAX_WORKERS);
    drop(client);
    let mut back = fixture.client_after(Duration::from_millis(400), || image.set_wall(0));
    back.write(0, 1, 0, &[2; 4096]);
    assert_eq!(back.reply().errno(), 0);
    until("the end of the first", || fixture.server.connections("") == 1);
    assert_eq!(image.contents()[..4096], [2; 4096]);
}

/// A server that stood still finds a write of a client that is gone by then. While nothing keeps others from the
/// image, whoever came after that client may have written to the same place, past this server.
#[test]
fn what_a_client_that_has_gone_has_left_in_its_socket_is_not_written() {
    for unlocked in [true, false] {
        let image = Arc::new(Memory::new(LEN).never_warning());
        image.set_wall(LEN as u64);
        let disk = Disk::new(Arc::clone(&image) as Arc<dyn Image>);
        disk.set_unlocked(unlocked);
        let fixture = Fixture::with(disk);
        let mut client = fixture.client().go_simple();
        let mut bytes = request(0, READ, 1, 0, 512);
        bytes.extend(request(0, WRITE, 2, 8192, 512));
        bytes.extend([7; 512]);
        client.send(&bytes);
        waits(&image, 1);
        drop(client);
        image.set_wall(0);
        until("its end", || fixture.server.connections("") == 0);
        let written = image.contents()[8192..8704] == [7; 512];
        assert_eq!(written, !unlocked, "a locked image is nobody else's");
    }
}

/// The clients that are there are served meanwhile.
#[test]
fn an_image_that_others_may_open_is_served() {
    let image = Arc::new(Memory::new(LEN));
    let disk = Disk::new(Arc::clone(&image) as Arc<dyn Image>);
    disk.set_unlocked(true);
    let fixture = Fixture::with(disk);
    let mut client = fixture.client().go_simple();
    client.write(0, 1, 0, &[5; 4096]);
    assert_eq!(client.reply().errno(), 0);
    client.send(&request(0, FLUSH, 2, 0, 0));
    assert_eq!(client.reply().errno(), 0);
    assert_eq!(image.contents()[..4096], [5; 4096]);
}
