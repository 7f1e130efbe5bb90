//! A layer's plan: everything needed to put one image of a disk under dray and back, worked out
//! before anything is touched. It can be stored and sent: an agent that was killed releases with
//! the plan in its journal, and the target's nodes are made from the source's plan.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bitmap;
use crate::error::{Error, ErrorKind, Result};
use crate::graph::{Graph, Layer, Node, VmDisk};
use crate::iothread::Holder;
use crate::options::{NodeOptions, Options};
use crate::sign;

/// QEMU takes node names of up to this many bytes.
const MAX_NODE_NAME: usize = 31;

/// How the layer's protocol node is exchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "kebab-case")]
pub enum Pivot {
    /// A format node with a name sits on it and is reopened with these options.
    Reopen {
        /// Every option of the format node but its children.
        options: Options,
    },
    /// The device sits on it (or on a raw node without a name): mirrored, without copying.
    Mirror,
}

/// One image of a disk, and how it gets under dray and back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// The disk.
    pub qdev: String,
    /// The device id that the names of dray's nodes are made of, where the disk has another one by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named_for: Option<String>,
    /// The layer's place in the chain: 0 is the image the guest writes.
    pub depth: usize,
    /// The image's format.
    pub format: String,
    /// The bytes the guest, or the layer above, sees.
    pub size: u64,
    /// The bytes of the file or device.
    pub file_size: u64,
    /// Whether the layer is read-only.
    pub read_only: bool,
    /// How the protocol node is exchanged.
    pub pivot: Pivot,
    /// The options of the local file node, as `blockdev-add` takes them.
    pub local: Options,
}

/// Whether the file of an image of this format becomes longer as its guest writes. Of LUKS the guest's disk is as long
/// as the file without its header.
pub fn grows(format: &str) -> bool {
    !matches!(format, "raw" | "luks")
}

impl LayerPlan {
    /// Plans the layers of a disk, the active one first. Refuses what could not be put back as it
    /// was, except the dirty bitmaps and jobs that only the layer's adoption touches: see
    /// `check_unused`.
    pub fn of_disk(disk: &VmDisk, known: &NodeOptions) -> Result<Vec<Self>> {
        let layers = disk.layers.iter().enumerate();
        layers.map(|(depth, layer)| Self::of_layer(disk, depth, layer, known)).collect()
    }

    /// Plans the image the guest writes: the only one that is adopted at the source.
    pub fn of_active(disk: &VmDisk, known: &NodeOptions) -> Result<Self> {
        Self::of_layer(disk, 0, disk.active(), known)
    }

