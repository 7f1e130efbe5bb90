//! The files and devices that hold images.

mod absent;
mod audience;
mod bulk;
mod direct;
pub mod file;
mod opened;
mod state;
mod under_way;
mod write_back;

pub use file::{FileImage, FileOptions};
pub use opened::{ImageFile, OpenImages, RealImages};
pub use state::StateImages;
pub use write_back::{Loss, LossLog, Past};
