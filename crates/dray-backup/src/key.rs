//! Keys: what an operator gives, and what is derived from it for each use.
//!
//! One master key per repository. From it a key for every single pack and small object is derived
//! (BLAKE3 in its key derivation mode), so no nonce can ever be used twice with one key:
//! * a pack's key comes from its session and number, its nonces are the offsets in the pack;
//! * a small object carries 32 random bytes that its key comes from, and is sealed once.

use crate::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// Longest key or passphrase file.
const MAX_KEY_FILE: usize = 64 << 10;
/// Most memory that a repository may ask an opener to spend on a passphrase (I7), in KiB.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// Most rounds likewise.
const MAX_ROUNDS: u32 = 32;

/// What opens a repository.
#[derive(Clone, PartialEq, Eq)]
pub enum Key {
    /// The repository is not encrypted.
    None,
    /// 256 random bits.
    Raw([u8; 32]),
    /// A passphrase; slow to open by intention.
    Passphrase(Vec<u8>),
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "Key::None",
            Self::Raw(_) => "Key::Raw(…)",
            Self::Passphrase(_) => "Key::Passphrase(…)",
        })
    }
}

impl Key {
    /// The key in a file: 64 hexadecimal digits (`openssl rand -hex 32`).
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `Invalid` when it holds something else.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = read_trimmed(path)?;
        let wrong =
            || Error::invalid(format!("{} does not hold 64 hexadecimal digits", path.display()));
        if text.len() != 64 || !text.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong());
        }
        let mut key = [0; 32];
        for (byte, digits) in key.iter_mut().zip(text.chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
        }
        Ok(Self::Raw(key))
    }

    /// The passphrase in a file, without the line's end.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`; `Invalid` when it is empty.
    pub fn from_passphrase_file(path: &Path) -> Result<Self> {
        let text = read_trimmed(path)?;
        if text.is_empty() {
            return Err(Error::invalid(format!("{} is empty", path.display())));
        }
        Ok(Self::Passphrase(text))
    }
}

fn read_trimmed(path: &Path) -> Result<Vec<u8>> {
    let text = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => {
            Error::new(Kind::NotFound, format!("there is no key file {}", path.display()))
        }
        _ => Error::unavailable(format!("cannot read the key file {}", path.display()), e),
    })?;
    if text.len() > MAX_KEY_FILE {
        return Err(Error::invalid(format!("{} is too long for a key", path.display())));
    }
    Ok(text.trim_ascii_end().to_vec())
}

/// How the master key comes about; a part of the repository's configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Scheme {
    /// There is none.
    Plain,
    /// It is given.
    Raw,
    /// Argon2id of a passphrase.
    Argon2id { salt: [u8; 16], memory_kib: u32, rounds: u32 },
}

impl Scheme {
    /// What suits `key`; `salt` is random.
    pub(crate) fn for_key(key: &Key, salt: [u8; 16]) -> Self {
        match key {
            Key::None => Self::Plain,
            Key::Raw(_) => Self::Raw,
            // OWASP's second choice for Argon2id asks for 19 MiB and 2 rounds; we open rarely.
            Key::Passphrase(_) => Self::Argon2id { salt, memory_kib: 64 << 10, rounds: 3 },
        }
    }

    /// The master key, none for a plain repository.
    pub(crate) fn master(&self, key: &Key) -> Result<Option<[u8; 32]>> {
        let wrong = |what: &str| Err(Error::new(Kind::WrongKey, what));
        match (self, key) {
            (Self::Plain, Key::None) => Ok(None),
            (Self::Plain, _) => wrong("the repository is not encrypted, yet a key was given"),
            (_, Key::None) => wrong("the repository is encrypted and no key was given"),
            (Self::Raw, Key::Raw(key)) => Ok(Some(*key)),
            (Self::Raw, _) => wrong("the repository is opened by a key file, not a passphrase"),
            (Self::Argon2id { salt, memory_kib, rounds }, Key::Passphrase(text)) => {
                stretch(text, salt, *memory_kib, *rounds).map(Some)
            }
            (Self::Argon2id { .. }, _) => {
                wrong("the repository is opened by a passphrase, not a key file")
            }
        }
    }
}

fn stretch(text: &[u8], salt: &[u8], memory_kib: u32, rounds: u32) -> Result<[u8; 32]> {
    if memory_kib > MAX_MEMORY_KIB || rounds > MAX_ROUNDS {
        return Err(Error::damaged(
            "opening the repository would take more memory or time than dray allows",
        ));
    }
    let failed = |e: argon2::Error| Error::damaged(format!("the repository's key scheme: {e}"));
    let params = argon2::Params::new(memory_kib, rounds, 1, Some(32)).map_err(failed)?;
    let argon = argon2::Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, params);
    let mut master = [0; 32];
    argon.hash_password_into(text, salt, &mut master).map_err(failed)?;
    Ok(master)
}

/// The master key's uses.
#[derive(Clone)]
pub(crate) struct Keys(Option<[u8; 32]>);

impl Keys {
    pub(crate) fn new(master: Option<[u8; 32]>) -> Self {
        Self(master)
    }

    /// Whether this repository is encrypted.
    pub(crate) fn sealed(&self) -> bool {
        self.0.is_some()
    }

    /// Shown in the configuration: tells a wrong key from the right one, and nothing else.
    pub(crate) fn check_value(&self, repository: u128) -> [u8; 32] {
        self.derive("dray backup v1 check", &repository.to_le_bytes()).unwrap_or_default()
    }

    /// The key of a pack.
    pub(crate) fn of_pack(&self, session: u128, number: u32) -> Option<[u8; 32]> {
        let mut input = [0; 20];
        input[..16].copy_from_slice(&session.to_le_bytes());
        input[16..].copy_from_slice(&number.to_le_bytes());
        self.derive("dray backup v1 pack", &input)
    }

    /// The key of a small object that carries `salt`.
    pub(crate) fn of_object(&self, salt: &[u8; 32]) -> Option<[u8; 32]> {
        self.derive("dray backup v1 object", salt)
    }

    fn derive(&self, context: &'static str, input: &[u8]) -> Option<[u8; 32]> {
        let master = self.0?;
        Some(
            *blake3::Hasher::new_derive_key(context)
                .update(&master)
                .update(input)
                .finalize()
                .as_bytes(),
        )
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.sealed() { "Keys(sealed)" } else { "Keys(plain)" })
    }
}
