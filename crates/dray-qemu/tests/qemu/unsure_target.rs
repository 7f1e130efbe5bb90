//! A monitor that goes wrong at any command of a migration's target: its guest runs only when it was asked to,
//! and a paused one not at all; what is told is so, and the same step again comes to its end.

use crate::support::pair::{LONG, Pair};
use crate::support::walk::{Slip, walk};
use dray_qemu::graph::Graph;
use dray_qemu::{Error, Incoming, Qmp, activate, migrate, status};
use dray_testkit::guest::tools;
use std::time::{Duration, Instant};

/// How long the memory may take, over a monitor that goes wrong.
const LOAD: Duration = Duration::from_secs(5);
/// One of so many runs in `make test`.
const SOME: usize = 40;

/// The target's QEMU is made ready: over a good monitor where that has failed, as an agent asks once more.
async fn prepare(pair: &mut Pair, qmp: &Qmp, slip: Slip) -> Incoming {
    let plans = [pair.target.plan.clone()];
    match Incoming::prepare(qmp, &plans).await {
        Ok(incoming) => incoming,
        Err(why) if slip.is_none() => panic!("{why}"),
        Err(why) => {
            pair.target.check_asleep(&format!("{slip}: told is {why}")).await;
            let again = Incoming::prepare(&pair.target.vm.own, &plans).await;
            again.unwrap_or_else(|why| panic!("{slip}: and then: {why}"))
        }
    }
}

/// It listens: what is told of that is so, and asked again it does.
async fn listen(pair: &Pair, incoming: Incoming, slip: Slip) -> Incoming {
    let (socket, plans) = (pair.socket(), [pair.target.plan.clone()]);
    let told = incoming.listen(&socket).await;
    let good = Incoming::prepare(&pair.target.vm.own, &plans).await;
    let good = good.unwrap_or_else(|why| panic!("{slip}: prepared again: {why}"));
    let listens = good.listens(&socket).await.expect("asked");
    match told {
        Ok(()) => assert!(listens, "{slip}: told is that it listens"),
        Err(why) if !why.kind().is_unknown() => assert!(!listens, "{slip}: told is {why}"),
        Err(_) => {}
    }
    if !listens {
        good.listen(&socket).await.unwrap_or_else(|why| panic!("{slip}: asked again: {why}"));
    }
    incoming
}

/// The memory has arrived, whatever is told; when that is told it is so.
async fn wait_loaded(pair: &mut Pair, mut incoming: Incoming, slip: Slip) -> Incoming {
    let told = incoming.wait_loaded(LOAD).await;
    assert!(!slip.is_none() || told.is_ok(), "{told:?}");
    let (own, deadline) = (&pair.target.vm.own, Instant::now() + LONG);
    loop {
        let now = migrate::progress(own).await.expect("progress").status;
        if now == "completed" {
            break;
        }
        assert!(told.is_err(), "{slip}: told is that it has loaded: {now}");
        assert!(Instant::now() < deadline, "{slip}: {now}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    pair.target.check_asleep(&format!("{slip}: loaded")).await;
    incoming
}

/// Whether what was asked for last is done: the guest runs, or QEMU has a paused guest's disks.
async fn is_started(pair: &Pair, running: bool) -> bool {
    let own = &pair.target.vm.own;
    let runs = status::status(own).await.expect("status").running;
    assert!(running || !runs, "a paused guest runs");
    let graph = Graph::read(own).await.expect("graph");
    if running { runs } else { graph.held_back().is_none() }
}

/// The guest is started, or a paused guest's disks are made active; what is told of that is so.
async fn start(pair: &Pair, qmp: &Qmp, incoming: &mut Incoming, running: bool, slip: Slip) {
    let told: Result<(), Error> = match running {
        true => incoming.resume().await.map(drop),
        false => activate(qmp).await,
    };
    let is_started = is_started(pair, running).await;
    match &told {
        Ok(()) => assert!(is_started, "{slip}: told is that it is done"),
        Err(why) if slip.is_none() => panic!("{why}"),
        // QEMU may refuse to say that it has made them active.
        Err(why) if running && !why.kind().is_unknown() => {
            assert!(!is_started, "{slip}: told is {why}");
        }
        Err(_) => {}
    }
}

/// The guest comes here over a monitor that goes wrong; the commands that this takes.
async fn comes_in(running: bool, slip: Slip) -> Vec<String> {
    let mut pair = Pair::new(running).await;
    let line = slip.connect(&pair.target.vm.monitor(), &pair.path("proxy.qmp")).await;
    let incoming = prepare(&mut pair, &line.qmp, slip).await;
    let incoming = listen(&pair, incoming, slip).await;
    pair.send().await;
    let mut incoming = wait_loaded(&mut pair, incoming, slip).await;
    pair.hand_over();
    start(&pair, &line.qmp, &mut incoming, running, slip).await;
    let heard = line.end().await;
    let own = &pair.target.vm.own;
    let again = match running {
        true => status::cont(own).await,
        false => activate(own).await,
    };
    again.unwrap_or_else(|why| panic!("{slip}: and then: {why}"));
    assert!(is_started(&pair, running).await, "{slip}");
    pair.finish(&slip.to_string(), &[(1, "0 1M")]).await;
    heard
}

async fn goes_wrong(running: bool) {
    if tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        let what = format!("Receiving, running {running}");
        walk(&what, SOME, async |slip| comes_in(running, slip).await).await;
    }
}

#[tokio::test]
async fn a_guest_runs_at_the_target_only_when_it_is_asked_to() {
    goes_wrong(true).await;
}

#[tokio::test]
async fn a_paused_guest_stays_paused_at_the_target() {
    goes_wrong(false).await;
}
