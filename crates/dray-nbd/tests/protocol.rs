//! The protocol byte by byte: what is right gets its answer, what is wrong gets the error the
//! protocol names.

mod support;

use dray_image::{ErrorKind, Image};
use std::sync::Arc;
use support::memory::Memory;
use support::raw::{
    CACHE, Client, DF, DISC, FAST, FLUSH, FUA, GO, NO_HOLE, ONE, READ, Reply, STATUS, TRIM, WRITE,
    ZEROES, info, meta, request,
};
use support::{Fixture, noise};

const UNSUP: u32 = 1 << 31 | 1;
const POLICY: u32 = 1 << 31 | 2;
const INVALID: u32 = 1 << 31 | 3;
const UNKNOWN: u32 = 1 << 31 | 6;
const SIZE_REQUIRED: u32 = 1 << 31 | 8;
const TOO_BIG: u32 = 1 << 31 | 9;
const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;

fn memory(len: usize) -> (Fixture, Arc<Memory>) {
    let image = Arc::new(Memory::new(len));
    (Fixture::with(Arc::clone(&image) as Arc<dyn Image>), image)
}

#[test]
fn greeting_offers_fixed_newstyle_and_refuses_unknown_flags() {
    let (fixture, _) = memory(4096);
    let mut client = Client::silent(&fixture.socket());
    assert_eq!(client.greeting, 3);
    client.send(&0x10u32.to_be_bytes());
    assert!(client.is_closed());
}

#[test]
fn wrong_option_magic_closes() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client();
    client.send(&[0; 16]);
    assert!(client.is_closed());
}

#[test]
fn unknown_and_malformed_options_are_refused_and_the_talk_goes_on() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client();
    assert_eq!(client.verdict(999, b"whatever"), UNSUP);
    assert_eq!(client.verdict(4, &[]), UNSUP);
    assert_eq!(client.verdict(5, &[]), POLICY);
    assert_eq!(client.verdict(5, &[1]), INVALID);
    assert_eq!(client.verdict(3, &[1]), INVALID);
    assert_eq!(client.verdict(8, &[1]), INVALID);
    assert_eq!(client.verdict(GO, &[]), INVALID);
    assert_eq!(client.verdict(GO, &[0, 0, 0, 200, 1, 2]), INVALID);
    assert_eq!(client.verdict(GO, &[info("", &[]), vec![0]].concat()), INVALID);
    assert_eq!(client.verdict(GO, &[0, 0, 0, 2, 0xff, 0xfe, 0, 0]), INVALID);
    assert_eq!(client.verdict(GO, &info(&"x".repeat(4097), &[])), TOO_BIG);
    assert_eq!(client.verdict(GO, &vec![0; 65 << 10]), TOO_BIG);
    assert_eq!(client.verdict(10, &meta("", &["base:allocation"])), INVALID, "no structured");
    assert_eq!(client.verdict(GO, &info("nope", &[])), UNKNOWN);
    let unknown = client.option(GO, &info("nope", &[])).remove(0);
    assert_eq!(String::from_utf8(unknown.payload).unwrap(), "no export named 'nope'");
    assert_eq!(client.verdict(2, &[]), 1);
    assert!(client.is_closed());
}

#[test]
fn an_option_of_absurd_length_closes() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client();
    client.send(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff");
    assert!(client.is_closed());
}

#[test]
fn endless_options_close() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client();
    for _ in 0..dray_nbd::limits::MAX_OPTIONS {
        client.send_option(999, &[]);
    }
    assert!(client.is_closed());
}

#[test]
fn metadata_contexts_are_listed_and_set() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client();
    assert_eq!(client.verdict(8, &[]), 1);
    let count = |client: &mut Client, option, queries: &[&str]| {
        client.option(option, &meta("", queries)).len() - 1
    };
    assert_eq!(count(&mut client, 9, &[]), 1);
    assert_eq!(count(&mut client, 9, &["base:"]), 1);
    assert_eq!(count(&mut client, 9, &["qemu:"]), 0);
    assert_eq!(count(&mut client, 10, &[]), 0);
    assert_eq!(count(&mut client, 10, &["base:"]), 0);
    assert_eq!(count(&mut client, 10, &["x:y", "base:allocation"]), 1);
    assert_eq!(client.verdict(10, &meta("nope", &["base:allocation"])), UNKNOWN);
    assert_eq!(client.verdict(10, &meta("", &["q"; 65])), TOO_BIG);
    // The last SET failed, so block status is not negotiated.
    let mut client = client.go_simple();
    client.request(0, STATUS, 1, 0, 4096);
    assert_eq!(client.reply().errno(), EINVAL);
}

