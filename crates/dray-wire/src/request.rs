//! Requests between agents outside a migration: one question and one answer on a stream of its own.

use crate::control::MAX_IMAGES;
use crate::error::WireError;
use dray_types::list;
use dray_types::refusal::de_refusal;
use dray_types::{Ancestor, Endpoint, Epoch, ImageId, MigrationId, Refusal, text};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest request or answer.
pub const MAX_REQUEST: u32 = 1 << 20;
/// Most generations that the owner of an image remembers.
pub const MAX_ANCESTORS: usize = 64;
/// Most images of a request while it is decoded: some more than a migration may have ([`MAX_IMAGES`]), so
/// that whoever wants a few too many is told so in words.
const MAX_LISTED: usize = 1024;

/// An image that the target shall make room for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WantedImage {
    /// The image's id.
    pub id: ImageId,
    /// Name it shall have at the target: its file name inside the pool and its export name.
    #[serde(deserialize_with = "text::de_text")]
    pub name: String,
    /// Exported length in bytes.
    pub len: u64,
    /// Bytes allocated at the source now: what the pool must have free at least.
    pub allocated: u64,
    /// A backing image.
    pub read_only: bool,
}

/// To whom the file of an image belongs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileOwner {
    /// Name of the user, or its number where it has none.
    #[serde(deserialize_with = "text::de_text")]
    pub user: String,
    /// Name of the group, or its number; empty for the user's own.
    #[serde(deserialize_with = "text::de_text")]
    pub group: String,
    /// Permission bits.
    pub mode: u32,
}

/// An image that comes with a migration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ComingImage {
    /// Id, name and length of the image.
    pub image: WantedImage,
    /// The closed generations that its owner remembers, oldest first: the target may begin with a replica
    /// that holds one of them.
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_ANCESTORS>")]
    pub ancestors: Vec<Ancestor>,
    /// The digest of its content, if a file that lies there already is to be used, as `Bases` has told.
    pub digest: Option<ContentDigest>,
    /// The target makes a qcow2 of it, which is raw, when it is complete.
    pub qcow2: bool,
    /// To whom its file shall belong at the target; to the agent's own user when absent.
    pub owner: Option<FileOwner>,
}

/// What an incomplete image at the target begins with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Base {
    /// The target has nothing with which the image could begin.
    Empty,
    /// A replica of this image that cannot be used lies there; why not.
    Refused {
        /// What stands against it.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
    /// The content of a replica.
    Replica {
        /// The generation that it holds.
        generation: Ancestor,
        /// Regions of 64 MiB that do not hold it any more: a migration that came to nothing wrote
        /// there.
        distrusted: Vec<u64>,
        /// The target vouches for nothing of it: a block counts only after it had the hash that the source gave.
        unproved: bool,
    },
    /// A file that lies there already and has the image's content: it is used where it is, and never
    /// written. Only of an image that came with a digest.
    InPlace {
        /// Name of its export: several migrations may use one file.
        #[serde(deserialize_with = "text::de_text")]
        export: String,
    },
}

impl Base {
    /// Whether all of it is compared before any of it counts.
    pub fn is_unproved(&self) -> bool {
        matches!(self, Self::Replica { unproved: true, .. })
    }
}

/// What content is told by: see `docs/reference/formats.md`.
pub type ContentDigest = [u8; 32];

/// A read-only image of which the target may have a file already.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SoughtBase {
    /// The name that it would have there.
    #[serde(deserialize_with = "text::de_text")]
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
    /// The digest of its content, once its owner knows it.
    pub digest: Option<ContentDigest>,
}

/// What the target has of a [`SoughtBase`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum BaseThere {
    /// No file that could be used in place.
    Absent,
    /// A file of this name and length, whose content is being read.
    Reading {
        /// Bytes that were looked at.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Its content is known and waits for the other side's digest.
    Read,
    /// It has the same content.
    Same,
    /// Another file has the name.
    Other {
        /// What it is, and what to do.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
}

/// An image that the target shall read from backups before it comes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SeedImage {
    /// The image as it will be offered.
    pub image: WantedImage,
    /// The epoch in which its owner has it now.
    pub epoch: Epoch,
    /// The closed generations that its owner remembers, oldest first.
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_ANCESTORS>")]
    pub ancestors: Vec<Ancestor>,
}

