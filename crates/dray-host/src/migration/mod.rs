//! What is durable of migrations, and what is made of it without their loops.
//!
//! * [`intent`]: what was asked for, durably, before anything is done.
//! * [`log`]: the engine's records in the migration's journal, and the folder they are in.
//! * [`intents`]: which regions were written into while a migration tracked them.
//! * [`present`]: which blocks an owner has that did not have them all.
//! * [`revive`]: which migrations a restart brings back, and what stays closed.
//! * [`claim`]: taking an image without asking; [`standing`]: what a migration's folder says of it;
//!   [`lost`]: what a claim has made zeros of.
//! * [`fate`]: what a source says of a migration to a target that has no session with it.
//! * [`abort`]: where crash tests end the process.

pub mod abort;
pub mod claim;
pub mod fate;
pub mod intent;
pub mod intents;
pub mod log;
pub(crate) mod lost;
pub mod present;
pub mod revive;
pub mod standing;
pub mod waiting;
