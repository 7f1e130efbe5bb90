//! A monitor that dray does not own: a manager stands in front of QEMU and passes commands through.

use crate::support::bench::{Bench, connect, plan};
use dray_qemu::qmp::{Answer, Channel, EVENT_QUEUE, Monitored};
use dray_qemu::{AdoptOptions, ErrorKind, Event, Qmp, adopt, graph, release};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::broadcast;

/// A manager that has QEMU's monitor to itself.
struct Manager {
    own: Qmp,
    events: broadcast::Sender<Event>,
    /// Number of commands that it passed through.
    passed: AtomicUsize,
    left: AtomicBool,
}

impl Manager {
    fn before(own: Qmp) -> Arc<Self> {
        let events = broadcast::channel(EVENT_QUEUE).0;
        let (passed, left) = <(AtomicUsize, AtomicBool)>::default();
        let (mut heard, to) = (own.events(), events.clone());
        tokio::spawn(async move {
            while let Ok(event) = heard.next().await {
                // An error means that nobody listens, which is fine.
                let _ = to.send(event);
            }
        });
        Arc::new(Self { own, events, passed, left })
    }

    /// What dray gets of it.
    fn monitor(self: &Arc<Self>) -> Qmp {
        let (socket, pid) = (self.own.socket().to_owned(), self.own.pid());
        let (user, version) = (self.own.user(), self.own.version());
        let monitored = Monitored { socket, pid, user, version };
        Qmp::over(Box::new(Through(Arc::clone(self))), monitored, Duration::from_secs(30))
    }
}

struct Through(Arc<Manager>);

impl Channel for Through {
    fn execute<'a>(&'a self, command: &'a str, arguments: Value) -> Answer<'a> {
        self.0.passed.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            match self.is_open() {
                true => self.0.own.execute(command, arguments).await,
                false => Err(dray_qemu::Error::new(ErrorKind::Closed, "the manager has ended")),
            }
        })
    }

    fn events(&self) -> Option<broadcast::Receiver<Event>> {
        self.is_open().then(|| self.0.events.subscribe())
    }

    fn is_open(&self) -> bool {
        !self.0.left.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn a_disk_goes_there_and_back_through_a_manager() {
    let Some(bench) = Bench::new() else { return };
    let mut vm = bench.raw_vm();
    let manager = Manager::before(connect(&vm).await);
    let monitor = manager.monitor();
    let plan = plan(&monitor).await.expect("plan");
    let before = graph::disk(&monitor, "disk0").await.expect("disk");
    let server = bench.serve();
    adopt(&monitor, &plan, &server.export(), AdoptOptions::default()).await.expect("adopt");
    let during = graph::disk(&monitor, "disk0").await.expect("disk");
    assert_eq!(during.active().protocol.driver, "nbd");
    release(&monitor, &plan).await.expect("release");
    let after = graph::disk(&monitor, "disk0").await.expect("disk");
    assert_eq!(release::differences(&before, &after), Vec::<String>::new());
    assert!(manager.passed.load(Ordering::Relaxed) > 10, "it went through the manager");

    manager.left.store(true, Ordering::Relaxed);
    let gone = graph::disk(&monitor, "disk0").await.expect_err("nobody passes it on");
    assert_eq!(gone.kind(), ErrorKind::Closed);
    assert!(monitor.events().next().await.is_err() && !monitor.is_open());
    vm.kill().expect("kill");
}
