//! A console line: a word, then `key=value` pairs and bare arguments, separated by blanks.

use std::fmt::Display;
use std::str::FromStr;

/// One parsed line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// The first word: a command, or the kind of a report.
    pub word: String,
    fields: Vec<(String, String)>,
}

impl Line {
    /// Starts a line.
    pub fn new(word: &str) -> Self {
        Self { word: word.to_owned(), fields: Vec::new() }
    }

    /// Adds a pair.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Display) -> Self {
        self.fields.push((key.to_owned(), value.to_string()));
        self
    }

    /// Reads a line; a word without `=` is a pair with an empty value.
    pub fn parse(text: &str) -> Self {
        let mut words = text.split_whitespace();
        let word = words.next().unwrap_or_default().to_owned();
        let fields = words
            .map(|w| w.split_once('=').unwrap_or((w, "")))
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect();
        Self { word, fields }
    }

    /// The value of a pair, unparsed.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// The value of a pair, or `default` when there is none.
    pub fn value<T: FromStr>(&self, key: &str, default: T) -> Result<T, String> {
        match self.get(key) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("{key}={text}: not understood")),
        }
    }
}

impl Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.word)?;
        for (key, value) in &self.fields {
            write!(f, " {key}={value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_round_trip() {
        let line = Line::new("STAT").with("disk", "vda").with("rate", 40);
        assert_eq!(line.to_string(), "STAT disk=vda rate=40");
        let read = Line::parse(" STAT  disk=vda rate=40\r\n");
        assert_eq!(read, line);
        assert_eq!(read.value("rate", 0u64), Ok(40));
        assert_eq!(read.value("depth", 1u64), Ok(1));
        assert!(Line::parse("x rate=fast").value("rate", 0u64).is_err());
    }
}
