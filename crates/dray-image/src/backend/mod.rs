//! Where images live.

mod bulk;
mod direct;
pub mod file;

pub use file::{FileImage, FileOptions};
