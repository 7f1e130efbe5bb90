//! Lines of bounded length out of a stream, without an allocation per line.

use crate::error::Fault;
use std::io::{self, Read};

/// Longest line, in bytes.
pub(super) const MAX_LINE: usize = 4096;
/// Read at a time, and what the format is told by.
const BUFFER: usize = 256 << 10;

/// Why there is no next line.
#[derive(Debug)]
pub(super) enum LineError {
    /// The stream failed, or a decoder of it.
    Io(io::Error),
    /// No end of line in [`MAX_LINE`] bytes.
    TooLong,
}

/// What to say of a line that is too long.
pub(super) fn too_long() -> Fault {
    Fault::new(format!("a line of more than {MAX_LINE} bytes"), "this is no text of a trace")
}

/// A stream cut into lines.
pub(super) struct Lines {
    source: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    /// What is left of the buffer: `at .. end`.
    at: usize,
    end: usize,
    number: u64,
}

impl Lines {
    /// The lines of `source`.
    pub(super) fn new(source: Box<dyn Read + Send>) -> Self {
        Self { source, buffer: vec![0; BUFFER], at: 0, end: 0, number: 0 }
    }

    /// Number of the line that was read last, counted from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next bytes, as many as fit the buffer; nothing is taken.
    pub(super) fn peek(&mut self) -> io::Result<&[u8]> {
        while self.end < BUFFER && self.fill()? > 0 {}
        Ok(&self.buffer[self.at..self.end])
    }

    /// The stream from here on, peeked bytes included.
    pub(super) fn into_read(self) -> impl Read + Send {
        let Self { source, buffer, at, end, .. } = self;
        io::Cursor::new(buffer[at..end].to_vec()).chain(source)
    }

    /// The next line without its end, or none after the last one.
    #[inline]
    pub(super) fn next_line(&mut self) -> Result<Option<&[u8]>, LineError> {
        let mut seen = 0;
        loop {
            let rest = &self.buffer[self.at..self.end];
            if let Some(len) = rest[seen..].iter().position(|&byte| byte == b'\n') {
                let len = seen + len;
                if len > MAX_LINE {
                    break;
                }
                return Ok(Some(self.take(len, 1)));
            }
            seen = rest.len();
            if seen > MAX_LINE {
                break;
            }
            if self.fill().map_err(LineError::Io)? == 0 {
                return Ok(if seen == 0 { None } else { Some(self.take(seen, 0)) });
            }
        }
        self.number += 1;
        Err(LineError::TooLong)
    }

    fn take(&mut self, len: usize, end: usize) -> &[u8] {
        let from = self.at;
        self.at += len + end;
        self.number += 1;
        let line = &self.buffer[from..from + len];
        line.strip_suffix(b"\r").unwrap_or(line)
    }

    fn fill(&mut self) -> io::Result<usize> {
        if self.at > 0 {
            self.buffer.copy_within(self.at..self.end, 0);
            self.end -= self.at;
            self.at = 0;
        }
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(count) => {
                    self.end += count;
                    return Ok(count);
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &'static [u8]) -> Vec<Vec<u8>> {
        let mut lines = Lines::new(Box::new(text));
        let mut all = Vec::new();
        while let Some(line) = lines.next_line().unwrap() {
            all.push(line.to_vec());
        }
        all
    }

    #[test]
    fn ends_of_lines() {
        assert_eq!(all(b"a\r\n\nbc"), [&b"a"[..], b"", b"bc"]);
        assert!(all(b"").is_empty());
    }

    #[test]
    fn a_line_across_buffers_is_whole_and_an_endless_one_is_refused() {
        let long = vec![b'x'; MAX_LINE];
        let text: Vec<u8> = (0..200).flat_map(|_| [&long[..], b"\n"].concat()).collect();
        let mut lines = Lines::new(Box::new(io::Cursor::new(text)));
        for _ in 0..200 {
            assert_eq!(lines.next_line().unwrap().unwrap().len(), MAX_LINE);
        }
        assert!(lines.next_line().unwrap().is_none());
        let mut endless = Lines::new(Box::new(io::repeat(b'x')));
        assert!(matches!(endless.next_line(), Err(LineError::TooLong)));
        assert_eq!(endless.number(), 1);
    }
}
