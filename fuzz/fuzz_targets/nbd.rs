//! An NBD client that says anything, to the server as it is: over a real socket, on a real image.

#![no_main]

use dray_image::{FileImage, FileOptions, Image};
use dray_nbd::{Client, ExportError, ExportInfo, Exports, Server, ServerHandle};
use libfuzzer_sys::fuzz_target;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Size of the image: requests that fit into it must be easy to hit.
const LEN: u64 = 1 << 20;

struct One(Arc<dyn Image>);

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { name: String::new(), description: String::new(), fast_zero: true }]
    }

    fn open(&self, _name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        Ok(Arc::clone(&self.0))
    }
}

fn server() -> &'static (ServerHandle, PathBuf) {
    static SERVER: OnceLock<(ServerHandle, PathBuf)> = OnceLock::new();
    SERVER.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("dray-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("image");
        std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
        let options = FileOptions { write: true, ..FileOptions::default() };
        let image = Arc::new(FileImage::open(&path, options).unwrap());
        let socket = dir.join("nbd.sock");
        let server = Server::new(Arc::new(One(image)));
        (server.bind_unix(&socket, 0o600, None).unwrap(), socket)
    })
}

/// Negotiates the export without structured replies, so that most bytes are requests.
const GO: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";

fuzz_target!(|bytes: &[u8]| {
    let (_, socket) = server();
    let mut client = UnixStream::connect(socket).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut script = Vec::new();
    match bytes.split_first() {
        Some((first, rest)) if first & 1 == 1 => {
            script.extend_from_slice(GO);
            // Requests whose magic is right get further than those that are noise.
            for request in rest.chunks(26) {
                script.extend_from_slice(&0x2560_9513u32.to_be_bytes());
                script.extend_from_slice(request);
            }
        }
        _ => script.extend_from_slice(bytes),
    }
    // The server may hang up in the middle: that is an answer too.
    let mut reader = client.try_clone().unwrap();
    let drain = std::thread::spawn(move || {
        let mut sink = vec![0; 1 << 16];
        while reader.read(&mut sink).expect("the server neither answers nor hangs up") > 0 {}
    });
    if client.write_all(&script).is_ok() {
        let _ = client.shutdown(Shutdown::Write);
    }
    drain.join().expect("the server hangs");
});
