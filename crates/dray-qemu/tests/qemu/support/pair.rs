//! A VM whose guest moves, and the QEMU that waits for it: one qcow2 between them, and no system in the guest.

use super::NbdServer;
use super::idle::{Idle, check_image};
use dray_qemu::graph::Graph;
use dray_qemu::{
    AdoptOptions, ErrorKind, Events, Incoming, LayerPlan, Limits, Outgoing, adopt, blockdev,
    release, status,
};
use dray_testkit::guest::tools;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;

const SIZE: u64 = 16 << 20;
/// The memory goes as fast as it can.
pub const FAST: Limits = Limits { max_bandwidth: 0, downtime_limit: Duration::from_millis(300) };
/// How long what goes well may take.
pub const LONG: Duration = Duration::from_secs(20);

/// Both sides.
pub struct Pair {
    /// Where the guest is at first.
    pub source: Idle,
    /// Where it is to be.
    pub target: Waiting,
    running: bool,
    /// The source's, since the guest is as it is to stay.
    events: Events,
    plan: LayerPlan,
    server: NbdServer,
    dir: tempfile::TempDir,
}

/// A QEMU that waits for the guest. Its guest would run by itself if nobody told it not to.
pub struct Waiting {
    /// The QEMU.
    pub vm: Idle,
    /// The disk as it has it.
    pub plan: LayerPlan,
    server: NbdServer,
    events: Events,
}

/// The guest has not run for a moment either.
async fn check_stayed(events: &mut Events, what: &str) {
    while let Ok(Ok(event)) = timeout(Duration::ZERO, events.next()).await {
        assert_ne!(event.name, "RESUME", "{what}");
    }
}

impl Waiting {
    async fn start(dir: &Path, name: &str, plan: &LayerPlan) -> Self {
        let (path, socket) = (plan.path(), dir.join(format!("{name}.nbd")));
        let server = NbdServer::start_incoming(&path, &socket);
        let plan = plan.for_target(&path);
        let mut builder = Idle::builder(dir, name).incoming();
        for argument in blockdev::arguments(&[(plan.clone(), server.export())]) {
            builder = builder.blockdev(argument);
        }
        let builder = builder.disk("disk0", &blockdev::top_node(&plan));
        let vm = Idle::start(builder, dir, name).await;
        status::cont(&vm.own).await.expect("cont");
        let events = vm.own.events();
        Self { vm, plan, server, events }
    }

    /// Its guest has not run until now, and nothing was written here.
    pub async fn check_asleep(&mut self, what: &str) {
        match status::status(&self.vm.own).await {
            Ok(now) => assert!(!now.running, "{what}: the target's guest runs"),
            // A QEMU whose migration has failed ends by itself.
            Err(why) if why.kind() == ErrorKind::Closed => self.vm.wait_ended(),
            Err(why) => panic!("{what}: {why}"),
        }
        check_stayed(&mut self.events, &format!("{what}: at the target")).await;
        assert_eq!(self.server.disk().stats().writes, 0, "{what}: the target has written");
    }
}

