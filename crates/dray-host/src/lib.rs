//! What a host makes durable, and how: every file that dray must find again after a restart or a
//! power cut goes through one interface with two implementations.
//!
//! There is no thread, socket or clock in here. Where a restart or a power cut may hurt, the same code
//! runs over a simulated disk that has both at any call.
//!
//! * [`files`]: the interface, the real files below it, and the simulated disk.
//! * [`record`]: small values that are replaced as a whole.

pub mod files;
pub mod record;