#[test]
fn export_name_goes_straight_to_transmission() {
    let (fixture, _) = memory(1 << 20);
    for (flags, zeroes) in [(1u32, 124), (3, 0)] {
        let mut client = Client::silent(&fixture.socket());
        client.send(&flags.to_be_bytes());
        client.send_option(1, b"");
        assert_eq!(client.take(8), (1u64 << 20).to_be_bytes());
        client.take(2 + zeroes);
        client.request(0, FLUSH, 5, 0, 0);
        assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 5 });
    }
    let mut client = fixture.client();
    client.send_option(1, b"nope");
    assert!(client.is_closed());
}

#[test]
fn block_size_constraints_are_told_and_kept() {
    let image = Arc::new(Memory::new(1 << 20).min_block(512));
    let fixture = Fixture::with(image);
    let mut client = fixture.client();
    assert_eq!(client.verdict(GO, &info("", &[])), SIZE_REQUIRED);
    let answers = client.option(6, &info("", &[1, 2, 3, 99]));
    let items: Vec<u16> =
        answers[..4].iter().map(|a| u16::from_be_bytes([a.payload[0], a.payload[1]])).collect();
    assert_eq!(items, [0, 1, 2, 3]);
    let sizes = [512u32, 4096, 64 << 20].map(u32::to_be_bytes).concat();
    assert_eq!(answers[3].payload[2..], sizes);
    let mut client = client.go_simple();
    client.request(0, READ, 1, 100, 512);
    assert_eq!(client.reply().errno(), EINVAL);
    client.request(0, READ, 1, 512, 511);
    assert_eq!(client.reply().errno(), EINVAL);
}

#[test]
fn wrong_request_magic_closes() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client().go_simple();
    client.send(&[7; 28]);
    assert!(client.is_closed());
}

/// Every kind of wrong request, with the error it deserves; the connection survives all of them.
#[test]
fn wrong_requests_get_their_errors() {
    let (fixture, image) = memory(1 << 20);
    let end = 1 << 20;
    for structured in [false, true] {
        let client = fixture.client();
        let mut client = if structured { client.go_structured() } else { client.go_simple() };
        let cases = [
            (0, 42, 0, 0, EINVAL),
            (0, READ, end, 1, EINVAL),
            (0, READ, u64::MAX, 4096, EINVAL),
            (0, READ, 0, (64 << 20) + 1, EINVAL),
            (NO_HOLE, READ, 0, 1, EINVAL),
            (1 << 5, READ, 0, 1, EINVAL),
            (0, TRIM, end - 1, 2, EINVAL),
            (0, CACHE, end, 1, EINVAL),
            (0, ZEROES, end, 1, ENOSPC),
            (0, ZEROES, u64::MAX, u32::MAX, ENOSPC),
            (DF, ZEROES, 0, 1, EINVAL),
            (FAST | NO_HOLE, ZEROES, 0, 1, ENOTSUP),
            (ONE, FLUSH, 0, 0, EINVAL),
            (0, STATUS, 0, 0, EINVAL),
        ];
        for (cookie, (flags, command, offset, len, errno)) in (1..).zip(cases) {
            client.request(flags, command, cookie, offset, len);
            let reply = client.reply();
            assert_eq!((reply.cookie(), reply.errno()), (cookie, errno), "{command} at {offset}");
        }
        client.request(DF, READ, 8, 0, 65 << 20);
        assert_eq!(client.reply().errno(), if structured { EOVERFLOW } else { EINVAL });
        client.write(0, 9, end - 1, &[1, 2]);
        assert_eq!(client.reply().errno(), ENOSPC);
        client.write(DF, 10, 0, &[1; 100_000]);
        assert_eq!(client.reply().errno(), EINVAL);
        client.write(0, 11, 0, &vec![1; (64 << 20) + 1]);
        assert_eq!(client.reply().errno(), EINVAL);
        client.write(0, 12, 0, &[9; 10]);
        assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 12 });
    }
    assert_eq!(image.contents()[..11], [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 0]);
}

#[test]
fn an_absurd_write_closes() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client().go_simple();
    client.request(0, WRITE, 1, 0, u32::MAX);
    assert!(client.is_closed());
}

