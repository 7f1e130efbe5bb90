//! One line of a monitor: bytes in, a message out. The QEMU at the other end may be in the hands of its guest, so a line
//! has limits before it becomes values: a value takes up to 700 bytes of memory, and 3 bytes of a line.

use super::closed;
use crate::error::{Error, ErrorKind, Result};
use serde_json::Value;
use std::path::Path;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// Longest line that is read, in bytes. A VM with hundreds of nodes answers in a few MiB.
const MAX_LINE: u64 = 16 << 20;
/// Most values in an answer: some 3000 nodes. QEMU says some 80 of each.
const MAX_VALUES: usize = 1 << 18;
/// Longest event, in bytes: many may wait for who reads them. Those of QEMU have less than one KiB.
const MAX_EVENT: usize = 64 << 10;
/// Most values in an event. Those of QEMU have up to 30.
const MAX_EVENT_VALUES: usize = 256;

/// The next line.
///
/// # Errors
/// That none comes any more, or one that is too long.
pub(super) async fn read(
    reader: &mut (impl AsyncBufRead + Unpin),
    socket: &Path,
) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    match reader.take(MAX_LINE).read_until(b'\n', &mut line).await {
        Ok(n) if n > 0 && line.last() == Some(&b'\n') => Ok(line),
        Ok(n) if n as u64 == MAX_LINE => Err(too_much(socket, "a message", &line)),
        _ => Err(closed(socket)),
    }
}

/// What a line says; none where it is too long for an event, and no answer is awaited (`awaited`).
///
/// # Errors
/// That it is too long for what it is, or no message.
pub(super) fn parse(line: &[u8], awaited: bool, socket: &Path) -> Result<Option<Value>> {
    let values = values(line);
    let is_short = line.len() <= MAX_EVENT && values <= MAX_EVENT_VALUES;
    if !is_short && !awaited {
        return Ok(None);
    }
    if values > MAX_VALUES {
        return Err(too_much(socket, "a message", line));
    }
    let message: Value = serde_json::from_slice(line).map_err(|e| {
        let start = String::from_utf8_lossy(&line[..line.len().min(60)]).trim_end().to_owned();
        let why = format!("{}: not a QMP message: {start:?}", socket.display());
        Error::with_source(ErrorKind::NotQmp, why, e)
    })?;
    match is_short || message.get("event").is_none() {
        true => Ok(Some(message)),
        false => Err(too_much(socket, "an event", line)),
    }
}

fn too_much(socket: &Path, what: &str, line: &[u8]) -> Error {
    let (len, values) = (line.len(), values(line));
    let why = format!("{}: {what} of {len} bytes and {values} values", socket.display());
    Error::new(ErrorKind::Protocol, why)
}

/// Most values that a line can have: outside of its texts each bracket and each comma begins one.
fn values(line: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for &byte in line {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b'[' | b'{' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str, awaited: bool) -> Result<Option<Value>> {
        parse(line.as_bytes(), awaited, Path::new("qmp"))
    }

    /// A line with so many values, and so many bytes of text.
    fn line(kind: &str, values: usize, text: usize) -> String {
        let (values, text) = (vec!["{}"; values].join(","), "\\\"[".repeat(text / 3));
        format!(r#"{{"{kind}": "X", "data": [{values}], "text": "{text}"}}"#)
    }

    #[test]
    fn an_answer_may_be_long_and_an_event_not() {
        for (values, text) in [(1, 100), (100, 60_000)] {
            for (kind, awaited) in [("event", true), ("event", false), ("return", false)] {
                assert!(parsed(&line(kind, values, text), awaited).unwrap().is_some(), "{kind}");
            }
        }
        for (values, text) in [(300, 0), (0, 70_000)] {
            assert!(parsed(&line("return", values, text), true).unwrap().is_some());
            for kind in ["event", "return"] {
                assert_eq!(parsed(&line(kind, values, text), false).unwrap(), None, "{kind}");
            }
            let why = parsed(&line("event", values, text), true).unwrap_err();
            assert_eq!(why.kind(), ErrorKind::Protocol, "{why}");
        }
    }

    #[test]
    fn an_answer_has_only_so_many_values() {
        assert!(parsed(&line("return", MAX_VALUES / 2 - 10, 0), true).unwrap().is_some());
        let why = parsed(&line("return", MAX_VALUES, 0), true).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::Protocol, "{why}");
    }

    #[test]
    fn no_value_is_missed() {
        for (text, count) in
            [("1", 1), (r#"{"a": [1, 2, {"b": "c,[d"}]}"#, 6), (r#"["\\", ","]"#, 3)]
        {
            assert_eq!(values(text.as_bytes()), count, "{text}");
        }
    }

    #[tokio::test]
    async fn a_line_that_does_not_end_is_not_read_to_its_end() {
        let socket = Path::new("qmp");
        let long = vec![b'a'; MAX_LINE as usize + 1];
        let why = read(&mut long.as_slice(), socket).await.unwrap_err();
        assert_eq!(why.kind(), ErrorKind::Protocol, "{why}");
        let mut two: &[u8] = b"1\n2";
        assert_eq!(read(&mut two, socket).await.unwrap(), b"1\n");
        assert_eq!(read(&mut two, socket).await.unwrap_err().kind(), ErrorKind::Closed);
    }
}
