//! Writing traces: CSV, compressed when the name ends in `.zst`.

use crate::error::TraceError;
use crate::read::csv::HEAD;
use crate::record::{Op, Record};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// zstd's level 3: traces shrink to a fifth, at several million records a second.
const LEVEL: i32 = 3;
/// Nanoseconds in a microsecond: the resolution of the times.
const MICRO: u64 = 1000;

enum Sink {
    Plain(BufWriter<File>),
    Zstd(BufWriter<zstd::Encoder<'static, File>>),
}

/// Writes records one after another; [`Writer::finish`] completes the file.
pub struct Writer {
    path: PathBuf,
    sink: Sink,
}

impl Writer {
    /// Makes a file, replacing one of that name.
    pub fn create(path: &Path) -> Result<Self, TraceError> {
        let failed = |why| TraceError::io(path, "cannot create", why);
        let file = File::create(path).map_err(failed)?;
        let sink = if path.extension().is_some_and(|extension| extension == "zst") {
            Sink::Zstd(BufWriter::new(zstd::Encoder::new(file, LEVEL).map_err(failed)?))
        } else {
            Sink::Plain(BufWriter::new(file))
        };
        let mut writer = Self { path: path.to_owned(), sink };
        writer.line(HEAD)?;
        Ok(writer)
    }

    /// Adds a record. Times are written in microseconds.
    pub fn write(&mut self, record: &Record) -> Result<(), TraceError> {
        let op = match record.op {
            Op::Read => 'R',
            Op::Write => 'W',
        };
        let micros = record.time_ns / MICRO;
        let (seconds, fraction) = (micros / 1_000_000, micros % 1_000_000);
        let Record { offset, length, .. } = record;
        self.out(format_args!("{seconds}.{fraction:06},{op},{offset},{length}\n"))
    }

    fn line(&mut self, line: &str) -> Result<(), TraceError> {
        self.out(format_args!("{line}\n"))
    }

    fn out(&mut self, text: std::fmt::Arguments<'_>) -> Result<(), TraceError> {
        let result = match &mut self.sink {
            Sink::Plain(file) => file.write_fmt(text),
            Sink::Zstd(file) => file.write_fmt(text),
        };
        result.map_err(|why| TraceError::io(&self.path, "cannot write", why))
    }

    /// Writes what is left.
    pub fn finish(self) -> Result<(), TraceError> {
        let Self { path, sink } = self;
        let result = match sink {
            Sink::Plain(mut file) => file.flush(),
            Sink::Zstd(file) => file
                .into_inner()
                .map_err(|why| why.into_error())
                .and_then(|encoder| encoder.finish().map(drop)),
        };
        result.map_err(|why| TraceError::io(&path, "cannot write", why))
    }
}
