//! Where backups are: repositories that this host may read and write.

use std::path::PathBuf;
use std::time::Duration;

/// A backup repository, `[[backup]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupPlace {
    /// How commands name it.
    pub name: String,
    /// `file:///PATH` or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// The file with its key, when it is encrypted.
    pub key_file: Option<PathBuf>,
    /// How often images are backed up there; never by itself when absent.
    pub every: Option<Duration>,
    /// Which images: all of them at one moment.
    pub images: Vec<String>,
    /// Backups of each of them that stay; all when absent.
    pub keep_last: Option<u32>,
}
