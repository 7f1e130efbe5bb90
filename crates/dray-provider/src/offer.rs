//! The store that this host offers to peers (`[backup_store]` in the configuration), over streams
//! of their own with a thread each. A faulty question gets an error as its answer, and the stream
//! continues.

use dray_backup::{Error, Kind, LocalStore, Put, Store};
use dray_host::abort;
use dray_net::questions::read;
use dray_net::{BlockingStream, NetError, NetErrorKind, Stream};
use dray_wire::store::{self, Answer, Ask, Listed, MAX_OBJECT, Refusal};
use std::io;
use std::path::Path;

/// Serves the store in `folder` until the peer has had enough.
///
/// # Errors
/// When the store cannot be opened or no thread be made.
pub fn serve(stream: Stream, folder: &Path) -> Result<(), NetError> {
    let local = |why: String| NetError::new(NetErrorKind::Local, format!("offer a store: {why}"));
    let objects = LocalStore::open(folder).map_err(|why| local(why.to_string()))?;
    let mut stream = stream.into_blocking()?;
    let work = move || {
        let peer = stream.peer().to_owned();
        if let Err(why) = answer_all(&mut stream, &objects) {
            tracing::debug!(peer, %why, "a stream to the backup store ended");
        }
    };
    let made = std::thread::Builder::new().name("dray-store".to_owned()).spawn(work);
    made.map(drop).map_err(|why| local(why.to_string()))
}

fn answer_all(stream: &mut BlockingStream, objects: &LocalStore) -> io::Result<()> {
    while let Some((ask, body)) = read::<Ask>(stream)? {
        abort::before(|| vec!["store-answer".to_owned()]);
        let (answer, bytes) = answer(objects, ask, &body);
        let head = store::encode(&answer, bytes.len()).map_err(io::Error::other)?;
        stream.write_both(&head, &bytes)?;
    }
    Ok(())
}

fn answer(objects: &LocalStore, ask: Ask, body: &[u8]) -> (Answer, Vec<u8>) {
    match carry_out(objects, ask, body) {
        Ok(answer) => answer,
        Err(why) => {
            (Answer::Failed { kind: refusal(why.kind()), why: why.to_string() }, Vec::new())
        }
    }
}

fn carry_out(objects: &LocalStore, ask: Ask, body: &[u8]) -> Result<(Answer, Vec<u8>), Error> {
    let bounded = |len: u32| len.min(MAX_OBJECT) as usize;
    Ok(match ask {
        Ask::PutNew { name } => match objects.put_new(&name, body)? {
            Put::Created => (Answer::Created, Vec::new()),
            Put::Existed => (Answer::Existed, Vec::new()),
        },
        Ask::Get { name, limit } => (Answer::Bytes, objects.get(&name, bounded(limit))?),
        Ask::GetRange { name, offset, len } => {
            (Answer::Bytes, objects.get_range(&name, offset, bounded(len))?)
        }
        Ask::List { prefix } => {
            let listed = objects.list(&prefix)?.into_iter().map(|object| Listed {
                name: object.name,
                bytes: object.bytes,
                age_ms: object.age.as_millis() as u64,
            });
            (Answer::Objects(listed.collect()), Vec::new())
        }
        Ask::Delete { name } => {
            objects.delete(&name)?;
            (Answer::Done, Vec::new())
        }
        Ask::Exists { name } => (Answer::Exists(objects.exists(&name)?), Vec::new()),
    })
}

fn refusal(kind: Kind) -> Refusal {
    match kind {
        Kind::NotFound => Refusal::NotFound,
        Kind::Damaged => Refusal::Damaged,
        Kind::Invalid => Refusal::Invalid,
        _ => Refusal::Unavailable,
    }
}
