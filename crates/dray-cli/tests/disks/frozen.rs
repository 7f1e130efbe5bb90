//! A guest that a backup has frozen thaws, whatever happens to the agent.

use crate::backups::{image, repository};
use crate::lab::{Lab, wait_for};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// A guest agent: one client at a time, and freezing takes it `freezes`.
fn guest_agent(socket: &PathBuf, freezes: Duration) -> Receiver<String> {
    let listener = UnixListener::bind(socket).expect("bind");
    let (said, heard) = channel();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            while let Some(asked) = next(&mut client) {
                let command = asked["execute"].as_str().expect("a command").to_owned();
                let answer = match command.as_str() {
                    "guest-sync-delimited" => asked["arguments"]["id"].clone(),
                    _ => json!(1),
                };
                if said.send(command.clone()).is_err() {
                    return;
                }
                if command == "guest-fsfreeze-freeze" {
                    std::thread::sleep(freezes);
                }
                // Who has gone hears nothing.
                let _ = client.write_all(format!("{}\n", json!({ "return": answer })).as_bytes());
            }
        }
    });
    heard
}

/// The next command, if there is one.
fn next(client: &mut UnixStream) -> Option<Value> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        if client.read(&mut byte).unwrap_or(0) == 0 {
            return None;
        }
        if byte[0] != 0xff {
            line.push(byte[0]);
        }
    }
    Some(serde_json::from_slice(&line).expect("JSON"))
}

fn hears(heard: &Receiver<String>, command: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let said = heard.recv_timeout(left);
        match said {
            Ok(said) if said == command => return,
            Ok(_) => {}
            Err(why) => panic!("the guest was never asked to {command}: {why}"),
        }
    }
}

fn backup(url: &str, socket: &PathBuf) -> Value {
    json!({"backup": {"images": ["disk.img"], "to": url, "fsfreeze": socket}})
}

#[test]
fn a_guest_whose_agent_dies_while_it_is_frozen_thaws() {
    let mut lab = Lab::new();
    lab.a.start();
    let url = repository(&lab);
    image(&lab, "disk.img");
    lab.a.stop();
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Backup-Turned")]);
    let socket = lab.a.pool().join("guest.sock");
    let heard = guest_agent(&socket, Duration::ZERO);
    assert!(lab.a.ask(backup(&url, &socket)).is_err());
    wait_for("the death", PATIENCE, || lab.a.has_died()).unwrap();
    hears(&heard, "guest-fsfreeze-freeze");
    assert!(heard.try_iter().all(|said| said != "guest-fsfreeze-thaw"), "nobody was there to ask");
    lab.a.start();
    hears(&heard, "guest-fsfreeze-thaw");
    // Nothing is left to be done: the next one begins at once.
    wait_for("the next", PATIENCE, || lab.a.ask(backup(&url, &socket)).is_ok()).unwrap();
    hears(&heard, "guest-fsfreeze-thaw");
}

/// The guest agent writes its guest's caches to a disk of which the agent that ends has cut it off.
#[test]
fn an_agent_that_is_told_to_end_while_a_guest_freezes_ends_in_order() {
    let mut lab = Lab::new();
    lab.a.start();
    let url = repository(&lab);
    image(&lab, "disk.img");
    let socket = lab.a.pool().join("guest.sock");
    let heard = guest_agent(&socket, Duration::from_secs(8));
    let order = backup(&url, &socket);
    // It keeps a line from now on.
    lab.a.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    let api = lab.a.api();
    let asked = std::thread::spawn(move || crate::lab::ask(&api, order));
    hears(&heard, "guest-fsfreeze-freeze");
    let began = Instant::now();
    lab.a.signal("TERM");
    wait_for("the end", PATIENCE, || lab.a.has_died()).unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(5), "it waited {took:?} for the guest");
    assert!(asked.join().expect("no panic").is_err());
    hears(&heard, "guest-fsfreeze-thaw");
    lab.a.start();
    // Its line was written down: the next backup need not read everything.
    let done = lab.a.ask(json!({"backup": {"images": ["disk.img"], "to": url}})).unwrap();
    assert_eq!(done["images"][0]["changed_bytes"], 0, "{done}");
}