#[test]
fn a_read_only_export_refuses_changes() {
    let fixture = Fixture::with(Arc::new(Memory::new(4096).read_only()));
    let mut client = fixture.client().go_structured();
    client.write(0, 1, 0, &[1; 512]);
    assert_eq!(client.reply().errno(), EPERM);
    for command in [TRIM, ZEROES] {
        client.request(0, command, 2, 0, 512);
        assert_eq!(client.reply().errno(), EPERM);
    }
    assert_eq!(client.read(0, 0, 512), [0; 512]);
}

#[test]
fn image_errors_become_protocol_errors() {
    let (fixture, image) = memory(1 << 20);
    let mut client = fixture.client().go_structured();
    let kinds = [
        (ErrorKind::NoSpace, ENOSPC),
        (ErrorKind::Io, EIO),
        (ErrorKind::ReadOnly, EPERM),
        (ErrorKind::OutOfRange, EINVAL),
        (ErrorKind::Unavailable, EIO),
    ];
    for (kind, errno) in kinds {
        image.fail_next(kind);
        client.write(0, 3, 0, &[1; 512]);
        assert_eq!(client.reply().errno(), errno);
        image.fail_next(kind);
        client.request(0, ZEROES, 4, 0, 512);
        assert_eq!(client.reply().errno(), errno);
    }
    image.fail_next(ErrorKind::Io);
    client.request(0, READ, 5, 0, 512);
    let Reply::Chunk { last: true, payload, .. } = client.reply() else { panic!("no chunk") };
    assert_eq!(&payload[6..], b"test: told to fail");
    image.fail_next(ErrorKind::Io);
    client.request(0, FLUSH, 6, 0, 0);
    assert_eq!(client.reply().errno(), EIO);
    client.request(0, FLUSH, 7, 0, 0);
    assert_eq!(client.reply().errno(), 0);
}

#[test]
fn a_long_write_that_fails_half_way_is_answered_once_and_leaves_the_stream_in_step() {
    let (fixture, image) = memory(4 << 20);
    let mut client = fixture.client().go_structured();
    let data = noise((2 << 20) + 9, 4);
    for after in 0..8 {
        image.fail_after(after, ErrorKind::NoSpace);
        client.write(0, 3, 5, &data);
        assert_eq!(client.reply().errno(), ENOSPC, "after {after} pieces");
        client.write(0, 4, 5, &data);
        assert_eq!(client.reply().errno(), 0);
        assert!(image.contents()[5..][..data.len()] == data);
    }
}

#[test]
fn block_status_tells_extents() {
    let (fixture, image) = memory(1 << 20);
    image.write_at(&[1; 4096], 8192, false).unwrap();
    let mut client = fixture.client().go_structured();
    let status = |client: &mut Client, flags, offset, len| {
        client.request(flags, STATUS, 1, offset, len);
        let Reply::Chunk { last: true, kind: 5, payload, .. } = client.reply() else {
            panic!("not one block status chunk")
        };
        let numbers = payload[4..].chunks(4).map(|n| u32::from_be_bytes(n.try_into().unwrap()));
        numbers.collect::<Vec<_>>()
    };
    assert_eq!(status(&mut client, 0, 0, 16384), [8192, 3, 4096, 0, 4096, 3]);
    assert_eq!(status(&mut client, ONE, 0, 16384), [8192, 3]);
    assert_eq!(status(&mut client, 0, 9000, 10), [10, 0]);
}

#[test]
fn big_and_odd_requests_are_whole() {
    const LEN: usize = 65 << 20;
    for image in [Memory::new(LEN), Memory::new(LEN).always_waiting()] {
        let image = Arc::new(image);
        let fixture = Fixture::with(Arc::clone(&image) as Arc<dyn Image>);
        let mut client = fixture.client().go_structured();
        let mut simple = fixture.client().go_simple();
        for (at, len) in
            [(3, 1), (511, 4097), (1, 65_537), (7, 1 << 20), (9, (2 << 20) + 3), (13, 64 << 20)]
        {
            let data = noise(len, at);
            client.write(FUA, 1, at, &data);
            assert_eq!(client.reply().errno(), 0);
            assert!(client.read(0, at, len as u32) == data, "structured, {len} bytes");
            assert!(client.read(DF, at, len as u32) == data, "in one piece, {len} bytes");
            simple.request(0, READ, 2, at, len as u32);
            assert_eq!(simple.reply(), Reply::Simple { errno: 0, cookie: 2 });
            assert!(simple.take(len) == data, "simple, {len} bytes");
            simple.write(0, 3, 0, &data);
            assert_eq!(simple.reply(), Reply::Simple { errno: 0, cookie: 3 });
            assert!(client.read(0, 0, len as u32) == data, "not forced out, {len} bytes");
        }
        // A request is never one piece in memory, however long it is.
        let longest = image.longest.load(std::sync::atomic::Ordering::SeqCst);
        assert!(longest <= dray_nbd::limits::JOB_PIECE as usize, "{longest}");
    }
}

