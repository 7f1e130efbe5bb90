//! Images of which this host makes a qcow2 when they have arrived: what has to be so before they come.

use dray_host::pool::{Pool, PoolKind};
use dray_host::refusals::{Answer, conflict, failed, invalid, of_path};
use dray_host::registry::Registry;
use dray_vm::flat::fresh;
use dray_vm::flat::swap::refuse_used;
use dray_wire::request::{ComingImage, WantedImage};

/// What to do about a name that is taken.
const OTHER_NAME: &str = "choose another name or pool";

/// How many bytes the qcow2 files of these images take beside them.
pub(super) fn check_made(registry: &Registry, pool: &Pool, images: &[ComingImage]) -> Answer<u64> {
    let wanted = images.iter().filter(|coming| coming.qcow2).map(|coming| &coming.image);
    let wanted: Vec<_> = wanted.collect();
    if wanted.is_empty() {
        return Ok(0);
    }
    if pool.kind == PoolKind::Devices {
        let name = &pool.name;
        let why = format!("pool '{name}' holds block devices, and no qcow2 is made of one");
        return Err(invalid(why).hint("name a pool of files or leave the disk raw"));
    }
    fresh::check_tools().map_err(failed)?;
    for image in &wanted {
        check_free(registry, pool, image)?;
    }
    let bytes = wanted.iter().map(|image| fresh::qcow2_bytes(image.allocated));
    Ok(bytes.fold(0, u64::saturating_add))
}

/// The name of an image's qcow2 has to be free.
fn check_free(registry: &Registry, pool: &Pool, image: &WantedImage) -> Answer<()> {
    if image.read_only {
        return Err(invalid(format!("image '{}' is read-only and stays as it is", image.name)));
    }
    let name = fresh::qcow2_name(&image.name);
    let path = pool.image_path(&name).map_err(of_path)?;
    if path.exists() {
        let shown = path.display();
        return Err(conflict(format!("{shown} exists already")).hint(OTHER_NAME));
    }
    refuse_used(registry, &path, &image.name).map_err(|why| conflict(why).hint(OTHER_NAME))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_api::ErrorKind;
    use dray_config::Config;
    use dray_host::pool::PoolIo;
    use dray_host::store::Store;
    use dray_types::ImageId;
    use dray_vm::flat::Pools;
    use std::sync::Arc;

    #[test]
    fn what_cannot_become_a_qcow2_is_refused_before_it_comes() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("pool");
        std::fs::create_dir(&at).unwrap();
        let text = "[agent]\nname = 'hosta'\n[tls]\ndir = '/'\n[[pool]]\nname = 'p'\npath = '/'\n";
        let config = Config::parse(text, "dray.toml".as_ref()).unwrap();
        let store = Store::open(&dir.path().join("state")).unwrap();
        let registry = Registry::load(store, Arc::new(Pools(Arc::new(config)))).unwrap();
        let kind = PoolKind::Files;
        let (name, io) = ("p".to_owned(), PoolIo::Buffered);
        let files = Pool { name, path: at.clone(), kind, io, reuse_domain: None };
        let wanted = |name: &str, read_only| {
            let (len, allocated) = (1 << 30, 64 << 20);
            WantedImage { id: ImageId(1), name: name.into(), len, allocated, read_only }
        };
        let coming = |name, read_only, qcow2| {
            let image = wanted(name, read_only);
            ComingImage { image, ancestors: Vec::new(), digest: None, qcow2, owner: None }
        };
        let check = |pool: &Pool, made: &[bool; 2]| {
            let images = [coming("a.raw", false, made[0]), coming("b.raw", false, made[1])];
            check_made(&registry, pool, &images)
        };
        assert_eq!(check(&files, &[false, false]), Ok(0));
        let bytes = check(&files, &[false, true]).unwrap();
        assert!((64 << 20..66 << 20).contains(&bytes), "once more, and its tables: {bytes}");
        let devices = Pool { kind: PoolKind::Devices, ..files.clone() };
        assert_eq!(check(&devices, &[true, false]).unwrap_err().kind, ErrorKind::Invalid);
        std::fs::write(at.join("b.qcow2"), "somebody's").unwrap();
        assert!(check(&files, &[true, false]).is_ok());
        assert_eq!(check(&files, &[true, true]).unwrap_err().kind, ErrorKind::Conflict);
        let backing = [coming("base.raw", true, true)];
        assert!(check_made(&registry, &files, &backing).is_err());
    }
}
