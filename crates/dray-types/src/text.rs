//! Texts of others. What a peer or a QEMU says ends up on an operator's screen and in logs, so it is made
//! [`harmless`] where it enters: while a peer's message is decoded, and where QEMU's answer is read.
//!
//! The functions that begin with `de_` are for serde's `deserialize_with`.

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::path::Path;

/// Longest text of others, in bytes: some ten lines of a terminal.
pub const MAX_TEXT: usize = 1024;
/// Most texts in a list of them: names of pools, words, notes for people.
pub const MAX_TEXTS: usize = 1024;
/// What a text ends in that was cut.
const CUT: &str = "…";

/// What a VM is called that was started without a name: as its QMP socket.
pub fn name_of_socket(socket: &Path) -> Option<String> {
    socket.file_stem().map(|stem| harmless(stem.to_string_lossy()))
}

/// The text as it may be shown: on one line, of at most [`MAX_TEXT`] bytes, and nothing in it that a terminal
/// obeys or that hides the rest. Names pass unchanged; one that does not names nothing.
pub fn harmless(text: impl Into<String>) -> String {
    let text = text.into();
    if text.len() <= MAX_TEXT && !text.chars().any(is_harmful) {
        return text;
    }
    let mut shown = String::new();
    for char in text.chars() {
        let char = match char {
            '\n' | '\r' | '\t' => ' ',
            char if is_harmful(char) => char::REPLACEMENT_CHARACTER,
            char => char,
        };
        if shown.len() + char.len_utf8() > MAX_TEXT {
            shown.truncate(shown.floor_char_boundary(MAX_TEXT - CUT.len()));
            shown.push_str(CUT);
            break;
        }
        shown.push(char);
    }
    shown
}

/// Control characters, and those that take no room or turn the direction of what follows.
fn is_harmful(char: char) -> bool {
    let unseen = matches!(char,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e0fff}');
    char.is_control() || unseen
}

/// Why something was not done, in words, where that is all there is to know: nobody decides by it, neither on
/// this host nor on another. One of another host is [`harmless`]. Whoever decides by a kind wants a
/// [`Refusal`](crate::Refusal).
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(transparent)]
pub struct Why(String);

impl Why {
    /// What an error says.
    pub fn of(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

impl From<String> for Why {
    fn from(why: String) -> Self {
        Self(why)
    }
}

impl From<&str> for Why {
    fn from(why: &str) -> Self {
        Self(why.to_owned())
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Why {}

impl<'de> Deserialize<'de> for Why {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        de_text(from).map(Self)
    }
}

/// One text of others.
///
/// # Errors
/// When there is none.
pub fn de_text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    String::deserialize(from).map(harmless)
}

/// One that may be left out.
///
/// # Errors
/// When there is something else.
pub fn de_optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<String>::deserialize(from)?.map(harmless))
}

/// At most [`MAX_TEXTS`] of them.
///
/// # Errors
/// When there are more, or there is something else.
pub fn de_texts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    Ok(from.deserialize_seq(Few::<String>(Default::default()))?.into_iter().map(harmless).collect())
}

/// At most [`MAX_TEXTS`] of them, each with something else.
///
/// # Errors
/// As [`de_texts`].
pub fn de_named<'de, D, T>(from: D) -> Result<Vec<(String, T)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let named = from.deserialize_seq(Few::<(String, T)>(Default::default()))?;
    Ok(named.into_iter().map(|(name, what)| (harmless(name), what)).collect())
}

/// A list of at most [`MAX_TEXTS`].
struct Few<T>(std::marker::PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Few<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX_TEXTS}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            if list.len() == MAX_TEXTS {
                return Err(A::Error::invalid_length(MAX_TEXTS + 1, &self));
            }
            list.push(item);
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_without_a_name_is_called_as_its_socket() {
        let name = |path: &str| name_of_socket(Path::new(path));
        assert_eq!(name("/run/vm1.qmp").as_deref(), Some("vm1"));
        assert_eq!(name("/run/web.server.sock").as_deref(), Some("web.server"));
        assert_eq!(name("/"), None);
    }

    #[test]
    fn what_a_terminal_obeys_or_hides_is_replaced() {
        assert_eq!(harmless("pool 'ü' is full; free some"), "pool 'ü' is full; free some");
        assert_eq!(harmless("a\nb\tc\r"), "a b c ");
        assert_eq!(
            harmless("\x1b[2Jgone\x07\u{9b}31m\x7f"),
            "\u{fffd}[2Jgone\u{fffd}\u{fffd}31m\u{fffd}"
        );
        assert_eq!(harmless("x\u{202e}gmi.ksid\u{200b}"), "x\u{fffd}gmi.ksid\u{fffd}");
    }

    #[test]
    fn what_is_too_long_is_cut_where_a_letter_ends() {
        assert_eq!(harmless("a".repeat(MAX_TEXT)), "a".repeat(MAX_TEXT));
        for letter in ["a", "ü", "€", "🦀", "\x1b"] {
            let cut = harmless(letter.repeat(MAX_TEXT + 1));
            assert!(cut.len() <= MAX_TEXT && cut.ends_with(CUT), "{} {cut}", cut.len());
            assert!(cut.len() > MAX_TEXT - 8 && !cut.chars().any(char::is_control), "{cut}");
        }
    }
}
