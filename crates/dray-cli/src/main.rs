//! The `dray` command.
fn main() {}
