//! The options that block nodes were made with. QMP does not show all of them, but reopening a
//! node needs every one: they are read from the QEMU process's command line, and dray knows those of nodes
//! that it made. An option whose type is not known here is an error, never a guess.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};

/// A node's options as QMP takes them.
pub type Options = Map<String, Value>;

/// Options that are booleans; on the command line they read `on` or `off`.
const BOOLEANS: [&str; 12] = [
    "read-only",
    "auto-read-only",
    "force-share",
    "cache.direct",
    "cache.no-flush",
    "lazy-refcounts",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
    "discard-no-unref",
    "drop-cache",
    "x-check-cache-dropped",
];
/// Options that are numbers; on the command line sizes may have a suffix.
const NUMBERS: [&str; 10] = [
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-clean-interval",
    "aio-max-batch",
    "offset",
    "size",
    "reconnect-delay",
    "open-timeout",
];
/// Options that are strings or names of enumeration members.
const STRINGS: [&str; 16] = [
    "driver",
    "node-name",
    "filename",
    "discard",
    "detect-zeroes",
    "aio",
    "locking",
    "pr-manager",
    "overlap-check",
    "export",
    "key-secret",
    "server.type",
    "server.path",
    "encrypt.format",
    "encrypt.key-secret",
    "tls-creds",
];
/// Options that name a child, or hold its options.
const CHILDREN: [&str; 3] = ["file", "backing", "data-file"];

/// What is known about a VM's nodes beside QMP.
#[derive(Clone, Debug, Default)]
pub struct NodeOptions {
    trees: Vec<Options>,
    /// Arguments that were not understood, and why; they matter only if a node is missing.
    unread: Vec<String>,
    /// Where QEMU was started: file names may be relative to it.
    directory: Option<PathBuf>,
}

impl NodeOptions {
    /// Reads the command line of a process.
    pub fn of_process(pid: i32) -> Result<Self> {
        let path = format!("/proc/{pid}/cmdline");
        let bytes = std::fs::read(&path).map_err(|e| {
            let what = format!("could not read qemu's command line from {path}");
            Error::with_source(ErrorKind::NotFound, what, e)
        })?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let args: Vec<&str> = text.split_terminator('\0').collect();
        // Unreadable for a process of another user; matters only for relative names.
        let directory = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
        Ok(Self { directory, ..Self::of_arguments(&args) })
    }

    /// Understands the block nodes of a QEMU command line. What is not understood is an error only
    /// when somebody asks for the node.
    pub fn of_arguments(args: &[&str]) -> Self {
        let mut found = Self::default();
        for pair in args.windows(2) {
            let tree = match pair[0] {
                "-blockdev" | "--blockdev" => blockdev(pair[1]).map(Some),
                "-drive" | "--drive" => drive(pair[1]),
                _ => continue,
            };
            match tree {
                Ok(tree) => found.trees.extend(tree),
                Err(error) => found.unread.push(error.to_string()),
            }
        }
        found
    }

    /// Adds nodes that were made while QEMU ran, so that its command line does not name them.
    pub(crate) fn add(&mut self, made: Vec<Options>) {
        self.trees.splice(0..0, made);
    }

    /// A file's absolute path, from its name as QEMU knows it.
    pub fn absolute(&self, file: &Path) -> Result<PathBuf> {
        if file.starts_with("/dev/fdset") {
            let why = "its file was passed to qemu as a descriptor: its path is not known";
            return Err(Error::new(ErrorKind::Refused, why));
        }
        match (&self.directory, file.is_absolute()) {
            (_, true) => Ok(file.to_owned()),
            (Some(directory), false) => Ok(directory.join(file)),
            (None, false) => {
                let why = format!("{}: relative to a directory not known", file.display());
                Err(Error::new(ErrorKind::Refused, why))
            }
        }
    }

    /// The options of a node with a name of its own, without those of its children.
    pub fn of_node(&self, name: &str) -> Result<Options> {
        let found = self.trees.iter().find_map(|tree| find_named(tree, name));
        found.map(own).ok_or_else(|| self.unknown(name)).and_then(reopenable)
    }

