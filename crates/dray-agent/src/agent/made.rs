//! Images of which this host makes a qcow2 when they have arrived: what has to be so before they come.

use crate::flat::fresh;
use crate::flat::swap::refuse_used;
use dray_host::pool::{Pool, PoolKind};
use dray_host::registry::Registry;
use dray_wire::request::{ComingImage, WantedImage};

/// How many bytes the qcow2 files of these images take beside them.
pub(super) fn check_made(
    registry: &Registry,
    pool: &Pool,
    images: &[ComingImage],
) -> Result<u64, String> {
    let wanted = images.iter().filter(|coming| coming.qcow2).map(|coming| &coming.image);
    let wanted: Vec<_> = wanted.collect();
    if wanted.is_empty() {
        return Ok(0);
    }
    if pool.kind == PoolKind::Devices {
        let name = &pool.name;
        return Err(format!(
            "pool '{name}' holds block devices, and no qcow2 is made of one; name a pool of \
                 files or leave the disk raw"
        ));
    }
    fresh::check_tools()?;
    for image in &wanted {
        check_free(registry, pool, image)?;
    }
    let bytes = wanted.iter().map(|image| fresh::qcow2_bytes(image.allocated));
    Ok(bytes.fold(0, u64::saturating_add))
}

/// The name of an image's qcow2 has to be free.
fn check_free(registry: &Registry, pool: &Pool, image: &WantedImage) -> Result<(), String> {
    if image.read_only {
        return Err(format!("image '{}' is only read, and stays as it is", image.name));
    }
    let name = fresh::qcow2_name(&image.name);
    let path = pool.image_path(&name).map_err(|why| why.to_string())?;
    if path.exists() {
        let shown = path.display();
        return Err(format!("{shown} exists already; choose another name or pool"));
    }
    refuse_used(registry, &path, &image.name)
        .map_err(|why| format!("{why}; choose another name or pool"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flat::swap::tests::Host;
    use crate::ops::refused_kind;
    use dray_api::ErrorKind;
    use dray_host::pool::PoolIo;
    use dray_types::ImageId;

    #[test]
    fn what_cannot_become_a_qcow2_is_refused_before_it_comes() {
        let host = Host::new();
        let kind = PoolKind::Files;
        let (name, io) = ("p".to_owned(), PoolIo::Buffered);
        let files = Pool { name, path: host.pool(), kind, io };
        let wanted = |name: &str, read_only| {
            let (len, allocated) = (1 << 30, 64 << 20);
            WantedImage { id: ImageId(1), name: name.into(), len, allocated, read_only }
        };
        let coming = |name, read_only, qcow2| {
            let image = wanted(name, read_only);
            ComingImage { image, ancestors: Vec::new(), digest: None, qcow2 }
        };
        let check = |pool: &Pool, made: &[bool; 2]| {
            let images = [coming("a.raw", false, made[0]), coming("b.raw", false, made[1])];
            check_made(&host.registry, pool, &images)
        };
        assert_eq!(check(&files, &[false, false]), Ok(0));
        let bytes = check(&files, &[false, true]).unwrap();
        assert!((64 << 20..66 << 20).contains(&bytes), "once more, and its tables: {bytes}");
        let devices = Pool { kind: PoolKind::Devices, ..files.clone() };
        let why = check(&devices, &[true, false]).unwrap_err();
        assert_eq!(refused_kind(&format!("hostb refuses: {why}")), ErrorKind::Invalid, "{why}");
        std::fs::write(host.pool().join("b.qcow2"), "somebody's").unwrap();
        assert!(check(&files, &[true, false]).is_ok());
        let why = check(&files, &[true, true]).unwrap_err();
        assert_eq!(refused_kind(&why), ErrorKind::Conflict, "{why}");
        let backing = [coming("base.raw", true, true)];
        assert!(check_made(&host.registry, &files, &backing).is_err());
    }
}
