//! The last look at a VM at its source, when its guest has stopped and before its images are handed over: each
//! disk is still on the export that moves. What another program has put there meanwhile (a snapshot's overlay, a
//! mirror, another file) has writes of the guest that the target would never see.

use super::look::Look;
use super::picture::MERGE;
use dray_host::folder::intent::SourceImage;
use dray_qemu::{Layer, LayerPlan, VmDisk};
use std::path::Path;

/// Where a migration has the disks of its VM.
pub struct Expected<'a> {
    /// The layers of its disks, with the number of the image that each is in.
    pub plans: &'a [(usize, LayerPlan)],
    /// The images.
    pub images: &'a [SourceImage],
    /// Where this agent serves them.
    pub nbd_socket: &'a Path,
}

/// What to do about anything that was changed and has no other remedy.
pub const PREPARE: &str =
    "when nothing changes the vm's disks any more, prepare and migrate it again";

/// What is not as it was, and what to do about it.
#[derive(PartialEq, Eq, Debug)]
pub struct Changed {
    /// What.
    pub why: String,
    /// How the operator can remove the cause.
    pub hint: String,
}

impl From<String> for Changed {
    fn from(why: String) -> Self {
        Self { why, hint: PREPARE.to_owned() }
    }
}

impl Expected<'_> {
    /// Checks that the VM is as its migration has known it.
    ///
    /// # Errors
    /// What is not.
    pub fn check(&self, look: &Look) -> Result<(), Changed> {
        if let Some(job) = look.jobs.first() {
            let (id, kind) = (&job.id, &job.kind);
            return Err(Changed {
                why: format!("another program has begun the block job {id} ({kind})"),
                hint: format!(
                    "wait until it has ended, or end it (`virsh blockjob VM DISK --abort`, or \
                     `block-job-cancel` of {id} in QMP), then prepare and migrate it again"
                ),
            });
        }
        let planned = self.plans.iter().filter(|(_, plan)| plan.depth == 0);
        for (_, plan) in planned {
            let qdev = &plan.qdev;
            let disk = look.disks.iter().find(|disk| disk.qdev == *qdev);
            let disk = disk.ok_or_else(|| format!("the vm has no disk {qdev} any more"))?;
            if disk.size() != plan.size {
                let (now, then) = (disk.size(), plan.size);
                let why = format!("disk {qdev}: it was resized from {then} to {now} bytes");
                return Err(why.into());
            }
            let changed = |found: Changed| {
                let why = format!("disk {qdev}: {}", found.why);
                Changed { why, ..found }
            };
            self.check_disk(disk).map_err(changed)?;
        }
        let planned = |disk: &&VmDisk| self.plans.iter().any(|(_, plan)| plan.qdev == disk.qdev);
        match look.disks.iter().find(|disk| !planned(disk)) {
            Some(disk) => Err(format!("the vm has another disk, {}", disk.qdev).into()),
            None => Ok(()),
        }
    }

    fn check_disk(&self, disk: &VmDisk) -> Result<(), Changed> {
        let plans: Vec<_> = self.plans.iter().filter(|(_, p)| p.qdev == disk.qdev).collect();
        if disk.layers.len() != plans.len() {
            let (now, then) = (disk.layers.len(), plans.len());
            let top = &disk.active().protocol.file;
            let why = format!(
                "it consists of {now} images, the uppermost {top}, and consisted of {then}"
            );
            let hint = if now > then { MERGE } else { PREPARE };
            return Err(Changed { why, hint: hint.to_owned() });
        }
        disk.layers.iter().enumerate().try_for_each(|(depth, layer)| {
            let plan = plans.iter().find(|(_, plan)| plan.depth == depth);
            let (number, plan) =
                plan.ok_or_else(|| format!("no image is planned for layer {depth}"))?;
            let image = self.images.get(*number);
            let image = image.ok_or_else(|| "the plan names no image".to_owned())?;
            self.check_layer(layer, plan, image)
        })
    }

    fn check_layer(
        &self,
        layer: &Layer,
        plan: &LayerPlan,
        image: &SourceImage,
    ) -> Result<(), Changed> {
        let file = &layer.protocol.file;
        match layer.export_at(self.nbd_socket) {
            Some(name) if name == image.name => {
                plan.check_shown(layer).map_err(|why| why.to_string().into())
            }
            // Nobody writes it: it is moved from its file.
            None if layer.top().read_only && is_file(layer, &image.path) => Ok(()),
            _ => {
                let name = &image.name;
                Err(format!("it is on {file}, and not on the export of image '{name}'").into())
            }
        }
    }
}