impl Pair {
    /// The guest runs, or is paused; its disk is adopted.
    pub async fn new(running: bool) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("disk.qcow2");
        let path = image.to_string_lossy();
        tools::run("qemu-img", &["create", "-f", "qcow2", &path, &SIZE.to_string()])
            .expect("create");
        // QEMU stores it when it has finished with the image.
        tools::run("qemu-img", &["bitmap", "--add", &path, "backup"]).expect("bitmap");
        let node =
            format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={}", path.as_ref());
        let builder = Idle::builder(dir.path(), "source").blockdev(node).disk("disk0", "disk");
        let source = Idle::start(builder, dir.path(), "source").await;
        let plan = source.layers().await.remove(0);
        let server = NbdServer::start(&image, &dir.path().join("source.nbd"));
        let adopted = adopt(&source.own, &plan, &server.export(), AdoptOptions::default()).await;
        adopted.expect("adopt");
        status::cont(&source.own).await.expect("cont");
        source.io("write -P 1 0 1M").await;
        if !running {
            status::stop(&source.own).await.expect("stop");
        }
        let events = source.own.events();
        let target = Waiting::start(dir.path(), "target", &plan).await;
        Self { source, target, running, events, plan, server, dir }
    }

    /// A place in the test's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the memory goes.
    pub fn socket(&self) -> PathBuf {
        self.path("memory.sock")
    }

    /// The target's side of the beginning.
    pub async fn listen(&self) -> Incoming {
        let plans = [self.target.plan.clone()];
        let incoming = Incoming::prepare(&self.target.vm.own, &plans).await.expect("prepare");
        // A target that was killed has left it.
        std::fs::remove_file(self.socket()).ok();
        incoming.listen(&self.socket()).await.expect("listen");
        incoming
    }

    /// The source's side, until everything is sent.
    pub async fn send(&self) {
        let own = &self.source.own;
        let mut outgoing = Outgoing::start(own, &self.socket(), &FAST).await.expect("start");
        assert_eq!(outgoing.was_running(), self.running);
        outgoing.wait_pre_switchover(|_| ()).await.expect("pre-switchover");
        outgoing.complete().await.expect("complete");
    }

    /// The guest is at the source as before: it runs if it ran, and its disk is there for it.
    pub async fn check_home(&mut self, what: &str) {
        let own = &self.source.own;
        let now = status::status(own).await.expect("status");
        assert_eq!(now.running, self.running, "{what}: the source's guest is {}", now.state);
        if !self.running {
            check_stayed(&mut self.events, &format!("{what}: at the source")).await;
        }
        let graph = Graph::read(own).await.expect("graph");
        assert_eq!(graph.held_back(), None, "{what}: the source's disk is held back");
        self.source.io("write -P 2 64k 1M").await;
        self.source.io("read -P 2 64k 1M").await;
    }

    /// The disk's handover.
    pub fn hand_over(&self) {
        let quiesced = self.server.disk().quiesce(LONG).expect("nothing is in flight");
        self.server.disk().park(quiesced);
        self.target.server.take_over();
    }

    /// A guest that has stayed at the source moves, to another QEMU.
    pub async fn move_well(mut self) {
        self.target.vm.kill();
        self.target = Waiting::start(self.dir.path(), "again", &self.plan).await;
        if !self.running {
            // QEMU does not send a guest again that it has sent already, or tried to, before it has run.
            status::cont(&self.source.own).await.expect("cont");
            status::stop(&self.source.own).await.expect("stop");
        }
        let mut incoming = self.listen().await;
        self.send().await;
        incoming.wait_loaded(LONG).await.expect("loaded");
        self.target.check_asleep("moved well").await;
        self.hand_over();
        match self.running {
            true => incoming.resume().await.map(drop).expect("resume"),
            false => dray_qemu::activate(&self.target.vm.own).await.expect("activate"),
        }
        self.finish("moved well", &[(1, "0 64k"), (2, "64k 1M")]).await;
    }

    /// The guest is at the target as it was at the source. What it has written is in the image.
    pub async fn finish(mut self, what: &str, written: &[(u8, &str)]) {
        let Waiting { vm, plan, server, events } = &mut self.target;
        let now = status::status(&vm.own).await.expect("status");
        assert_eq!(now.running, self.running, "{what}: the target's guest is {}", now.state);
        if !self.running {
            check_stayed(events, &format!("{what}: at the target")).await;
        }
        let gone = status::status(&self.source.own).await.expect("status");
        assert_eq!(gone.state, "postmigrate", "{what}: at the source");
        self.source.kill();
        vm.io("write -P 5 8M 64k").await;
        let written = [written, &[(5, "8M 64k")]].concat();
        vm.check(&written).await;
        server.make_room();
        release(&vm.own, plan).await.expect("release");
        server.wait_left();
        vm.quit().await;
        let image = plan.path();
        let path = image.to_string_lossy();
        tools::run("qemu-img", &["check", &path]).expect("a sound qcow2");
        let info = tools::run("qemu-img", &["info", &path]).expect("info").stdout;
        let info = String::from_utf8_lossy(&info);
        assert!(info.contains("name: backup") && !info.contains("in-use"), "{what}: {info}");
        check_image(&image, "qcow2", &written, what);
    }
}