    /// Plans the layer at `depth` alone, which has to be there: others of the disk may be under dray.
    ///
    /// # Errors
    /// When it could not be put back as it was.
    pub fn of_depth(disk: &VmDisk, depth: usize, known: &NodeOptions) -> Result<Self> {
        let layer = disk.layers.get(depth).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("disk {} has no layer {depth}", disk.qdev))
        })?;
        Self::of_layer(disk, depth, layer, known)
    }

    fn of_layer(disk: &VmDisk, depth: usize, layer: &Layer, known: &NodeOptions) -> Result<Self> {
        let what = || format!("disk {} layer {depth}", disk.qdev);
        let protocol = &layer.protocol;
        let path = protocol.path().ok_or_else(|| {
            let why = format!(
                "{}: node {} has driver {}: only local files and block devices are adopted",
                what(),
                protocol.name,
                protocol.driver
            );
            Error::new(ErrorKind::Refused, why)
        })?;
        let (pivot, mut local) = match &layer.format {
            None => (Pivot::Mirror, known.of_node(&protocol.name).map_err(|e| e.during(what()))?),
            Some(format) if format.is_auto_named() => unnamed(&disk.qdev, depth, format, protocol)?,
            Some(format) => named(format, protocol, known).map_err(|e| e.during(what()))?,
        };
        check_driver(&local, &protocol.driver).map_err(|e| e.during(what()))?;
        // Absolute: whoever serves the image was not started where QEMU was.
        let path = known.absolute(path).map_err(|e| e.during(what()))?;
        local.insert("filename".into(), path_value(&path));
        state_facts(&mut local, protocol);
        if protocol.is_auto_named() || !local.contains_key("node-name") {
            local.insert("node-name".into(), node_name("file", &disk.qdev, depth).into());
        }
        Ok(Self {
            qdev: disk.qdev.clone(),
            named_for: None,
            depth,
            format: layer.format_name().to_owned(),
            size: layer.top().size,
            file_size: protocol.size,
            read_only: layer.top().read_only,
            pivot,
            local,
        })
    }

    /// The file or device, absolute.
    pub fn path(&self) -> PathBuf {
        self.local.get("filename").and_then(Value::as_str).unwrap_or_default().into()
    }

    /// The local file node's name.
    pub fn local_node(&self) -> &str {
        self.local.get("node-name").and_then(Value::as_str).unwrap_or_default()
    }

    /// A name for the local file node of a layer that has none yet.
    pub fn file_node(qdev: &str, depth: usize) -> String {
        node_name("file", qdev, depth)
    }

    /// Whether nobody but dray knows how its file's node is made once it is released: QEMU's command line does not
    /// name it, nor a format node above it.
    pub fn is_named_by_dray(&self) -> bool {
        self.pivot == Pivot::Mirror && self.local_node() == self.node("file")
    }

    /// The name of the format node that is reopened, if there is one.
    pub fn format_node(&self) -> Option<&str> {
        match &self.pivot {
            Pivot::Reopen { options } => options.get("node-name").and_then(Value::as_str),
            Pivot::Mirror => None,
        }
    }

    /// The part of the image that its raw node shows; all of it where it has none that is reopened.
    pub fn window(&self) -> Window {
        match &self.pivot {
            Pivot::Reopen { options } if self.format == "raw" => Window::of(options),
            _ => Window::default(),
        }
    }

    /// Checks that a layer shows of its image what the plan says: by the same format driver, the same part. Somebody may
    /// have reopened its node, or have made it anew.
    ///
    /// # Errors
    /// `Mismatch`, with what it shows.
    pub fn check_shown(&self, layer: &Layer) -> Result<()> {
        let mismatch = |why: String| Err(Error::new(ErrorKind::Mismatch, why));
        let (format, planned) = (layer.format_name(), &self.format);
        if format != planned {
            return mismatch(format!("its node shows the image as {format}, and not as {planned}"));
        }
        let shown = layer.format.as_ref().map_or(Ok(Window::default()), Window::shown_by)?;
        let window = self.window();
        if shown == window {
            return Ok(());
        }
        mismatch(format!("its node shows {shown} of the image, and not {window}"))
    }

    /// The same layer of a disk that has the device id `qdev` by now: it was plugged in again. Its nodes keep their
    /// names.
    #[must_use]
    pub fn plugged_in_as(self, qdev: &str) -> Self {
        let named_for = Some(self.named_for.unwrap_or(self.qdev)).filter(|first| first != qdev);
        Self { qdev: qdev.to_owned(), named_for, ..self }
    }

    /// The same layer of a disk that has been under dray since it was `adopted` like that: a device that was directly
    /// on its file's node is to be on a node of that name at a target, too.
    #[must_use]
    pub fn named_as(mut self, adopted: &Self) -> Self {
        let both_direct = self.pivot == Pivot::Mirror && adopted.pivot == Pivot::Mirror;
        if both_direct && self.depth == adopted.depth && !adopted.is_named_by_dray() {
            self.local.insert("node-name".into(), adopted.local_node().into());
        }
        self
    }

    /// The name of a node that dray makes for the layer.
    pub(crate) fn node(&self, kind: &str) -> String {
        node_name(kind, self.named_for.as_ref().unwrap_or(&self.qdev), self.depth)
    }

    /// The name of the NBD node that stands for the local node while dray has the image.
    pub fn nbd_node(&self) -> String {
        self.node("nbd")
    }

    /// The nodes that hold the layer's files while a disk in an iothread is reopened.
    pub(crate) fn holder(&self) -> Holder {
        Holder { top: self.node("old"), from: self.node("from"), to: self.node("to") }
    }

    /// The layer as it is now.
    pub(crate) fn layer_in(&self, graph: &Graph) -> Result<Layer> {
        let disk = graph.disk(&self.qdev)?;
        disk.layers.into_iter().nth(self.depth).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("it has no layer {}", self.depth))
        })
    }

    /// The same layer at the target, in the file at `path`. A raw disk gets a raw node there, so
    /// that it is released by a reopen.
    #[must_use]
    pub fn for_target(&self, path: &Path) -> Self {
        let mut plan = self.clone();
        if self.pivot == Pivot::Mirror {
            let file = self.node("file");
            // A device directly on dray's node has that name, which the export has there.
            let (name, taken) = (self.local_node(), self.nbd_node());
            let name = match name == file || name == taken {
                true => self.node("format"),
                false => name.to_owned(),
            };
            let options = raw_node(&name, &self.local);
            plan.local.remove("detect-zeroes");
            plan.local.insert("node-name".into(), file.into());
            plan.pivot = Pivot::Reopen { options };
        }
        plan.local.insert("filename".into(), path_value(path));
        plan
    }
}

