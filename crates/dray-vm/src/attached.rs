//! Whether the QEMU that waits for a guest has the disks that its migration brings, and no others: the right
//! ids and sizes may be those of old files, of disks in another order, or of another VM.

use dray_host::folder::intent::TargetImageIntent;
use dray_qemu::{Error, ErrorKind, Layer, LayerPlan, Result, VmDisk};
use std::path::Path;

/// What a migration brings for a VM.
pub struct Expected<'a> {
    /// The layers of its disks at the source, with the number of the image that each is in.
    pub plans: &'a [(usize, LayerPlan)],
    /// The images.
    pub images: &'a [TargetImageIntent],
    /// Where this agent serves them.
    pub nbd_socket: &'a Path,
    /// The guest has arrived: disks may be on their files already, or on qcow2 files made of them.
    pub arrived: bool,
}

impl Expected<'_> {
    /// Checks that a VM has a disk on an export of this migration's images. Of one that has none its peer learns nothing
    /// else.
    ///
    /// # Errors
    /// `Mismatch`, that it has none.
    pub fn concerns(&self, disks: &[VmDisk]) -> Result<()> {
        let name = |layer: &Layer| layer.export_at(self.nbd_socket);
        let mut names = disks.iter().flat_map(|disk| disk.layers.iter().filter_map(name));
        if names.any(|name| self.images.iter().any(|image| image.name_here() == name)) {
            return Ok(());
        }
        Err(mismatch("the target's QEMU has no disk on an export of this migration"))
    }

    /// Checks that each disk of a VM is on the exports of this migration's images.
    ///
    /// # Errors
    /// `Mismatch`, with which disk is not, and where it is.
    pub fn check(&self, disks: &[VmDisk]) -> Result<()> {
        disks.iter().try_for_each(|disk| self.check_disk(disk))
    }

    fn check_disk(&self, disk: &VmDisk) -> Result<()> {
        let qdev = &disk.qdev;
        let plans: Vec<_> = self.plans.iter().filter(|(_, plan)| plan.qdev == *qdev).collect();
        if disk.layers.len() != plans.len() && !self.arrived {
            let (there, here) = (plans.len(), disk.layers.len());
            return Err(mismatch(format!(
                "disk {qdev} consists of {here} images in the target's QEMU, and of {there} at \
                 the source"
            )));
        }
        disk.layers.iter().enumerate().try_for_each(|(depth, layer)| {
            let Some((number, plan)) = plans.iter().find(|(_, plan)| plan.depth == depth) else {
                let why = format!("disk {qdev}: no image is planned for its layer {depth}");
                return if self.arrived { Ok(()) } else { Err(mismatch(why)) };
            };
            let image = self.images.get(*number);
            let image = image.ok_or_else(|| mismatch("the plan names no image"))?;
            let fits = self.check_layer(layer, plan, image);
            fits.map_err(|why| why.during(format!("disk {qdev}")))
        })
    }

    fn check_layer(
        &self,
        layer: &Layer,
        plan: &LayerPlan,
        image: &TargetImageIntent,
    ) -> Result<()> {
        let export = image.name_here();
        match layer.export_at(self.nbd_socket) {
            Some(name) if name == export => plan.check_shown(layer),
            Some(name) => Err(mismatch(format!(
                "it is on the export of image '{name}', and its image is '{export}' here"
            ))),
            None if self.arrived => Ok(()),
            None => Err(mismatch(format!(
                "it is on {}, and not on the export '{export}' of the agent there",
                layer.protocol.file
            ))),
        }
    }
}

