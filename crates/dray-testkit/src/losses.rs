//! What an agent has written down of a loss that its guest has not heard of.

use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Where the checksum is.
const SUM: usize = 504;
/// Length of the boot's id in text.
const BOOT_LEN: usize = 36;

/// Says in an agent's state directory that writes to image `name` were lost in this boot because of `why`.
///
/// # Panics
/// When the file cannot be written.
pub fn write_loss(state_dir: &Path, name: &str, why: &str) {
    let mut owed = std::fs::read("/proc/sys/kernel/random/boot_id").expect("the boot's id");
    owed.truncate(BOOT_LEN);
    owed.extend(why.as_bytes());
    owed.resize(SUM, 0);
    let sum = xxh3_64(&owed).to_le_bytes();
    owed.extend(sum);
    let path = state_dir.join("images").join(format!("{name}.lost"));
    std::fs::write(path, owed).expect("write");
}
