//! Images that move between two real agents while a guest uses them, through everything that can
//! happen to an agent, a link or a disk. One scenario a file.
//!
//! * [`lab`]: two agents on this machine. [`nbd`], [`guest`]: a guest that knows what it wrote.
//! * [`case`]: one migration from its beginning to the last check.
//! * [`moves`]: nothing happens. [`links`], [`progress`]: the link breaks, agents are killed.
//! * [`kills`]: an agent dies before every effect of a migration.
//! * [`hot_set`]: what the guest uses moves first.
//! * [`mirror`]: writes during the copy are sent on.
//! * [`throttle`]: guests that write faster than the link.
//! * [`together`]: commands that ask for one image at the same time.
//! * [`clients`]: those that are not the guest's QEMU, or not any more.
//! * [`record`]: a trace of what a client did is what it did.
//! * [`returns`]: images that go back to a host that has an earlier generation of them.
//! * [`reuse`]: content that the target has already.
//! * [`seeds`]: images that begin with a backup at the target.
//! * [`bases`]: base images that the target has already.
//! * [`restarts`]: the target restarts in Backfill. [`again`]: files that are made again, or written to, while no agent runs.
//! * [`answering`]: which peers answer.
//! * [`refusals`]: what cannot be done. [`versions`]: hosts with other software.
//! * [`auto`]: the agent chooses, and says before what it will take.
//! * [`batch`]: several migrations with one command and one budget.
//! * [`deferred`]: the target fetches when its operator says so.
//! * [`claims`]: images whose other host is gone for good.
//! * [`devices`]: onto block devices and away from them.
//! * [`backups`]: backups under writing clients, and what is restored of them.
//! * [`buckets`]: backups in an S3 server, [`store`], which may be busy, silent or distrustful.
//! * [`neighbours`]: a host of the fleet that says whatever it likes.
//! * [`peers`]: images that begin with what another host has kept of them.
//! * [`plans`]: where the bytes will come from, said before and compared afterwards.
//! * [`direct`]: pools that bypass the page cache.
//! * [`losses`]: writes that a sync has lost.
//! * [`locks`]: a file is one image's. [`closed`]: exports that nobody vouches for. [`stale`]: what is left of migrations that are over.
//! * [`orders`]: which blocks move first.
//! * [`starts`]: agents that start while something is wrong.
//! * [`faults`]: disks that are read-only, full or broken, with [`mounts`] of their own.
//! * [`full_state`]: nothing can be written down at the source.

mod again;
mod answering;
mod auto;
mod backups;
mod bases;
mod batch;
mod buckets;
mod case;
mod chains;
mod claimed_late;
mod claims;
mod clients;
mod closed;
mod deferred;
mod devices;
mod direct;
mod done;
mod faults;
mod frozen;
mod full_state;
mod guest;
mod hot_set;
mod kills;
mod lab;
mod links;
mod locks;
mod losses;
mod mirror;
mod mounts;
mod moves;
mod nbd;
mod neighbours;
mod orders;
mod peers;
mod plans;
mod progress;
mod promises;
mod record;
mod refusals;
mod restarts;
mod returns;
mod reuse;
mod seeds;
mod stale;
mod stale_seeds;
mod starts;
mod store;
mod throttle;
mod together;
mod versions;