fn mismatch(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Mismatch, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{SOCKET, layer, on, plan};
    use dray_qemu::Node;
    use dray_types::ImageId;
    use dray_wire::ImageOffer;

    fn image(name: &str) -> TargetImageIntent {
        TargetImageIntent {
            offer: ImageOffer { id: ImageId(1), name: name.into(), len: 1, read_only: false },
            path: format!("/pool/{name}").into(),
            zeroed: true,
            replica: None,
            refused: None,
            in_place: None,
            qcow2: false,
        }
    }

    /// What is said of a VM whose disk0 has these files below it, the active one first, and whose disk1 is on
    /// its export.
    fn check(files: &[String], arrived: bool) -> Result<()> {
        let plans = [(0, plan("disk0", 0)), (2, plan("disk0", 1)), (1, plan("disk1", 0))];
        let images = [image("root"), image("data"), image("base")];
        let disk = |qdev: &str, files: &[String]| VmDisk {
            qdev: qdev.into(),
            backend: String::new(),
            layers: files.iter().map(|file| layer(file)).collect(),
        };
        let disks = [disk("disk0", files), disk("disk1", &[on("data")])];
        let nbd_socket = Path::new(SOCKET);
        Expected { plans: &plans, images: &images, nbd_socket, arrived }.check(&disks)
    }

    #[test]
    fn a_disk_is_on_the_exports_of_its_own_images_and_nowhere_else() {
        let base = on("base");
        check(&[on("root"), base.clone()], false).unwrap();
        let elsewhere = "nbd+unix:///root?socket=/run/other.sock".to_owned();
        let wrong = [
            (vec![on("data"), base.clone()], "export of image 'data'"),
            (vec![base.clone(), on("root")], "export of image 'base'"),
            (vec!["/pool/root".into(), base.clone()], "it is on /pool/root"),
            (vec![elsewhere, base.clone()], "socket=/run/other.sock"),
            (vec![on("root")], "consists of 1 images"),
            (vec!["/tmp/overlay".into(), on("root"), base], "consists of 3 images"),
        ];
        for (files, said) in wrong {
            let why = check(&files, false).unwrap_err().to_string();
            assert!(why.contains("disk0") && why.contains(said), "{files:?}: {why}");
        }
    }

    /// Whoever makes the plan may be anybody.
    #[test]
    fn a_layer_that_no_plan_is_of_is_not_passed_over() {
        let plans = [(0, plan("disk0", 0)), (1, plan("disk0", 7))];
        let images = [image("root"), image("data")];
        let layers = vec![layer(&on("root")), layer(&on("stranger"))];
        let disk = VmDisk { qdev: "disk0".into(), backend: String::new(), layers };
        let nbd_socket = Path::new(SOCKET);
        let expected = Expected { plans: &plans, images: &images, nbd_socket, arrived: false };
        assert!(expected.check(&[disk]).unwrap_err().to_string().contains("layer 1"));
    }

    /// Somebody may put the disk on the right export by another driver, or let its node show another part of it.
    #[test]
    fn a_disk_shows_of_its_image_what_it_did_at_the_source() {
        let plans = [(0, plan("disk0", 0))];
        let images = [image("root")];
        let check = |driver: &str, file: &str| {
            let node = Node { driver: driver.into(), file: file.into(), ..layer("").protocol };
            let shown = Layer { format: Some(node), ..layer(&on("root")) };
            let disk = VmDisk { qdev: "disk0".into(), backend: String::new(), layers: vec![shown] };
            let nbd_socket = Path::new(SOCKET);
            let expected =
                |arrived| Expected { plans: &plans, images: &images, nbd_socket, arrived };
            let said =
                [false, true].map(|arrived| expected(arrived).check(std::slice::from_ref(&disk)));
            said.map(|said| said.err().map(|why| why.to_string()))
        };
        assert_eq!(check("raw", &on("root")), [None, None]);
        let part = r#"json:{"driver": "raw", "offset": 4096, "file": {"driver": "nbd"}}"#;
        let wrong =
            [("qcow2", "", "shows the image as qcow2, and not as raw"), ("raw", part, "4096")];
        for (driver, file, said) in wrong {
            for why in check(driver, file) {
                let why = why.unwrap_or_default();
                assert!(why.contains("disk0") && why.contains(said), "{driver} {file}: {why}");
            }
        }
    }

    #[test]
    fn a_disk_of_a_guest_that_has_arrived_may_be_on_its_file_and_not_on_another_images_export() {
        check(&["/pool/root.qcow2".into()], true).unwrap();
        check(&[on("root"), "/pool/base".into()], true).unwrap();
        assert!(check(&[on("data"), on("base")], true).is_err());
    }
}
