//! The backup repository: it stores backups of images, and reads, lists and removes them.
//!
//! Content is cut into pieces of 64 KiB, each stored once, in packs of up to 16 MiB, compressed and
//! sealed with a key if the operator gives one. A backup is a manifest: a list of segments, which
//! list pieces. Nothing is ever changed in place; objects are created once and removed by the
//! collector when no manifest names them. Any number of hosts may write, prune and collect at once,
//! and each may die at any moment.
//!
//! | module | is responsible for |
//! |---|---|
//! | [`store`] | names and bytes: a directory, and others |
//! | `envelope`, `seal`, [`key`] | checksums, encryption, keys |
//! | [`pack`], [`piece`] | content and where it lies |
//! | `segment`, `manifest` | what a backup consists of |
//! | `session`, `mark` | what writers and collectors tell each other |
//! | [`repository`] | opening, listing |
//! | `writer`, `reader` | backups in and out |
//! | [`gc`], `prune`, `verify` | what goes when, and why that is safe; whether everything is there |
//!
//! Everything is synchronous and may be used by any number of threads. Formats are described in
//! `docs/reference/formats.md`. Not here: what a guest changed since when (`dray-engine`'s lineage), which
//! host holds what, and the commands.
//!
//! ```
//! use dray_backup::{Consistency, Info, Key, LocalStore, PIECE_BYTES, Repository, WriterOptions};
//! use dray_types::{Ancestor, GenerationId, ImageId};
//! # fn main() -> dray_backup::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("backups");
//! let store = std::sync::Arc::new(LocalStore::open(&path)?);
//! let repository = Repository::create(store, &Key::None)?;
//!
//! let (image, bytes) = (ImageId(1), 10 * PIECE_BYTES as u64);
//! let mut writer = repository.writer(image, bytes, None, WriterOptions::default())?;
//! writer.put(3, &[7; PIECE_BYTES])?;
//! let backup = writer.finish(Info {
//!     image,
//!     name: "vm1.img".into(),
//!     bytes,
//!     generation: Ancestor { id: GenerationId(5), number: 1 },
//!     parent: None,
//!     ancestors: vec![],
//!     taken_unix_ms: 1_700_000_000_000,
//!     host: "hosta".into(),
//!     consistency: Consistency::Crash,
//! })?;
//!
//! let reader = repository.reader(&repository.manifest(&backup)?);
//! assert_eq!(reader.read_piece(3)?, [7; PIECE_BYTES]);
//! assert_eq!(reader.read_piece(4)?, [0; PIECE_BYTES]);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod config;
mod envelope;
pub mod error;
pub mod gc;
mod index;
pub mod key;
mod manifest;
mod mark;
pub mod pack;
pub mod piece;
pub mod place;
mod prune;
mod reader;
pub mod repository;
mod seal;
mod segment;
mod session;
#[cfg(test)]
mod simulation;
pub mod store;
mod tombstone;
mod verify;
pub mod world;
mod writer;

pub use error::{Error, Kind, Result};
pub use gc::{GcOptions, GcReport};
pub use key::Key;
pub use manifest::{Backup, Consistency, Info, Manifest, NEVER_CHANGES};
pub use piece::{Hash, PIECE_BYTES, Piece, piece_count, piece_len};
pub use prune::{Policy, Pruned};
pub use reader::{Content, Reader, StreamOptions};
pub use repository::{Listing, Repository, Settings};
pub use session::FOLDER as SESSIONS;
pub use store::access::{Credentials, S3Access};
pub use store::fault::{Fault, FaultyStore};
pub use store::local::LocalStore;
pub use store::memory::MemoryStore;
#[cfg(feature = "s3")]
pub use store::s3::S3Store;
pub use store::url::Location;
pub use store::{Object, Put, Store};
pub use verify::{Level, Problem, VerifyReport};
pub use writer::{Dedup, Writer, WriterOptions, Written};