    /// The options of a node's file child, however it was written: by name, inline, or only as a
    /// file name (then there are none). The flag tells whether it inherits from its parent.
    pub fn of_file_child(&self, parent: &str) -> Result<(Options, bool)> {
        let tree = self.trees.iter().find_map(|tree| find_named(tree, parent));
        match tree.ok_or_else(|| self.unknown(parent))?.get("file") {
            Some(Value::String(name)) => Ok((self.of_node(name)?, false)),
            Some(Value::Object(inline)) => Ok((reopenable(own(inline))?, true)),
            _ => Err(self.unknown(parent)),
        }
    }

    fn unknown(&self, name: &str) -> Error {
        let mut why = format!(
            "the options of block node {name} are not known: it is not on qemu's command line (or \
             was replaced since); start the vm with -blockdev for each of its nodes, or end what has replaced it"
        );
        for unread in &self.unread {
            why.push_str("; not understood: ");
            why.push_str(unread);
        }
        Error::new(ErrorKind::Refused, why)
    }
}

/// QEMU reopens no node that was made with this option, whatever its value. One in an iothread ends QEMU by that,
/// before 9.0.
fn reopenable(options: Options) -> Result<Options> {
    if !options.contains_key("force-share") {
        return Ok(options);
    }
    let why = "its node was made with force-share, which QEMU cannot reopen; start the vm without that option";
    Err(Error::new(ErrorKind::Refused, why))
}

/// A node's options without its children.
fn own(tree: &Options) -> Options {
    let own = tree.iter().filter(|(key, _)| !CHILDREN.contains(&key.as_str()));
    own.map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn find_named<'a>(tree: &'a Options, name: &str) -> Option<&'a Options> {
    if tree.get("node-name").and_then(Value::as_str) == Some(name) {
        return Some(tree);
    }
    let children = CHILDREN.iter().filter_map(|child| tree.get(*child)?.as_object());
    children.into_iter().find_map(|child| find_named(child, name))
}

/// Understands a `-blockdev` argument: JSON, or `key=value,…`.
fn blockdev(text: &str) -> Result<Options> {
    if text.starts_with('{') {
        return serde_json::from_str(text).map_err(|e| {
            Error::with_source(ErrorKind::Refused, format!("-blockdev {text}: not understood"), e)
        });
    }
    let mut tree = Options::new();
    for (key, value) in pairs(text) {
        let key = if key.is_empty() { "driver".to_owned() } else { key };
        let typed = typed(&key, &value)?;
        insert(&mut tree, &key, typed);
    }
    Ok(tree)
}

/// Understands a `-drive` argument; `None` if it names no node.
fn drive(text: &str) -> Result<Option<Options>> {
    let mut tree = Options::new();
    for (key, value) in pairs(text) {
        let on = value == "on" || value.is_empty();
        match key.as_str() {
            "format" => insert(&mut tree, "driver", value.into()),
            "file" => insert(&mut tree, "file.filename", value.into()),
            "aio" => insert(&mut tree, "file.aio", value.into()),
            "readonly" | "read-only" => insert(&mut tree, "read-only", on.into()),
            "discard" => {
                let unmap = matches!(value.as_str(), "on" | "unmap");
                insert(&mut tree, "discard", if unmap { "unmap" } else { "ignore" }.into());
            }
            // Cache modes are shown by QMP; the rest belongs to the device or to nothing.
            "cache" | "if" | "id" | "index" | "media" | "werror" | "rerror" | "serial" => {}
            key if key.starts_with("throttling.") || key.starts_with("cache.") => {}
            key => insert(&mut tree, key, typed(key, &value)?),
        }
    }
    Ok(tree.contains_key("node-name").then_some(tree))
}

/// `a=1,b=x,,y` → (a, 1), (b, "x,y"); the first may lack its key.
pub(crate) fn pairs(text: &str) -> Vec<(String, String)> {
    let mut items = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' {
            items.last_mut().expect("never empty").push(c);
        } else if chars.next_if_eq(&',').is_some() {
            items.last_mut().expect("never empty").push(',');
        } else {
            items.push(String::new());
        }
    }
    let split = |item: String| match item.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None => (String::new(), item),
    };
    items.into_iter().filter(|i| !i.is_empty()).map(split).collect()
}

