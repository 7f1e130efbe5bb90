//! What disks a VM has, as QMP shows them: devices, the block nodes under them, and how the nodes
//! hang together. Options that QMP does not show are in [`crate::options`].

use std::collections::HashMap;
use std::path::Path;

use dray_types::MAX_CHAIN;
use dray_types::text::harmless;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Result};
use crate::qmp::Qmp;

/// Drivers that are the lowest node under a disk.
const PROTOCOLS: [&str; 4] = ["file", "host_device", "nbd", "null-co"];
/// Drivers that may sit on a protocol node.
const FORMATS: [&str; 3] = ["raw", "qcow2", "luks"];

/// A dirty bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Bitmap {
    /// Its name; empty for one that belongs to a job.
    #[serde(default)]
    pub name: String,
    /// Bytes per bit.
    pub granularity: u64,
    /// Whether it is stored in the image.
    #[serde(default)]
    pub persistent: bool,
    /// Whether writes are recorded.
    #[serde(default)]
    pub recording: bool,
    /// Whether a job uses it.
    #[serde(default)]
    pub busy: bool,
    /// Whether it was not stored when the image was last closed.
    #[serde(default)]
    pub inconsistent: bool,
    /// Dirty bytes.
    pub count: u64,
}

/// A node's cache mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cache {
    /// Past the host's page cache.
    pub direct: bool,
    /// Flushes are ignored.
    pub no_flush: bool,
}

/// A block node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its name; begins with `#` when QEMU made it up.
    pub name: String,
    /// Its driver, `qcow2`.
    pub driver: String,
    /// What QEMU opened: a path for files and devices.
    pub file: String,
    /// The bytes a parent sees.
    pub size: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// `off`, `on` or `unmap`.
    pub detect_zeroes: String,
    /// Its cache mode.
    pub cache: Cache,
    /// Its dirty bitmaps.
    pub bitmaps: Vec<Bitmap>,
    /// What the format driver says of the image; null when it says nothing.
    pub format_specific: Value,
    /// Names of the snapshots inside the image.
    pub snapshots: Vec<String>,
    /// Whether the image is encrypted.
    pub encrypted: bool,
}

impl Node {
    /// Whether QEMU made the name up: such a node cannot be reopened.
    pub fn is_auto_named(&self) -> bool {
        self.name.starts_with('#')
    }

    /// The path of a file or block device.
    pub fn path(&self) -> Option<&Path> {
        matches!(self.driver.as_str(), "file" | "host_device").then(|| Path::new(&self.file))
    }
}

/// One image of a chain: a protocol node, and the format node on it if there is one.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The format node; `None` when the device, or the layer above, sits on the protocol node.
    pub format: Option<Node>,
    /// The protocol node.
    pub protocol: Node,
}

impl Layer {
    /// The uppermost node.
    pub fn top(&self) -> &Node {
        self.format.as_ref().unwrap_or(&self.protocol)
    }

    /// Whether it is on this local file or device, which QEMU may know by a relative name.
    pub(crate) fn is_on_file(&self, path: &Path) -> bool {
        self.protocol.path().is_some_and(|name| path.ends_with(name))
    }

    /// The name of the export on a server's `socket` that it is on, if it is on one (QEMU calls such a file
    /// `nbd+unix:///NAME?socket=PATH`).
    pub fn export_at(&self, socket: &Path) -> Option<String> {
        let rest = self.protocol.file.strip_prefix("nbd+unix:///")?;
        let (name, found) = rest.split_once("?socket=")?;
        is_same(Path::new(found), socket).then(|| name.to_owned())
    }

    /// The format's name; `raw` when there is no format node.
    pub fn format_name(&self) -> &str {
        self.format.as_ref().map_or("raw", |f| &f.driver)
    }
}

/// Whether two paths lead to the same file, perhaps through links.
fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    one == other || real(one).is_some_and(|path| Some(path) == real(other))
}

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmDisk {
    /// The device's id, by which disks of two VMs pair.
    pub qdev: String,
    /// The block backend's name in the graph: what sits on the top node.
    pub backend: String,
    /// The active image first, then its backing images.
    pub layers: Vec<Layer>,
}