/// How far the target is with an image that it reads from backups.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Seeding {
    /// Nothing is read, because of this.
    Nothing {
        /// What stands in the way; nothing worth telling when empty.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
    /// It is being read.
    Running {
        /// Bytes of data that are there.
        done: u64,
        /// Bytes of data in all, as far as they are counted.
        total: u64,
    },
    /// There is a replica now.
    Ready {
        /// The generation that it holds.
        generation: Ancestor,
        /// Bytes of data that each provider gave, by its name there.
        #[serde(deserialize_with = "text::de_named")]
        given: Vec<(String, u64)>,
        /// Bytes of the image that nobody could give: the source sends them.
        missing: u64,
        /// What went wrong on the way, for people.
        #[serde(deserialize_with = "text::de_texts")]
        notes: Vec<String>,
    },
}

/// A replica that the asking peer may read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Holding {
    /// The generation that it holds.
    pub generation: Ancestor,
    /// Its length in bytes.
    pub len: u64,
    /// Bytes allocated for it.
    pub allocated: u64,
    /// Regions of 64 MiB that do not hold the generation any more.
    pub distrusted: Vec<u64>,
}

/// What an image would begin with at the target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Surveyed {
    /// What a migration would begin with: a replica that lies there or, where anybody would give
    /// something of it, one that would be read first.
    pub base: Base,
    /// Bytes of data that each provider would give, by its name there, were all equally quick.
    #[serde(deserialize_with = "text::de_named")]
    pub given: Vec<(String, u64)>,
    /// What cannot be used and what is not known before, for people.
    #[serde(deserialize_with = "text::de_texts")]
    pub notes: Vec<String>,
}

/// What becomes of a migration, as its source knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Fate {
    /// It may begin, or goes on: the source comes by itself.
    Live,
    /// It was given up before it was handed over: nothing that was promised to it counts. Another try may
    /// use what was received.
    Abandoned,
    /// It never begins, or never again, and was not handed over: nothing that is there is needed.
    Never,
    /// It was handed over, or may have been.
    HandedOver,
    /// The source knows nothing of it.
    Unknown {
        /// Every image that was asked about is the source's own, which serves it.
        owned: bool,
    },
    /// An image was claimed from it at the source: it is void there.
    Claimed,
}

/// What one agent asks of another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Which software, which protocol, which pools: answered with `Identity`.
    Identify,
    /// Make partial images and exports for a migration; asking again for the same migration and
    /// images answers the same.
    Prepare {
        /// The migration.
        migration: MigrationId,
        /// Pool at the target; its default one when none is named.
        #[serde(deserialize_with = "text::de_optional")]
        pool: Option<String>,
        /// The images, in the migration's order.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        images: Vec<ComingImage>,
    },
    /// Forget a prepared migration that never began and remove its partial images.
    Forget {
        /// The migration.
        migration: MigrationId,
    },
    /// Read images from backups, as they were at one of their closed generations, so that a migration
    /// that follows can begin with them. Begins it, and asked again with the same number tells how far
    /// it is; the target stops when nobody asks any more.
    Seed {
        /// Names this wish.
        number: u64,
        /// Pool at the target; its default one when none is named.
        #[serde(deserialize_with = "text::de_optional")]
        pool: Option<String>,
        /// The images.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        images: Vec<SeedImage>,
        /// Bytes a second that the link from their owner is known to carry.
        link: Option<u64>,
    },
    /// Which replicas of an image lie there that the asking peer may read: answered with `Holdings`.
    Holdings {
        /// The image.
        image: ImageId,
    },
    /// What images would begin with, and who would give it; nothing is made or read for it but lists.
    Survey {
        /// A wish that was seeded: then nobody is asked, and what was expected of it is told.
        number: Option<u64>,
        /// Pool at the target; its default one when none is named.
        #[serde(deserialize_with = "text::de_optional")]
        pool: Option<String>,
        /// The images.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        images: Vec<SeedImage>,
        /// Backups and other hosts' replicas count.
        backups: bool,
    },
    /// Whether files with the content of read-only images lie there already. Begins to read those that
    /// have the name and length, and asked again tells how far that is; the target stops when nobody
    /// asks any more.
    Bases {
        /// Pool at the target; its default one when none is named.
        #[serde(deserialize_with = "text::de_optional")]
        pool: Option<String>,
        /// The images.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        images: Vec<SoughtBase>,
    },
    /// What becomes of a migration of which the asking target has no session: answered with `Fate`.
    Fate {
        /// The migration.
        migration: MigrationId,
        /// Its images that a guest may write.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_IMAGES>")]
        images: Vec<ImageId>,
    },
    /// Whether the QEMU that is to take the VM of a prepared migration waits there and has its disks: answered with
    /// `Done`. Nothing begins by it.
    Waits {
        /// The migration.
        migration: MigrationId,
        /// QMP socket of that QEMU.
        #[serde(deserialize_with = "text::de_text")]
        qmp: String,
        /// The VM's disks' layers: the number of the image each is in, and how it is attached (JSON).
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        layers: Vec<(u16, String)>,
    },
}

