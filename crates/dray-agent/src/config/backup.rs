//! Where backups are: repositories that this host may read and write.

use std::path::PathBuf;

/// A backup repository, `[[backup]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupPlace {
    /// How commands name it.
    pub name: String,
    /// `file:///PATH` or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// The file with its key, when it is encrypted.
    pub key_file: Option<PathBuf>,
}
