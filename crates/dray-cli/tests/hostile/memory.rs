//! A peer that wants the agent's memory: messages that it does not finish, and answers that it does not take.

use crate::attacker::{Attacker, lab};
use crate::lab::{ALL_RIGHTS, Host};
use crate::peers::prepare;
use dray_net::BlockingStream;
use dray_types::MigrationId;
use dray_wire::StreamKind;
use dray_wire::control::MAX_CONTROL;
use dray_wire::request::{Reply, Request};
use dray_wire::store::{self, Ask, MAX_OBJECT};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// So long an attack lasts.
const LASTS: Duration = Duration::from_secs(10);

/// The most memory that the agent has had at any time, in bytes.
fn peak_memory(host: &Host) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", host.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Watches for a while that the agent does not get larger by more than this.
fn stays_small(host: &Host, before: u64, most: u64) {
    let begun = Instant::now();
    while begun.elapsed() < LASTS {
        let grown = peak_memory(host).saturating_sub(before) / MIB;
        assert!(grown < most, "{grown} MiB after {:?}", begun.elapsed());
        thread::sleep(Duration::from_millis(100));
    }
    println!("{} MiB", peak_memory(host).saturating_sub(before) / MIB);
}

/// The handover of a very scattered image, of which 64 MiB come, and then a byte now and then.
fn begin_long_message(stream: &mut BlockingStream) {
    let head = [&MAX_CONTROL.to_le_bytes()[..], &[0, 1, 1]].concat();
    let some = vec![0; MIB as usize];
    let mut going = stream.write_both(&head, &[]).is_ok();
    for _ in 0..64 {
        going = going && stream.write_both(&some, &[]).is_ok();
    }
    while going {
        thread::sleep(Duration::from_secs(1));
        going = stream.write_both(&[0], &[]).is_ok();
    }
}

#[test]
fn messages_that_are_not_finished_do_not_fill_the_memory() {
    let lab = lab(ALL_RIGHTS, "");
    let attacker = Attacker::new(&lab, "hostb");
    let open = |migration: u128| {
        attacker.ask(&lab.a, &prepare(migration * 10)).unwrap();
        let migration = Some(MigrationId(migration * 10));
        let stream = attacker.open(&lab.a, StreamKind::Control, migration).unwrap();
        let _inside = attacker.runtime.enter();
        stream.into_blocking().unwrap()
    };
    let mut streams: Vec<_> = (1..=10).map(open).collect();
    let closers: Vec<_> = streams.iter().map(BlockingStream::closer).collect();
    let before = peak_memory(&lab.a);
    thread::scope(|scope| {
        for stream in &mut streams {
            scope.spawn(|| begin_long_message(stream));
        }
        let watched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stays_small(&lab.a, before, 320);
            // Whatever else it wants, it gets.
            let known = attacker.ask(&lab.a, &Request::Identify);
            assert!(matches!(known, Ok(Reply::Identity { .. })), "{known:?}");
        }));
        closers.iter().for_each(dray_net::stream::Closer::close);
        watched.unwrap_or_else(|why| std::panic::resume_unwind(why));
    });
}

#[test]
fn answers_that_are_not_taken_do_not_fill_the_memory() {
    let store = tempfile::tempdir().unwrap();
    let lab = lab(ALL_RIGHTS, &format!("[backup_store]\npath = \"{}\"\n", store.path().display()));
    let attacker = Attacker::new(&lab, "hostb");
    let open = || attacker.open_blocking(&lab.a, StreamKind::Store).unwrap();
    let object = vec![7; MAX_OBJECT as usize];
    let put = store::encode(&Ask::PutNew { name: "packs/1".to_owned() }, object.len()).unwrap();
    let mut first = open();
    first.write_both(&put, &object).unwrap();
    first.read_all_or_end(&mut [0; 8]).unwrap();
    drop(first);
    let before = peak_memory(&lab.a);
    let get = Ask::Get { name: "packs/1".to_owned(), limit: MAX_OBJECT };
    let get = store::encode(&get, 0).unwrap();
    let ask = |_| {
        let mut stream = open();
        stream.write_both(&get, &[]).unwrap();
        stream
    };
    let streams: Vec<_> = (0..40).map(ask).collect();
    stays_small(&lab.a, before, 256);
    // Who takes his answer makes room for the others.
    thread::scope(|scope| {
        for mut stream in streams {
            let object = &object;
            scope.spawn(move || {
                let mut answer = vec![0; 8 + 1];
                assert!(stream.read_all_or_end(&mut answer).unwrap());
                let mut body = vec![0; MAX_OBJECT as usize];
                assert!(stream.read_all_or_end(&mut body).unwrap() && body == *object);
            });
        }
    });
}
