//! What the manifest of a big image takes: bytes stored beside the content, time to list it, to
//! read all of it, and to back up a few changes.
//!
//! ```text
//! cargo run --release -p dray-backup --example manifest -- [GIB]
//! ```
//!
//! Every piece has content of its own that shrinks to next to nothing; the store is in memory.

use dray_backup::{
    Backup, Consistency, Dedup, Info, Key, MemoryStore, PIECE_BYTES, Repository, Result,
    WriterOptions,
};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::sync::Arc;
use std::time::Instant;

fn back_up(
    repository: &Repository,
    bytes: u64,
    parent: Option<&Backup>,
    pieces: impl Iterator<Item = u64>,
) -> Result<Backup> {
    let options = WriterOptions { dedup: Dedup::Parent, index_pieces: 0, ..Default::default() };
    let parent = parent.map(|parent| repository.manifest(parent)).transpose()?;
    let mut writer = repository.writer(ImageId(1), bytes, parent.as_ref(), options)?;
    let mut piece = vec![0; PIECE_BYTES];
    let salt = u64::from(parent.is_some()) << 32;
    for ix in pieces {
        piece[..8].copy_from_slice(&(ix + 1 + salt).to_le_bytes());
        writer.put(ix, &piece)?;
    }
    writer.finish(Info {
        image: ImageId(1),
        name: "image".into(),
        bytes,
        generation: Ancestor { id: GenerationId(1), number: 1 },
        parent: None,
        ancestors: vec![],
        taken_unix_ms: 0,
        host: "here".into(),
        consistency: Consistency::Crash,
    })
}

fn main() -> Result<()> {
    let gib: u64 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(64);
    let (bytes, count) = (gib << 30, (gib << 30) / PIECE_BYTES as u64);
    let store = Arc::new(MemoryStore::default());
    let repository = Repository::create(store.clone(), &Key::None)?;
    let kib = |bytes: u64| bytes as f64 / 1024.0;

    let first = back_up(&repository, bytes, None, 0..count)?;
    // A piece's content is 8 bytes and a length; what is above that is manifest.
    let content: u64 = (0..1000).map(|ix| stored(&repository, &first, ix)).sum::<Result<u64>>()?;
    let stored_content = content as f64 / 1000.0 * count as f64;
    let beside = first.added_bytes as f64 - stored_content;
    println!("{gib} GiB, {count} pieces");
    println!("segments: {:.0} KiB, {:.1} bytes a piece", beside / 1024.0, beside / count as f64);
    let manifests = |n: usize| -> Result<u64> {
        use dray_backup::Store;
        let mut all = store.list("manifests/")?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all[n].bytes)
    };
    println!("manifest: {:.0} KiB", kib(manifests(0)?));

    let since = Instant::now();
    let listed = repository.all()?.backups.len();
    println!("list {listed} backup: {:.1} ms", since.elapsed().as_secs_f64() * 1e3);

    let since = Instant::now();
    let recipe = repository.hashes(&repository.manifest(&first)?)?;
    println!("read the whole recipe: {:.2} s", since.elapsed().as_secs_f64());
    assert_eq!(recipe.iter().flatten().count() as u64, count);

    // 1000 pieces all over the image, the worst case.
    let since = Instant::now();
    let second = back_up(&repository, bytes, Some(&first), (0..1000).map(|n| n * (count / 1000)))?;
    let seconds = since.elapsed().as_secs_f64();
    println!("1000 scattered pieces: {:.0} KiB of packs, {seconds:.2} s", kib(second.added_bytes));
    Ok(())
}

fn stored(repository: &Repository, backup: &Backup, ix: u64) -> Result<u64> {
    let reader = repository.reader(&repository.manifest(backup)?);
    Ok(match reader.piece(ix)? {
        dray_backup::Piece::Zero => 0,
        dray_backup::Piece::Data { place, .. } => place.stored.into(),
    })
}
