//! A store at another dray host, `dray://HOST/…`: objects over TLS streams, a few of them kept open.

use dray_backup::{Error, Kind, Object, Put, Result, Store};
use dray_net::questions::Questions;
use dray_net::tls::Identity;
use dray_wire::StreamKind;
use dray_wire::store::{Answer, Ask, Listed, MAX_OBJECT, Refusal};
use std::fmt;
use std::io;
use std::time::Duration;

/// The way to who answers.
pub(crate) trait Way: Send + Sync {
    /// The peer's name.
    fn peer(&self) -> &str;

    /// Asks one thing.
    ///
    /// # Errors
    /// `InvalidInput` for a question that no peer would take; whatever else keeps the answer away.
    fn ask(&self, ask: &Ask, body: &[u8]) -> io::Result<(Answer, Vec<u8>)>;
}

impl Way for Questions {
    fn peer(&self) -> &str {
        self.peer()
    }

    fn ask(&self, ask: &Ask, body: &[u8]) -> io::Result<(Answer, Vec<u8>)> {
        self.ask(ask, body)
    }
}

/// The store.
pub struct PeerStore {
    way: Box<dyn Way>,
    /// Put before every name; empty or ending in a slash.
    prefix: String,
}

impl fmt::Debug for PeerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dray://{}/{}", self.way.peer(), self.prefix)
    }
}

impl PeerStore {
    /// The store at `peer` below `folder`.
    pub fn new(identity: Identity, peer: &str, address: &str, folder: &str) -> Self {
        Self::on(Questions::new(identity, peer, address, StreamKind::Store), folder)
    }

    /// The store at the end of `way` below `folder`.
    pub(crate) fn on(way: impl Way + 'static, folder: &str) -> Self {
        let folder = folder.trim_matches('/');
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        Self { way: Box::new(way), prefix }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn ask(&self, ask: &Ask, body: &[u8]) -> Result<(Answer, Vec<u8>)> {
        match self.way.ask(ask, body) {
            Ok((Answer::Failed { kind, why }, _)) => Err(Error::new(kind_of(kind), why)),
            Ok(answer) => Ok(answer),
            Err(why) if why.kind() == io::ErrorKind::InvalidInput => {
                Err(Error::invalid(why.to_string()))
            }
            Err(why) => {
                let what = format!("{} cannot be asked", self.way.peer());
                Err(Error::unavailable(what, why))
            }
        }
    }

    fn unexpected(&self) -> Error {
        Error::unavailable(
            format!("the answer of {} does not fit the question", self.way.peer()),
            "protocol",
        )
    }

    fn bytes(&self, ask: &Ask, fits: impl Fn(usize) -> bool) -> Result<Vec<u8>> {
        match self.ask(ask, &[])? {
            (Answer::Bytes, bytes) if fits(bytes.len()) => Ok(bytes),
            (Answer::Bytes, _) => Err(Error::damaged("the peer's answer has another length")),
            _ => Err(self.unexpected()),
        }
    }
}

fn kind_of(refusal: Refusal) -> Kind {
    match refusal {
        Refusal::NotFound => Kind::NotFound,
        Refusal::Damaged => Kind::Damaged,
        Refusal::Unavailable => Kind::Unavailable,
        Refusal::Invalid => Kind::Invalid,
        Refusal::Denied => Kind::Denied,
    }
}

impl Store for PeerStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        match self.ask(&Ask::PutNew { name: self.name(name) }, bytes)?.0 {
            Answer::Created => Ok(Put::Created),
            Answer::Existed => Ok(Put::Existed),
            _ => Err(self.unexpected()),
        }
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        let most = limit.min(MAX_OBJECT as usize);
        let ask = Ask::Get { name: self.name(name), limit: most as u32 };
        self.bytes(&ask, |len| len <= most)
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        let wanted = u32::try_from(len).map_err(|_| Error::invalid("it is too long"))?;
        let ask = Ask::GetRange { name: self.name(name), offset, len: wanted };
        self.bytes(&ask, |got| got == len)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let Answer::Objects(listed) = self.ask(&Ask::List { prefix: self.name(prefix) }, &[])?.0
        else {
            return Err(self.unexpected());
        };
        let object = |listed: Listed| {
            let name = listed.name.strip_prefix(&self.prefix)?.to_owned();
            let age = Duration::from_millis(listed.age_ms);
            Some(Object { name, bytes: listed.bytes, age })
        };
        Ok(listed.into_iter().filter_map(object).collect())
    }

    fn delete(&self, name: &str) -> Result<()> {
        match self.ask(&Ask::Delete { name: self.name(name) }, &[])?.0 {
            Answer::Done => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    fn exists(&self, name: &str) -> Result<bool> {
        match self.ask(&Ask::Exists { name: self.name(name) }, &[])?.0 {
            Answer::Exists(exists) => Ok(exists),
            _ => Err(self.unexpected()),
        }
    }
}
