//! An image is backed up while a client writes to it; the backup is restored beside it and compared: it is the image
//! as it was at some moment between begin and end.

use crate::judge;
use crate::loose::Loose;
use crate::walk::Walk;
use crate::world::REPOSITORY;
use dray_guest::content::{BLOCK, Written};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// For how long the client writes before a backup begins, at most.
const BEFORE: Duration = Duration::from_millis(500);

impl Walk<'_> {
    pub fn back_up(&mut self, nth: usize) -> Result<(), String> {
        let (host, name) = (self.images[nth].host, self.images[nth].name.clone());
        // What is flushed now is in the backup in any case.
        self.write_image(nth)?;
        let least = self.images[nth].flushed();
        let writer = self.images[nth].writer(&self.world, self.random.below(1 << 40));
        std::thread::sleep(self.random.time(BEFORE));
        let mut args = vec!["backup", &name, "--to", REPOSITORY];
        args.extend(if self.random.chance(20) { &["--full"][..] } else { &[] });
        let done = self.ask(host, &args)?;
        let wrote = writer.end()?;
        self.images[nth].take_well(wrote)?;
        if done.is_none() {
            return Ok(());
        }
        let restored = format!("restored-{name}");
        let at = self.random.pick(&[host, host, 1 - host]);
        let restore = ["restore", &name, "--from", REPOSITORY, "--as", &restored];
        if self.ask(at, &restore)?.is_none() {
            return Ok(());
        }
        let file = self.world.file(at, &restored);
        let bytes = is_of_a_moment(&self.images[nth], &file, least)?;
        self.counts.add("MiB restored", bytes >> 20);
        self.forget_restored(at, &restored)
    }

    fn forget_restored(&mut self, at: usize, restored: &str) -> Result<(), String> {
        let file = self.world.file(at, restored);
        self.ask(at, &["images", "remove", restored])?.ok_or("a restored image stays")?;
        std::fs::remove_file(&file).map_err(|why| format!("{}: {why}", file.display()))
    }
}

/// The newest write in the file names the moment: every answered write before it is there as well, and nothing
/// else. The moment is not before the first `least` writes.
fn is_of_a_moment(image: &Loose, file: &Path, least: usize) -> Result<u64, String> {
    let newest = newest(file).map_err(|why| format!("{}: {why}", file.display()))?;
    let writes = image.history.iter().take_while(|write| write.seq <= newest).count();
    let known = image.after(writes.max(least));
    known.check_flushed(file, &[]).map_err(|why| {
        format!("a backup of {} with write {newest} and at least {least}: {why}", image.name)
    })?;
    Ok(judge::length(file))
}

fn newest(file: &Path) -> std::io::Result<u32> {
    let (length, file) = (judge::length(file), std::fs::File::open(file)?);
    let mut newest = 0;
    let mut bytes = [0; BLOCK];
    for at in (0..length).step_by(BLOCK) {
        file.read_exact_at(&mut bytes, at)?;
        newest = newest.max(Written::identify(&bytes).map_or(0, |written| written.seq));
    }
    Ok(newest)
}
