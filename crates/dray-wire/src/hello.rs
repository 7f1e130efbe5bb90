//! The first bytes of every stream: who speaks which versions, and what the stream is for.
//!
//! ```text
//! offset size
//!      0    4  "dray"
//!      4    2  lowest protocol version spoken, little endian
//!      6    2  highest protocol version spoken
//!      8    1  kind of stream: 1 control, 2 data, 3 memory, 4 request, 5 store, 6 replica
//!      9    1  zero
//!     10    2  length of what follows
//!     12    …  postcard encoding of `Hello`
//! ```
//! The answer has the same fixed part and a [`HelloReply`]. The fixed part never changes, so agents
//! of any two versions can tell each other that they do not understand each other.

use crate::error::WireError;
use dray_types::refusal::de_refusal;
use dray_types::{MigrationId, Refusal, text};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Lowest protocol version this build speaks.
pub const VERSION_MIN: u16 = 1;
/// Highest protocol version this build speaks.
pub const VERSION_MAX: u16 = 1;
/// Length of the fixed part.
pub const PREFACE_LEN: usize = 12;
/// Longest body of a hello: a name and a handful of feature words.
pub const MAX_HELLO: u16 = 4096;

const MAGIC: [u8; 4] = *b"dray";

/// What a stream carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamKind {
    /// Control messages of one migration, both ways.
    Control,
    /// Runs, from source to target.
    Data,
    /// The guest's memory, raw bytes both ways between the two QEMUs.
    Memory,
    /// One request and its answer, outside any migration.
    Request,
    /// Objects of a backup store, outside any migration.
    Store,
    /// A replica's content, outside any migration.
    Replica,
    /// Bytes that measure the link, outside any migration.
    Probe,
}

impl fmt::Display for StreamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Data => "data",
            Self::Memory => "memory",
            Self::Request => "request",
            Self::Store => "store",
            Self::Replica => "replica",
            Self::Probe => "probe",
        })
    }
}

impl StreamKind {
    fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Data => 2,
            Self::Memory => 3,
            Self::Request => 4,
            Self::Store => 5,
            Self::Replica => 6,
            Self::Probe => 7,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Control,
            2 => Self::Data,
            3 => Self::Memory,
            4 => Self::Request,
            5 => Self::Store,
            6 => Self::Replica,
            7 => Self::Probe,
            _ => return None,
        })
    }
}

/// What the dialling agent says of itself and the stream.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Name and version of the software, for logs only.
    #[serde(deserialize_with = "text::de_text")]
    pub agent: String,
    /// The migration the stream belongs to; none on a request stream.
    pub migration: Option<MigrationId>,
    /// Number of the session: streams of one session name the same number, and a new session
    /// replaces the one before it.
    pub session: u64,
    /// Which of several data streams this is.
    pub stream: u16,
    /// Optional things the dialling agent can do; unknown words are ignored.
    #[serde(deserialize_with = "text::de_texts")]
    pub features: Vec<String>,
}

/// The answer to a [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum HelloReply {
    /// The stream is accepted.
    Welcome {
        /// Name and version of the software, for logs only.
        #[serde(deserialize_with = "text::de_text")]
        agent: String,
        /// The version both will speak.
        version: u16,
        /// The offered features that will be used.
        #[serde(deserialize_with = "text::de_texts")]
        features: Vec<String>,
    },
    /// The stream is refused and will be closed.
    Refused(#[serde(deserialize_with = "de_refusal")] Refusal),
    /// The stream is refused: a session with a higher number has been made. The dialling agent may
    /// go on with one above it.
    Overtaken {
        /// The highest number so far.
        newest: u64,
    },
}

/// The fixed part, as received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Preface {
    /// What the stream is for.
    pub kind: StreamKind,
    /// Highest version both ends speak.
    pub version: u16,
    /// Length of the body that follows.
    pub body_len: usize,
}

