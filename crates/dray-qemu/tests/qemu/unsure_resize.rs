//! A monitor that goes wrong at any command with which a guest is told that its disk has grown: the disk has
//! its old or its new size, what is told afterwards is so, the disk works, and the same step again comes to its
//! end.

use crate::support::NbdServer;
use crate::support::idle::{Idle, check_image};
use crate::support::walk::{Slip, walk};
use dray_qemu::{AdoptOptions, LayerPlan, adopt, release, resize};
use dray_testkit::guest::tools;
use std::fs::File;
use std::path::PathBuf;

const OLD: u64 = 16 << 20;
const NEW: u64 = 32 << 20;
/// One of so many runs in `make test`.
const SOME: usize = 48;

/// A VM whose raw disk is on an export that has cut it off and is longer by now.
struct Bench {
    vm: Idle,
    server: NbdServer,
    plan: LayerPlan,
    image: PathBuf,
    dir: tempfile::TempDir,
}

impl Bench {
    /// The device is on a raw node with a name, or on the file's own.
    async fn new(named: bool) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("disk.raw");
        File::create(&image).expect("create").set_len(OLD).expect("size");
        let path = image.display();
        let builder = Idle::builder(dir.path(), "vm");
        let builder = match named {
            true => builder
                .blockdev(format!("driver=file,node-name=storage,filename={path}"))
                .blockdev("driver=raw,node-name=disk,file=storage"),
            false => builder.blockdev(format!("driver=file,node-name=disk,filename={path}")),
        };
        let vm = Idle::start(builder.disk("disk0", "disk"), dir.path(), "vm").await;
        let plan = vm.layers().await.remove(0);
        let socket = dir.path().join("disk.nbd");
        let small = NbdServer::start(&image, &socket);
        let adopted = adopt(&vm.own, &plan, &small.export(), AdoptOptions::default()).await;
        adopted.expect("adopt");
        vm.io("write -P 1 0 1M").await;
        File::options().write(true).open(&image).expect("open").set_len(NEW).expect("grow");
        drop(small);
        let server = NbdServer::start(&image, &socket);
        Self { vm, server, plan, image, dir }
    }

    /// The size of the disk for its guest.
    async fn size(&self) -> u64 {
        let size = self.vm.disk().await.size();
        let reach = self.vm.tool(&format!("read -q {} 512", size - 512)).await;
        assert_eq!(reach, "", "it has {size} bytes");
        let past = self.vm.tool(&format!("read -q {size} 512")).await;
        assert!(past.contains("Input/output error"), "it has {size} bytes: {past}");
        size
    }

    /// Tells the guest through a monitor that goes wrong; the commands that it takes.
    async fn run(self, slip: Slip) -> Vec<String> {
        let line = slip.connect(&self.vm.monitor(), &self.dir.path().join("proxy.qmp")).await;
        let told = resize::grown(&line.qmp, &self.plan, &self.server.export(), NEW).await;
        let heard = line.end().await;
        let size = self.size().await;
        assert!([OLD, NEW].contains(&size), "{slip}: {size} bytes");
        match &told {
            Ok(()) => assert_eq!(size, NEW, "{slip}: it is not told"),
            Err(why) if slip.is_none() => panic!("{why}"),
            Err(why) if !why.kind().is_unknown() => assert_eq!(size, OLD, "{slip}: told is {why}"),
            Err(_) => {}
        }
        self.vm.io("write -P 2 64k 1M").await;
        self.finish(slip).await;
        heard
    }

    /// The same once more over a monitor that does as it is told, and then the disk leaves its export.
    async fn finish(self, slip: Slip) {
        let again = resize::grown(&self.vm.own, &self.plan, &self.server.export(), NEW).await;
        again.unwrap_or_else(|why| panic!("{slip}: and then: {why}"));
        assert_eq!(self.size().await, NEW, "{slip}");
        self.vm.io("write -P 3 31M 1M").await;
        let written = [(1, "0 64k"), (2, "64k 1M"), (3, "31M 1M")];
        self.vm.check(&written).await;
        let Self { mut vm, server, plan, image, .. } = self;
        let plan = LayerPlan { size: NEW, file_size: NEW, ..plan };
        release(&vm.own, &plan).await.expect("release");
        server.wait_left();
        vm.quit().await;
        check_image(&image, "raw", &written, &slip.to_string());
    }
}

async fn goes_wrong(what: &str, named: bool) {
    if tools::available(&[tools::QEMU, "qemu-io"]) {
        walk(what, SOME, async |slip| Bench::new(named).await.run(slip).await).await;
    }
}

#[tokio::test]
async fn a_disk_under_a_raw_node_has_its_old_size_or_its_new_one() {
    goes_wrong("Growing under a raw node", true).await;
}

#[tokio::test]
async fn a_disk_on_a_file_node_has_its_old_size_or_its_new_one() {
    goes_wrong("Growing on a file node", false).await;
}
