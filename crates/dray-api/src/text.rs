//! Ids in JSON (32 hexadecimal digits), and the ways in which operators name a migration.

use super::{ErrorKind, Refusal};
use dray_types::MigrationId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// For `#[serde(with = …)]`: an id as its text instead of a number that JSON readers would round.
pub mod id {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Display;
    use std::str::FromStr;

    /// Writes the id as text.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<T: Display, S: Serializer>(id: &T, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(id)
    }

    /// Reads the id from text.
    ///
    /// # Errors
    /// When the text is no id.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// The same for an id that may be absent.
pub mod optional_id {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Display;
    use std::str::FromStr;

    /// Writes the id as text, or null.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<T, S>(id: &Option<T>, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Display,
        S: Serializer,
    {
        match id {
            Some(id) => serializer.collect_str(id),
            None => serializer.serialize_none(),
        }
    }

    /// Reads the id from text, or null.
    ///
    /// # Errors
    /// When the text is no id.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text: Option<String> = Option::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// A migration as an operator names it: its id, or enough of its beginning to tell it from others.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MigrationRef(pub String);

impl MigrationRef {
    /// True when this names `id`.
    pub fn names(&self, id: MigrationId) -> bool {
        !self.0.is_empty() && id.to_string().starts_with(&self.0.to_ascii_lowercase())
    }

    /// The one migration among `known` that this names.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Invalid` when there are several.
    pub fn resolve(
        &self,
        known: impl IntoIterator<Item = MigrationId>,
    ) -> Result<MigrationId, Refusal> {
        let what = || format!("cannot find migration {self}");
        let mut found = known.into_iter().filter(|&id| self.names(id));
        let first = found.next().ok_or_else(|| {
            Refusal::new(ErrorKind::NotFound, what(), "no migration has this id")
                .hint("`dray status` lists the migrations")
        })?;
        if found.any(|other| other != first) {
            return Err(Refusal::new(ErrorKind::Invalid, what(), "several ids begin like this")
                .hint("give more digits; `dray status` lists the migrations"));
        }
        Ok(first)
    }
}

impl From<MigrationId> for MigrationRef {
    fn from(id: MigrationId) -> Self {
        Self(id.to_string())
    }
}

impl fmt::Display for MigrationRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The migration that `named` names, or the only one of `running` when nothing was named.
///
/// # Errors
/// `NotFound` when there is none, `Invalid` when it is not clear which one is meant.
pub fn pick(
    named: Option<&MigrationRef>,
    known: impl IntoIterator<Item = MigrationId>,
    running: impl IntoIterator<Item = MigrationId>,
) -> Result<MigrationId, Refusal> {
    if let Some(named) = named {
        return named.resolve(known);
    }
    let what = "cannot tell which migration is meant";
    let mut running = running.into_iter();
    let first = running.next().ok_or_else(|| {
        Refusal::new(ErrorKind::NotFound, what, "none is running")
            .hint("give the id of one that is prepared or has ended; `dray status` lists them")
    })?;
    if running.any(|other| other != first) {
        return Err(Refusal::new(ErrorKind::Invalid, what, "several are running")
            .hint("give its id; `dray status` lists the migrations"));
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_named_by_the_start_of_its_id() {
        let one = MigrationId(0xaa << 120);
        let two = MigrationId(0xab << 120);
        assert_eq!(MigrationRef("aa".into()).resolve([one, two]), Ok(one));
        assert_eq!(MigrationRef("AB".into()).resolve([one, two]), Ok(two));
        let kind = |text: &str| MigrationRef(text.into()).resolve([one, two]).unwrap_err().kind;
        assert_eq!(kind("a"), ErrorKind::Invalid);
        assert_eq!(kind("c"), ErrorKind::NotFound);
        assert_eq!(kind(""), ErrorKind::NotFound);
    }

    #[test]
    fn no_name_means_the_only_one_running() {
        let (one, two) = (MigrationId(1), MigrationId(2));
        assert_eq!(pick(None, [one, two], [two]), Ok(two));
        assert_eq!(pick(None, [one, two], []).unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(pick(None, [one, two], [one, two]).unwrap_err().kind, ErrorKind::Invalid);
    }
}