/// The answer to a [`Request`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Answer to `Identify`.
    Identity {
        /// Name and version of the software.
        #[serde(deserialize_with = "text::de_text")]
        agent: String,
        /// The pools that the asking peer may use: their names, and the bytes that are free in each, if that is known.
        #[serde(deserialize_with = "text::de_named")]
        pools: Vec<(String, Option<u64>)>,
        /// Its clock, in milliseconds since 1970 (UTC).
        unix_ms: u64,
        /// For how many whole days its certificates are valid still.
        certificate_days: Option<u64>,
    },
    /// Answer to `Prepare`.
    Prepared {
        /// Where images are served at the target.
        endpoint: Endpoint,
        /// What each image begins with, in order.
        #[serde(deserialize_with = "list::at_most::<_, _, MAX_LISTED>")]
        bases: Vec<Base>,
    },
    /// Done, nothing to say.
    Done,
    /// Refused or failed.
    Refused(#[serde(deserialize_with = "de_refusal")] Refusal),
    /// Answer to `Seed`: each image, in order.
    Seeding {
        /// How far it is.
        images: Vec<Seeding>,
    },
    /// Answer to `Holdings`.
    Holdings {
        /// The replicas.
        held: Vec<Holding>,
    },
    /// Answer to `Survey`: each image, in order.
    Surveyed {
        /// What each would begin with.
        images: Vec<Surveyed>,
        /// Bytes of content there that are known by hash: what an image has in common with it is
        /// found while it moves.
        indexed: u64,
    },
    /// Answer to `Bases`: each image, in order.
    Bases {
        /// What lies there.
        images: Vec<BaseThere>,
    },
    /// Answer to `Fate`.
    Fate {
        /// What becomes of it.
        fate: Fate,
    },
}

/// Encodes a request or reply with its length (u32, little endian) in front.
///
/// # Errors
/// `TooLong` when it is over [`MAX_REQUEST`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let body =
        postcard::to_allocvec(message).map_err(|why| WireError::malformed("request", why))?;
    check_len(body.len() as u32)?;
    let mut out = (body.len() as u32).to_le_bytes().to_vec();
    out.extend(body);
    Ok(out)
}

/// Checks the length that precedes a request or reply.
///
/// # Errors
/// `TooLong` when it is over [`MAX_REQUEST`].
pub fn check_len(len: u32) -> Result<usize, WireError> {
    if len > MAX_REQUEST {
        let limit = MAX_REQUEST.into();
        return Err(WireError::TooLong { what: "request", len: len.into(), limit });
    }
    Ok(len as usize)
}

