//! Somebody edits a copy that was left behind, before its image comes back: nothing of the edit may be seen then.

use crate::walk::Walk;
use crate::world::LETTERS;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How many places are edited.
const EDITS: u64 = 3;
const BLOCK: u64 = 4096;

impl Walk<'_> {
    pub fn edit_replica(&mut self) -> Result<(), String> {
        let mut all = Vec::new();
        for host in 0..2 {
            let names = self.world.host(host).pool_files().map_err(|why| why.to_string())?;
            let replicas = names.into_iter().filter(|name| name.contains(".dray-replica-"));
            all.extend(replicas.map(|name| (host, self.world.file(host, &name))));
        }
        if all.is_empty() {
            return Ok(());
        }
        let (host, file) = all[self.random.below(all.len() as u64) as usize].clone();
        let hidden = self.random.chance(50);
        self.edit(&file, hidden).map_err(|why| format!("{}: {why}", file.display()))?;
        self.counts.add(if hidden { "replicas edited unseen" } else { "replicas edited" }, 1);
        self.tell(format!(
            "   {} at {} is edited, unseen: {hidden}",
            file.display(),
            LETTERS[host]
        ));
        self.bring_back(host, &file)
    }

    /// Moves whatever left the replica to where it is.
    fn bring_back(&mut self, host: usize, file: &Path) -> Result<(), String> {
        let hidden = file.file_name().map(|name| name.to_string_lossy().into_owned());
        let hidden = hidden.unwrap_or_default();
        let left_by = |name: &str| hidden.starts_with(&format!(".{name}.dray-replica-"));
        let image = self.images.iter().position(|image| image.host != host && left_by(&image.name));
        let vm = self
            .vms
            .iter()
            .position(|vm| vm.host() != host && vm.disks.iter().any(|disk| left_by(&disk.file)));
        match (image, vm) {
            (Some(nth), _) => self.move_image(nth),
            (None, Some(number)) => self.move_vm(number),
            (None, None) => Ok(()),
        }
    }

    /// `hidden`: the time of its last change is put back.
    fn edit(&mut self, file: &Path, hidden: bool) -> io::Result<()> {
        let path: PathBuf = file.to_owned();
        let file = File::options().read(true).write(true).open(path)?;
        let meta = file.metadata()?;
        let (times, blocks) = (meta.modified()?, (meta.len() / BLOCK).max(1));
        for _ in 0..EDITS {
            let at = self.random.below(blocks) * BLOCK;
            file.write_all_at(b"somebody was here", at)?;
        }
        if hidden { file.set_modified(times) } else { Ok(()) }
    }
}