fn encode(kind: StreamKind, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(PREFACE_LEN + body.len());
    out.extend(MAGIC);
    out.extend(VERSION_MIN.to_le_bytes());
    out.extend(VERSION_MAX.to_le_bytes());
    out.extend([kind.code(), 0]);
    out.extend((body.len() as u16).to_le_bytes());
    out.extend(body);
    out
}

/// Reads the fixed part of a hello or of its answer.
///
/// # Errors
/// `NotDray`, `Version`, or `TooLong`/`Malformed` for a body or kind outside the protocol.
pub fn decode_preface(bytes: &[u8; PREFACE_LEN]) -> Result<Preface, WireError> {
    if bytes[..4] != MAGIC {
        return Err(WireError::NotDray);
    }
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let (their_min, their_max) = (word(4), word(6));
    let version = their_max.min(VERSION_MAX);
    if version < their_min || version < VERSION_MIN {
        return Err(WireError::Version {
            their_min,
            their_max,
            our_min: VERSION_MIN,
            our_max: VERSION_MAX,
        });
    }
    let kind = StreamKind::from_code(bytes[8])
        .ok_or_else(|| WireError::malformed("hello", format!("stream kind {}", bytes[8])))?;
    let len = word(10);
    if len > MAX_HELLO {
        return Err(WireError::TooLong { what: "hello", len: len.into(), limit: MAX_HELLO.into() });
    }
    Ok(Preface { kind, version, body_len: len.into() })
}

impl Hello {
    /// The bytes that open a stream of `kind`.
    pub fn encode(&self, kind: StreamKind) -> Vec<u8> {
        encode(kind, &postcard::to_allocvec(self).unwrap_or_default())
    }

    /// Reads the body that follows a preface.
    ///
    /// # Errors
    /// `Malformed` when the bytes are not a hello.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        postcard::from_bytes(body).map_err(|why| WireError::malformed("hello", why))
    }
}

impl HelloReply {
    /// The bytes that answer a hello on a stream of `kind`.
    pub fn encode(&self, kind: StreamKind) -> Vec<u8> {
        encode(kind, &postcard::to_allocvec(self).unwrap_or_default())
    }

    /// Reads the body that follows a preface.
    ///
    /// # Errors
    /// `Malformed` when the bytes are not the answer to a hello.
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        postcard::from_bytes(body).map_err(|why| WireError::malformed("hello", why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preface(bytes: &[u8]) -> [u8; PREFACE_LEN] {
        bytes[..PREFACE_LEN].try_into().unwrap()
    }

    #[test]
    fn hello_round_trips() {
        let hello = Hello {
            agent: "dray/0.1".into(),
            migration: Some(MigrationId(7)),
            session: 3,
            stream: 1,
            features: vec!["zstd".into()],
        };
        let bytes = hello.encode(StreamKind::Data);
        let head = decode_preface(&preface(&bytes)).unwrap();
        assert_eq!((head.kind, head.version), (StreamKind::Data, 1));
        assert_eq!(head.body_len, bytes.len() - PREFACE_LEN);
        assert_eq!(Hello::decode(&bytes[PREFACE_LEN..]), Ok(hello));
    }

    #[test]
    fn foreign_and_distant_peers_are_told_apart() {
        assert_eq!(decode_preface(b"GET / HTTP/1"), Err(WireError::NotDray));
        let mut bytes = Hello {
            agent: String::new(),
            migration: None,
            session: 0,
            stream: 0,
            features: Vec::new(),
        }
        .encode(StreamKind::Control);
        bytes[4..8].copy_from_slice(&[9, 0, 12, 0]);
        let too_new = decode_preface(&preface(&bytes)).unwrap_err();
        assert!(too_new.to_string().contains("the peer speaks 9 to 12"), "{too_new}");
        bytes[4..8].copy_from_slice(&[0, 0, 0, 0]);
        assert!(matches!(decode_preface(&preface(&bytes)), Err(WireError::Version { .. })));
    }
}
