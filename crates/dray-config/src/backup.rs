//! The repositories for backups that this host may read and write.

use dray_backup::S3Access;
use dray_types::ByteSize;
use std::path::PathBuf;
use std::time::Duration;

/// A backup repository, `[[backup]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupPlace {
    /// How commands name it.
    pub name: String,
    /// `file:///PATH`, `s3://BUCKET/PREFIX`, or `dray://HOST/FOLDER` at a peer.
    pub url: String,
    /// How a bucket is reached; nothing for the others.
    pub access: S3Access,
    /// The file with its key, when it is encrypted.
    pub key_file: Option<PathBuf>,
    /// How often images are backed up there; never by itself when absent.
    pub every: Option<Duration>,
    /// Which images: all of them at one moment.
    pub images: Vec<String>,
    /// Backups of each of them that stay; all when absent.
    pub keep_last: Option<u32>,
}

/// A folder in which peers with the right `store` may keep their backups, `[backup_store]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupStore {
    /// The folder. Each peer has one of its own in it.
    pub path: PathBuf,
    /// Peers delete nothing but the empty marks of their own running backups.
    pub append_only: bool,
    /// How long what a peer has deleted stays.
    pub keep_deleted: Duration,
    /// Most bytes of one peer; any number when absent.
    pub quota: Option<ByteSize>,
    /// Most objects of one peer.
    pub max_objects: u64,
}
