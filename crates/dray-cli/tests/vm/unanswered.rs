//! QEMU does what it was asked, and nobody hears the answer: the disk is where QEMU has it.

use crate::home::assert_back_home;
use crate::restart::{dies, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Longer than dray waits for a monitor to greet it.
const BUSY: Duration = Duration::from_secs(90);

/// Carries lines between the client and QEMU's monitor. One command is the last that QEMU gets: its answer
/// reaches nobody. Then it ends, or goes on for whoever connects anew. A program of its own, as dray reads the
/// command line of whoever listens.
const EAVESDROPPER: &str = r#"
use IO::Socket::UNIX; use IO::Select;
my ($between, $monitor, $last, $stays) = @ARGV;
my $listener = IO::Socket::UNIX->new(Local => $between, Listen => 5) or die "listen: $!";
while (my $client = $listener->accept) {
    my $qemu = IO::Socket::UNIX->new(Peer => $monitor) or die "connect: $!";
    my ($both, $asked, %text) = (IO::Select->new($client, $qemu), 0);
    CLIENT: while (1) {
        for my $from ($both->can_read) {
            sysread($from, $text{$from}, 65536, length($text{$from} // "")) or last CLIENT;
            while ($text{$from} =~ s/^(.*\n)//) {
                my $line = $1;
                if ($from == $qemu) {
                    if ($asked && $line !~ /"event"/) {
                        exit 0 unless $stays;
                        ($last, $asked) = ("\0", 0);
                        open my $broken, ">", "$between.broken";
                        last CLIENT;
                    }
                    syswrite $client, $line unless $asked;
                    next;
                }
                if ($line =~ /"$last"/) { $asked = 1; $both->remove($client); close $client }
                syswrite $qemu, $line;
                last if $asked;
            }
        }
    }
    exit 1 if $asked;
}"#;

pub struct Eavesdropper {
    pub socket: PathBuf,
    process: Child,
}

impl Eavesdropper {
    /// On the way to the monitor of the stage's QEMU, up to the answer to `last`.
    fn start(stage: &Stage, last: &str) -> Self {
        Self::between(&stage.source.qmp_path(), stage.source.pid(), [last, ""])
    }

    /// The same, which breaks once and lets its clients through after that.
    fn once_at_source(stage: &Stage, last: &str) -> Self {
        Self::between(&stage.source.qmp_path(), stage.source.pid(), [last, "stays"])
    }

    /// On the way to the monitor of the QEMU that waits at the target. The connection breaks at `last`, once.
    pub fn once(stage: &Stage, last: &str) -> Self {
        let target = stage.target.as_ref().expect("target");
        Self::between(&target.qmp_path(), target.pid(), [last, "stays"])
    }

    fn between(monitor: &Path, pid: u32, how: [&str; 2]) -> Self {
        let socket = monitor.with_extension("between");
        let mut perl = Command::new("perl");
        perl.args(["-e", EAVESDROPPER, "--"]).args([&socket, monitor]).args(how);
        let process = perl.args(arguments_of(pid)).spawn().expect("perl");
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "nobody listens");
            std::thread::sleep(Duration::from_millis(10));
        }
        Self { socket, process }
    }

    /// Waits until QEMU has answered to what nobody hears the answer of: the client may have given up before. False
    /// when it was never asked.
    pub fn is_broken(&self) -> bool {
        let (broken, deadline) =
            (self.socket.with_extension("between.broken"), Instant::now() + PATIENCE);
        while !broken.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        broken.exists()
    }

    /// Whether it came to what breaks the connection, and ended there.
    fn has_broken(mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.process.try_wait().expect("wait") {
                Some(status) => return status.success(),
                None if Instant::now() >= deadline => return false,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Eavesdropper {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// QEMU's arguments: dray reads in them how the nodes of its disks are made.
fn arguments_of(pid: u32) -> Vec<String> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).expect("a command line");
    line.split_terminator('\0').skip(1).map(str::to_owned).collect()
}

fn images(stage: &Stage) -> Vec<Value> {
    let images = stage.lab.host("a").json(&["images"]).expect("images");
    images.as_array().cloned().expect("a list")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

#[test]
fn a_disk_that_qemu_took_without_saying_so_stays_on_dray_until_it_is_released() {
    let name = "unanswered-adopt";
    let Some(mut stage) = Stage::new(name, &[Kind::Qcow2], 4 << 20) else { return };
    stage.assert_guest_is_well();
    let between = Eavesdropper::start(&stage, "blockdev-reopen");
    let args = ["adopt", "--qmp", text(&between.socket)];
    let adopted = stage.lab.host("a").dray(&args).expect("adopt");
    assert!(between.has_broken(), "it never came to the exchange: {adopted:?}");
    assert_ne!(adopted.code, 0, "{adopted:?}");
    assert!(adopted.stderr.contains("`dray release`"), "{adopted:?}");
    let known = images(&stage);
    assert_eq!(known.len(), 1, "{known:?}");
    assert_eq!(known[0]["clients"], 1, "QEMU is on it: {known:?}");
    stage.assert_guest_is_well();
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// Nobody knows where the disk is: dray takes no lock that could end QEMU, believes no line, and neither moves
/// nor backs up what it has. The next look settles it.
#[test]
fn a_disk_that_qemu_took_back_without_saying_so_is_released_by_the_next_look() {
    let name = "unanswered-release";
    let Some(mut stage) = Stage::new(name, &[Kind::Qcow2], 4 << 20) else { return };
    let qmp = stage.source_qmp();
    let adopted = stage.lab.host("a").dray(&["adopt", "--qmp", &qmp]).expect("adopt");
    assert_eq!(adopted.code, 0, "{adopted:?}");
    let between = Eavesdropper::start(&stage, "blockdev-reopen");
    let args = ["release", "--qmp", text(&between.socket)];
    let released = stage.lab.host("a").dray(&args).expect("release");
    assert!(between.has_broken(), "it never came to the exchange: {released:?}");
    assert_ne!(released.code, 0, "{released:?}");
    stage.assert_guest_is_well();
    let known = images(&stage);
    let image = known[0]["name"].as_str().expect("a name");
    let moved = stage.lab.host("a").dray(&["migrate", "--image", image, "--to", "hostb"]);
    let moved = moved.expect("migrate");
    assert_eq!(moved.code, 6, "{moved:?}\n{}", stage.logs());
    assert!(moved.stderr.contains("in use elsewhere"), "{moved:?}");
    // The look that the error names.
    let looked = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert!(looked.stderr.contains("no disk of the vm is on this agent's socket"), "{looked:?}");
    assert!(
        images(&stage).iter().all(|image| image["state"] == "released"),
        "{:?}",
        images(&stage)
    );
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The last step of a migration: the connection breaks when the target's QEMU takes its disk, and nobody hears that
/// it has. It is asked again, and dray takes no lock that could end it.
#[test]
fn a_last_step_that_qemu_took_without_saying_so_is_asked_for_again() {
    let name = "unanswered-last";
    let Some(mut stage) = Stage::new(name, &[Kind::Qcow2], 4 << 20) else { return };
    let answer = stage.prepared_with(&[]);
    let prepared = answer.json().unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.start_target(&prepared);
    let between = Eavesdropper::once(&stage, "blockdev-reopen");
    let (source, target) = (stage.source_qmp(), text(&between.socket).to_owned());
    let args = ["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", &target];
    let migrated = stage.lab.host("a").dray(&args).expect("migrate");
    assert!(between.is_broken(), "it never came to the exchange: {migrated:?}");
    assert_eq!(migrated.code, 0, "{migrated:?}\n{}", stage.logs());
    let known = stage.lab.host("b").json(&["images"]).expect("images");
    let known = known.as_array().expect("a list");
    assert!(known.iter().all(|image| image["state"] == "released"), "{known:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// The agent that gave the disk back is gone, and the next one cannot ask: somebody else has the monitor. It waits.
#[test]
#[ignore = "long: make long"]
fn a_last_step_that_another_agent_began_is_not_over_before_qemu_was_asked() {
    let Some(mut stage) = Stage::new("unanswered-begun", &[Kind::Qcow2], 4 << 20) else { return };
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", "ReleasePivoted");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("b"));
    let taken = UnixStream::connect(stage.target_qmp()).expect("the monitor");
    let b = stage.lab.host("b");
    b.start().expect("restart");
    let says = |status: &Value| status.to_string().contains("the exchange of the disk");
    let waits = b.wait_status(BUSY, says);
    waits.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    drop(taken);
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    let known = stage.lab.host("b").json(&["images"]).expect("images");
    let known = known.as_array().expect("a list");
    assert!(known.iter().all(|image| image["state"] == "released"), "{known:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// The connection to the source's QEMU breaks while the guest stands still for the exchange. That is not the end of
/// the VM, whose guest goes on.
#[test]
fn a_guest_that_stands_still_when_the_connection_breaks_goes_on() {
    let Some(mut stage) = Stage::new("unanswered-flatten", &[Kind::Chain], 2_000_000) else {
        return;
    };
    let between = Eavesdropper::once_at_source(&stage, "job-complete");
    let (source, target) = (text(&between.socket), stage.target_qmp());
    let a = stage.lab.host("a");
    let args = ["--json", "prepare", "--qmp", source, "--to", "hostb", "--chain", "flatten"];
    let prepared = a.dray(&args).expect("prepare").json().expect("it is prepared");
    stage.start_target(&prepared);
    let a = stage.lab.host("a");
    let args = ["migrate", "--qmp", source, "--to", "hostb", "--target-qmp", &target];
    let migrated = a.dray(&args).expect("migrate");
    assert!(between.is_broken(), "it never came to the exchange: {migrated:?}");
    let deadline = Instant::now() + PATIENCE;
    let runs = |stage: &Stage| {
        let answer = qmp(&stage.other_monitor(), "{\"execute\":\"query-status\"}");
        answer["return"]["running"] == true
    };
    while !runs(&stage) {
        assert!(Instant::now() < deadline, "it stands still: {migrated:?}\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    stage.target = None;
    stage.assert_guest_is_well();
    let shown = stage.lab.host("a").json(&["status"]).expect("status");
    for id in shown.as_array().expect("a list").iter().flat_map(|one| one["migration"].as_str()) {
        stage.lab.host("a").dray(&["cancel", id]).expect("cancel");
    }
    while images(&stage) != [] as [Value; 0] {
        let said = stage.lab.host("a").dray(&["release", "--qmp", source]).expect("release");
        assert!(Instant::now() < deadline, "it does not go home: {said:?}\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_back_home(&mut stage);
}

/// QEMU sends the guest's memory then, and stops the guest when most is sent, for whoever would continue it. What
/// the agent sees first, that there is no answer or that the connection is closed, is chance.
#[test]
fn a_guest_whose_memory_moves_without_an_answer_goes_on() {
    let name = "unanswered-migrate";
    let Some(mut stage) = Stage::new(name, &[Kind::Plain], 1_000_000) else { return };
    for _ in 0..2 {
        move_unanswered(&mut stage);
    }
    assert_back_home(&mut stage);
}

fn move_unanswered(stage: &mut Stage) {
    let between = Eavesdropper::once_at_source(stage, r#"execute":"migrate"#);
    let (source, target) = (text(&between.socket), stage.target_qmp());
    let args = ["--json", "prepare", "--qmp", source, "--to", "hostb"];
    let prepared =
        stage.lab.host("a").dray(&args).expect("prepare").json().expect("it is prepared");
    stage.start_target(&prepared);
    let args = ["migrate", "--qmp", source, "--to", "hostb", "--target-qmp", &target];
    let migrated = stage.lab.host("a").dray(&args).expect("migrate");
    assert!(between.is_broken(), "its memory was never moved: {migrated:?}");
    assert_ne!(migrated.code, 0, "{migrated:?}");
    let deadline = Instant::now() + PATIENCE;
    let ask = |command: &str| qmp(&stage.other_monitor(), &format!(r#"{{"execute":"{command}"}}"#));
    let is_over = || {
        let sent = ask("query-migrate")["return"]["status"].clone();
        let over = matches!(sent.as_str(), None | Some("cancelled" | "failed"));
        over && ask("query-status")["return"]["running"] == true
    };
    while !is_over() {
        assert!(Instant::now() < deadline, "it does not go on: {migrated:?}\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    stage.target = None;
    stage.assert_guest_is_well();
    // It was adopted for the migration, and goes back behind the same monitor.
    while images(stage) != [] as [Value; 0] {
        assert!(
            Instant::now() < deadline,
            "its disk stays on dray: {migrated:?}\n{}",
            stage.logs()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    std::fs::remove_file(&between.socket).expect("its socket");
    std::fs::remove_file(between.socket.with_extension("between.broken")).expect("its mark");
}
