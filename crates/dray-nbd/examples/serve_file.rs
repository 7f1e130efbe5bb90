//! Serves one file on a unix socket until it is killed: `serve_file FILE SOCKET [KIND]`.
//!
//! KIND is `disk` (default: every layer a guest's I/O passes), `tracked` (the same while it counts
//! written blocks) or `file` (the bare file). For trying clients by hand and for
//! `bench/nbd-compare.sh`.

use dray_image::{Disk, FileImage, FileOptions, Image};
use dray_nbd::Server;
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use std::path::PathBuf;
use std::sync::Arc;

/// The file, under the empty name, which is what clients ask for by default.
struct OneFile(Arc<dyn Image>);

impl Exports for OneFile {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { fast_zero: true, ..ExportInfo::new("") }]
    }

    fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        if name.is_empty() { Ok(Arc::clone(&self.0)) } else { Err(ExportError::unknown(name)) }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut args = std::env::args_os().skip(1);
    let (Some(path), Some(socket)) = (args.next(), args.next()) else {
        return Err("usage: serve_file FILE SOCKET".into());
    };
    let options = FileOptions { write: true, ..FileOptions::default() };
    let file = Arc::new(FileImage::open(&PathBuf::from(path), options)?);
    let image: Arc<dyn Image> = match args.next().as_deref().and_then(|kind| kind.to_str()) {
        Some("file") => file,
        None | Some("disk") => Disk::new(file),
        Some("tracked") => {
            let disk = Disk::new(file);
            disk.start_tracking(None).expect("nothing is in flight");
            disk
        }
        _ => return Err("KIND is disk, tracked or file".into()),
    };
    let server = Server::new(Arc::new(OneFile(image)));
    let _handle = server.bind_unix(&PathBuf::from(socket), 0o660, None)?;
    loop {
        std::thread::park();
    }
}
