//! The local API's commands: each checks what was asked, does it or starts it, and answers in the
//! API's own words. A command is an [`Answers`](crate::api::Answers) for the agent, in a file of its
//! own; small ones of one subject share one. A command that waits for a file system leaves its thread
//! to others (`block_in_place`).

mod ask_peer;
mod backfill;
mod backup;
mod bases;
mod batch;
mod cancel;
mod claim;
mod ended;
mod flatten;
mod image_add;
mod image_remove;
pub mod images;
mod info;
mod limit;
mod lineage;
mod migrate;
mod peers;
mod pick;
mod plan;
mod prepare;
pub mod prepared;
mod probe;
mod quit;
mod record;
mod released;
mod reload;
mod resize;
mod resume;
mod seed;
mod selection;
mod settle;
pub(crate) mod splice;
mod status;
mod survey;
mod unstall;
mod waiting_command;
mod watch;

pub(crate) use migrate::Together;
pub(crate) use watch::outcome;
