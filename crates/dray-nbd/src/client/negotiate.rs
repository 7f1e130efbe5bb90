//! The client's half of the negotiation: greeting, structured replies, contexts, export.

use super::Wish;
use super::error::ClientError;
use crate::limits::{MAX_OPTION, MAX_OPTIONS, MAX_STRING, NEGOTIATION_TIME};
use crate::proto::{INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, handshake, info, opt, rep};
use dray_types::text::harmless;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// What was agreed.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) len: u64,
    pub(super) flags: u16,
    pub(super) contexts: Vec<(String, u32)>,
}

/// One answer to an option.
struct Answer {
    kind: u32,
    payload: Vec<u8>,
}

struct Negotiation<'a> {
    stream: &'a UnixStream,
}

pub(super) fn negotiate(stream: &UnixStream, wish: &Wish) -> Result<Agreed, ClientError> {
    stream.set_read_timeout(Some(NEGOTIATION_TIME))?;
    let mut with = Negotiation { stream };
    with.greet()?;
    with.structured()?;
    let contexts = wish
        .contexts
        .iter()
        .map(|context| Ok((context.clone(), with.context(&wish.export, context)?)))
        .collect::<Result<Vec<_>, ClientError>>();
    let contexts = match contexts {
        Ok(contexts) if contexts.len() > 1 => with.contexts(&wish.export, contexts)?,
        other => other?,
    };
    let (len, flags) = with.go(&wish.export)?;
    stream.set_read_timeout(None)?;
    Ok(Agreed { len, flags, contexts })
}

impl Negotiation<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], ClientError> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn greet(&mut self) -> Result<(), ClientError> {
        let magics = (u64::from_be_bytes(self.take()?), u64::from_be_bytes(self.take()?));
        if magics != (INIT_MAGIC, OPTION_MAGIC) {
            return Err(ClientError::Protocol("no newstyle greeting"));
        }
        let flags = u16::from_be_bytes(self.take()?);
        if flags & handshake::FIXED_NEWSTYLE == 0 {
            return Err(ClientError::Protocol("no fixed newstyle negotiation"));
        }
        let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        self.stream.write_all(&u32::from(ours).to_be_bytes())?;
        Ok(())
    }

    fn structured(&mut self) -> Result<(), ClientError> {
        self.option(opt::STRUCTURED_REPLY, &[], "structured replies").map(drop)
    }

    /// The number of one context, negotiated alone: a server answers a list of contexts in an order
    /// of its own, and leaves out what it does not know.
    fn context(&mut self, export: &str, context: &str) -> Result<u32, ClientError> {
        let found = self.contexts_of(export, &[context])?;
        let one = found.into_iter().find(|(name, _)| name == context);
        let missing = || ClientError::Refused {
            what: format!("metadata context '{context}'"),
            why: "it is not known there".into(),
        };
        Ok(one.ok_or_else(missing)?.1)
    }

    /// All contexts together, which is what counts for the connection.
    fn contexts(
        &mut self,
        export: &str,
        wished: Vec<(String, u32)>,
    ) -> Result<Vec<(String, u32)>, ClientError> {
        let names: Vec<&str> = wished.iter().map(|(name, _)| name.as_str()).collect();
        let found = self.contexts_of(export, &names)?;
        let all = names.iter().all(|name| found.iter().any(|(known, _)| known == name));
        all.then_some(found).ok_or(ClientError::Protocol("a metadata context has gone"))
    }

    fn contexts_of(
        &mut self,
        export: &str,
        queries: &[&str],
    ) -> Result<Vec<(String, u32)>, ClientError> {
        let mut payload = string(export)?;
        payload.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        for query in queries {
            payload.extend_from_slice(&string(query)?);
        }
        let answers = self.option(opt::SET_META_CONTEXT, &payload, "metadata contexts")?;
        let contexts = answers.iter().filter(|answer| answer.kind == rep::META_CONTEXT);
        contexts.map(|answer| context_of(&answer.payload)).collect()
    }

    fn go(&mut self, export: &str) -> Result<(u64, u16), ClientError> {
        let mut payload = string(export)?;
        payload.extend_from_slice(&0u16.to_be_bytes());
        let answers = self.option(opt::GO, &payload, &format!("export '{export}'"))?;
        let items = answers.iter().filter(|answer| answer.kind == rep::INFO);
        let mut found = items.filter_map(|answer| export_of(&answer.payload));
        found.next().ok_or(ClientError::Protocol("export without a length"))
    }

    /// Sends an option and takes its answers up to the last, which is not among them.
    fn option(
        &mut self,
        option: u32,
        payload: &[u8],
        what: &str,
    ) -> Result<Vec<Answer>, ClientError> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        self.stream.write_all(&bytes)?;
        let mut answers = Vec::new();
        for _ in 0..MAX_OPTIONS {
            let answer = self.answer(option)?;
            match answer.kind {
                rep::ACK => return Ok(answers),
                kind if kind >> 31 == 1 => return Err(refused(what, &answer)),
                _ => answers.push(answer),
            }
        }
        Err(ClientError::Protocol("too many answers to one option"))
    }

    fn answer(&mut self, option: u32) -> Result<Answer, ClientError> {
        if u64::from_be_bytes(self.take()?) != OPTION_REPLY_MAGIC {
            return Err(ClientError::Protocol("wrong magic of an answer"));
        }
        if u32::from_be_bytes(self.take()?) != option {
            return Err(ClientError::Protocol("answer to another option"));
        }
        let kind = u32::from_be_bytes(self.take()?);
        let len = u32::from_be_bytes(self.take()?);
        if len > MAX_OPTION {
            return Err(ClientError::Protocol("answer is too long"));
        }
        let mut payload = vec![0; len as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(Answer { kind, payload })
    }
}

fn refused(what: &str, answer: &Answer) -> ClientError {
    let why = match std::str::from_utf8(&answer.payload) {
        Ok(text) if !text.is_empty() => harmless(text),
        _ => format!("error {}", answer.kind & !(1 << 31)),
    };
    ClientError::Refused { what: what.to_owned(), why }
}

fn string(text: &str) -> Result<Vec<u8>, ClientError> {
    if text.len() > MAX_STRING {
        let what = format!("name of {} bytes", text.len());
        return Err(ClientError::Refused { what, why: "it is too long".into() });
    }
    Ok([&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat())
}

fn context_of(payload: &[u8]) -> Result<(String, u32), ClientError> {
    let (id, name) =
        payload.split_first_chunk().ok_or(ClientError::Protocol("context without a number"))?;
    let name = std::str::from_utf8(name).map_err(|_| ClientError::Protocol("context's name"))?;
    Ok((name.to_owned(), u32::from_be_bytes(*id)))
}

/// Length and flags, if this item is about them.
fn export_of(payload: &[u8]) -> Option<(u64, u16)> {
    let payload: &[u8; 12] = payload.try_into().ok()?;
    let (kind, rest) = payload.split_first_chunk::<2>()?;
    let (len, flags) = rest.split_first_chunk::<8>()?;
    let flags = flags.try_into().ok()?;
    let export = u16::from_be_bytes(*kind) == info::EXPORT;
    export.then(|| (u64::from_be_bytes(*len), u16::from_be_bytes(flags)))
}
