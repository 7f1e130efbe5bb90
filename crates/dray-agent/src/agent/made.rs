//! Images of which this host makes a qcow2 when they have arrived: what has to be so before they come.

use super::Agent;
use crate::config::{Pool, PoolKind};
use crate::flat::fresh;
use dray_wire::request::WantedImage;

/// Of which of `count` images a qcow2 is made; `made` is empty when of none.
pub(super) fn is_made(made: &[bool], count: usize) -> impl Iterator<Item = bool> {
    made.iter().copied().chain(std::iter::repeat(false)).take(count)
}

impl Agent {
    /// How many bytes the qcow2 files of these images take beside them.
    pub(super) fn check_made(
        &self,
        pool: &Pool,
        images: &[WantedImage],
        made: &[bool],
    ) -> Result<u64, String> {
        if !made.is_empty() && made.len() != images.len() {
            return Err("the request names other images than formats".to_owned());
        }
        let wanted = images.iter().zip(made).filter(|(_, made)| **made).map(|(image, _)| image);
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
            self.check_free(pool, image)?;
        }
        let bytes = wanted.iter().map(|image| fresh::qcow2_bytes(image.allocated));
        Ok(bytes.fold(0, u64::saturating_add))
    }

    /// The name of an image's qcow2 has to be free.
    fn check_free(&self, pool: &Pool, image: &WantedImage) -> Result<(), String> {
        if image.read_only {
            return Err(format!("image '{}' is only read, and stays as it is", image.name));
        }
        let name = fresh::qcow2_name(&image.name);
        let path = pool.image_path(&name).map_err(|why| why.to_string())?;
        if path.exists() {
            let shown = path.display();
            return Err(format!("{shown} exists already; choose another name or pool"));
        }
        self.registry
            .refuse_used(&path, &image.name)
            .map_err(|why| format!("{why}; choose another name or pool"))
    }
}
