//! Two images move from the first host to the second while clients use them, and go on to be used
//! there. Every change that can be seen from outside is marked.

use crate::agent::Host;
use crate::client::{Client, Plan};
use crate::notes::Notes;
use crate::order::Order;
use crate::{Image, await_agent, wait_for};
use dray_guest::note::Note;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn run(hosts: &mut [Host], order: &Order) -> Result<Value, String> {
    let notes = open_notes()?;
    let images = crate::images(order)?;
    for Image { name, growable, .. } in &images {
        let path = format!("/a/pool/{name}");
        hosts[0].ask(&json!({"image-add": {"name": name, "path": path, "growable": growable}}))?;
    }
    let clients = start_clients(hosts, order, [0, 0], 0, &notes)?;
    let aside = Duration::from_millis(order.number("aside_ms")?);
    mark(&notes, "before")?;
    std::thread::sleep(aside);
    mark(&notes, "begin")?;
    let names: Vec<_> = images.iter().map(|image| &image.name).collect();
    hosts[0].ask(&json!({"migrate": {
        "subject": {"images": {"names": names}}, "to": "hostb",
        "strategy": order.get("strategy"), "detach": true,
        "bandwidth": {"bytes_per_second": order.number::<u64>("rate")?},
    }}))?;
    follow(hosts, &clients, &notes, &mut Restart::read(order)?)?;
    mark(&notes, "after")?;
    std::thread::sleep(aside);
    mark(&notes, "end")?;
    let mut done = 0;
    for client in clients {
        done += client.stop()?;
    }
    Ok(json!({"requests": done}))
}

/// The partition for notes.
fn open_notes() -> Result<Arc<Notes>, String> {
    let notes = Notes::open(Path::new("/dev/vda3"));
    notes.map(Arc::new).map_err(|why| format!("the notes: {why}"))
}

/// Starts a client of each image at the host of that number, with its requests from `first`.
fn start_clients(
    hosts: &[Host],
    order: &Order,
    at: [usize; 2],
    first: u64,
    notes: &Arc<Notes>,
) -> Result<Vec<Client>, String> {
    let pause = Duration::from_millis(order.number("pause_ms")?);
    let [a, b] = hosts else { return Err("two hosts are needed".to_owned()) };
    let start = |(image, at): (Image, usize)| {
        let Image { name, script, .. } = image;
        let nbd = [a.nbd(), b.nbd()];
        Client::start(Plan { name, script, nbd, at, first, pause }, notes)
    };
    Ok(crate::images(order)?.into_iter().zip(at).map(start).collect())
}

/// An agent that is killed in a phase and started again: `dray.restart=HOST:PHASE:MILLISECONDS`.
struct Restart {
    host: usize,
    phase: String,
    after: Duration,
    /// When.
    due: Option<Instant>,
}

impl Restart {
    fn read(order: &Order) -> Result<Self, String> {
        let text = order.get("restart").unwrap_or("a:never:0");
        let [host, phase, after] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(format!("no restart: {text}"));
        };
        let after = after.parse().map(Duration::from_millis).map_err(|why| why.to_string())?;
        Ok(Self { host: usize::from(host == "b"), phase: phase.to_owned(), after, due: None })
    }

    fn reached(&mut self, phase: &str) {
        if phase == self.phase {
            self.due = Some(Instant::now() + self.after);
        }
    }

    fn run(&mut self, hosts: &mut [Host], notes: &Notes) -> Result<(), String> {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        self.due = None;
        let host = &mut hosts[self.host];
        host.kill().map_err(|why| why.to_string())?;
        mark(notes, &format!("killed-{}", host.letter))?;
        host.start().map_err(|why| why.to_string())?;
        await_agent(host)?;
        mark(notes, &format!("restarted-{}", host.letter))
    }
}

/// Lets the clients go where their images go, until nobody knows of a migration any more.
fn follow(
    hosts: &mut [Host],
    clients: &[Client],
    notes: &Notes,
    restart: &mut Restart,
) -> Result<(), String> {
    let mut phase = String::new();
    wait_for("the end of the migration", || {
        restart.run(hosts, notes)?;
        let [a, b] = &*hosts else { return Ok(true) };
        for client in clients {
            if let Some(why) = client.complaint() {
                return Err(why);
            }
            if client.at() == 0 && owns(b, client.image()) {
                client.moved_to(1);
                mark(notes, "moved")?;
            }
        }
        let now = a.migration().or_else(|| b.migration());
        let now = now.map(|migration| migration["progress"]["phase"].clone());
        if let Some(now) = now.as_ref().and_then(Value::as_str)
            && now != phase
        {
            mark(notes, now)?;
            restart.reached(now);
            now.clone_into(&mut phase);
        }
        Ok(a.open_migrations() + b.open_migrations() == 0)
    })
}

/// Whether the host owns the image.
pub fn owns(host: &Host, image: &str) -> bool {
    host.image(image).is_some_and(|image| image["state"] == "owner")
}

fn mark(notes: &Notes, text: &str) -> Result<(), String> {
    notes.write(&Note::Mark(text.to_owned())).map_err(|why| format!("notes: {why}"))
}
