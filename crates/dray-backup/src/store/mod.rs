//! Stores: names and bytes, nothing else. What a name means is the repository's business.
//!
//! An implementation must keep four promises, everything else here builds on them:
//!
//! 1. **Create-only.** Of any number of [`Store::put_new`] for one name exactly one creates it. The
//!    object then has all of its bytes, or does not exist at all.
//! 2. **Durable.** What `put_new` or `delete` reported as done survives a crash of the store.
//! 3. **Read your writes, everybody's.** After a `put_new` or `delete` has returned, every `get`,
//!    `exists` and `list` that begins later, on any host, sees it (S3 has done so since 2020).
//! 4. **Listings.** An object that exists from before a listing begins until after it ends is in it.

pub mod access;
pub mod fault;
pub mod local;
pub mod memory;
#[cfg(feature = "s3")]
pub mod s3;
pub mod url;

use crate::error::{Error, Result};
use std::fmt;
use std::time::Duration;

/// Longest name.
pub const MAX_NAME: usize = 200;
/// Largest object that anybody writes here: a pack with what one piece may run over.
pub const MAX_OBJECT: usize = 32 << 20;

/// What a [`Store::put_new`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Put {
    /// The object is there now, durable, with these bytes.
    Created,
    /// The name was taken; nothing was changed.
    Existed,
}

/// One line of a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Object {
    /// Its whole name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Time since it was created, as far as the clocks agree; zero if they do not.
    pub age: Duration,
}

/// A place that keeps named, immutable objects. Names are checked by [`check_name`].
pub trait Store: Send + Sync + fmt::Debug {
    /// Creates `name` with `bytes` unless it exists.
    ///
    /// # Errors
    /// `Unavailable`. It may or may not have been created then, or be created later.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put>;

    /// The whole object, of at most `limit` bytes.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `Damaged` when it is longer than `limit`.
    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>>;

    /// Exactly `len` bytes at `offset`.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `Damaged` when the object ends before them.
    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>>;

    /// Every object whose name begins with `prefix`, in any order. A prefix ends at a `/` or is
    /// empty.
    ///
    /// # Errors
    /// `Unavailable`; never a part of the list.
    fn list(&self, prefix: &str) -> Result<Vec<Object>>;

    /// Removes an object; one that is not there is removed already.
    ///
    /// # Errors
    /// `Unavailable`. It may or may not be gone then.
    fn delete(&self, name: &str) -> Result<()>;

    /// Whether there is such an object.
    ///
    /// # Errors
    /// `Unavailable`.
    fn exists(&self, name: &str) -> Result<bool>;
}

/// Whether `name` is one that every store can keep: `[a-z0-9._-]` in parts separated by `/`, no
/// part empty or beginning with a dot, at most [`MAX_NAME`] bytes (I7).
///
/// # Errors
/// `Invalid`.
pub fn check_name(name: &str) -> Result<()> {
    let part = |part: &str| {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
        !part.is_empty() && !part.starts_with('.') && part.bytes().all(plain)
    };
    if name.len() <= MAX_NAME && name.split('/').all(part) {
        return Ok(());
    }
    Err(Error::invalid(format!("'{}' is not a name for an object", name.escape_debug())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_pass() {
        for good in ["config", "packs/00ff/1-2.x", "a_b/c"] {
            check_name(good).unwrap();
        }
        let long = "a".repeat(MAX_NAME + 1);
        for bad in ["", "/a", "a/", "a//b", "../a", "a/..", "a/.b", "A", "a b", "a\0", "ä", &long]
        {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
