//! Where images live.

mod direct;
pub mod file;

pub use file::{FileImage, FileOptions};
