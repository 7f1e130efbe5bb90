//! Lists whose length is bounded while they are decoded (I7): a peer's list of a few bytes each must
//! not become gigabytes before anybody counts.

use crate::BlockSet;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Decodes at most `MAX` items.
///
/// # Errors
/// One more is an error, whatever follows.
pub fn at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(Items::<T, MAX> { parts: |_| 0, most: 0, kind: PhantomData })
}

/// Something with a set of blocks.
pub trait HasSet {
    /// That set.
    fn set(&self) -> &BlockSet;
}

/// The same for items with sets, which have at most `PARTS` parts together: a part takes far more memory than
/// its bytes.
///
/// # Errors
/// One item or part more is an error, whatever follows.
pub fn of_sets<'de, D, T, const MAX: usize, const PARTS: u64>(
    deserializer: D,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + HasSet,
{
    let parts = |item: &T| item.set().parts();
    deserializer.deserialize_seq(Items::<T, MAX> { parts, most: PARTS, kind: PhantomData })
}

struct Items<T, const MAX: usize> {
    /// Parts of the sets of an item, and how many all items may have.
    parts: fn(&T) -> u64,
    most: u64,
    kind: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Items<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        // The length is said first. What it claims is not reserved before it comes.
        let claimed = items.size_hint().unwrap_or(0);
        if claimed > MAX {
            return Err(A::Error::invalid_length(claimed, &self));
        }
        let (mut list, mut parts) = (Vec::new(), 0);
        while let Some(item) = items.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            parts += (self.parts)(&item);
            if parts > self.most {
                return Err(A::Error::custom("the sets of blocks have too many parts"));
            }
            list.push(item);
        }
        Ok(list)
    }
}
