//! Another host's backup store: objects by name, on a stream of its own (kind 5).
//!
//! The asking side sends one question after the other and waits for each answer. Both are a head and a
//! body: `u32` length of the head, `u32` length of the body, little endian, then the head (postcard),
//! then the body, which is the bytes of an object and empty otherwise.

use crate::error::WireError;
use dray_types::text;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest object: what a store takes.
pub const MAX_OBJECT: u32 = 32 << 20;
/// Longest head: the listing of a repository of some ten terabytes.
pub const MAX_HEAD: u32 = 64 << 20;
/// Bytes of the two lengths.
pub const LENGTHS: usize = 8;

/// A question. Names are checked by the store that answers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Create the object with the body's bytes unless it exists: `Created` or `Existed`.
    PutNew {
        /// Name of the object.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
    },
    /// The whole object, of at most `limit` bytes: `Bytes`.
    Get {
        /// Name of the object.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
        /// Longest object wanted.
        limit: u32,
    },
    /// Part of an object: `Bytes`.
    GetRange {
        /// Name of the object.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// Every object whose name begins with `prefix`: `Objects`.
    List {
        /// The prefix.
        #[serde(deserialize_with = "text::de_text")]
        prefix: String,
    },
    /// Remove it: `Done`.
    Delete {
        /// Name of the object.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
    },
    /// Whether there is such an object: `Exists`.
    Exists {
        /// Name of the object.
        #[serde(deserialize_with = "text::de_text")]
        name: String,
    },
}

/// An object of a listing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Listed {
    /// Name of the object.
    #[serde(deserialize_with = "text::de_text")]
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Milliseconds since it was created.
    pub age_ms: u64,
}

/// Why a question has no better answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no such object.
    NotFound,
    /// It is longer or shorter than it was asked for.
    Damaged,
    /// The store does not work just now.
    Unavailable,
    /// The question makes no sense.
    Invalid,
    /// The asking host may not do this, or has used all the room that it may have.
    Denied,
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The object is there now, durable.
    Created,
    /// The name was taken.
    Existed,
    /// The body is what was asked for.
    Bytes,
    /// The listing.
    Objects(Vec<Listed>),
    /// It is done.
    Done,
    /// Whether there is such an object.
    Exists(bool),
    /// It cannot be done.
    Failed {
        /// The kind of failure.
        kind: Refusal,
        /// What failed, for people.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
}

/// The lengths and the head of a message with a body of so many bytes.
///
/// # Errors
/// `TooLong` when a peer would not take it.
pub fn encode<T: Serialize>(head: &T, body: usize) -> Result<Vec<u8>, WireError> {
    let head = postcard::to_allocvec(head).map_err(|why| WireError::malformed("store", why))?;
    let lengths = [head.len() as u64, body as u64];
    check(lengths)?;
    let mut out = Vec::with_capacity(LENGTHS + head.len());
    lengths.iter().for_each(|&len| out.extend((len as u32).to_le_bytes()));
    out.extend(head);
    Ok(out)
}

/// The lengths of head and body, checked before anything is read (I7).
///
/// # Errors
/// `TooLong`.
pub fn decode_lengths(bytes: [u8; LENGTHS]) -> Result<(usize, usize), WireError> {
    let [a, b, c, d, e, f, g, h] = bytes;
    let (head, body) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    check([head.into(), body.into()])?;
    Ok((head as usize, body as usize))
}

fn check(lengths: [u64; 2]) -> Result<(), WireError> {
    for (what, len, limit) in
        [("store head", lengths[0], MAX_HEAD), ("object", lengths[1], MAX_OBJECT)]
    {
        let limit = u64::from(limit);
        if len > limit {
            return Err(WireError::TooLong { what, len, limit });
        }
    }
    Ok(())
}

/// Decodes a head; all of its bytes must be used.
///
/// # Errors
/// `Malformed`.
pub fn decode<T: DeserializeOwned>(head: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(head) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(WireError::malformed("store", "bytes after its end")),
        Err(why) => Err(WireError::malformed("store", why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_lengths_are_bounded() {
        let ask = Ask::GetRange { name: "packs/1".into(), offset: 7, len: 9 };
        let bytes = encode(&ask, 5).unwrap();
        let (head, body) = decode_lengths(bytes[..LENGTHS].try_into().unwrap()).unwrap();
        assert_eq!((head, body), (bytes.len() - LENGTHS, 5));
        assert_eq!(decode::<Ask>(&bytes[LENGTHS..]), Ok(ask));
        assert!(decode::<Ask>(&[&bytes[LENGTHS..], &[0]].concat()).is_err());
        assert!(decode::<Answer>(&[99]).is_err());
        assert!(encode(&Answer::Bytes, MAX_OBJECT as usize + 1).is_err());
        assert!(decode_lengths([0xff; LENGTHS]).is_err());
    }
}
