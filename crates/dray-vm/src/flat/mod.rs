//! Disks that move flattened: what their guest sees, without the chain of images it is made of.
//!
//! dray never looks into a qcow2 beyond the head that says whether all of it is there ([`barred`]). The chain is
//! *frozen*: a QEMU storage daemon behind a wall (`server`) gets its files from this agent ([`layer`]) and serves
//! it to this agent ([`chain`]), which only reads it, and what the guest writes goes into an
//! [`Overlay`](dray_image::Overlay) that is dray's own. Both together are an image like any other.
//! [`turn`] puts a running VM's disk on it, and merges the overlay back into the chain and puts the disk back, when
//! the guest stays here after all (`merge` is how); it ends what an agent died in, too.
//! [`peeks`](dray_host::flat::peeks) are of those who look before. While the overlay is the truth the
//! chain's active file has no name that anybody would open. What is durable of it all is in
//! [`dray_host::flat`].
//!
//! At the target the image is raw. [`fresh`] makes a qcow2 of it where that was asked for (`maker` has QEMU's
//! tools do it), and [`swap`]
//! puts the disk on it.

pub mod barred;
pub mod chain;
#[cfg(test)]
mod confined;
pub mod fresh;
pub mod layer;
mod maker;
mod merge;
mod others;
mod server;
pub mod swap;
pub mod turn;

use chain::Chain;
use dray_config::Config;
use dray_host::flat::{ChainImage, Purpose};
use dray_host::pool::PoolIo;
use dray_host::record::ImageRecord;
use dray_host::record::chain::ChainLayer;
use dray_host::registry::Surroundings;
use dray_host::stamp::unwritten;
use dray_image::{ImageNames, Quiesced};
use dray_qemu::{LayerPlan, Pivot, Stopped};
use dray_types::ImageId;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// How long a look waits for a chain that cannot be read. The target's reader gives up after 30 s,
/// and should hear why before that.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long writes may take to end that QEMU no longer waits for.
pub const QUIET: Duration = Duration::from_secs(5);

/// Options of a format node that change how an image is handled and not what is in it.
const HARMLESS: [&str; 19] = [
    "driver",
    "node-name",
    "read-only",
    "auto-read-only",
    "force-share",
    "discard",
    "discard-no-unref",
    "detect-zeroes",
    "cache",
    "cache-size",
    "cache-clean-interval",
    "lazy-refcounts",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "overlap-check",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
];

/// Carries out an exchange while the writes of a stopped guest are held back by `quiet`. When somebody lets the
/// guest go on they are held back no longer, unless `may_open` says otherwise: QEMU would wait for them, with
/// everything else that it does.
pub async fn held_back<T>(
    exchange: impl Future<Output = T>,
    stopped: &Stopped,
    quiet: &mut Option<Quiesced>,
    may_open: impl FnOnce() -> bool,
) -> T {
    let mut exchange = pin!(exchange);
    tokio::select! {
        biased;
        done = &mut exchange => return done,
        () = stopped.goes_on() => {}
    }
    if may_open() {
        *quiet = None;
    }
    exchange.await
}

/// The images of a disk's chain, the active one first.
///
/// # Errors
/// `Refused`, with what of it another process could not be told to open.
pub fn chain_of(layers: &[LayerPlan]) -> dray_qemu::Result<Vec<ChainLayer>> {
    layers.iter().enumerate().map(|(depth, plan)| layer_of(plan, depth > 0)).collect()
}

fn layer_of(plan: &LayerPlan, below: bool) -> dray_qemu::Result<ChainLayer> {
    let path = plan.path();
    if let Pivot::Reopen { options } = &plan.pivot
        && let Some(option) = options.keys().find(|key| !HARMLESS.contains(&key.as_str()))
    {
        let shown = path.display();
        let why = format!("{shown} has the option {option}, which changes its content");
        return Err(dray_qemu::Error::new(dray_qemu::ErrorKind::Refused, why));
    }
    let protocol = plan.local.get("driver").and_then(|name| name.as_str()).unwrap_or("file");
    let seen = if below { unwritten(&path) } else { Ok(None) };
    let seen = seen.map_err(|why| {
        let why = format!("{}: {why}", path.display());
        dray_qemu::Error::new(dray_qemu::ErrorKind::Refused, why)
    })?;
    Ok(ChainLayer { path, format: plan.format.clone(), protocol: protocol.to_owned(), seen })
}

/// What the registry asks of the host that the configuration describes.
pub struct Pools(pub Arc<Config>);

impl Surroundings for Pools {
    fn is_direct(&self, path: &Path) -> bool {
        self.0.io(path) == PoolIo::Direct
    }

    /// The daemon that reads it is started by the first read and ends with the last user.
    fn chain(
        &self,
        purpose: Purpose,
        id: ImageId,
        layers: Vec<ChainLayer>,
        len: u64,
    ) -> Arc<dyn ChainImage> {
        let patience = match purpose {
            Purpose::Serve => self.0.limits.stall,
            Purpose::Peek => Some(PATIENCE),
        };
        let place = daemon_place(&self.0.run_dir, purpose, id);
        Chain::new(place, layers, len, patience, Arc::clone(&self.0) as _)
    }
}

/// What the names of a storage daemon's files begin with.
fn prefix(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Serve => "chain-",
        Purpose::Peek => "peek-",
    }
}

/// Where the daemon that serves an image's chain has its socket, without the ending.
pub fn daemon_place(run_dir: &Path, purpose: Purpose, id: ImageId) -> PathBuf {
    run_dir.join(format!("{}{:016x}", prefix(purpose), id.0 as u64))
}

/// Ends the storage daemons that an agent before this one has left behind: they serve nobody, and
/// keep QEMU from taking its disks back.
pub fn end_leftovers(run_dir: &Path) {
    for purpose in [Purpose::Serve, Purpose::Peek] {
        if let Err(why) = server::end_leftovers(run_dir, prefix(purpose)) {
            tracing::error!(%why, "cannot end the storage daemons of an earlier agent");
        }
    }
}

/// The names of an image's files.
///
/// # Errors
/// That its path has no name.
pub fn names_of(record: &ImageRecord) -> io::Result<ImageNames> {
    ImageNames::of(&record.path).map_err(io::Error::other)
}

/// How the disk of a flattened image gets back on its chain.
///
/// # Errors
/// When its record does not tell.
pub fn layers_of(record: &ImageRecord) -> io::Result<Vec<LayerPlan>> {
    let adopted = record.adopted.as_ref().ok_or_else(|| io::Error::other("it was not adopted"))?;
    serde_json::from_value(adopted.splice.clone()).map_err(io::Error::other)
}

/// Name of a flattened disk's image at the target when none is given.
pub fn raw_name(name: &str) -> String {
    let stem = name.strip_suffix(".qcow2").or_else(|| name.strip_suffix(".qcow")).unwrap_or(name);
    if stem.ends_with(".raw") { stem.to_owned() } else { format!("{stem}.raw") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_gets_a_raw_image() {
        assert_eq!(raw_name("vm.qcow2"), "vm.raw");
        assert_eq!(raw_name("vm"), "vm.raw");
        assert_eq!(raw_name("vm.raw"), "vm.raw");
    }
}
