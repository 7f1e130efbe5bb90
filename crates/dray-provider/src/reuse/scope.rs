//! Who shares the places of content. Each scope has entries of its own in the index: one that the content of others
//! replaced would tell that they have such content.

use super::files::FileRef;
use dray_config::Config;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// A set of files whose content the same askers may get. It is the same after a restart, and whatever the order of the
/// configuration.
pub(super) type Scope = u64;

fn scope(kind: &str, name: &[u8]) -> Scope {
    xxh3_64(&[kind.as_bytes(), &[0], name].concat())
}

/// The file alone.
pub(super) fn of_file(file: &FileRef) -> Scope {
    match file {
        FileRef::Image { name, id } => {
            scope("image", &[name.as_bytes(), &id.0.to_le_bytes()].concat())
        }
        FileRef::Plain { path } => scope("file", path.as_os_str().as_encoded_bytes()),
    }
}

/// The pools of one reuse domain.
pub(super) fn of_domain(domain: &str) -> Scope {
    scope("domain", domain.as_bytes())
}

/// The read-only base images of a pool.
pub(super) fn of_bases(pool: &str) -> Scope {
    scope("bases", pool.as_bytes())
}

/// The scope in which content of a file at `path` is written down.
pub(super) fn of(config: &Config, file: &FileRef, path: &Path, read_only: bool) -> Scope {
    let Some(pool) = config.pool_of(path) else { return of_file(file) };
    match &pool.reuse_domain {
        // Others than those of its domain may get it, too.
        _ if read_only => of_bases(&pool.name),
        Some(domain) => of_domain(domain),
        None => of_file(file),
    }
}
