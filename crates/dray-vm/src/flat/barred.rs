//! What of a chain is not given to QEMU's tools, and how a command is refused then.

use dray_api::{ErrorKind, Refusal};
use dray_host::refusals::io_error;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of a qcow2 that tell what of it is elsewhere.
const HEAD: usize = 80;
/// Where they tell how it is encrypted, and its "incompatible features", which versions from 3 on have
/// (QEMU, docs/interop/qcow2.txt).
const ENCRYPTION: usize = 32;
const FEATURES: usize = 72;
/// The feature of data that is in another file.
const DATA_ELSEWHERE: u64 = 1 << 2;

/// An image that is not given to QEMU's tools.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Barred {
    kind: ErrorKind,
    why: String,
    hint: String,
}

impl Barred {
    fn error(kind: ErrorKind, why: String, hint: impl Into<String>) -> io::Error {
        io::Error::other(Self { kind, why, hint: hint.into() })
    }

    /// One that lies outside the pools.
    pub(super) fn outside(path: &Path) -> io::Error {
        let why = format!("{} lies outside every pool of this host", path.display());
        Self::error(ErrorKind::Denied, why, "add its folder as a [[pool]] to the configuration")
    }
}

impl fmt::Display for Barred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

impl std::error::Error for Barred {}

/// A failure at a chain as the API tells it.
pub fn chain_error(what: impl Into<String>, why: &io::Error) -> Refusal {
    match barred(why) {
        Some(barred) => Refusal::new(barred.kind, what, barred).hint(barred.hint.clone()),
        None => io_error(what, why),
    }
}

/// What was barred, below whatever was said of it. The source of an error of the system is not what is in it,
/// but the source of that.
fn barred(why: &io::Error) -> Option<&Barred> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(why);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<Barred>() {
            return Some(found);
        }
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inside) => Some(inside),
            None => error.source(),
        };
    }
    None
}

/// Refuses a qcow2 whose data is in another file, or is encrypted.
///
/// # Errors
/// What of it is so, or that it cannot be read.
pub fn refuse_header(path: &Path, file: &File) -> io::Result<()> {
    let Some(head) = head(file)? else { return Ok(()) };
    let shown = path.display();
    if has_data_elsewhere(&head) {
        let why = format!("{shown} is a qcow2 whose data is in another file");
        let hint = "make one file of it with `qemu-img convert -O qcow2`";
        return Err(Barred::error(ErrorKind::Unsupported, why, hint));
    }
    if head[ENCRYPTION..ENCRYPTION + 4] != [0; 4] {
        let why = format!("{shown} is an encrypted qcow2, for which dray has no key");
        return Err(Barred::error(ErrorKind::Unsupported, why, "use --chain keep"));
    }
    Ok(())
}

/// Whether an open file is a qcow2 whose data is in another file.
///
/// # Errors
/// That it cannot be read.
pub fn is_elsewhere(file: &File) -> io::Result<bool> {
    Ok(head(file)?.is_some_and(|head| has_data_elsewhere(&head)))
}

/// The head of a qcow2; none of another file.
fn head(file: &File) -> io::Result<Option<[u8; HEAD]>> {
    let mut head = [0; HEAD];
    match file.read_exact_at(&mut head, 0) {
        Ok(()) => Ok(Some(head).filter(|head| head.starts_with(b"QFI\xfb"))),
        Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(why) => Err(why),
    }
}

fn has_data_elsewhere(head: &[u8; HEAD]) -> bool {
    let version = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
    let mut features = [0; 8];
    features.copy_from_slice(&head[FEATURES..]);
    version >= 3 && u64::from_be_bytes(features) & DATA_ELSEWHERE != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut [u8; 104])) -> Option<Refusal> {
        let mut head = [0; 104];
        head[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        change(&mut head);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.qcow2");
        std::fs::write(&path, head).unwrap();
        let refused = refuse_header(&path, &File::open(&path).unwrap());
        refused.err().map(|why| chain_error("cannot", &io::Error::other(why)))
    }

    #[test]
    fn what_is_elsewhere_or_encrypted_is_refused() {
        assert_eq!(refused(|_| {}), None);
        assert_eq!(refused(|head| head[79] = 1), None, "dirty");
        let data = refused(|head| head[79] = 5).unwrap();
        assert_eq!(data.kind, ErrorKind::Unsupported);
        assert!(data.to_string().contains("another file"), "{data}");
        assert!(refused(|head| head[35] = 2).unwrap().to_string().contains("encrypted"));
        assert_eq!(refused(|head| (head[7], head[79]) = (2, 4)), None, "version 2 has no features");
        assert_eq!(refused(|head| (head[0], head[79]) = (0, 4)), None, "no qcow2");
    }

    #[test]
    fn other_failures_are_failures_of_the_disk() {
        assert_eq!(chain_error("cannot", &io::Error::other("x")).kind, ErrorKind::Io);
        let outside = Barred::outside(Path::new("/etc/shadow"));
        assert_eq!(chain_error("cannot", &outside).kind, ErrorKind::Denied);
    }
}
