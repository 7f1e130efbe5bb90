//! What QEMU's own tool tells of an image file.

use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_host::refusals::io_error;
use dray_types::text::harmless;
use std::path::{Path, PathBuf};

/// The files that an image is built on, the nearest first, as they are named in it.
///
/// # Errors
/// What `qemu-img` says.
pub fn backing_chain(what: &str, path: &Path, format: &str) -> ApiResult<Vec<PathBuf>> {
    let info = image_info(what, path, format, &["--backing-chain"])?;
    let chain = info.as_array().map_or(&[][..], Vec::as_slice);
    let below = chain.iter().filter_map(|image| image["full-backing-filename"].as_str());
    Ok(below.map(PathBuf::from).collect())
}

/// The guest-visible size of an image under a format driver, asked of QEMU's own tool: dray does
/// not look into images.
///
/// # Errors
/// What `qemu-img` says.
pub fn virtual_size(what: &str, path: &Path, format: &str) -> ApiResult<u64> {
    let info = image_info(what, path, format, &[])?;
    info["virtual-size"].as_u64().ok_or_else(|| {
        Refusal::new(ErrorKind::Invalid, what, "qemu-img does not report the length of the image")
    })
}

fn image_info(
    what: &str,
    path: &Path,
    format: &str,
    more: &[&str],
) -> ApiResult<serde_json::Value> {
    let run = std::process::Command::new("qemu-img")
        .args(["info", "-U", "--output=json", "-f", format])
        .args(more)
        .arg(path)
        .output()
        .map_err(|why| io_error(what, format!("cannot run qemu-img: {why}")))?;
    serde_json::from_slice(&run.stdout).map_err(|_| {
        let why = harmless(String::from_utf8_lossy(&run.stderr).trim());
        Refusal::new(ErrorKind::Invalid, what, why).hint("check the format")
    })
}
