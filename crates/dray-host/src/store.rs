//! The agent's state directory: small records replaced as a whole, and a folder per migration.
//!
//! ```text
//! images/NAME.json            one record per image
//! images/NAME.beat            touched for as long as an agent has its file open (docs/reference/formats.md)
//! images/NAME.heat            what is known of its accesses (docs/reference/formats.md); not synced, may be lost
//! lossy/INODE-BIRTH           a file that has lost writes, and whose image was forgotten
//! released/ID.json            an image that QEMU has taken back, and its line (ID.line)
//! seeds/NAME.json             an image that is being read from backups
//! digests.json                the digests of base images; may be lost
//! content.redb                which content is where, by hash; may be lost
//! backups/NAME.json           which of its generations are in backup where
//! backups/.schedule.json      when what was last backed up by itself
//! batches/ID.json             one record per batch
//! migrations/ID/intent.json   what was asked for
//! migrations/ID/journal       what has happened (see docs/reference/formats.md)
//! migrations/ID/counts.json   what the summary counts; not synced, lost with the host
//! ```

use dray_files::StatePath;
use dray_image::{ImageNames, OpenImages, RealImages};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The state directory, and beside it where the files of images are.
#[derive(Clone, Debug)]
pub struct Store {
    root: StatePath,
    opener: Arc<dyn OpenImages>,
}

impl Store {
    /// The store below `root`, which is made if it does not exist.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn open(root: &Path) -> io::Result<Self> {
        Self::among(StatePath::real(root), Arc::new(RealImages))
    }

    /// The store below `root`, whose images `opener` opens.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn among(root: StatePath, opener: Arc<dyn OpenImages>) -> io::Result<Self> {
        for folder in ["images", "migrations", "released", "seeds", "batches"] {
            root.join(folder).make_dirs()?;
        }
        Ok(Self { root, opener })
    }

    /// What opens image files.
    pub fn opener(&self) -> &dyn OpenImages {
        &*self.opener
    }

    /// The names that the file of the image configured as `path` can have.
    ///
    /// # Errors
    /// When `path` is no file name, or one too long to be changed.
    pub fn names(&self, path: &Path) -> io::Result<ImageNames> {
        ImageNames::among(self.root.files(), path).map_err(io::Error::other)
    }

    /// A path of this host beside the state directory, among the same files.
    pub fn beside(&self, path: &Path) -> StatePath {
        StatePath::new(Arc::clone(self.root.files()), path)
    }

    /// Where the records of images are.
    pub fn images(&self) -> StatePath {
        self.root.join("images")
    }

    /// The file of what links have carried.
    pub fn links(&self) -> StatePath {
        self.root.join("links.json")
    }

    /// The list of QEMUs whose VMs have left this host.
    pub fn past_vms(&self) -> StatePath {
        self.root.join("past.vms")
    }

    /// The folder of the marks of files that have lost writes.
    pub fn lossy(&self) -> StatePath {
        self.root.join("lossy")
    }

    /// Where the notes of images are that QEMU has taken back.
    pub fn released(&self) -> StatePath {
        self.root.join("released")
    }

    /// The file of who gave targets what of images.
    pub fn given(&self) -> StatePath {
        self.root.join("given.json")
    }

    /// Where the notes of images are that are being read from backups.
    pub fn seeds(&self) -> StatePath {
        self.root.join("seeds")
    }

    /// The file of the digests of base images.
    pub fn digests(&self) -> StatePath {
        self.root.join("digests.json")
    }

    /// The index of content.
    pub fn content(&self) -> StatePath {
        self.root.join("content.redb")
    }

    /// The folder of what is known of backups.
    pub fn backups(&self) -> StatePath {
        self.root.join("backups")
    }

    /// The file of the guests that are frozen for a backup.
    pub fn frozen(&self) -> StatePath {
        self.root.join("frozen.json")
    }

    /// Where the records of batches are.
    pub fn batches(&self) -> StatePath {
        self.root.join("batches")
    }

    /// The folder of all migrations.
    pub fn migrations(&self) -> StatePath {
        self.root.join("migrations")
    }
}
