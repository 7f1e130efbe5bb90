//! The link between the hosts: cut, stalled, gone for good.

use crate::case::{Case, DATA, IMAGE};
use crate::lab::Lab;
use crate::moves::SLOW;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A link that is dead for longer than the agents believe in it.
const DEAD: Duration = Duration::from_secs(3);

/// Everything the source sends to the target goes through here.
#[derive(Default)]
struct Link {
    streams: Mutex<Vec<TcpStream>>,
    closed: AtomicBool,
    stalled: AtomicBool,
}

impl Link {
    /// A lab whose source reaches its target only through the link.
    fn lab() -> (Lab, Arc<Self>) {
        let limits = "\n[limits]\nlink_dead_seconds = 1\nlink_timeout_seconds = 4\n";
        let lab = Lab::with(|name, config| {
            let through = name == "hosta";
            let config = if through { config.replace(".2:7421", ".3:7421") } else { config };
            config + limits
        });
        let target = lab.b.address.clone();
        let listener = TcpListener::bind(target.replace(".2:7421", ".3:7421")).unwrap();
        let link = Arc::new(Self::default());
        let held = Arc::clone(&link);
        std::thread::spawn(move || {
            for accepted in listener.incoming().flatten() {
                if !held.closed.load(Ordering::SeqCst) {
                    // A target that is down refuses, and so does the link.
                    let _ = held.carry(accepted, &target);
                }
            }
        });
        (lab, link)
    }

    fn carry(self: &Arc<Self>, near: TcpStream, target: &str) -> std::io::Result<()> {
        let far = TcpStream::connect(target)?;
        self.streams.lock().unwrap().extend([near.try_clone()?, far.try_clone()?]);
        for (from, to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
            let link = Arc::clone(self);
            std::thread::spawn(move || link.copy(from, to));
        }
        Ok(())
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buf = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buf) {
            while self.stalled.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(10));
            }
            if to.write_all(&buf[..count]).is_err() {
                break;
            }
        }
        // Either end may be gone already.
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }

    /// Breaks every connection; new ones may be made.
    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// No connections until it is opened again.
    fn close(&self, closed: bool) {
        self.closed.store(closed, Ordering::SeqCst);
        if closed {
            self.cut();
        }
    }
}

/// Everything the source has put on the wire in this try, over all processes of its agent.
pub fn sent(case: &Case) -> u64 {
    let summary = case.lab.a.migrations()[0]["summary"].clone();
    summary["wire_bytes"]["total"].as_u64().unwrap_or_else(|| panic!("no summary: {summary}"))
}

#[test]
fn a_copy_goes_on_where_the_link_was_cut() {
    let (lab, link) = Link::lab();
    let mut case = Case::begin_small(lab);
    case.migrate("hybrid", Some(SLOW)).unwrap();
    for part in 1..4 {
        case.await_bytes(DATA / 4 * part).unwrap();
        link.cut();
    }
    case.await_end().unwrap();
    // Each cut costs what was under way.
    assert!(sent(&case) < DATA / 2 * 3, "{} bytes sent for {DATA}", sent(&case));
    case.end().unwrap();
}

#[test]
fn a_copy_goes_on_when_a_link_that_was_silent_is_back() {
    let (lab, link) = Link::lab();
    let mut case = Case::begin_small(lab);
    case.migrate("pre-copy", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 2).unwrap();
    link.stalled.store(true, Ordering::SeqCst);
    std::thread::sleep(DEAD);
    link.stalled.store(false, Ordering::SeqCst);
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn after_handover_the_target_waits_for_the_link() {
    let (lab, link) = Link::lab();
    let mut case = Case::begin(lab, 3, &[], &[]);
    case.migrate("post-copy", Some(SLOW)).unwrap();
    case.await_shown("backfill").unwrap();
    link.close(true);
    // Longer than a migration before handover would wait.
    std::thread::sleep(DEAD * 2);
    assert_eq!(case.guest.complaint(), None);
    link.close(false);
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn a_link_that_is_gone_for_good_ends_the_migration_and_not_the_guest() {
    let (lab, link) = Link::lab();
    let mut case = Case::begin_small(lab);
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 2).unwrap();
    link.close(true);
    let watched = case.lab.a.dray(&["watch"]);
    let text = String::from_utf8_lossy(&watched.stderr).into_owned();
    assert_eq!(watched.status.code(), Some(8), "{text}");
    assert!(text.contains("link") && text.contains("hint: "), "{text}");
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    let before = case.guest.requests();
    link.close(false);
    assert!(case.lab.a.dray(&["resume"]).status.success());
    case.await_end().unwrap();
    assert!(case.guest.requests() > before);
    assert!(sent(&case) < DATA / 4 * 3, "{} bytes sent for the rest", sent(&case));
    case.end().unwrap();
}
