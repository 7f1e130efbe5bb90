//! The files that dray must find again after a restart or a power cut: all of them go through one
//! interface, which has two implementations.
//!
//! There is no thread or socket in here, and no clock but [`unix_ms`]. Where a restart or a power cut may hurt, the same code
//! runs over a simulated disk that has both at any call.
//!
//! * [`files`]: the interface, the real files below it, and the simulated disk.
//! * [`folders`]: which of them other users could exchange.
//! * [`record`]: small values that are replaced as a whole. [`StatePath`]: a path among such files.

mod clock;
pub mod files;
pub mod folders;
mod path;
pub mod record;

pub use clock::unix_ms;
pub use path::StatePath;
