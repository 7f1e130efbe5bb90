//! Where images live.

mod bulk;
mod direct;
pub mod file;
pub(crate) mod write_back;

pub use file::{FileImage, FileOptions};
