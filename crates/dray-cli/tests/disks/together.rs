//! One image takes part in one operation at a time, however many commands ask for it at once.

use crate::case::{BLOCKS, IMAGE};
use crate::guest::{self, BLOCK};
use crate::lab::{Host, Lab, wait_for};
use crate::refusals::{CONFLICT, refused};
use std::process::Output;
use std::time::Duration;

/// Longest wait for anything.
const END: Duration = Duration::from_secs(45);
/// So often two commands are given at once.
const ROUNDS: usize = 20;
/// A migration that stays in its copy for as long as a test looks at it.
const SLOW: [&str; 5] = ["--strategy", "pre-copy", "--bandwidth", "1Mbit", "--detach"];

fn three() -> (Lab, Host) {
    let mut lab = Lab::new();
    let mut c = lab.third();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
    lab.start();
    c.start();
    lab.a.add(IMAGE);
    (lab, c)
}

fn migrate(from: &Host, to: &str, how: &[&str]) -> Output {
    from.dray(&[&["migrate", "--image", IMAGE, "--to", to], how].concat())
}

fn begun(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn owns(host: &Host) -> bool {
    host.image(IMAGE).is_some_and(|image| image["state"] == "owner")
}

/// The migration that is shown as the newest.
fn newest(host: &Host) -> String {
    host.migrations()[0]["migration"].as_str().unwrap().to_owned()
}

/// Two commands at once.
fn both<T: Send>(one: impl FnOnce() -> T + Send, other: impl FnOnce() -> T) -> [T; 2] {
    std::thread::scope(|scope| {
        let one = scope.spawn(one);
        let other = other();
        [one.join().unwrap(), other]
    })
}

/// Ends every migration of a host, and leaves nothing of it anywhere.
fn end_all(host: &Host) {
    for shown in host.migrations() {
        if shown["state"] == "running" || shown["state"] == "prepared" {
            let migration = shown["migration"].as_str().unwrap();
            host.dray(&["cancel", migration, "--discard"]);
        }
    }
}

#[test]
fn what_was_cancelled_is_not_resumed_beside_another_migration() {
    let (lab, c) = three();
    begun(&migrate(&lab.a, "hostb", &SLOW));
    let first = newest(&lab.a);
    let copied = || lab.a.progress().is_some_and(|(_, p)| p["total"]["bytes_done"] != 0);
    wait_for("the copy", END, copied).unwrap();
    begun(&lab.a.dray(&["cancel", &first]));
    begun(&migrate(&lab.a, "hostc", &SLOW));
    refused(&lab.a, &["resume", &first, "--detach"], CONFLICT, &["takes part in migration"]);
    end_all(&lab.a);
    // Once the image has left, and after it came back.
    begun(&migrate(&lab.a, "hostc", &[]));
    wait_for("the arrival", END, || owns(&c)).unwrap();
    refused(&lab.a, &["resume", &first, "--detach"], CONFLICT, &["does not own"]);
    begun(&migrate(&c, "hosta", &[]));
    wait_for("the return", END, || {
        owns(&lab.a) && lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null())
    })
    .unwrap();
    refused(&lab.a, &["resume", &first, "--detach"], CONFLICT, &["has been away", "migrate"]);
    // A new migration to that host is told apart from the old one.
    begun(&migrate(&lab.a, "hostb", &[]));
    wait_for("the arrival", END, || owns(&lab.b)).unwrap();
    assert!(!owns(&lab.a) && !owns(&c));
    let epoch = |host: &Host| host.image(IMAGE).map(|image| image["epoch"].as_u64());
    assert!(epoch(&lab.b) > epoch(&c), "{:?} {:?}", epoch(&lab.b), epoch(&c));
}

#[test]
fn of_two_migrations_of_an_image_one_begins() {
    let (lab, c) = three();
    for round in 0..ROUNDS {
        if round % 2 == 1 {
            for to in ["hostb", "hostc"] {
                begun(&lab.a.dray(&["prepare", "--image", IMAGE, "--to", to]));
            }
        }
        let to = |host: &'static str| migrate(&lab.a, host, &SLOW);
        let tried = both(|| to("hostb"), || to("hostc"));
        let accepted = tried.iter().filter(|tried| tried.status.success()).count();
        assert_eq!(accepted, 1, "round {round}: {tried:?}");
        end_all(&lab.a);
        let free = || lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null());
        wait_for("the end", END, free).unwrap();
        assert!(owns(&lab.a) && !owns(&lab.b) && !owns(&c), "round {round}");
    }
}

#[test]
fn an_image_that_grew_after_it_was_prepared_is_not_handed_over() {
    let (lab, _c) = three();
    begun(&lab.a.dray(&["prepare", "--image", IMAGE, "--to", "hostb"]));
    let larger = ((BLOCKS + 8) * BLOCK).to_string();
    begun(&lab.a.dray(&["resize", IMAGE, &larger]));
    let args = ["migrate", "--image", IMAGE, "--to", "hostb"];
    refused(&lab.a, &args, CONFLICT, &["has grown", "cancel"]);
    assert!(owns(&lab.a) && !owns(&lab.b));
    end_all(&lab.a);
    begun(&migrate(&lab.a, "hostb", &[]));
    wait_for("the arrival", END, || owns(&lab.b)).unwrap();
}

/// Whichever comes first, the other one is refused.
#[test]
fn an_image_is_not_removed_or_resized_while_a_migration_of_it_begins() {
    let (lab, _c) = three();
    for round in 0..ROUNDS {
        let size = ((BLOCKS + 8 * (round as u64 + 1)) * BLOCK).to_string();
        let remove: &[&str] = match round % 2 {
            0 => &["images", "remove", IMAGE],
            _ => &["resize", IMAGE, &size],
        };
        let act = || {
            std::thread::sleep(Duration::from_millis(round as u64 * 2));
            lab.a.dray(remove)
        };
        let [acted, moved] = both(act, || migrate(&lab.a, "hostb", &SLOW));
        let bound = lab.a.image(IMAGE).is_some_and(|image| !image["migration"].is_null());
        assert_eq!(bound, moved.status.success(), "round {round}: {acted:?} {moved:?}");
        // An image that was resized first moves as it is then.
        let both = acted.status.success() && moved.status.success();
        assert!(!both || round % 2 == 1, "round {round}: {acted:?} {moved:?}");
        end_all(&lab.a);
        if lab.a.image(IMAGE).is_none() {
            lab.a.add(IMAGE);
        }
    }
}
