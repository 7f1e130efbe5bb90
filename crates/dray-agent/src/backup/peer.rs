//! A store at another dray host, `dray://HOST/…`: objects over TLS streams, a few of them kept open.

use super::offer::read;
use crate::net::{AGENT, BlockingStream, DialSettings, NetError, NetErrorKind, dial};
use crate::tls::Identity;
use dray_backup::{Error, Kind, Object, Put, Result, Store};
use dray_wire::store::{self, Answer, Ask, Listed, MAX_OBJECT, Refusal};
use dray_wire::{Hello, StreamKind};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A stream that nobody has used for this long is not used any more: the peer may have restarted.
const IDLE: Duration = Duration::from_secs(10);

/// The store.
pub struct PeerStore {
    identity: Identity,
    peer: String,
    address: String,
    /// Put before every name; empty or ending in a slash.
    prefix: String,
    idle: Mutex<Vec<(Instant, BlockingStream)>>,
}

impl fmt::Debug for PeerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dray://{}/{}", self.peer, self.prefix)
    }
}

impl PeerStore {
    /// The store at `peer` below `folder`.
    pub fn new(identity: Identity, peer: &str, address: &str, folder: &str) -> Self {
        let folder = folder.trim_matches('/');
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let (peer, address) = (peer.to_owned(), address.to_owned());
        Self { identity, peer, address, prefix, idle: Mutex::default() }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A stream that waits, or a new one.
    fn stream(&self) -> Result<BlockingStream> {
        {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|(since, _)| since.elapsed() < IDLE);
            if let Some((_, stream)) = idle.pop() {
                return Ok(stream);
            }
        }
        self.dial().map_err(|why| Error::unavailable(format!("{} cannot be asked", self.peer), why))
    }

    fn dial(&self) -> std::result::Result<BlockingStream, NetError> {
        let local = |why: std::io::Error| NetError::new(NetErrorKind::Local, why.to_string());
        let open = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let hello = Hello {
                agent: AGENT.to_owned(),
                migration: None,
                session: 0,
                stream: 0,
                features: Vec::new(),
            };
            let (name, address) = (&self.peer, &self.address);
            let settings = DialSettings::default();
            runtime.map_err(local)?.block_on(async {
                let kind = StreamKind::Store;
                dial(&self.identity, name, address, kind, &hello, &settings).await?.into_blocking()
            })
        };
        // On a thread of its own: the caller may be a task of another runtime.
        std::thread::scope(|scope| {
            let opened = scope.spawn(open).join();
            opened.unwrap_or_else(|_| Err(local(std::io::Error::other("the dialling thread died"))))
        })
    }

    fn ask(&self, ask: &Ask, body: &[u8]) -> Result<(Answer, Vec<u8>)> {
        let mut stream = self.stream()?;
        let lost = |why: std::io::Error| {
            Error::unavailable(format!("lost the connection to {}", self.peer), why)
        };
        let head = store::encode(ask, body.len()).map_err(|why| Error::invalid(why.to_string()))?;
        stream.write_both(&head, body).map_err(lost)?;
        let answer = read::<Answer>(&mut stream).map_err(lost)?;
        let answer = answer.ok_or_else(|| lost(std::io::ErrorKind::UnexpectedEof.into()))?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push((Instant::now(), stream));
        match answer {
            (Answer::Failed { kind, why }, _) => Err(Error::new(kind_of(kind), why)),
            answer => Ok(answer),
        }
    }

    fn unexpected(&self) -> Error {
        Error::unavailable(format!("{} answered something else", self.peer), "protocol")
    }

    fn bytes(&self, ask: &Ask, fits: impl Fn(usize) -> bool) -> Result<Vec<u8>> {
        match self.ask(ask, &[])? {
            (Answer::Bytes, bytes) if fits(bytes.len()) => Ok(bytes),
            (Answer::Bytes, _) => Err(Error::damaged("the peer gave another length")),
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
