//! The repository's configuration object: its id, how its key comes about, and a check of the key.
//!
//! It is never encrypted and never changes.

use crate::envelope::{Content, unwrap, wrap};
use crate::error::{Error, Kind, Result};
use crate::key::{Key, Keys, Scheme};
use crate::store::{Put, Store};
use crate::world::{World, random_id};
use serde::{Deserialize, Serialize};

pub(crate) const NAME: &str = "config";
const MAX_BYTES: usize = 4096;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) repository: u128,
    scheme: Scheme,
    check: [u8; 32],
}

/// Writes a new repository's configuration.
pub(crate) fn create(store: &dyn Store, key: &Key, world: &dyn World) -> Result<(Config, Keys)> {
    let repository = random_id(world)?;
    let mut salt = [0; 16];
    world.fill(&mut salt)?;
    let scheme = Scheme::for_key(key, salt);
    let keys = Keys::new(scheme.master(key)?);
    let config = Config { repository, scheme, check: keys.check_value(repository) };
    let bytes = wrap(Content::Config, &config, &Keys::new(None), world)?;
    if store.put_new(NAME, &bytes)? == Put::Existed {
        return Err(Error::new(Kind::Exists, "there is a repository already"));
    }
    // Everything is built on this; there are object stores that do not know the condition.
    match store.put_new(NAME, &bytes)? {
        Put::Existed => Ok((config, keys)),
        Put::Created => Err(Error::new(Kind::Unsupported, "the store overwrites objects")),
    }
}

/// Reads it and checks the key against it.
pub(crate) fn open(store: &dyn Store, key: &Key) -> Result<(Config, Keys)> {
    let bytes = store.get(NAME, MAX_BYTES).map_err(|e| match e.kind() {
        Kind::NotFound => Error::new(Kind::NotFound, "there is no backup repository"),
        _ => e,
    })?;
    let config: Config = unwrap(Content::Config, NAME, &bytes, &Keys::new(None))?;
    let keys = Keys::new(config.scheme.master(key)?);
    if keys.check_value(config.repository) != config.check {
        return Err(Error::new(Kind::WrongKey, "this is not the repository's key"));
    }
    Ok((config, keys))
}
