//! Requests that wait hold up nobody else: reads of blocks that are not here yet, disks that are
//! slow, and the end of connections in the middle of it.

mod support;

use dray_image::{Disk, Image};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::memory::Memory;
use support::raw::{CACHE, Client, DISC, FLUSH, FUA, READ, Reply, STATUS, TRIM, ZEROES};
use support::{Fixture, noise, until};

const LEN: usize = 4 << 20;
const WALL: u64 = 2 << 20;
/// Long enough for any machine; only a failing test ever waits so long.
const SOON: Duration = Duration::from_secs(20);

fn walled() -> (Fixture, Arc<Memory>) {
    let image = Arc::new(Memory::new(LEN));
    image.write_at(&noise(LEN, 3), 0, false).unwrap();
    image.set_wall(WALL);
    (Fixture::with(Arc::clone(&image) as Arc<dyn Image>), image)
}

/// Sends 48 requests that wait, of both kinds: three times what QEMU keeps under way.
fn send_waiting(client: &mut Client) {
    for n in 0..32 {
        client.request(0, READ, 1000 + n, n * 4096, 4096);
    }
    for n in 32..48 {
        client.write(0, 1000 + n, n * 4096, &[7; 4096]);
    }
}

#[test]
fn flush_and_everything_else_pass_waiting_requests() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    send_waiting(&mut client);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 48);
    let others: [(u16, u16, u64); 7] = [
        (0, FLUSH, 0),
        (0, TRIM, WALL),
        (FUA, ZEROES, WALL),
        (0, CACHE, WALL),
        (0, STATUS, WALL),
        (0, READ, WALL + 4096),
        (0, FLUSH, 0),
    ];
    for (cookie, (flags, command, offset)) in (1..).zip(others) {
        let len = if command == FLUSH { 0 } else { 4096 };
        client.request(flags, command, cookie, offset, len);
        let reply = client.reply();
        assert_eq!((reply.cookie(), reply.errno()), (cookie, 0), "command {command}");
    }
    client.write(FUA, 8, WALL, &[1; 4096]);
    assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 8 });
    assert_eq!(image.flushes.load(Ordering::SeqCst), 2);

    image.set_wall(0);
    let mut answered: Vec<u64> = (0..48).map(|_| client.reply().cookie()).collect();
    answered.sort_unstable();
    assert_eq!(answered, (1000..1048).collect::<Vec<_>>());
}

#[test]
fn a_flush_passes_even_when_every_worker_waits() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    let many = dray_serve::limits::MAX_WORKERS as u64 + 40;
    for n in 0..many {
        client.request(0, READ, 1000 + n, 0, 4096);
    }
    client.request(0, FLUSH, 1, 0, 0);
    assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 1 });
    image.set_wall(0);
    assert!((0..many).all(|_| client.reply().errno() == 0));
}

#[test]
fn a_read_that_starts_here_and_ends_elsewhere_is_whole() {
    let image = Arc::new(Memory::new(LEN));
    let data = noise(LEN, 4);
    image.write_at(&data, 0, false).unwrap();
    let fixture = Fixture::with(Arc::clone(&image) as Arc<dyn Image>);
    let mut client = fixture.client().go_structured();
    // A walled start of the image: the first piece waits, and so the rest of the read does.
    image.set_wall(1);
    client.request(0, READ, 5, 0, 1 << 20);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    image.set_wall(0);
    let mut seen = vec![0; 1 << 20];
    loop {
        let Reply::Chunk { last, kind: 1, cookie: 5, payload } = client.reply() else {
            panic!("not read data")
        };
        let at = u64::from_be_bytes(payload[..8].try_into().unwrap()) as usize;
        seen[at..][..payload.len() - 8].copy_from_slice(&payload[8..]);
        if last {
            break;
        }
    }
    assert!(seen == data[..1 << 20]);
}

#[test]
fn long_writes_that_must_wait_arrive_whole() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_simple();
    let data = noise((1 << 20) + 77, 9);
    client.write(0, 1, 5, &data);
    client.write(0, 2, WALL + 5, &data);
    assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 2 });
    image.set_wall(0);
    assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 1 });
    let contents = image.contents();
    assert!(contents[5..][..data.len()] == data);
    assert!(contents[WALL as usize + 5..][..data.len()] == data);
}

#[test]
fn slow_reads_run_side_by_side() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    for n in 0..16 {
        client.request(0, READ, n, n * 4096, 4096);
    }
    until("sixteen at once", || image.waiting.load(Ordering::SeqCst) == 16);
    image.set_wall(0);
    assert!((0..16).all(|_| client.reply().errno() == 0));
}

#[test]
fn goodbye_waits_for_requests_under_way() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.write(0, 1, 0, &[5; 4096]);
    client.request(0, DISC, 0, 0, 0);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    image.set_wall(0);
    assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 1 });
    assert!(client.is_closed());
    assert_eq!(image.contents()[..4096], [5; 4096]);
}

#[test]
fn a_vanished_client_counts_until_its_last_request_has_ended() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.request(0, READ, 1, 0, 4096);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    assert_eq!(fixture.server.connections(""), 1);
    drop(client);
    let again = fixture.client().go_structured();
    assert_eq!(fixture.server.connections(""), 2);
    image.set_wall(0);
    until("detached", || fixture.server.connections("") == 1);
    drop(again);
    until("detached", || fixture.shelf.visits.lock().unwrap().len() == 4);
    assert_eq!(fixture.server.connections(""), 0);
    let visits: Vec<_> = fixture.shelf.visits.lock().unwrap().iter().map(|v| (v.0, v.2)).collect();
    let expected = [("attached", 1), ("attached", 2), ("detached", 1), ("detached", 0)];
    assert_eq!(visits, expected);
}