/// A raw node that treats requests as a file node with the options `local` did.
pub(crate) fn raw_node(name: &str, local: &Options) -> Options {
    let mut options = Options::new();
    options.insert("driver".into(), "raw".into());
    options.insert("node-name".into(), name.into());
    options.insert("discard".into(), "unmap".into());
    for key in ["read-only", "discard", "detect-zeroes", "cache"] {
        if let Some(value) = local.get(key) {
            options.insert(key.into(), value.clone());
        }
    }
    options
}

fn path_value(path: &Path) -> Value {
    path.to_string_lossy().into_owned().into()
}

/// A reopened format node, and the file node below it.
fn named(format: &Node, file: &Node, known: &NodeOptions) -> Result<(Pivot, Options)> {
    let mut options = known.of_node(&format.name)?;
    check_driver(&options, &format.driver)?;
    check_window(&options, format)?;
    state_facts(&mut options, format);
    let (mut local, inherits) = known.of_file_child(&format.name)?;
    local.entry("driver").or_insert(file.driver.clone().into());
    if inherits {
        // An inline child passes discards on unless told otherwise; one of its own does not.
        local.entry("discard").or_insert("unmap".into());
    }
    Ok((Pivot::Reopen { options }, local))
}

/// A format node that QEMU named itself. Below the active image it is one that QEMU opened because
/// the image above names it: it has no options but what QMP shows, and gets a name at the target.
/// The active image's is from a `-drive` without node names: a raw one can be mirrored, any other
/// cannot be adopted.
fn unnamed(qdev: &str, depth: usize, format: &Node, file: &Node) -> Result<(Pivot, Options)> {
    check_window(&Options::new(), format)?;
    let mut local = Options::new();
    local.insert("driver".into(), file.driver.clone().into());
    local.insert("discard".into(), "unmap".into());
    if depth > 0 {
        let mut options = Options::new();
        options.insert("driver".into(), format.driver.clone().into());
        options.insert("node-name".into(), node_name("format", qdev, depth).into());
        state_facts(&mut options, format);
        return Ok((Pivot::Reopen { options }, local));
    }
    if format.driver == "raw" {
        return Ok((Pivot::Mirror, local));
    }
    let why = format!(
        "disk {qdev}: its {} node has no name of its own, so qemu cannot reopen it: start the vm \
         with -blockdev, or with node-name= on -drive",
        format.driver
    );
    Err(Error::new(ErrorKind::Refused, why))
}

