//! What becomes of the images when the power is back: both hosts settle it between them; a host alone
//! serves what it owns, and an operator claims the rest.

use crate::agent::Host;
use crate::moving::owns;
use crate::order::Order;
use crate::{GREETING, await_agent, wait_for};
use dray_guest::nbd::{Client, FLUSH, Fault, Request};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// An owner answers within this time: nobody is there to wait for.
const SERVES: Duration = Duration::from_secs(20);

pub fn run(hosts: &mut [Host], order: &Order) -> Result<Value, String> {
    let images: Vec<String> = crate::images(order)?.into_iter().map(|image| image.name).collect();
    match hosts {
        [a, b] => {
            wait_for("the end of the migration", || {
                hurry(a);
                hurry(b);
                Ok(settled(a, b, &images))
            })
            .map_err(|why| format!("{why}: {}", picture(hosts, &images)))?;
            Ok(report(hosts, &images, &[]))
        }
        [host] => {
            let claimed = claim(host, &images)?;
            // What was claimed stays claimed.
            host.kill().map_err(|why| why.to_string())?;
            host.start().map_err(|why| why.to_string())?;
            await_agent(host)?;
            for name in images.iter().filter(|name| owns(host, name)) {
                serves(host, name)?;
            }
            Ok(report(hosts, &images, &claimed))
        }
        _ => Err("one host or two".to_owned()),
    }
}

/// Nothing is to be seen any more of what a migration does slowly, or never: one that the power cut off before it
/// began waits for its operator.
fn hurry(host: &Host) {
    let prepared = host
        .migration()
        .filter(|migration| migration["role"] == "source" && migration["state"] == "prepared");
    if let Some(migration) = prepared {
        // What has begun meanwhile is not prepared any more.
        let _ = host.ask(&json!({"cancel": {"migration": migration["migration"]}}));
    }
    // There may be none, or none that moves now.
    let _ = host.ask(&json!({"limit": {"bandwidth": null}}));
}

/// Every image that is anywhere is whole at one host, and nobody knows of a migration.
fn settled(a: &Host, b: &Host, images: &[String]) -> bool {
    let free = |image: &Option<Value>| {
        image.as_ref().is_none_or(|image| {
            image["migration"].is_null()
                && (image["state"] != "owner" || image["missing_blocks"] == 0)
        })
    };
    let owner =
        |image: &Option<Value>| image.as_ref().is_some_and(|image| image["state"] == "owner");
    a.open_migrations() + b.open_migrations() == 0
        && images.iter().all(|name| {
            let (here, there) = (a.image(name), b.image(name));
            free(&here) && free(&there) && (owner(&here) != owner(&there))
        })
}

/// Claims what this host does not own, or not all of, as far as that can be claimed. A claim ends the
/// migration of the images beside it: they are closed, so what is left is claimed as well.
fn claim(host: &Host, images: &[String]) -> Result<Vec<String>, String> {
    let mut claimed = Vec::new();
    for _ in 0..2 {
        for name in images {
            if claimed.contains(name) || !wants_a_claim(host, name) {
                continue;
            }
            host.ask(
                &json!({"claim": {"image": name, "source_is_fenced": true, "accept_loss": true}}),
            )?;
            claimed.push(name.clone());
        }
    }
    Ok(claimed)
}

fn wants_a_claim(host: &Host, name: &str) -> bool {
    let Some(image) = host.image(name) else { return false };
    let whole = image["state"] == "owner" && image["missing_blocks"] == 0;
    let beside = image["closed"]["why"].as_str().is_some_and(|why| why.contains("was claimed"));
    image["state"] != "incoming" && (!whole || beside)
}

/// A host that owns an image lets its client go on.
fn serves(host: &Host, name: &str) -> Result<(), String> {
    let flush = Request { kind: FLUSH, forced: false, offset: 0, len: 0, data: &[] };
    let deadline = Instant::now() + SERVES;
    let wait = || Instant::now() < deadline;
    let connected = Client::connect(&host.nbd(), name, GREETING).map_err(|why| why.to_string());
    let served = connected.and_then(|mut client| match client.request(&flush, &wait) {
        Ok(_) => Ok(()),
        Err(Fault::Lost) => Err("no answer".to_owned()),
        Err(Fault::Error(error)) => Err(format!("error {error}")),
    });
    served.map_err(|why| format!("{} owns {name} and does not serve it: {why}", host.letter))
}

fn report(hosts: &[Host], images: &[String], claimed: &[String]) -> Value {
    let mut all = Map::new();
    for name in images {
        let copies = hosts.iter().filter_map(|host| {
            let image = host.image(name)?;
            Some(json!({"host": host.letter, "state": image["state"], "path": image["path"],
                "missing_blocks": image["missing_blocks"], "claimed": claimed.contains(name)}))
        });
        all.insert(name.clone(), copies.collect());
    }
    Value::Object(all)
}

fn picture(hosts: &[Host], images: &[String]) -> Value {
    let open = |host: &Host| json!({"open": host.open_migrations(), "status": host.migration()});
    json!({"images": report(hosts, images, &[]), "hosts": hosts.iter().map(open).collect::<Vec<_>>()})
}
