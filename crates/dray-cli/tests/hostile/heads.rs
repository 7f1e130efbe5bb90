//! Heads of qcow2 images as only somebody hostile writes them (QEMU, docs/interop/qcow2.txt).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where a head of version 3 has the name of the file below, and the length of that name.
const BACKING_AT: u64 = 8;
/// Where it has its features and its length.
const FEATURES_AT: u64 = 72;
const LENGTH_AT: u64 = 100;
/// The feature of data that is in another file.
const DATA_ELSEWHERE: u64 = 4;
/// The extension that names that file, and the one that names the format of the file below.
const DATA_NAME: u32 = 0x4441_5441;
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Where a name is put: in the cluster of the head, behind all extensions.
const NAME_AT: u64 = 4096;

/// The head of an image whose file the QEMU has open.
pub struct Head(File);

impl Head {
    pub fn of(path: &Path) -> Self {
        Self(File::options().read(true).write(true).open(path).expect("an image"))
    }

    fn extensions(&self, list: &[(u32, &str)]) {
        let mut len = [0; 4];
        self.0.read_exact_at(&mut len, LENGTH_AT).expect("head");
        let mut bytes = Vec::new();
        for (kind, text) in list {
            bytes.extend(kind.to_be_bytes());
            bytes.extend((text.len() as u32).to_be_bytes());
            bytes.extend(text.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        bytes.extend([0; 8]);
        self.0.write_all_at(&bytes, u32::from_be_bytes(len).into()).expect("extensions");
    }

    /// Says that the image's data is in another file.
    pub fn names_data(&self, name: &str) {
        self.extensions(&[(DATA_NAME, name)]);
        self.0.write_all_at(&DATA_ELSEWHERE.to_be_bytes(), FEATURES_AT).expect("features");
    }

    /// Says that the image is built on another one.
    pub fn names_backing(&self, name: &str) {
        self.extensions(&[(BACKING_FORMAT, "raw")]);
        self.0.write_all_at(name.as_bytes(), NAME_AT).expect("name");
        self.0.write_all_at(&NAME_AT.to_be_bytes(), BACKING_AT).expect("its place");
        let len = (name.len() as u32).to_be_bytes();
        self.0.write_all_at(&len, BACKING_AT + 8).expect("its length");
    }
}
