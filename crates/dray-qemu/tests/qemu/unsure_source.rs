//! A monitor that goes wrong at any command of a migration's source, or of its end there: what is told is so,
//! the target's guest does not run, and giving up over a good monitor brings the guest back, from where it can
//! move again. A paused guest stays paused.

use crate::support::pair::{FAST, Pair};
use crate::support::walk::{Slip, walk};
use dray_qemu::{Error, Limits, Outgoing, Qmp, migrate, status};
use dray_testkit::guest::tools;
use std::path::Path;
use std::time::Duration;

/// The memory is still on its way when it is given up.
const SLOW: Limits = Limits { max_bandwidth: 16 << 10, downtime_limit: Duration::from_millis(1) };
/// One of so many runs in `make test`.
const SOME: usize = 70;

/// How far the source has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Stage {
    OnTheWay,
    PreSwitchover,
    Completed,
}

/// Sends the guest as far as that. `sent` is there when it has begun.
async fn send(
    qmp: &Qmp,
    socket: &Path,
    to: Stage,
    sent: &mut Option<Outgoing>,
) -> Result<(), Error> {
    let limits = if to == Stage::OnTheWay { SLOW } else { FAST };
    let outgoing = sent.insert(Outgoing::start(qmp, socket, &limits).await?);
    if to >= Stage::PreSwitchover {
        outgoing.wait_pre_switchover(|_| ()).await?;
    }
    if to == Stage::Completed {
        outgoing.complete().await?;
    }
    Ok(())
}

/// What the source is told is so.
async fn check_told(pair: &mut Pair, told: &Result<(), Error>, begun: bool, what: &str) {
    match told {
        Ok(()) => {
            let own = &pair.source.own;
            let now = migrate::progress(own).await.expect("progress").status;
            assert_eq!(now, "completed", "{what}: told is that all is sent");
            let runs = status::status(own).await.expect("status").running;
            assert!(!runs, "{what}: told is that all is sent");
        }
        Err(why) if why.kind().is_unknown() => {}
        Err(why) => {
            let what = format!("{what}: told is {why}");
            if !begun {
                let now = migrate::progress(&pair.source.own).await.expect("progress").status;
                assert_eq!(now, "none", "{what}");
            }
            pair.check_home(&what).await;
        }
    }
}

/// The guest is sent over a monitor that goes wrong, and given up over it if that has begun, as an agent does
/// it; the commands that this takes.
async fn goes_out(running: bool, slip: Slip) -> Vec<String> {
    let mut pair = Pair::new(running).await;
    let what = format!("running {running}, {slip}");
    let _incoming = pair.listen().await;
    let line = slip.connect(&pair.source.monitor(), &pair.path("proxy.qmp")).await;
    let mut sent = None;
    let told = send(&line.qmp, &pair.socket(), Stage::Completed, &mut sent).await;
    assert!(!slip.is_none() || told.is_ok(), "{what}: {told:?}");
    check_told(&mut pair, &told, sent.is_some(), &what).await;
    let abandoned = match &mut sent {
        Some(outgoing) => outgoing.abandon().await.is_ok(),
        None => false,
    };
    comes_home(&mut pair, running, abandoned, &what).await;
    let heard = line.end().await;
    stays_home(pair, &what).await;
    heard
}

/// The guest is sent as far as that, and given up over a monitor that goes wrong; the commands that this takes.
async fn is_given_up(stage: Stage, running: bool, slip: Slip) -> Vec<String> {
    let mut pair = Pair::new(running).await;
    let what = format!("{stage:?}, running {running}, {slip}");
    let _incoming = pair.listen().await;
    let own = &pair.source.own;
    send(own, &pair.socket(), stage, &mut None).await.expect("sent");
    let line = slip.connect(&pair.source.monitor(), &pair.path("proxy.qmp")).await;
    let told = Outgoing::attach(&line.qmp, running).abandon().await;
    assert!(!slip.is_none() || told.is_ok(), "{what}: {told:?}");
    comes_home(&mut pair, running, told.is_ok(), &what).await;
    let heard = line.end().await;
    stays_home(pair, &what).await;
    heard
}

/// The guest is given up, over a good monitor if that has not been done, and is back then.
async fn comes_home(pair: &mut Pair, running: bool, abandoned: bool, what: &str) {
    if !abandoned {
        let abandoned = Outgoing::attach(&pair.source.own, running).abandon().await;
        abandoned.unwrap_or_else(|why| panic!("{what}: and then: {why}"));
    }
    pair.check_home(what).await;
}

/// What was asked late changes nothing, the other guest has not run, and this one can move.
async fn stays_home(mut pair: Pair, what: &str) {
    pair.check_home(what).await;
    pair.target.check_asleep(what).await;
    pair.move_well().await;
}

async fn sending_goes_wrong(running: bool) {
    if tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        let what = format!("Sending, running {running}");
        walk(&what, SOME, async |slip| goes_out(running, slip).await).await;
    }
}

async fn giving_up_goes_wrong(stage: Stage) {
    if tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        for running in [true, false] {
            let what = format!("Giving up, {stage:?}, running {running}");
            walk(&what, SOME, async |slip| is_given_up(stage, running, slip).await).await;
        }
    }
}

#[tokio::test]
async fn a_running_guest_that_is_sent_comes_back() {
    sending_goes_wrong(true).await;
}

#[tokio::test]
async fn a_paused_guest_that_is_sent_stays_paused() {
    sending_goes_wrong(false).await;
}

#[tokio::test]
async fn a_guest_that_is_given_up_on_the_way_is_back() {
    giving_up_goes_wrong(Stage::OnTheWay).await;
}

#[tokio::test]
async fn a_guest_that_is_given_up_before_the_switchover_is_back() {
    giving_up_goes_wrong(Stage::PreSwitchover).await;
}

#[tokio::test]
async fn a_guest_that_is_given_up_when_all_is_sent_is_back() {
    giving_up_goes_wrong(Stage::Completed).await;
}