#[test]
fn a_long_read_in_one_piece_fails_before_its_header_or_ends_the_connection() {
    const LEN: usize = 4 << 20;
    let (fixture, image) = memory(LEN);
    for structured in [false, true] {
        let connect = || {
            let client = fixture.client();
            if structured { client.go_structured() } else { client.go_simple() }
        };
        let mut client = connect();
        for after in 0..4 {
            image.fail_after(after, ErrorKind::Io);
            client.request(if structured { DF } else { 0 }, READ, 1, 0, LEN as u32);
            assert_eq!(client.reply().errno(), EIO, "after {after} pieces");
        }
        for after in 4..8 {
            image.fail_after(after, ErrorKind::Io);
            client.request(if structured { DF } else { 0 }, READ, 1, 0, LEN as u32);
            let mut said = Vec::new();
            let _ = std::io::Read::read_to_end(&mut client.stream, &mut said);
            let header = if structured { 28 } else { 16 };
            assert_eq!(said.len(), header + ((after - 4) << 20));
            client = connect();
        }
        client.request(0, FLUSH, 2, 0, 0);
        assert_eq!(client.reply().errno(), 0);
    }
}

#[test]
fn a_long_write_that_waits_is_answered_once_with_its_first_failure() {
    let image = Arc::new(Memory::new(8 << 20).always_waiting());
    let fixture = Fixture::with(Arc::clone(&image) as Arc<dyn Image>);
    let mut client = fixture.client().go_structured();
    let data = noise((5 << 20) + 9, 4);
    for (flags, after) in (0..6).flat_map(|after| [(0, after), (FUA, after)]) {
        image.fail_after(after, ErrorKind::NoSpace);
        client.write(flags, 3, 5, &data);
        assert_eq!(client.reply().errno(), ENOSPC, "after {after} pieces");
        client.write(flags, 4, 5, &data);
        assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 4 });
        assert!(image.contents()[5..][..data.len()] == data);
    }
}

#[test]
fn requests_of_no_bytes_succeed() {
    let (fixture, _) = memory(4096);
    let mut client = fixture.client().go_structured();
    for command in [WRITE, TRIM, CACHE, ZEROES] {
        client.request(0, command, 1, 4096, 0);
        assert_eq!(client.reply(), Reply::Simple { errno: 0, cookie: 1 });
    }
    client.request(0, READ, 2, 0, 0);
    let empty = Reply::Chunk { last: true, kind: 0, cookie: 2, payload: vec![] };
    assert_eq!(client.reply(), empty);
}

#[test]
fn requests_sent_in_one_piece_are_all_answered() {
    let (fixture, image) = memory(1 << 20);
    let mut client = fixture.client().go_structured();
    let mut bytes = Vec::new();
    for n in 0..200u64 {
        bytes.extend(request(0, WRITE, n, n * 4096, 4096));
        bytes.extend(vec![n as u8; 4096]);
        bytes.extend(request(0, READ, 1000 + n, n * 4096, 4096));
    }
    let mut sender = client.stream.try_clone().unwrap();
    let thread = std::thread::spawn(move || std::io::Write::write_all(&mut sender, &bytes));
    let mut open: std::collections::BTreeSet<u64> = (0..200).chain(1000..1200).collect();
    while !open.is_empty() {
        let reply = client.reply();
        assert_eq!(reply.errno(), 0);
        assert!(open.remove(&reply.cookie()));
    }
    thread.join().unwrap().unwrap();
    assert!((0..200).all(|n| image.contents()[n * 4096..(n + 1) * 4096] == [n as u8; 4096]));
    client.request(0, DISC, 0, 0, 0);
    assert!(client.is_closed());
}
