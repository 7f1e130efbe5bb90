//! What can be wrong with a trace, said so that it can be put right.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A trace that cannot be read or written.
#[derive(Debug)]
pub struct TraceError {
    /// The file.
    pub path: PathBuf,
    /// The line, counted from 1; none when it is about the whole file.
    pub line: Option<u64>,
    /// What is wrong, in lower case.
    pub what: String,
    /// What to do about it.
    pub hint: Option<&'static str>,
    /// What the system said, when it is the file and not its contents.
    pub source: Option<io::Error>,
}

impl TraceError {
    /// The file could not be opened, read or written.
    pub fn io(path: &Path, what: &str, source: io::Error) -> Self {
        let (path, what) = (path.to_owned(), what.to_owned());
        Self { path, line: None, what, hint: None, source: Some(source) }
    }

    /// The contents make no sense.
    pub fn bad(path: &Path, line: Option<u64>, fault: Fault) -> Self {
        let Fault { what, hint } = fault;
        Self { path: path.to_owned(), line, what, hint: Some(hint), source: None }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ", line {line}")?;
        }
        write!(f, ": {}", self.what)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

/// What is wrong with one line, before the file and the number of the line are known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// What is wrong.
    pub what: String,
    /// What to do about it.
    pub hint: &'static str,
}

impl Fault {
    /// A fault.
    pub fn new(what: impl Into<String>, hint: &'static str) -> Self {
        Self { what: what.into(), hint }
    }
}