/// Gives a command line's value the type QMP wants.
fn typed(key: &str, text: &str) -> Result<Value> {
    let name =
        CHILDREN.iter().fold(key, |k, child| k.strip_prefix(&format!("{child}.")).unwrap_or(k));
    let bad = |why: &str| {
        let what = format!("node option {key}={text} on qemu's command line: {why}");
        Error::new(ErrorKind::Refused, what)
    };
    if CHILDREN.contains(&name) || STRINGS.contains(&name) {
        return Ok(text.into());
    }
    if BOOLEANS.contains(&name) {
        return match text {
            "on" | "yes" | "true" | "y" => Ok(true.into()),
            "off" | "no" | "false" | "n" => Ok(false.into()),
            _ => Err(bad("must be on or off")),
        };
    }
    if NUMBERS.contains(&name) {
        return number(text).map(Value::from).ok_or_else(|| bad("not a number"));
    }
    Err(bad("dray does not know this option"))
}

fn number(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_shl(shift)
}

/// Puts a dotted key into nested objects. A child named by a string stays a string.
fn insert(tree: &mut Options, key: &str, value: Value) {
    let Some((head, rest)) = key.split_once('.') else {
        tree.insert(key.to_owned(), value);
        return;
    };
    let child = tree.entry(head).or_insert_with(|| Value::Object(Options::new()));
    if let Some(child) = child.as_object_mut() {
        insert(child, rest, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn options(args: &[&str]) -> NodeOptions {
        NodeOptions::of_arguments(args)
    }

    #[test]
    fn key_values_get_their_types() {
        let options = options(&[
            "qemu",
            "-blockdev",
            "qcow2,node-name=q,discard=unmap,lazy-refcounts=on,l2-cache-size=2M,cache.direct=on,\
             detect-zeroes=on,file.driver=file,file.filename=/a,,b,file.node-name=qf,file.aio=native",
            "-device",
            "virtio-blk-pci,drive=q",
        ]);
        let q = Value::Object(options.of_node("q").expect("q"));
        let want = json!({"driver": "qcow2", "node-name": "q", "discard": "unmap",
            "lazy-refcounts": true, "l2-cache-size": 2 << 20, "cache": {"direct": true},
            "detect-zeroes": "on"});
        assert_eq!(q, want);
        let file =
            json!({"driver": "file", "filename": "/a,b", "node-name": "qf", "aio": "native"});
        assert_eq!(Value::Object(options.of_node("qf").expect("qf")), file);
        let (child, inherits) = options.of_file_child("q").expect("child");
        assert_eq!((Value::Object(child), inherits), (file, true));
    }

    #[test]
    fn json_and_references() {
        let options = options(&[
            "-blockdev",
            r#"{"driver":"file","filename":"/i","node-name":"s","aio":"io_uring"}"#,
            "-blockdev",
            r#"{"driver":"raw","node-name":"f","file":"s"}"#,
        ]);
        let (child, inherits) = options.of_file_child("f").expect("child");
        assert_eq!(child["aio"], "io_uring");
        assert!(!inherits);
    }

    #[test]
    fn drives() {
        let options = options(&[
            "-drive",
            "if=none,id=d,node-name=n,file=/i,format=qcow2,cache=none,discard=on,aio=native",
            "-drive",
            "if=virtio,file=/j",
        ]);
        let n = Value::Object(options.of_node("n").expect("n"));
        assert_eq!(n, json!({"driver": "qcow2", "node-name": "n", "discard": "unmap"}));
        assert_eq!(options.of_file_child("n").expect("child").0["aio"], "native");
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let error = options(&[]).of_node("q").expect_err("unknown");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("node q are not known"), "{error}");
        let args = ["-blockdev", "driver=qcow2,node-name=q,file=f,brand-new=3"];
        let error = options(&args).of_node("q").expect_err("unknown option");
        assert!(error.to_string().contains("brand-new=3"), "{error}");
        let args = ["-blockdev", "driver=raw,node-name=q,file=f,read-only=maybe"];
        assert!(options(&args).of_node("q").is_err());
        let args = ["-blockdev", "rbd,node-name=r,pool=p", "-blockdev", "raw,node-name=q,file=f"];
        assert!(options(&args).of_node("q").is_ok(), "an unknown node does not matter to others");
    }

    #[test]
    fn relative_names() {
        let mut options = options(&[]);
        assert_eq!(options.absolute(Path::new("/a/b")).expect("absolute"), Path::new("/a/b"));
        assert!(options.absolute(Path::new("b")).is_err());
        options.directory = Some("/vm".into());
        assert_eq!(options.absolute(Path::new("b")).expect("joined"), Path::new("/vm/b"));
        assert!(options.absolute(Path::new("/dev/fdset/3")).is_err());
    }
}