fn check_driver(options: &Options, driver: &str) -> Result<()> {
    let known = options.get("driver").and_then(Value::as_str).unwrap_or_default();
    if known == driver {
        return Ok(());
    }
    let why = format!("the options known are for driver {known}, but the node's is {driver}");
    Err(Error::new(ErrorKind::Mismatch, why))
}

impl NodeOptions {
    /// Adds the nodes of a layer that was released by this plan: they were made while QEMU ran, so its
    /// command line does not name them.
    pub fn add_released(&mut self, plan: &LayerPlan) {
        let mut trees = vec![plan.local.clone()];
        if let Pivot::Reopen { options } = &plan.pivot {
            let mut format = options.clone();
            format.insert("file".into(), plan.local_node().into());
            trees.push(format);
        }
        self.add(trees);
    }
}

/// The part of its file that a raw node shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Where it begins.
    pub offset: u64,
    /// Its length, if it does not go as far as the file.
    pub size: Option<u64>,
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.offset, self.size) {
            (0, None) => f.write_str("all"),
            (offset, None) => write!(f, "what is behind byte {offset}"),
            (offset, Some(size)) => write!(f, "{size} bytes behind byte {offset}"),
        }
    }
}

impl Window {
    /// The bytes that it shows of a file of `len` bytes.
    pub fn shown_of(&self, len: u64) -> u64 {
        self.size.unwrap_or_else(|| len.saturating_sub(self.offset))
    }

    /// What the options of a node say.
    fn of(options: &Options) -> Self {
        let part = |key: &str| match options.get(key) {
            Some(Value::String(text)) => text.parse().ok(),
            number => number.and_then(Value::as_u64),
        };
        Self { offset: part("offset").unwrap_or(0), size: part("size") }
    }

    /// What a node shows now; all of its file if it is no raw one. QEMU names a node with such options by all that
    /// it was made with (`json:{…}`), and any other one by its file.
    fn shown_by(node: &Node) -> Result<Self> {
        let made_with = node.file.strip_prefix("json:").filter(|_| node.driver == "raw");
        let Some(made_with) = made_with else { return Ok(Self::default()) };
        let options = serde_json::from_str(made_with).map_err(|why| {
            let what = format!("{}: not understood", node.file);
            Error::with_source(ErrorKind::Refused, what, why)
        })?;
        Ok(Self::of(&options))
    }
}

/// The options of a raw node that shows a part of its file, which it needs on every other one as well; none of a
/// node that shows all.
///
/// # Errors
/// When they are not known.
pub fn options_of_part(node: &Node, known: &NodeOptions) -> Result<Option<Options>> {
    if Window::shown_by(node)? == Window::default() {
        return Ok(None);
    }
    let options = known.of_node(&node.name)?;
    check_window(&options, node)?;
    Ok(Some(options))
}

/// Checks that a raw node shows the part of its file that its known options say. The node may have been made
/// anew, or reopened, under the same name since QEMU was started.
fn check_window(options: &Options, node: &Node) -> Result<()> {
    if node.driver != "raw" || Window::shown_by(node)? == Window::of(options) {
        return Ok(());
    }
    let why = format!(
        "node {} shows another part of its file now than qemu's command line says: it was made anew or reopened \
         since; start the vm with these options",
        node.name
    );
    Err(Error::new(ErrorKind::Refused, why))
}

/// States what QMP shows, so that a reopen can change none of it.
fn state_facts(options: &mut Options, node: &Node) {
    options.insert("read-only".into(), node.read_only.into());
    options.insert("detect-zeroes".into(), node.detect_zeroes.clone().into());
    let cache = json!({ "direct": node.cache.direct, "no-flush": node.cache.no_flush });
    options.insert("cache".into(), cache);
    if node.read_only {
        // A read-only node cannot be told to unmap on zero detection, and needs not be.
        options.insert("detect-zeroes".into(), "off".into());
    }
}

