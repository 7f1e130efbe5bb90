//! What QEMU's own tool tells of an image file. The tool runs behind a wall and is handed the file, one at a
//! time: names that stand in a file are followed here, and only into the pools (I7).

use crate::agent::Agent;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_confine::Tool;
use dray_host::refusals::io_error;
use dray_types::MAX_CHAIN;
use dray_types::text::harmless;
use dray_vm::flat::barred::chain_error;
use dray_vm::flat::layer::{node, read_alone};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The tool.
const PROGRAM: &str = "qemu-img";
/// How long it may take: it reads the tables of one image.
const PATIENCE: Duration = Duration::from_secs(60);

impl Agent {
    /// The files that an image is built on, the nearest first, as they are named in it.
    ///
    /// # Errors
    /// What `qemu-img` says, or why one of them may not be read.
    pub fn backing_chain(&self, what: &str, path: &Path, format: &str) -> ApiResult<Vec<PathBuf>> {
        let mut chain: Vec<PathBuf> = Vec::new();
        let mut format = Some(format.to_owned());
        loop {
            let at = chain.last().map_or(path, PathBuf::as_path);
            let info = self.image_info(what, at, format.as_deref())?;
            let Some(name) = info["backing-filename"].as_str() else { return Ok(chain) };
            let below = named_in(what, at, name)?;
            self.check_file(what, &below, false)?;
            // With the image itself, and this one.
            if chain.len() + 2 > MAX_CHAIN {
                let why = format!("the chain has more than {MAX_CHAIN} images");
                return Err(Refusal::new(ErrorKind::Unsupported, what, why));
            }
            chain.push(below);
            format = info["backing-filename-format"].as_str().map(str::to_owned);
        }
    }

    /// The guest-visible size of an image under a format driver, asked of QEMU's own tool: dray does
    /// not look into images.
    ///
    /// # Errors
    /// What `qemu-img` says.
    pub fn virtual_size(&self, what: &str, path: &Path, format: &str) -> ApiResult<u64> {
        let info = self.image_info(what, path, Some(format))?;
        info["virtual-size"].as_u64().ok_or_else(|| {
            let why = "qemu-img does not report the length of the image";
            Refusal::new(ErrorKind::Invalid, what, why)
        })
    }

    /// What the tool tells of one file. Without a format it finds out which it is.
    fn image_info(&self, what: &str, path: &Path, format: Option<&str>) -> ApiResult<Value> {
        // Whatever it turns out to be, a qcow2 that is not whole is refused.
        let shown = format.unwrap_or("qcow2");
        let layer = read_alone(path.to_owned(), shown, &*self.config);
        let mut layer = layer.map_err(|why| chain_error(what, &why))?;
        let failed = |why: std::io::Error| io_error(what, format!("cannot run {PROGRAM}: {why}"));
        let mut tool = Tool::new(PROGRAM);
        let mut image = json!({"file": node(tool.hand(layer.socket().map_err(failed)?), true)});
        if let Some(format) = format {
            image["driver"] = format.into();
        }
        tool.args(["info", "-U", "--output=json", &format!("json:{image}")]);
        let ran = tool.run(PATIENCE).map_err(failed)?;
        serde_json::from_slice(&ran.stdout).map_err(|_| {
            let why = harmless(String::from_utf8_lossy(&ran.stderr).trim());
            Refusal::new(ErrorKind::Invalid, what, why).hint("check the format")
        })
    }
}

/// The file that an image at `at` names as the one below it, as QEMU understands the name.
fn named_in(what: &str, at: &Path, name: &str) -> ApiResult<PathBuf> {
    let path = name.strip_prefix("file:").unwrap_or(name);
    // "json:…", "nbd://…": QEMU takes what is before the first colon for a protocol, unless a slash comes first.
    if path.split('/').next().is_some_and(|first| first.contains(':')) {
        let (at, name) = (at.display(), harmless(name));
        let why = format!("{at} is built on {name}, which is no file of this host");
        return Err(Refusal::new(ErrorKind::Unsupported, what, why));
    }
    Ok(at.parent().unwrap_or(Path::new("/")).join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_an_image_are_files_of_this_host() {
        let named = |name| named_in("cannot", Path::new("/pool/vm.qcow2"), name);
        assert_eq!(named("base.qcow2").unwrap(), Path::new("/pool/base.qcow2"));
        assert_eq!(named("/other/base").unwrap(), Path::new("/other/base"));
        assert_eq!(named("file:base.qcow2").unwrap(), Path::new("/pool/base.qcow2"));
        assert_eq!(named("./a:b").unwrap(), Path::new("/pool/./a:b"));
        for name in
            ["json:{\"driver\":\"host_device\"}", "nbd://host/x", "nbd:unix:/run/x", "fat:/etc"]
        {
            assert_eq!(named(name).unwrap_err().kind, ErrorKind::Unsupported, "{name}");
        }
    }
}
