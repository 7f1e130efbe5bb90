//! Backups of a disk that is built on base images: these are in the repository too, once, as they were.

use crate::lab::{Lab, wait_for};
use dray_testkit::guest::tools;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

const TOP: &str = "top.qcow2";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn image_tool(args: &[&str]) {
    tools::run("qemu-img", args).unwrap();
}

fn fill(path: &Path, pattern: &str) {
    let write = format!("write -P {pattern} 1M 3M");
    tools::run("qemu-io", &["-f", "qcow2", "-c", &write, text(path)]).unwrap();
}

/// A repository, and a disk on a snapshot on a base.
struct Chain {
    lab: Lab,
    url: String,
    below: [PathBuf; 2],
}

impl Chain {
    fn begin() -> Self {
        let mut lab = Lab::new();
        lab.a.start();
        let url = format!("file://{}", lab.dir.path().join("repository").display());
        lab.a.ask(json!({"backup-init": {"at": url}})).unwrap();
        let pool = lab.a.pool();
        let [base, middle, top] = ["base.qcow2", "middle.qcow2", TOP].map(|name| pool.join(name));
        image_tool(&["create", "-f", "qcow2", text(&base), "16M"]);
        fill(&base, "0x11");
        for (below, above) in [(&base, &middle), (&middle, &top)] {
            image_tool(&["create", "-f", "qcow2", "-b", text(below), "-F", "qcow2", text(above)]);
            fill(above, "0x22");
        }
        let add = json!({"image-add": {"name": TOP, "path": top, "format": "qcow2"}});
        lab.a.ask(add).unwrap();
        Self { lab, url, below: [base, middle] }
    }

    fn back_up(&self) -> Result<Value, Value> {
        self.lab.a.ask(json!({"backup": {"images": [TOP], "to": self.url}}))
    }

    /// Names of what the repository has, by the time of their backups.
    fn held(&self) -> Vec<String> {
        let list = self.lab.a.ask(json!({"backups": {"repository": {"at": self.url}}})).unwrap();
        let name = |backup: &Value| backup["image"].as_str().unwrap().to_owned();
        list["backups"].as_array().unwrap().iter().map(name).collect()
    }
}

fn names(done: &Value) -> Vec<&str> {
    let images = done["images"].as_array().unwrap();
    images.iter().map(|image| image["image"].as_str().unwrap()).collect()
}

#[test]
fn what_a_disk_is_built_on_is_in_its_backup_once() {
    if !tools::available(&["qemu-img", "qemu-io"]) {
        return;
    }
    let chain = Chain::begin();
    let first = chain.back_up().unwrap();
    assert_eq!(names(&first), ["base.qcow2", "middle.qcow2", TOP], "{first}");
    assert_eq!(first["images"][0]["generation"]["number"], 0, "{first}");
    assert_eq!(names(&chain.back_up().unwrap()), [TOP]);
    for (path, name) in chain.below.iter().zip(["base.qcow2", "middle.qcow2"]) {
        let command = json!({"restore": {"repository": {"at": chain.url}, "image": name,
            "name": "restored"}});
        let done = chain.lab.a.ask(command).unwrap();
        let restored = Path::new(done["path"].as_str().unwrap());
        assert!(std::fs::read(restored).unwrap() == std::fs::read(path).unwrap(), "{name}");
        chain.lab.a.ask(json!({"image-remove": {"name": "restored"}})).unwrap();
        std::fs::remove_file(restored).unwrap();
    }
    // Old backups of the disk go, what they are built on stays, and another content is another image.
    let prune = json!({"backup-prune": {"repository": {"at": chain.url}, "keep_last": 1}});
    chain.lab.a.ask(prune).unwrap();
    let mut held = chain.held();
    held.sort();
    assert_eq!(held, ["base.qcow2", "middle.qcow2", TOP]);
    fill(&chain.below[0], "0x33");
    assert_eq!(names(&chain.back_up().unwrap()), ["base.qcow2", TOP]);
}

#[test]
fn an_agent_that_dies_before_a_base_image_is_whole_has_made_no_backup() {
    if !tools::available(&["qemu-img", "qemu-io"]) {
        return;
    }
    let mut chain = Chain::begin();
    chain.lab.a.stop();
    chain.lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Backup-Base:1")]);
    assert!(chain.back_up().is_err(), "the step never came");
    wait_for("the death", Duration::from_secs(10), || chain.lab.a.has_died()).unwrap();
    chain.lab.a.start();
    assert_eq!(chain.held(), ["base.qcow2"]);
    assert_eq!(names(&chain.back_up().unwrap()), ["middle.qcow2", TOP]);
}

#[test]
fn a_base_image_outside_the_pools_is_refused() {
    if !tools::available(&["qemu-img", "qemu-io"]) {
        return;
    }
    let chain = Chain::begin();
    let outside = chain.lab.dir.path().join("base.qcow2");
    std::fs::copy(&chain.below[0], &outside).unwrap();
    let middle = text(&chain.below[1]);
    image_tool(&["rebase", "-u", "-f", "qcow2", "-b", text(&outside), "-F", "qcow2", middle]);
    let refused = chain.back_up().unwrap_err().to_string();
    assert!(refused.contains("pool"), "{refused}");
    assert_eq!(chain.held(), [""; 0]);
}
