//! What verification has found at the end of a migration (I3).

use dray_types::Why;
use serde::{Deserialize, Serialize};

/// `verified` of a summary: re-read at the target and compared with the source (I3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(into = "VerifiedJson", try_from = "VerifiedJson")]
pub enum Verified {
    /// Equal: `true` in JSON.
    Equal,
    /// Not equal: `false` in JSON.
    Different,
    /// One at the source was not there any more, or another image had taken its place: `"not comparable"` in JSON.
    NotComparable,
    /// There were blocks, and none that the guest has certainly not written since the handover:
    /// `"nothing compared"` in JSON.
    NothingCompared,
    /// Nobody asked: `"not asked"` in JSON.
    #[default]
    NotAsked,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum VerifiedJson {
    Checked(bool),
    Not(String),
}

/// The text that stands for [`Verified::NotAsked`].
const NOT_ASKED: &str = "not asked";
/// The text that stands for [`Verified::NotComparable`].
const NOT_COMPARABLE: &str = "not comparable";
/// The text that stands for [`Verified::NothingCompared`].
const NOTHING_COMPARED: &str = "nothing compared";

impl From<Verified> for VerifiedJson {
    fn from(verified: Verified) -> Self {
        match verified {
            Verified::Equal => Self::Checked(true),
            Verified::Different => Self::Checked(false),
            Verified::NotComparable => Self::Not(NOT_COMPARABLE.to_owned()),
            Verified::NothingCompared => Self::Not(NOTHING_COMPARED.to_owned()),
            Verified::NotAsked => Self::Not(NOT_ASKED.to_owned()),
        }
    }
}

impl TryFrom<VerifiedJson> for Verified {
    type Error = Why;

    fn try_from(json: VerifiedJson) -> Result<Self, Why> {
        match json {
            VerifiedJson::Checked(true) => Ok(Self::Equal),
            VerifiedJson::Checked(false) => Ok(Self::Different),
            VerifiedJson::Not(text) if text == NOT_ASKED => Ok(Self::NotAsked),
            VerifiedJson::Not(text) if text == NOT_COMPARABLE => Ok(Self::NotComparable),
            VerifiedJson::Not(text) if text == NOTHING_COMPARED => Ok(Self::NothingCompared),
            VerifiedJson::Not(text) => {
                let known = format!(
                    "true, false, \"{NOT_ASKED}\", \"{NOT_COMPARABLE}\" or \"{NOTHING_COMPARED}\""
                );
                Err(format!("'{text}' is not {known}").into())
            }
        }
    }
}

/// How much verification compared.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Compared {
    /// Blocks of 4 KiB that were re-read at the target and compared.
    pub blocks: u64,
    /// Blocks that the images have.
    pub of: u64,
    /// Why the others were not; absent when all were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl Compared {
    /// So many blocks of so many were compared.
    pub fn new(blocks: u64, of: u64) -> Self {
        let why = "the guest may have written the others since the handover; a restarted agent \
                   counts whole regions of 64 MiB as written";
        Self { blocks, of, why: (blocks < of).then(|| why.to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_told_as_it_is_read() {
        let all = [
            (Verified::Equal, "true"),
            (Verified::Different, "false"),
            (Verified::NotComparable, r#""not comparable""#),
            (Verified::NothingCompared, r#""nothing compared""#),
            (Verified::NotAsked, r#""not asked""#),
        ];
        for (verified, text) in all {
            assert_eq!(serde_json::to_string(&verified).unwrap(), text);
            assert_eq!(serde_json::from_str::<Verified>(text).unwrap(), verified);
        }
        serde_json::from_str::<Verified>(r#""perhaps""#).unwrap_err();
    }

    #[test]
    fn why_blocks_were_not_compared_is_told_when_some_were_not() {
        let json = |blocks| serde_json::to_value(Compared::new(blocks, 8)).unwrap();
        assert_eq!(json(8), serde_json::json!({"blocks": 8, "of": 8}));
        assert!(json(0)["why"].as_str().unwrap().contains("regions of 64 MiB"));
    }
}
