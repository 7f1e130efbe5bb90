//! Many replays in one table.
