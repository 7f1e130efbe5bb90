//! The program inside a machine that loses its power: two hosts' agents, each with a file system of
//! its own, and a client of the images that move between them.
//!
//! One disk has everything: the first partition is mounted at `/a`, the second at `/b`, in the third
//! are the client's notes. What to do is in [`order`]; what came out is one line `RESULT` on the
//! console, in JSON, or `FAILED` and why.
//!
//! * [`moving`]: images move while their client uses them.
//! * [`after`]: what becomes of them when the power is back, for both hosts or for one alone.
//! * [`agent`], [`client`] with its [`notes`].

mod after;
mod agent;
mod client;
mod moving;
mod notes;
mod order;

use agent::Host;
use dray_guest::script::Script;
use order::Order;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// The longest time for anything that ends by itself. On a busy machine the guest has a tenth of a core.
const PATIENCE: Duration = Duration::from_secs(900);
/// An agent that does not greet within this time is not there.
const GREETING: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(30);

fn main() {
    match run() {
        Ok(result) => println!("\nRESULT {result}"),
        Err(why) => println!("\nFAILED {why}"),
    }
}

fn run() -> Result<Value, String> {
    let order = Order::read().map_err(|why| format!("the kernel's command line: {why}"))?;
    let alone = order.get("alone");
    let wanted = ["a", "b"].into_iter().filter(|letter| alone.is_none_or(|one| one == *letter));
    let mut hosts: Vec<Host> = wanted.map(Host::new).collect();
    for host in &mut hosts {
        let device = if host.letter == "a" { "/dev/vda1" } else { "/dev/vda2" };
        let mount = ["mount", "-t", "ext4", device, &format!("/{}", host.letter)];
        busybox(&mount)?;
        host.start().map_err(|why| format!("the agent of {}: {why}", host.letter))?;
    }
    for host in &mut hosts {
        await_agent(host)?;
    }
    let result = match order.get("do") {
        Some("move") => moving::run(&mut hosts, &order),
        Some("go-on") => moving::go_on(&mut hosts, &order),
        Some("look") => after::run(&mut hosts, &order),
        other => Err(format!("no such order: {other:?}")),
    };
    for host in &mut hosts {
        let up = host.is_up();
        host.kill().map_err(|why| why.to_string())?;
        busybox(&["umount", &format!("/{}", host.letter)])?;
        if !up {
            return Err(format!("the agent of {} has died", host.letter));
        }
    }
    result
}

fn await_agent(host: &mut Host) -> Result<(), String> {
    wait_for("the agent", || Ok(host.ask(&"info".into()).is_ok() || !host.is_up()))?;
    if host.is_up() { Ok(()) } else { Err(format!("the agent of {} ends", host.letter)) }
}

/// Waits until `done` says so, or fails.
fn wait_for(what: &str, mut done: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        if Instant::now() > deadline {
            return Err(format!("{what}: not within {} s", PATIENCE.as_secs()));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// An image of the order.
struct Image {
    name: String,
    growable: bool,
    script: Script,
}

/// The images: `dray.images=NAME:fixed|growable:BLOCKS:SEEDED,…`, numbered from one.
fn images(order: &Order) -> Result<Vec<Image>, String> {
    let seed = order.number("seed")?;
    let text = order.get("images").ok_or("dray.images= is missing")?;
    let image = |(nth, text): (u64, &str)| {
        let bad = || format!("no image: {text}");
        let [name, kind, blocks, seeded] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(bad());
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| bad());
        let (blocks, seeded) = (number(blocks)?, number(seeded)?);
        let script = Script { image: nth, blocks, seeded, seed };
        Ok(Image { name: name.to_owned(), growable: kind == "growable", script })
    };
    (1..).zip(text.split(',')).map(image).collect()
}

fn busybox(args: &[&str]) -> Result<(), String> {
    let output = Command::new("/bin/busybox").args(args).output();
    let output = output.map_err(|why| format!("{args:?}: {why}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{args:?}: {}", String::from_utf8_lossy(&output.stderr)))
}
