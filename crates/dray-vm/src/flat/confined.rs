//! The launcher of confined tools, in the program of these tests.

use super::layer::Admits;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

#[test]
fn launcher() {
    dray_confine::launch_if_asked();
}

/// Lets a tool have any file.
struct Anything;

impl Admits for Anything {
    fn admit(&self, _: &Path, _: &File) -> io::Result<()> {
        Ok(())
    }
}

/// Lets tools have any file, and makes this program their launcher.
pub fn anything() -> Arc<dyn Admits> {
    let launcher = ["flat::confined::launcher", "--exact", "--nocapture", dray_confine::ASKED];
    dray_confine::launch_with(&launcher);
    Arc::new(Anything)
}
