//! What is durable of a migration, in a folder of its own.
//!
//! * [`intent`]: what was asked for, durably, before anything is done.
//! * [`log`]: the engine's records in the migration's journal, and the folder they are in.
//! * [`intents`]: which regions were written into while a migration tracked them.
//! * [`present`]: which blocks an owner has that did not have them all.
//! * [`standing`]: what the folder says of its migration; [`lost`]: what a claim has made zeros of.
//! * [`doubt`]: files of images that come, and that another program may have changed.

pub(crate) mod doubt;
pub mod intent;
pub mod intents;
pub mod log;
pub(crate) mod lost;
pub mod present;
pub mod standing;
