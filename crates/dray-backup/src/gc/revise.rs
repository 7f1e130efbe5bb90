//! Emptying packs that are mostly dead: the manifests that name them are written anew.

use super::live::Live;
use super::{GcOptions, GcReport};
use crate::error::{Kind, Result};
use crate::manifest::Manifest;
use crate::mark::all_condemned;
use crate::piece::Piece;
use crate::place::PackId;
use crate::repository::{Core, Repository};
use crate::session;
use crate::writer::{Dedup, WriterOptions, packs};
use std::collections::{HashMap, HashSet};

/// Empties packs and removes the revisions that are out of date.
pub(super) fn empty_packs(
    repository: &Repository,
    options: GcOptions,
    report: &mut GcReport,
) -> Result<()> {
    let core = &repository.core;
    let (sparse, manifests) = sparse(core, options.keep_percent)?;
    let newest = remove_superseded(core, manifests)?;
    if sparse.is_empty() {
        return Ok(());
    }
    for manifest in newest {
        if names_any(repository, &manifest, &sparse)? {
            revise(repository, &manifest, &sparse, options.threads, report)?;
        }
    }
    // Their older revisions.
    let live = Live::read(core)?;
    remove_superseded(core, live.manifests).map(drop)
}

/// Packs of which too little is alive, and all manifests.
fn sparse(core: &Core, keep_percent: u8) -> Result<(HashSet<PackId>, Vec<Manifest>)> {
    let present = packs(core)?;
    let (sessions, _) = session::list(core)?;
    let running: HashSet<u128> = sessions.iter().map(|listed| listed.seen.session).collect();
    let condemned = all_condemned(core)?;
    let live = Live::read(core)?;
    let sparse = |pack: &PackId, bytes: u64| {
        let alive = live.bytes(pack);
        alive > 0
            && alive * 100 < bytes * u64::from(keep_percent)
            && !running.contains(&pack.session)
            && !condemned.contains(pack)
    };
    let sparse = present.iter().filter(|(pack, bytes)| sparse(pack, **bytes));
    let sparse = sparse.map(|(pack, _)| *pack).collect();
    Ok((sparse, live.manifests))
}

/// Keeps of each backup the greatest (revision, name), which all collectors agree on, and removes
/// the others. Returns those that stay.
fn remove_superseded(core: &Core, mut manifests: Vec<Manifest>) -> Result<Vec<Manifest>> {
    let rank = |manifest: &Manifest| (manifest.backup().revision, manifest.backup().object.clone());
    manifests.sort_by_key(rank);
    let mut newest: HashMap<u128, Manifest> = HashMap::new();
    for manifest in manifests {
        if let Some(old) = newest.insert(manifest.backup().id, manifest) {
            core.store.delete(&old.backup().object)?;
        }
    }
    let mut newest: Vec<Manifest> = newest.into_values().collect();
    newest.sort_by_key(rank);
    Ok(newest)
}

fn names_any(
    repository: &Repository,
    manifest: &Manifest,
    packs: &HashSet<PackId>,
) -> Result<bool> {
    let reader = repository.reader(manifest);
    for (ix, segment) in manifest.stored() {
        if packs.contains(&segment.place.pack) {
            return Ok(true);
        }
        let pieces = match reader.segment(ix) {
            Ok(pieces) => pieces,
            // Pruned, and its packs removed, since the manifests were read.
            Err(_) if !repository.core.store.exists(&manifest.backup().object)? => {
                return Ok(false);
            }
            Err(e) => return Err(e),
        };
        if pieces.iter().filter_map(Piece::place).any(|place| packs.contains(&place.pack)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn revise(
    repository: &Repository,
    manifest: &Manifest,
    avoid: &HashSet<PackId>,
    threads: usize,
    report: &mut GcReport,
) -> Result<()> {
    let options = WriterOptions { threads, dedup: Dedup::Everything, ..WriterOptions::default() };
    let revised = repository
        .reviser(manifest, options, avoid.clone())
        .and_then(|writer| writer.finish(manifest.info().clone()));
    match revised {
        Ok(_) => {
            report.revised_backups += 1;
            Ok(())
        }
        // Pruned meanwhile, or given up by another collector: it stays as it is.
        Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Fenced) => Ok(()),
        Err(e) => match repository.core.store.exists(&manifest.backup().object)? {
            true => Err(e),
            false => Ok(()),
        },
    }
}