/// The client that comes back (QEMU does, with `reconnect-delay`) must not be overtaken by its own
/// past.
#[test]
fn a_client_that_comes_back_waits_for_its_own_unfinished_writes() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.write(0, 1, 0, &[1; 4096]);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    assert_eq!(fixture.handle.disconnect("", Duration::from_millis(20)), 1);
    assert!(client.is_closed());
    let mut back = fixture.client_after(Duration::from_millis(100), || image.set_wall(0));
    back.write(0, 2, 0, &[2; 4096]);
    assert_eq!(back.reply(), Reply::Simple { errno: 0, cookie: 2 });
    assert_eq!(image.contents()[..4096], [2; 4096]);
}

/// The guest has written elsewhere since, and was told that this is durable.
#[test]
fn a_write_that_waits_for_a_disk_to_be_opened_ends_with_its_client() {
    let image = Arc::new(Memory::new(1 << 20));
    let disk = Disk::new(Arc::clone(&image) as Arc<dyn Image>);
    let fixture = Fixture::with(Arc::clone(&disk) as Arc<dyn Image>);
    disk.park_now();
    // All are here before one has left: who comes later would wait for what it has left behind.
    let [mut gone, mut lost, mut stays] = [(); 3].map(|()| fixture.client().go_structured());
    until("attached", || fixture.server.connections("") == 3);
    gone.write(0, 1, 0, &[1; 4096]);
    gone.request(0, DISC, 0, 0, 0);
    lost.write(0, 1, 4096, &[1; 4096]);
    stays.write(0, 1, 8192, &[3; 4096]);
    // They wait in the disk by then.
    std::thread::sleep(Duration::from_millis(200));
    drop((gone, lost));
    until("detached", || fixture.server.connections("") == 1);
    disk.unpark();
    assert_eq!(stays.reply(), Reply::Simple { errno: 0, cookie: 1 });
    let contents = image.contents();
    assert!(contents[..8192].iter().all(|&byte| byte == 0), "a write of a client that had gone");
    assert_eq!(contents[8192..12288], [3; 4096]);
}

#[test]
fn a_client_of_an_image_that_is_withdrawn_is_cut_off_and_told_nothing() {
    let image = Arc::new(Memory::new(1 << 20));
    let disk = Disk::new(Arc::clone(&image) as Arc<dyn Image>);
    let fixture = Fixture::with(Arc::clone(&disk) as Arc<dyn Image>);
    disk.park_now();
    let mut waits = fixture.client().go_structured();
    waits.write(0, 1, 0, &[1; 4096]);
    let mut idle = fixture.client().go_structured();
    until("attached", || fixture.server.connections("") == 2);
    disk.withdraw();
    assert!(waits.is_closed());
    idle.request(0, FLUSH, 1, 0, 0);
    assert!(idle.is_closed());
    disk.unpark();
    disk.unshut();
    until("detached", || fixture.server.connections("") == 0);
    assert!(image.contents().iter().all(|&byte| byte == 0));
}

#[test]
fn wrong_magic_closes_even_while_requests_wait() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.request(0, READ, 1, 0, 4096);
    client.send(&[9; 28]);
    assert!(client.is_closed());
    image.set_wall(0);
}

#[test]
fn shutdown_finishes_requests_under_way() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.request(0, READ, 1, 0, 4096);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    let mut idle = fixture.client().go_structured();
    let mut negotiating = fixture.client();
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| fixture.handle.shutdown());
        assert!(idle.is_closed());
        assert!(negotiating.is_closed());
        image.set_wall(0);
        assert_eq!(client.reply().errno(), 0);
        assert!(client.is_closed());
        assert_eq!(shutdown.join().unwrap(), 0);
    });
    assert!(!fixture.socket().exists());
    assert_eq!(fixture.handle.open_connections(), 0);
}

#[test]
fn shutdown_cuts_what_does_not_end() {
    let (fixture, image) = walled();
    let mut client = fixture.client().go_structured();
    client.request(0, READ, 1, 0, 4096);
    until("waiting", || image.waiting.load(Ordering::SeqCst) == 1);
    assert_eq!(fixture.handle.shutdown_within(Duration::from_millis(50)), 1);
    assert!(client.is_closed());
    image.set_wall(0);
}

#[test]
fn disconnect_ends_only_that_export() {
    let image = |len| Arc::new(Memory::new(len)) as Arc<dyn Image>;
    let fixture = Fixture::new(vec![("a", image(4096)), ("b", image(4096))]);
    let go = |name| {
        let mut client = fixture.client();
        assert_eq!(client.verdict(support::raw::GO, &support::raw::info(name, &[])), 1);
        client
    };
    let (mut a, mut b) = (go("a"), go("b"));
    until("attached", || fixture.handle.connections("a") + fixture.handle.connections("b") == 2);
    assert_eq!(fixture.handle.disconnect("a", SOON), 0);
    assert!(a.is_closed());
    assert_eq!(fixture.handle.connections("a"), 0);
    b.request(0, FLUSH, 1, 0, 0);
    assert_eq!(b.reply().errno(), 0);
    let mut a = go("a");
    a.request(0, FLUSH, 1, 0, 0);
    assert_eq!(a.reply().errno(), 0);
}