/// A name for one of dray's nodes: the same for the same disk and layer, everywhere.
pub(crate) fn node_name(kind: &str, qdev: &str, depth: usize) -> String {
    let plain: String =
        qdev.chars().filter(|c| c.is_ascii_alphanumeric() || "-._".contains(*c)).collect();
    let name = format!("dray-{kind}-{plain}-{depth}");
    if plain == qdev && name.len() <= MAX_NODE_NAME {
        return name;
    }
    // FNV-1a; a name need only be stable and differ from the VM's other disks'.
    let hash = qdev
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("dray-{kind}-{:08x}-{depth}", hash as u32)
}

/// Refuses a layer whose nodes somebody else uses (jobs, exports, other nodes) or whose protocol
/// node carries dirty bitmaps, which the pivot would lose. Returns the bitmaps when they may go;
/// those that dray has made itself are nobody's loss.
pub(crate) fn check_unused(
    graph: &Graph,
    plan: &LayerPlan,
    layer: &Layer,
    drop_bitmaps: bool,
) -> Result<Vec<(String, String)>> {
    for node in [Some(&layer.protocol), layer.format.as_ref()].into_iter().flatten() {
        // An agent that died may have left its own.
        let (mut users, holder) = (graph.parents(&node.name), plan.holder());
        users.retain(|user| !holder.has(&user.parent) && user.parent != sign::NODE);
        for user in &users {
            let ours = matches!(user.role.as_str(), "file" | "backing" | "root");
            let wanted = layer.format.as_ref().is_some_and(|f| f.name == user.parent);
            let top = node.name == layer.top().name;
            if !ours || !(wanted || top) || users.len() > 1 {
                let (qdev, name, role, parent) = (&plan.qdev, &node.name, &user.role, &user.parent);
                let why = format!(
                    "disk {qdev}: node {name} is also used by {parent:?} ({role}): a job or \
                     export; end it first"
                );
                return Err(Error::new(ErrorKind::Refused, why));
            }
        }
    }
    let lost = match plan.pivot {
        Pivot::Mirror => vec![Some(&layer.protocol), layer.format.as_ref()],
        Pivot::Reopen { .. } => vec![Some(&layer.protocol)],
    };
    let bitmaps = lost.into_iter().flatten().flat_map(|node| {
        let others = node.bitmaps.iter().filter(|bitmap| !bitmap::is_ours(&bitmap.name));
        others.map(|bitmap| (node.name.clone(), bitmap.name.clone()))
    });
    let bitmaps: Vec<_> = bitmaps.collect();
    if let (Some((node, bitmap)), false) = (bitmaps.first(), drop_bitmaps) {
        let why = format!(
            "disk {}: node {node} has the dirty bitmap {bitmap}, which would be lost: remove it, \
             or allow dray to (--drop-bitmaps)",
            plan.qdev
        );
        return Err(Error::new(ErrorKind::Refused, why));
    }
    Ok(bitmaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk whose device is directly on its file's node.
    fn direct(node: &str) -> LayerPlan {
        let mut local = Options::new();
        local.insert("node-name".into(), node.into());
        LayerPlan {
            qdev: "disk0".into(),
            named_for: None,
            depth: 0,
            format: "raw".into(),
            size: 1,
            file_size: 1,
            read_only: false,
            pivot: Pivot::Mirror,
            local,
        }
    }

    /// Also of a device that sits on dray's node when it moves on.
    #[test]
    fn the_nodes_of_a_target_have_different_names() {
        for name in ["disk", "dray-nbd-disk0-0", "dray-file-disk0-0"] {
            let there = direct(name).for_target(Path::new("/pool/disk"));
            let names = [there.format_node(), Some(there.local_node()), Some(&there.nbd_node())];
            let names: std::collections::BTreeSet<_> = names.into_iter().collect();
            assert_eq!(names.len(), 3, "{name}: {names:?}");
        }
    }

    #[test]
    fn a_device_on_its_files_node_keeps_that_nodes_name() {
        let under_dray = || direct("dray-nbd-disk0-0");
        let there =
            |adopted: &LayerPlan| under_dray().named_as(adopted).for_target(Path::new("/d"));
        assert_eq!(there(&direct("node0")).format_node(), Some("node0"));
        let unnamed = direct("dray-file-disk0-0");
        assert_eq!(there(&unnamed).format_node(), Some("dray-format-disk0-0"));
        let options = raw_node("root", &Options::new());
        let reopened = LayerPlan { pivot: Pivot::Reopen { options }, ..direct("file") };
        assert_eq!(there(&reopened).format_node(), Some("dray-format-disk0-0"));
    }

    #[test]
    fn a_raw_node_shows_the_part_that_its_options_say() {
        let node = |file: &str| Node {
            name: "disk".into(),
            driver: "raw".into(),
            file: file.into(),
            size: 1,
            read_only: false,
            detect_zeroes: "off".into(),
            cache: crate::graph::Cache { direct: false, no_flush: false },
            bitmaps: Vec::new(),
            format_specific: Value::Null,
            snapshots: Vec::new(),
            encrypted: false,
        };
        let options = |value: Value| value.as_object().cloned().unwrap_or_default();
        let (none, part) = (options(json!({})), options(json!({ "offset": 4096, "size": "512" })));
        let whole = node("/pool/disk");
        let shifted =
            r#"json:{"driver": "raw", "offset": "4096", "size": 512, "file": {"driver": "file"}}"#;
        assert!(check_window(&none, &whole).is_ok() && check_window(&part, &node(shifted)).is_ok());
        let longer = r#"json:{"driver": "raw", "offset": 4096, "file": {"driver": "file"}}"#;
        for (options, node) in [(&part, whole), (&none, node(shifted)), (&part, node(longer))] {
            let why = check_window(options, &node).unwrap_err().to_string();
            assert!(why.contains("node disk shows another part"), "{why}");
        }
        assert!(check_window(&none, &node("json:{")).is_err());
        let args = ["-blockdev", "raw,node-name=disk,offset=4096,size=512,file=f"];
        let known = NodeOptions::of_arguments(&args);
        let found = |file| options_of_part(&node(file), &known);
        assert_eq!(found("/pool/disk").unwrap(), None);
        let options = found(shifted).unwrap().expect("it needs them on every node");
        assert_eq!(Window::of(&options), Window { offset: 4096, size: Some(512) });
        assert!(found(longer).is_err());
    }

    #[test]
    fn nodes_keep_their_names_under_another_device_id() {
        let plan = json!({
            "qdev": "disk0", "depth": 0, "format": "raw", "size": 512, "file_size": 512,
            "read_only": false, "pivot": { "how": "mirror" }, "local": {},
        });
        let plan: LayerPlan = serde_json::from_value(plan).expect("a plan");
        let moved = plan.clone().plugged_in_as("disk9").plugged_in_as("disk7");
        assert_eq!((moved.qdev.as_str(), moved.nbd_node()), ("disk7", plan.nbd_node()));
        assert_eq!(moved.plugged_in_as("disk0"), plan);
    }

    #[test]
    fn node_names_are_valid_and_differ() {
        assert_eq!(node_name("nbd", "disk0", 0), "dray-nbd-disk0-0");
        let long = node_name("file", "/machine/peripheral-anon/device[0]/virtio-backend", 12);
        let other = node_name("file", "/machine/peripheral-anon/device[1]/virtio-backend", 12);
        assert!(long.len() <= MAX_NODE_NAME && !long.contains('/'), "{long}");
        assert_ne!(long, other);
    }
}