/// Decodes a request or reply.
///
/// # Errors
/// `Malformed` when the bytes are not one.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    postcard::from_bytes(body).map_err(|why| WireError::malformed("request", why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::ErrorKind;
    use dray_types::GenerationId;

    fn wanted() -> WantedImage {
        WantedImage { id: ImageId(2), name: "b".into(), len: 5, allocated: 4, read_only: false }
    }

    /// The bytes after the length, which are to be as in docs/reference/protocol.md.
    fn body<T: Serialize>(message: &T) -> Vec<u8> {
        encode(message).unwrap()[4..].to_vec()
    }

    #[test]
    fn requests_have_the_bytes_that_the_protocol_says() {
        let image = ComingImage {
            image: wanted(),
            ancestors: vec![Ancestor { id: GenerationId(7), number: 3 }],
            digest: None,
            qcow2: true,
            owner: Some(FileOwner { user: "u".into(), group: String::new(), mode: 0o600 }),
        };
        let room = Request::Prepare { migration: MigrationId(1), pool: None, images: vec![image] };
        assert_eq!(
            body(&room),
            [1, 1, 0, 1, 2, 1, b'b', 5, 4, 0, 1, 7, 3, 0, 1, 1, 1, b'u', 0, 0x80, 3]
        );
        assert_eq!(decode::<Request>(&body(&room)), Ok(room));
        let survey =
            Request::Survey { number: None, pool: None, images: Vec::new(), backups: true };
        assert_eq!(body(&survey), [5, 0, 0, 0, 1]);
        let sought = SoughtBase { name: "b".into(), len: 5, digest: Some([7; 32]) };
        let ask = Request::Bases { pool: None, images: vec![sought] };
        assert_eq!(body(&ask)[..7], [6, 0, 1, 1, b'b', 5, 1]);
        let ask = Request::Fate { migration: MigrationId(1), images: vec![ImageId(2)] };
        assert_eq!(body(&ask), [7, 1, 1, 2]);
        assert_eq!(decode::<Request>(&body(&ask)), Ok(ask));
        let layers = vec![(3, "{}".into())];
        let ask = Request::Waits { migration: MigrationId(1), qmp: "q".into(), layers };
        assert_eq!(body(&ask), [8, 1, 1, b'q', 1, 3, 2, b'{', b'}']);
        assert_eq!(decode::<Request>(&body(&ask)), Ok(ask));
    }

    #[test]
    fn replies_have_the_bytes_that_the_protocol_says() {
        let base = Base::InPlace { export: "b".into() };
        let prepared = Reply::Prepared { endpoint: Endpoint::nbd("s".as_ref()), bases: vec![base] };
        assert_eq!(body(&prepared), [1, 0, 1, b's', 1, 3, 1, b'b']);
        let one = Surveyed { base: Base::Empty, given: vec![("nas".into(), 5)], notes: Vec::new() };
        let reply = Reply::Surveyed { images: vec![one], indexed: 7 };
        assert_eq!(body(&reply)[0], 6);
        assert_eq!(decode::<Reply>(&body(&reply)), Ok(reply));
        assert_eq!(body(&Reply::Bases { images: vec![BaseThere::Same] }), [7, 1, 3]);
        assert_eq!(body(&Reply::Fate { fate: Fate::Unknown { owned: true } }), [8, 4, 1]);
        assert_eq!(body(&Reply::Fate { fate: Fate::Claimed }), [8, 5]);
    }

    #[test]
    fn what_a_peer_says_is_harmless_once_it_is_decoded() {
        let evil = "\x1b]0;all is well\x07".repeat(100);
        let clean = |text: &str| text.len() <= 1024 && !text.contains(char::is_control);
        let why = Refusal::new(ErrorKind::Io, evil.clone(), &evil).hint(evil.clone());
        let refused = Reply::Refused(why);
        let Ok(Reply::Refused(why)) = decode(&body(&refused)) else { panic!("not as sent") };
        let hint = why.hint.unwrap();
        assert!([why.what, why.why, hint].iter().all(|text| clean(text)));
        let base = Base::Refused { why: evil.clone() };
        let one = Surveyed { base, given: vec![(evil.clone(), 1)], notes: vec![evil.clone()] };
        let surveyed = Reply::Surveyed { images: vec![one], indexed: 0 };
        let told = format!("{:?}", decode::<Reply>(&body(&surveyed)).unwrap());
        assert!(
            !told.contains("\\u{1b}") && !told.contains("\\u{7}") && told.len() < 4000,
            "{told}"
        );
        let image = ComingImage {
            image: wanted(),
            ancestors: Vec::new(),
            digest: None,
            qcow2: false,
            owner: None,
        };
        let images = vec![image; 1025];
        let request = Request::Prepare { migration: MigrationId(1), pool: None, images };
        assert!(decode::<Request>(&encode(&request).unwrap()[4..]).is_err());
        let pools = vec![(String::new(), None); 1025];
        let (agent, certificate_days) = (String::new(), None);
        let many = Reply::Identity { agent, pools, unix_ms: 0, certificate_days };
        assert!(decode::<Reply>(&body(&many)).is_err());
    }

    #[test]
    fn requests_round_trip() {
        let request = Request::Forget { migration: MigrationId(5) };
        let bytes = encode(&request).unwrap();
        assert_eq!(
            check_len(u32::from_le_bytes(bytes[..4].try_into().unwrap())),
            Ok(bytes.len() - 4)
        );
        assert_eq!(decode::<Request>(&bytes[4..]), Ok(request));
        assert!(check_len(MAX_REQUEST + 1).is_err());
        assert!(decode::<Reply>(&[0xff, 1, 2]).is_err());
    }
}