impl VmDisk {
    /// The image the guest writes.
    pub fn active(&self) -> &Layer {
        &self.layers[0]
    }

    /// The bytes the guest sees.
    pub fn size(&self) -> u64 {
        self.active().top().size
    }
}

/// The drivers of nodes that QEMU's jobs put between a device and its disk, and the role in which the disk is below
/// them (QEMU, `block/copy-before-write.c`, `block/mirror.c`, `block/commit.c`).
const JOBS: [(&str, &str); 3] =
    [("copy-before-write", "file"), ("mirror_top", "backing"), ("commit_top", "backing")];

/// An edge of the node graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The upper node, or a backend or job.
    pub parent: String,
    /// The child's role: `root`, `file`, `backing`.
    pub role: String,
    /// The lower node.
    pub child: String,
    /// Whether the parent may use the node at all. A device may not while QEMU holds its disk back.
    pub used: bool,
}

/// All nodes and edges of a VM at one moment.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: HashMap<String, Node>,
    edges: Vec<Edge>,
    disks: Vec<(String, String)>,
}

/// The disks of a VM.
pub async fn disks(qmp: &Qmp) -> Result<Vec<VmDisk>> {
    Graph::read(qmp).await?.disks()
}

/// One disk of a VM, by the device's id.
pub async fn disk(qmp: &Qmp, qdev: &str) -> Result<VmDisk> {
    Graph::read(qmp).await?.disk(qdev)
}

/// What QMP shows of a node, of use to us.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct NodeInfo {
    node_name: String,
    drv: String,
    file: String,
    ro: bool,
    #[serde(rename = "detect_zeroes")]
    detect_zeroes: String,
    cache: Cache,
    image: ImageInfo,
    #[serde(default)]
    dirty_bitmaps: Vec<Bitmap>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ImageInfo {
    virtual_size: u64,
    #[serde(default)]
    format_specific: Value,
    #[serde(default)]
    snapshots: Vec<SnapshotInfo>,
    #[serde(default)]
    encrypted: bool,
}

#[derive(Deserialize)]
struct SnapshotInfo {
    name: String,
}

impl From<NodeInfo> for Node {
    fn from(info: NodeInfo) -> Self {
        Self {
            name: info.node_name,
            driver: info.drv,
            file: info.file,
            size: info.image.virtual_size,
            read_only: info.ro,
            detect_zeroes: info.detect_zeroes,
            cache: info.cache,
            bitmaps: info.dirty_bitmaps,
            format_specific: info.image.format_specific,
            snapshots: info.image.snapshots.into_iter().map(|known| known.name).collect(),
            encrypted: info.image.encrypted,
        }
    }
}

#[derive(Deserialize)]
struct RawGraph {
    nodes: Vec<RawNode>,
    edges: Vec<RawEdge>,
}

#[derive(Deserialize)]
struct RawNode {
    id: u64,
    name: String,
}

#[derive(Deserialize)]
struct RawEdge {
    parent: u64,
    child: u64,
    name: String,
    perm: Vec<String>,
}

fn parse<T: serde::de::DeserializeOwned>(command: &str, value: Value) -> Result<T> {
    serde_json::from_value(value).map_err(|e| {
        Error::with_source(ErrorKind::Protocol, format!("{command}: answer not understood"), e)
    })
}

impl Graph {
    /// Reads the VM's graph.
    pub async fn read(qmp: &Qmp) -> Result<Self> {
        let command = "query-named-block-nodes";
        let nodes = qmp.execute(command, json!({ "flat": true })).await?;
        let nodes: Vec<NodeInfo> = parse(command, nodes)?;
        let command = "x-debug-query-block-graph";
        let graph: RawGraph = parse(command, qmp.execute(command, Value::Null).await?)?;
        let disks = qmp.execute("query-block", Value::Null).await?;
        let names: HashMap<u64, &str> =
            graph.nodes.iter().map(|n| (n.id, n.name.as_str())).collect();
        let name = |id: u64| names.get(&id).copied().unwrap_or_default().to_owned();
        let edges = graph
            .edges
            .iter()
            .map(|e| Edge {
                parent: name(e.parent),
                role: e.name.clone(),
                child: name(e.child),
                used: !e.perm.is_empty(),
            })
            .collect();
        let nodes = nodes.into_iter().map(Node::from).map(|n| (n.name.clone(), n)).collect();
        Ok(Self { nodes, edges, disks: disk_tops(&disks) })
    }

