//! What the parts of a run are and remember: no part of this knows the world round it.

pub(crate) mod guest;
pub(crate) mod index;
pub(crate) mod link;
pub(crate) mod pasts;
pub(crate) mod replica;
pub(crate) mod source;
pub(crate) mod tally;
pub(crate) mod target;
pub(crate) mod vm;
