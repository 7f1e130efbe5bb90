//! Two images move from the first host to the second while clients use them, and go on to be used
//! there; or they are used again after the power was cut. Every change that can be seen from outside is marked.

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
    let clients = start_clients(hosts, order, &notes, |_| Ok(Some(0)))?;
    let aside = Duration::from_millis(order.number("aside_ms")?);
    mark(&notes, "before")?;
    std::thread::sleep(aside);
    mark(&notes, "begin")?;
    let names: Vec<_> = images.iter().map(|image| &image.name).collect();
    let tuning = order.get("throttle").map(|throttle| json!({"throttle": throttle}));
    let migrate = json!({"migrate": {
        "subject": {"images": {"names": names}}, "to": "hostb",
        "strategy": order.get("strategy"), "detach": true,
        "tuning": tuning.unwrap_or_else(|| json!({})),
        "bandwidth": {"bytes_per_second": order.number::<u64>("rate")?},
    }});
    wait_for("the migration", || match hosts[0].ask(&migrate) {
        Ok(_) => Ok(true),
        // On a busy machine an emulated one may not answer in time.
        Err(why) if why.contains(r#""kind":"peer""#) => Ok(false),
        Err(why) => Err(why),
    })?;
    follow(hosts, &clients, &notes, &mut Restart::read(order)?)?;
    finish(order, &notes, clients)
}

/// The power is back: the clients go on with requests from `dray.first`, while the hosts settle what
/// was under way.
pub fn go_on(hosts: &mut [Host], order: &Order) -> Result<Value, String> {
    let notes = open_notes()?;
    let owner = |image: &str| Ok(hosts.iter().position(|host| owns(host, image)));
    let clients = start_clients(hosts, order, &notes, owner)?;
    let mut restart = Restart::read(order)?;
    mark(&notes, "again")?;
    restart.reached("again");
    follow(hosts, &clients, &notes, &mut restart)?;
    finish(order, &notes, clients)
}

/// The clients go on for a while when all is over.
fn finish(order: &Order, notes: &Notes, clients: Vec<Client>) -> Result<Value, String> {
    mark(notes, "after")?;
    std::thread::sleep(Duration::from_millis(order.number("aside_ms")?));
    mark(notes, "end")?;
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

/// Starts a client of each image at its owner's host, as soon as it has one.
fn start_clients(
    hosts: &[Host],
    order: &Order,
    notes: &Arc<Notes>,
    owner: impl Fn(&str) -> Result<Option<usize>, String>,
) -> Result<Vec<Client>, String> {
    let pause = Duration::from_millis(order.number("pause_ms")?);
    let first = order.number("first")?;
    let [a, b] = hosts else { return Err("two hosts are needed".to_owned()) };
    let mut clients = Vec::new();
    for Image { name, script, .. } in crate::images(order)? {
        let mut at = None;
        wait_for("an owner", || {
            at = owner(&name)?;
            Ok(at.is_some())
        })?;
        let (nbd, at) = ([a.nbd(), b.nbd()], at.unwrap_or(0));
        clients.push(Client::start(Plan { name, script, nbd, at, first, pause }, notes));
    }
    Ok(clients)
}

/// An agent that is killed in a phase and started again, some times, with a pause before each:
/// `dray.restart=HOST:PHASE:TIMES:MILLISECONDS`.
struct Restart {
    host: usize,
    phase: String,
    left: u64,
    pause: Duration,
    /// When next.
    due: Option<Instant>,
}

impl Restart {
    fn read(order: &Order) -> Result<Self, String> {
        let text = order.get("restart").unwrap_or("a:never:0:0");
        let [host, phase, times, pause] = text.split(':').collect::<Vec<_>>()[..] else {
            return Err(format!("no restart: {text}"));
        };
        let number = |text: &str| text.parse::<u64>().map_err(|why| format!("{text}: {why}"));
        Ok(Self {
            host: usize::from(host == "b"),
            phase: phase.to_owned(),
            left: number(times)?,
            pause: Duration::from_millis(number(pause)?),
            due: None,
        })
    }

    fn reached(&mut self, phase: &str) {
        if phase == self.phase && self.left > 0 {
            self.due = Some(Instant::now() + self.pause);
        }
    }

    fn run(&mut self, hosts: &mut [Host], notes: &Notes) -> Result<(), String> {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        self.left -= 1;
        let host = &mut hosts[self.host];
        host.kill().map_err(|why| why.to_string())?;
        mark(notes, &format!("killed-{}", host.letter))?;
        host.start().map_err(|why| why.to_string())?;
        await_agent(host)?;
        self.due = (self.left > 0).then(|| Instant::now() + self.pause);
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
