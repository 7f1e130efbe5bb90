//! Ids, epochs and attempts. They are made by the shell (ids are random) and only compared here.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseIdError;

impl fmt::Display for ParseIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an id is 32 hexadecimal digits")
    }
}

impl std::error::Error for ParseIdError {}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub u128);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:032x})"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                if text.len() != 32 {
                    return Err(ParseIdError);
                }
                u128::from_str_radix(text, 16).map(Self).map_err(|_| ParseIdError)
            }
        }
    };
}

id!(
    /// One migration: all images of one VM moving together.
    MigrationId
);
id!(
    /// Several migrations that one command has begun.
    BatchId
);
id!(
    /// One image, the same on every host that holds a copy of it.
    ImageId
);
id!(
    /// One generation of an image's life.
    GenerationId
);

/// Where a generation stands in the line of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ancestor {
    /// Its random id.
    pub id: GenerationId,
    /// Its place: one more than its parent's.
    pub number: u64,
}

/// Which image of a migration a message is about: its place in the migration's list of images.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ImageIndex(pub u16);

impl ImageIndex {
    /// As an index into a slice.
    pub const fn ix(self) -> usize {
        self.0 as usize
    }
}

/// Highest epoch or attempt that a peer may say: there are as many above it as anybody will ever count.
pub const MAX_COUNT: u64 = 1 << 60;

/// Ownership counter of an image. It grows by one at every handover, hand-back and claim; the
/// owner is the host with the highest epoch, and a message that names a lower one is refused (I1).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Highest that a peer may say, and what a message says that no epoch concerns: it is never of an older one.
    pub const HIGHEST: Self = Self(MAX_COUNT);

    /// The epoch that the next owner will have.
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Number of one try of a handover, made durable at the source before it asks, never used twice (I1).
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct Attempt(pub u64);

impl Attempt {
    /// The attempt after this one.
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text() {
        let id = MigrationId(0x1234);
        assert_eq!(id.to_string().parse::<MigrationId>(), Ok(id));
        assert!("12".parse::<ImageId>().is_err());
        assert!("zz34567890123456789012345678901z".parse::<ImageId>().is_err());
    }
}
