//! The table of commands: what each is called, what it is answered with, and the events that come
//! before its answer. Whatever lists the commands is made of it: [`Command`] here, the dispatch in
//! the agent (`dray-agent/api/mod.rs`), and the lists of the tests.

use super::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A command: a type with its fields, its name, its answer and its events. Each row of the table
/// implements it.
pub trait Ask: Into<Command> + Serialize + Send + 'static {
    /// What it is called in the JSON.
    const NAME: &'static str;
    /// The events that come before the answer, by their names in the JSON.
    const EVENTS: &'static [&'static str];
    /// What it is answered with.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// Hands the table to the macro that it is given, which makes something of its rows. A row is
///
/// ```text
/// /// What the command does.
/// "name" Type -> Answer, sends "event" "event";
/// ```
///
/// `Type` is a type of this crate and holds the command's fields. `, sends …` is left out when no
/// event comes before the answer. Every macro that is given the table begins with the same pattern,
/// that of a row.
#[macro_export]
macro_rules! commands {
    ($make:ident) => {
        $make! {
            /// Says who is there.
            "info" Info -> AgentInfo;
            /// Asks every configured peer who it is, all at once, for 5 s at most.
            "peers" Peers -> Vec<PeerStatus>;

            /// Moves a VM or images. Everything that can be checked at once is checked before
            /// anything moves. The target begins with what its backups and peers have of the images, unless
            /// a migration is prepared. It is followed to its end unless it is detached; a client that hangs
            /// up ends the following, not the migration.
            "migrate" Migrate -> Migrated,
                sends "comparing" "seeding" "seeded" "started" "progress" "notice";
            /// Makes the exports at the target and says how to start the incoming QEMU.
            "prepare" Prepare -> Prepared, sends "comparing" "seeding" "seeded" "notice";
            /// One migration, or all that the agent knows, the newest first.
            "status" Status -> Vec<MigrationStatus>;
            /// Follows a migration to its end. One that has ended already is answered at once, one
            /// that failed or was cancelled with its error.
            "watch" Watch -> Summary, sends "progress" "notice";
            /// Stops a migration before its handover; the guest goes on at the source.
            "cancel" Cancel -> Cancelled;
            /// Takes up a migration that was interrupted.
            "resume" Resume -> Started;
            /// Changes the bandwidth limit of a running migration.
            "limit" Limit -> Limited;
            /// Starts, pauses or paces Backfill; this host is the target.
            "backfill" Backfill -> Backfilling;
            /// Ends the stall of guest I/O that waits for a lost source.
            "unstall" Unstall -> Unstalled;
            /// Predicts what a migration would take; nothing moves.
            "plan" Plan -> Planned;
            /// Has a target read images from backups. Ends when its client hangs up.
            "seed" Seed -> Seeded, sends "comparing" "seeding";

            /// Makes a batch of migrations durable, and goes on with it in the background. It is
            /// followed to its end unless it is detached. That some of it failed is no error: the
            /// answer says which.
            "batch" Batch -> BatchStatus,
                sends "comparing" "seeding" "seeded" "notice" "batch";
            /// Every batch that the agent knows, the newest first.
            "batches" Batches -> Vec<BatchStatus>;
            /// Follows a batch to its end.
            "batch-watch" BatchWatch -> BatchStatus, sends "batch";
            /// Begins nothing more of a batch, and cancels what is before its handover.
            "batch-cancel" BatchCancel -> BatchStatus;
            /// Changes what a batch may send.
            "batch-limit" BatchLimit -> BatchStatus;

            /// Every image that the agent knows.
            "images" Images -> Vec<ImageStatus>;
            /// Serves a file or block device as an image.
            "image-add" ImageAdd -> ImageStatus;
            /// Stops serving an image and forgets it. The answer is the image as it was.
            "image-remove" ImageRemove -> ImageStatus;
            /// Splices disks of a running VM under dray.
            "adopt" Adopt -> Spliced;
            /// Hands disks of a running VM back to its QEMU.
            "release" Release -> Spliced;
            /// Grows an image.
            "resize" Resize -> ImageStatus;
            /// Takes ownership of an image whose owner is gone for good. Stands outside I1.
            "claim" Claim -> Claimed;
            /// The generations of an image, as this host knows them.
            "lineage" Lineage -> LineageStatus;
            /// Tells what guests do to an image until the recording ends, or its client hangs up.
            "record" Record -> Recorded, sends "accesses";

            /// Makes a backup of images that this host serves. Ends when its client hangs up.
            "backup" Backup -> BackupDone, sends "backup";
            /// Ends a backup that is under way. The answer is how far it was.
            "backup-cancel" BackupCancel -> BackupProgress;
            /// Lists destinations, or the backups in a repository.
            "backups" Backups -> BackupListing;
            /// Makes a repository.
            "backup-init" BackupInit -> RepositoryMade;
            /// Removes backups.
            "backup-prune" BackupPrune -> BackupPruned;
            /// Removes content that no backup needs.
            "backup-gc" BackupGc -> BackupCollected;
            /// Checks the backups in a repository. Ends when its client hangs up.
            "backup-verify" BackupVerify -> BackupVerified, sends "backup";
            /// Makes an image of a backup. Ends when its client hangs up.
            "restore" Restore -> Restored, sends "backup";
        }
    };
}

/// Makes [`Command`], a variant a row, and implements [`Ask`] for the type of each row.
macro_rules! define {
    ($(
        $(#[$doc:meta])*
        $name:literal $command:ident -> $answer:ty $(, sends $($event:literal)+)?;
    )+) => {
        /// Any command, as it is on the socket: `{"limit":{…}}`.
        #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
        pub enum Command {
            $(
                $(#[$doc])*
                #[serde(rename = $name)]
                $command($command),
            )+
        }

        impl Command {
            /// Every command by its name, with its events.
            pub const ALL: &'static [(&'static str, &'static [&'static str])] =
                &[$(($name, <$command as Ask>::EVENTS)),+];
        }

        $(
            impl Ask for $command {
                const NAME: &'static str = $name;
                const EVENTS: &'static [&'static str] = &[$($($event),+)?];
                type Answer = $answer;
            }

            impl From<$command> for Command {
                fn from(command: $command) -> Self {
                    Self::$command(command)
                }
            }
        )+
    };
}

commands!(define);

/// One line from a client.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// [`API_VERSION`] of the client.
    pub version: u32,
    /// The command.
    pub command: Command,
}
