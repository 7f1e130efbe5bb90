//! What the server's tests share: images, an export registry, a client that speaks raw bytes.
#![allow(dead_code)] // Every test file uses another part of it.

pub mod memory;
pub mod raw;

use dray_image::{FileImage, FileOptions, Image};
use dray_nbd::{Server, ServerHandle};
use dray_serve::{Client, ExportError, ExportInfo, Exports};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Exports by name that remember who came and went.
pub struct Shelf {
    images: Vec<(ExportInfo, Arc<dyn Image>)>,
    pub visits: Mutex<Vec<(&'static str, String, usize)>>,
}

impl Shelf {
    pub fn new(images: Vec<(&str, Arc<dyn Image>)>) -> Arc<Self> {
        let images = images.into_iter().map(|(name, image)| {
            let description = format!("image {name} of the test");
            (ExportInfo { description, fast_zero: true, ..ExportInfo::new(name) }, image)
        });
        Arc::new(Self { images: images.collect(), visits: Mutex::default() })
    }
}

impl Exports for Shelf {
    fn list(&self) -> Vec<ExportInfo> {
        self.images.iter().map(|(info, _)| info.clone()).collect()
    }

    fn open(&self, name: &str, _: &Client) -> Result<Arc<dyn Image>, ExportError> {
        let found = self.images.iter().find(|(info, _)| info.name == name);
        found.map(|(_, image)| Arc::clone(image)).ok_or_else(|| ExportError::unknown(name))
    }

    fn attached(&self, name: &str, _: &Client, connections: usize) {
        self.visits.lock().unwrap().push(("attached", name.to_owned(), connections));
    }

    fn detached(&self, name: &str, _: &Client, connections: usize) {
        self.visits.lock().unwrap().push(("detached", name.to_owned(), connections));
    }
}

/// A server on a unix socket in a directory of its own.
pub struct Fixture {
    pub shelf: Arc<Shelf>,
    pub server: Server,
    pub handle: ServerHandle,
    pub dir: tempfile::TempDir,
}

impl Fixture {
    pub fn new(images: Vec<(&str, Arc<dyn Image>)>) -> Self {
        Self::inside(tempfile::Builder::new().prefix("nbd-test").tempdir().unwrap(), images)
    }

    fn inside(dir: tempfile::TempDir, images: Vec<(&str, Arc<dyn Image>)>) -> Self {
        let shelf = Shelf::new(images);
        let server = Server::new(Arc::clone(&shelf) as Arc<dyn Exports>);
        let handle = server.bind_unix(&dir.path().join("nbd.sock"), 0o660, None).unwrap();
        Self { shelf, server, handle, dir }
    }

    /// One export with the empty name, which clients ask for by default.
    pub fn with(image: Arc<dyn Image>) -> Self {
        Self::new(vec![("", image)])
    }

    /// One export with the empty name, from a new file of `len` bytes.
    pub fn with_file(len: u64) -> Self {
        let dir = tempfile::Builder::new().prefix("nbd-test").tempdir().unwrap();
        let path = dir.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(len).unwrap();
        let image = open_file(&path);
        Self::inside(dir, vec![("", image)])
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    /// The file behind the export of [`with_file`](Self::with_file).
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("disk.img")
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// A client that is kept waiting for all of `silence`, and is let in after `then`.
    pub fn client_after(&self, silence: Duration, then: impl FnOnce()) -> raw::Client {
        let mut client = self.client();
        client.send_option(raw::GO, &raw::info("", &[]));
        client.stream.set_read_timeout(Some(silence)).unwrap();
        let silent = client.stream.read(&mut [0; 1]).unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::WouldBlock);
        client.stream.set_read_timeout(Some(raw::PATIENCE)).unwrap();
        then();
        while client.answer().kind != 1 {}
        client
    }

    pub fn client(&self) -> raw::Client {
        raw::Client::connect(&self.socket())
    }
}

pub fn open_file(path: &Path) -> Arc<dyn Image> {
    let options = FileOptions { write: true, ..FileOptions::default() };
    Arc::new(FileImage::open(path, options).unwrap())
}

/// `len` bytes that do not compress and differ with `seed`.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(len).collect()
}

/// Waits until `done`; what it waits for happens in another thread.
pub fn until(what: &str, done: impl Fn() -> bool) {
    // Long enough for any machine; only a failing test ever waits so long.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !done() {
        assert!(std::time::Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

/// Says on stdout that a test could not run, and why.
pub fn skip(test: &str, why: &str) {
    println!("SKIP: {test}: {why}");
}

/// Whether `program` is installed; says so if not.
pub fn have(test: &str, program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).any(|dir: PathBuf| Path::new(&dir).join(program).exists());
    if !found {
        skip(test, &format!("{program} is not installed"));
    }
    found
}