    /// A node by name.
    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.get(name).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the vm has no block node {name}"))
        })
    }

    /// Whether a node of this name exists.
    pub fn has_node(&self, name: &str) -> bool {
        self.nodes.contains_key(name)
    }

    /// A node's child in a role.
    pub fn child(&self, parent: &str, role: &str) -> Option<&str> {
        let edge = self.edges.iter().find(|e| e.parent == parent && e.role == role);
        edge.map(|e| e.child.as_str())
    }

    /// Who uses a node.
    pub fn parents(&self, child: &str) -> Vec<&Edge> {
        self.edges.iter().filter(|e| e.child == child).collect()
    }

    /// The nodes that are part of no other.
    pub fn tops(&self) -> Vec<&str> {
        let below = |name: &str| self.parents(name).iter().any(|e| self.has_node(&e.parent));
        let mut tops: Vec<&str> =
            self.nodes.keys().map(String::as_str).filter(|name| !below(name)).collect();
        tops.sort_unstable();
        tops
    }

    /// A writable disk that its device may not use: QEMU holds it back ([`mod@crate::activate`]).
    pub fn held_back(&self) -> Option<&str> {
        let mut found = self.disks.iter().filter(|(_, top)| self.is_used(top) == Some(false));
        found.next().map(|(qdev, _)| qdev.as_str())
    }

    /// Whether the devices of the VM may use its disks, all of them; no as well where it has none that is writable.
    pub(crate) fn are_used(&self) -> bool {
        let mut used = self.disks.iter().filter_map(|(_, top)| self.is_used(top)).peekable();
        used.peek().is_some() && used.all(|used| used)
    }

    /// Whether its device may use the disk with this node; none of one that nobody writes, or that has no device.
    fn is_used(&self, top: &str) -> Option<bool> {
        let parents = self.parents(top);
        let mut devices = parents.iter().filter(|e| e.role == "root").peekable();
        let writable = self.node(top).is_ok_and(|node| !node.read_only);
        (writable && devices.peek().is_some()).then(|| devices.any(|e| e.used))
    }

    /// The disks with a medium.
    pub fn disks(&self) -> Result<Vec<VmDisk>> {
        self.disks.iter().map(|(qdev, top)| self.build(qdev, top)).collect()
    }

    /// One disk.
    pub fn disk(&self, qdev: &str) -> Result<VmDisk> {
        self.build(qdev, self.top_of(qdev)?)
    }

    /// One disk as it is below what jobs of others have put on it: the guest's writes go there.
    pub fn disk_below_jobs(&self, qdev: &str) -> Result<VmDisk> {
        let mut top = self.top_of(qdev)?;
        for _ in 0..MAX_CHAIN {
            let job =
                JOBS.iter().find(|(driver, _)| self.node(top).is_ok_and(|n| n.driver == *driver));
            let Some(below) = job.and_then(|(_, role)| self.child(top, role)) else { break };
            top = below;
        }
        self.build(qdev, top)
    }

    fn top_of(&self, qdev: &str) -> Result<&str> {
        let found = self.disks.iter().find(|(name, _)| name == qdev);
        found.map(|(_, top)| top.as_str()).ok_or_else(|| {
            let known: Vec<&str> = self.disks.iter().map(|(name, _)| name.as_str()).collect();
            let why = format!("the vm has no disk {qdev}: it has {}", known.join(", "));
            Error::new(ErrorKind::NotFound, why)
        })
    }

    fn build(&self, qdev: &str, top: &str) -> Result<VmDisk> {
        let backend = self.parents(top).iter().find(|e| e.role == "root").map(|e| &e.parent);
        let mut layers = Vec::new();
        let mut next = Some(top.to_owned());
        while let Some(name) = next {
            let (layer, below) = self.layer(qdev, &name)?;
            layers.push(layer);
            next = below;
            if layers.len() > MAX_CHAIN {
                let why = format!("disk {qdev}: a chain of over {MAX_CHAIN} images");
                return Err(Error::new(ErrorKind::Refused, why));
            }
        }
        let backend = backend.cloned().unwrap_or_default();
        Ok(VmDisk { qdev: qdev.to_owned(), backend, layers })
    }

    fn layer(&self, qdev: &str, name: &str) -> Result<(Layer, Option<String>)> {
        let refuse = |node: &Node| {
            let (name, driver) = (&node.name, &node.driver);
            let why = format!(
                "disk {qdev}: node {name} has driver {driver}, which dray does not know (a job \
                 may have put it there): {} on {} are supported",
                FORMATS.join(", "),
                PROTOCOLS.join(", ")
            );
            Error::new(ErrorKind::Refused, why)
        };
        let node = self.node(name)?.clone();
        if PROTOCOLS.contains(&node.driver.as_str()) {
            return Ok((Layer { format: None, protocol: node }, None));
        }
        if !FORMATS.contains(&node.driver.as_str()) {
            return Err(refuse(&node));
        }
        if let Some(edge) = self.edges.iter().find(|e| e.parent == name && !is_known(&e.role)) {
            let role = harmless(&edge.role);
            let why = format!(
                "disk {qdev}: node {name} has a {role} beside its file, which dray would leave behind"
            );
            return Err(Error::new(ErrorKind::Refused, why));
        }
        let missing =
            || Error::new(ErrorKind::Protocol, format!("node {name} has no file node below it"));
        let protocol = self.node(self.child(name, "file").ok_or_else(missing)?)?.clone();
        if !PROTOCOLS.contains(&protocol.driver.as_str()) {
            return Err(refuse(&protocol));
        }
        let below = self.child(name, "backing").map(str::to_owned);
        Ok((Layer { format: Some(node), protocol }, below))
    }
}

