//! What happens in the world when an event comes: each file is a part of `impl World`. The
//! world hands an event to them by its method, so nothing here is named anywhere else.

mod basis;
mod check;
mod journal;
mod ops;
mod reuse;
mod source;
mod target;
mod vm;
mod wire;
