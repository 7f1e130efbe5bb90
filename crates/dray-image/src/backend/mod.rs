//! Where images live.

mod bulk;
mod direct;
pub mod file;
mod write_back;

pub use file::{FileImage, FileOptions};
pub use write_back::LossLog;