/// Whether dray moves what a format node has in this role.
fn is_known(role: &str) -> bool {
    matches!(role, "file" | "backing")
}

/// Device ids and the nodes they sit on.
fn disk_tops(query_block: &Value) -> Vec<(String, String)> {
    let mut disks = Vec::new();
    for block in query_block.as_array().into_iter().flatten() {
        let qdev = block["qdev"].as_str().map(device_id);
        // A drive without a device is not the guest's disk.
        let (Some(qdev), Some(top)) = (qdev, block["inserted"]["node-name"].as_str()) else {
            continue;
        };
        disks.push((qdev, top.to_owned()));
    }
    disks.sort();
    disks
}

/// A device's id from what `query-block` calls it: the id itself, or a path in QEMU's object tree.
pub(crate) fn device_id(qdev: &str) -> String {
    let path = qdev.strip_prefix("/machine/peripheral/");
    path.and_then(|p| p.split('/').next()).unwrap_or(qdev).to_owned()
}

/// Where a device is in QEMU's object tree, from what `query-block` calls it.
pub(crate) fn object_path(qdev: &str) -> String {
    match qdev.starts_with('/') {
        true => qdev.to_owned(),
        false => format!("/machine/peripheral/{qdev}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_ids() {
        assert_eq!(device_id("/machine/peripheral/disk0/virtio-backend"), "disk0");
        assert_eq!(device_id("scsi0"), "scsi0");
        let anonymous = "/machine/peripheral-anon/device[0]/virtio-backend";
        assert_eq!(device_id(anonymous), anonymous);
    }

    fn node(name: &str, driver: &str) -> (String, Node) {
        let cache = Cache { direct: false, no_flush: false };
        let node = Node {
            name: name.into(),
            driver: driver.into(),
            file: format!("/images/{name}"),
            size: 1 << 20,
            read_only: false,
            detect_zeroes: "off".into(),
            cache,
            bitmaps: Vec::new(),
            format_specific: Value::Null,
            snapshots: Vec::new(),
            encrypted: false,
        };
        (name.into(), node)
    }

    fn edge(parent: &str, role: &str, child: &str) -> Edge {
        Edge { parent: parent.into(), role: role.into(), child: child.into(), used: true }
    }

    #[test]
    fn chains_are_followed() {
        let nodes = [node("a", "qcow2"), node("af", "file"), node("b", "raw"), node("bf", "nbd")];
        let graph = Graph {
            nodes: nodes.into_iter().collect(),
            edges: vec![
                edge("backend", "root", "a"),
                edge("a", "file", "af"),
                edge("a", "backing", "b"),
                edge("b", "file", "bf"),
            ],
            disks: vec![("disk0".into(), "a".into())],
        };
        let disk = graph.disk("disk0").expect("disk");
        assert_eq!(disk.backend, "backend");
        assert_eq!(disk.layers.len(), 2);
        assert_eq!(disk.active().protocol.path(), Some(Path::new("/images/af")));
        assert_eq!(disk.layers[1].protocol.path(), None);
        let error = graph.disk("disk1").expect_err("unknown").to_string();
        assert_eq!(error, "the vm has no disk disk1: it has disk0");
    }

    #[test]
    fn a_disk_that_its_device_may_not_use_is_held_back() {
        let nodes = [node("a", "qcow2"), node("af", "file"), node("b", "file"), node("c", "file")];
        let mut graph = Graph {
            nodes: nodes.into_iter().collect(),
            edges: vec![
                edge("backend", "root", "a"),
                edge("a", "file", "af"),
                edge("other", "root", "b"),
            ],
            disks: vec![("disk0".into(), "a".into()), ("disk1".into(), "b".into())],
        };
        assert_eq!(graph.tops(), ["a", "b", "c"]);
        assert_eq!((graph.held_back(), graph.are_used()), (None, true));
        graph.edges[2].used = false;
        assert_eq!((graph.held_back(), graph.are_used()), (Some("disk1"), false));
        // A disk that nobody writes is read as it is.
        graph.nodes.get_mut("b").expect("b").read_only = true;
        assert_eq!((graph.held_back(), graph.are_used()), (None, true));
        // Of those alone nothing can be told.
        graph.nodes.get_mut("a").expect("a").read_only = true;
        assert_eq!((graph.held_back(), graph.are_used()), (None, false));
    }

    #[test]
    fn data_beside_the_file_is_not_left_behind() {
        let nodes = [node("a", "qcow2"), node("af", "file"), node("data", "file")];
        let mut graph = Graph {
            nodes: nodes.into_iter().collect(),
            edges: vec![edge("a", "file", "af"), edge("a", "data-file", "data")],
            disks: vec![("disk0".into(), "a".into())],
        };
        let error = graph.disk("disk0").expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("node a has a data-file"), "{error}");
        graph.edges.pop();
        graph.disk("disk0").expect("all of it is known");
    }

    #[test]
    fn a_disk_is_below_the_jobs_of_others() {
        let names =
            [("m", "mirror_top"), ("c", "copy-before-write"), ("a", "qcow2"), ("af", "nbd")];
        let graph = Graph {
            nodes: names.into_iter().map(|(name, driver)| node(name, driver)).collect(),
            edges: vec![
                edge("m", "backing", "c"),
                edge("c", "target", "elsewhere"),
                edge("c", "file", "a"),
                edge("a", "file", "af"),
            ],
            disks: vec![("disk0".into(), "m".into())],
        };
        assert!(graph.disk("disk0").is_err());
        let disk = graph.disk_below_jobs("disk0").expect("disk");
        assert_eq!((disk.layers.len(), disk.active().protocol.name.as_str()), (1, "af"));
    }

    #[test]
    fn unknown_drivers_are_refused() {
        let nodes = [node("t", "throttle"), node("f", "file")];
        let graph = Graph {
            nodes: nodes.into_iter().collect(),
            edges: vec![edge("t", "file", "f")],
            disks: vec![("disk0".into(), "t".into())],
        };
        let error = graph.disk("disk0").expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("node t has driver throttle"), "{error}");
    }
}
