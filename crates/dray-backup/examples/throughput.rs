//! How fast a backup is written to and read from a directory, beside `cp` of the same bytes.
//!
//! ```text
//! cargo run --release -p dray-backup --example throughput -- DIRECTORY [GIB] [sealed]
//! ```
//!
//! The image is half noise and half text that zstd shrinks. `cp` ends with a sync of the copy, a
//! backup with everything durable. Reads come from the page cache in all cases.

use dray_backup::{
    Consistency, Content, Info, Key, Kind, LocalStore, PIECE_BYTES, Repository, Result,
    StreamOptions, WriterOptions,
};
use dray_types::{Ancestor, GenerationId, ImageId};
use std::fs::File;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: throughput DIRECTORY [GIB] [sealed]")?;
    let gib: u64 = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let key = match arguments.next().as_deref() {
        Some("sealed") => Key::Raw([7; 32]),
        _ => Key::None,
    };
    let folder = Path::new(&folder).join("throughput");
    std::fs::create_dir(&folder)?;
    let measured = measure(&folder, gib << 30, &key);
    std::fs::remove_dir_all(&folder)?;
    measured
}

fn measure(
    folder: &Path,
    bytes: u64,
    key: &Key,
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let (image, copy) = (folder.join("image"), folder.join("copy"));
    make_image(&image, bytes)?;
    let rate = |what: &str, since: Instant| {
        let seconds = since.elapsed().as_secs_f64();
        println!("{what:32} {:7.0} MB/s  {seconds:6.2} s", bytes as f64 / 1e6 / seconds);
    };
    let since = Instant::now();
    let done =
        std::process::Command::new("cp").arg("--reflink=never").args([&image, &copy]).status()?;
    File::open(&copy)?.sync_all()?;
    rate("cp and sync", since);
    assert!(done.success());
    std::fs::remove_file(&copy)?;

    let store = Arc::new(LocalStore::open(&folder.join("repository"))?);
    let repository = Repository::create(store.clone(), key)?;
    let file = File::open(&image)?;
    let since = Instant::now();
    let first = back_up(&repository, &file, bytes, None)?;
    rate("first backup", since);
    let written = first.added_bytes;
    println!("{:32} {:7.2} of the image", "stored", written as f64 / bytes as f64);

    let since = Instant::now();
    let second = back_up(&repository, &file, bytes, Some(&first))?;
    rate("second backup, all read again", since);
    assert!(second.added_bytes < bytes / 100);

    for parallel in [1, 4] {
        let since = Instant::now();
        let mut sum = 0;
        let reader = repository.reader(&repository.manifest(&second)?);
        let all = std::iter::once(0..reader.piece_count());
        reader.stream(all, StreamOptions { parallel }, |_, content| {
            match content {
                Ok(Content::Data(bytes)) => sum += bytes.len() as u64,
                Ok(Content::Zero) => sum += PIECE_BYTES as u64,
                Err(e) => panic!("{e}"),
            }
            ControlFlow::Continue(())
        });
        assert_eq!(sum, bytes);
        rate(&format!("restore, {parallel} at a time"), since);
    }
    Ok(())
}

fn back_up(
    repository: &Repository,
    file: &File,
    bytes: u64,
    parent: Option<&dray_backup::Backup>,
) -> Result<dray_backup::Backup> {
    let (image, options) = (ImageId(1), WriterOptions::default());
    let parent = parent.map(|parent| repository.manifest(parent)).transpose()?;
    let mut writer = repository.writer(image, bytes, parent.as_ref(), options)?;
    let mut piece = vec![0; PIECE_BYTES];
    for ix in 0..writer.piece_count() {
        file.read_exact_at(&mut piece, ix * PIECE_BYTES as u64)
            .map_err(|e| dray_backup::Error::new(Kind::Unavailable, e.to_string()))?;
        writer.put(ix, &piece)?;
    }
    writer.finish(Info {
        image,
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

/// Every other 64 KiB is noise, the others are numbers as text.
fn make_image(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = std::io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut noise = blake3::Hasher::new().finalize_xof();
    let mut piece = vec![0; PIECE_BYTES];
    for ix in 0..bytes / PIECE_BYTES as u64 {
        if ix % 2 == 0 {
            noise.read_exact(&mut piece)?;
        } else {
            piece.clear();
            let mut number = ix * 1_000_003;
            while piece.len() < PIECE_BYTES {
                number += 7919;
                writeln!(piece, "{number} of {ix}")?;
            }
            piece.truncate(PIECE_BYTES);
        }
        file.write_all(&piece)?;
    }
    file.into_inner()?.sync_all()
}