/// Whether a layer is on this file. QEMU may know it by a relative name, or through a link.
fn is_file(layer: &Layer, path: &Path) -> bool {
    layer.protocol.path().is_some_and(|name| {
        path.ends_with(name) || name.canonicalize().is_ok_and(|real| real == path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{SOCKET, layer, on, plan};
    use dray_qemu::Node;
    use dray_qemu::status::{BlockJob, VmStatus};
    use dray_types::ImageId;
    use dray_wire::ImageOffer;

    fn image(name: &str) -> SourceImage {
        let offer = ImageOffer { id: ImageId(1), name: name.into(), len: 1, read_only: false };
        SourceImage::new(name.into(), offer, format!("/pool/{name}").into(), None)
    }

    fn disk(qdev: &str, layers: Vec<Layer>) -> VmDisk {
        VmDisk { qdev: qdev.into(), backend: String::new(), layers }
    }

    fn base() -> Layer {
        let mut base = layer("/pool/base");
        base.protocol.read_only = true;
        base
    }

    fn look(disks: Vec<VmDisk>) -> Look {
        let status = VmStatus { running: false, state: "postmigrate".into() };
        Look { process: None, status, disks, jobs: Vec::new() }
    }

    fn check(look: &Look) -> Result<(), Changed> {
        let plans = [(0, plan("disk0", 0)), (2, plan("disk0", 1)), (1, plan("disk1", 0))];
        let images = [image("root"), image("data"), image("base")];
        Expected { plans: &plans, images: &images, nbd_socket: Path::new(SOCKET) }.check(look)
    }

    fn root() -> VmDisk {
        disk("disk0", vec![layer(&on("root")), base()])
    }

    fn data() -> VmDisk {
        disk("disk1", vec![layer(&on("data"))])
    }

    #[test]
    fn a_vm_is_as_its_migration_knows_it_or_stays() {
        assert_eq!(check(&look(vec![root(), data()])), Ok(()));
        let overlay = || layer("/pool/overlay");
        let wrong = [
            (vec![root()], "no disk disk1"),
            (vec![root(), data(), disk("disk2", vec![overlay()])], "another disk, disk2"),
            (
                vec![disk("disk0", vec![overlay(), layer(&on("root")), base()]), data()],
                "disk0: it consists of 3 images, the uppermost /pool/overlay",
            ),
            (vec![root(), disk("disk1", vec![overlay()])], "disk1: it is on /pool/overlay"),
            (vec![root(), disk("disk1", vec![layer(&on("root"))])], "export of image 'data'"),
            // The file of the image itself, which the guest writes past the export.
            (vec![root(), disk("disk1", vec![layer("/pool/data")])], "disk1: it is on /pool/data"),
            (
                vec![disk("disk0", vec![layer(&on("root")), layer("/pool/base")]), data()],
                "/pool/base",
            ),
        ];
        for (disks, said) in wrong {
            let Changed { why, hint } = check(&look(disks)).expect_err(said);
            assert!(why.contains(said), "{why}");
            assert_eq!(hint.contains("block-commit"), why.contains("consists of"), "{hint}");
        }
    }

    /// Somebody may have let its raw node show another part of it: a guest writes there what the target has elsewhere.
    #[test]
    fn a_disk_that_shows_another_part_of_its_image_is_not_the_one_that_waits() {
        let part = r#"json:{"driver": "raw", "offset": 4096, "file": {"driver": "nbd"}}"#;
        let node = Node { driver: "raw".into(), file: part.into(), ..layer("").protocol };
        let shifted = disk("disk1", vec![Layer { format: Some(node), ..layer(&on("data")) }]);
        let why = check(&look(vec![root(), shifted])).unwrap_err().why;
        assert!(why.contains("disk1: its node shows what is behind byte 4096"), "{why}");
    }

    #[test]
    fn a_disk_that_was_resized_is_not_the_one_that_waits() {
        let mut grown = root();
        grown.layers[0].protocol.size = 2;
        let why = check(&look(vec![grown, data()])).unwrap_err().why;
        assert!(why.contains("disk0: it was resized from 1 to 2 bytes"), "{why}");
    }

    #[test]
    fn a_job_of_somebody_else_is_told() {
        let job = BlockJob { id: "copy".into(), kind: "mirror".into() };
        let busy = Look { jobs: vec![job], ..look(vec![root(), data()]) };
        let Changed { why, hint } = check(&busy).unwrap_err();
        assert!(why.contains("the block job copy (mirror)"), "{why}");
        assert!(hint.contains("`block-job-cancel` of copy"), "{hint}");
    }
}
