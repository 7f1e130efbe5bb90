//! The list of a peer's objects: no longer than what an answer holds.

use dray_backup::{Error, Kind, Object, Result};
use dray_wire::store::{Listed, MAX_HEAD};

/// Bytes of an answer that are no object: its kind, and how many objects it has.
const FRAME: usize = 16;

/// Bytes that a number takes in an answer.
fn varint(number: u64) -> usize {
    (u64::BITS - (number | 1).leading_zeros()).div_ceil(7) as usize
}

/// A list that grows.
pub(super) struct Listing<'a> {
    prefix: &'a str,
    /// Put before every name.
    before: &'a str,
    room: usize,
    objects: Vec<Listed>,
}

impl<'a> Listing<'a> {
    /// Of what begins with `prefix`, whose first part, `before`, the shelf does not know.
    pub(super) fn new(prefix: &'a str, before: &'a str) -> Self {
        Self::within(MAX_HEAD as usize - FRAME, prefix, before)
    }

    fn within(room: usize, prefix: &'a str, before: &'a str) -> Self {
        Self { prefix, before, room, objects: Vec::new() }
    }

    /// Adds an object.
    ///
    /// # Errors
    /// `Denied` when the list would be longer than an answer. Nobody gets a part of a list: what is missing there
    /// would look as if it had been deleted.
    pub(super) fn add(&mut self, object: Object) -> Result<()> {
        let name = format!("{}{}", self.before, object.name);
        let age_ms = object.age.as_millis() as u64;
        let numbers = [name.len() as u64, object.bytes, age_ms].map(varint);
        let len = name.len() + numbers.iter().sum::<usize>();
        let Some(room) = self.room.checked_sub(len) else {
            let what = format!(
                "cannot list '{}': there are more than {} objects, which is more than an answer \
                 holds; remove old backups, or use several repositories in folders of their own",
                self.prefix,
                self.objects.len(),
            );
            return Err(Error::new(Kind::Denied, what));
        };
        self.room = room;
        self.objects.push(Listed { name, bytes: object.bytes, age_ms });
        Ok(())
    }

    /// All of it.
    pub(super) fn done(self) -> Vec<Listed> {
        self.objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_wire::store::{Answer, encode};
    use std::time::Duration;

    #[test]
    fn a_list_is_an_answer_or_an_error_and_never_a_part() {
        let room = 4000;
        for number in [0, 127, 128, 16384, u64::MAX] {
            let mut list = Listing::within(room, "@hostb/packs/", "@hostb/");
            let age = Duration::from_millis(number);
            let object = Object { name: format!("packs/{}", "a".repeat(190)), bytes: number, age };
            let why = std::iter::repeat_with(|| list.add(object.clone())).find_map(Result::err);
            let why = why.unwrap();
            assert_eq!(why.kind(), Kind::Denied);
            assert!(why.to_string().contains("more than 1"), "{why}");
            let left = list.room;
            let bytes = encode(&Answer::Objects(list.done()), 0).unwrap().len();
            // The lengths before the head, the kind, and the number of objects.
            assert_eq!(bytes, room - left + 8 + 2, "{number}");
        }
    }
}
