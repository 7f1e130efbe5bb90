//! The durable state of one host: its images with their records and disks, the migrations that it
//! takes part in as their folders tell them, and what a restart and a claim make of both.
//!
//! Nothing here has a thread, a socket or a clock of its own: whoever owns a [`Registry`](registry::Registry)
//! says what time it is where that matters, begins what is to be done now and then, and serves what
//! is open. Nothing here knows QEMU: what only that understands is kept as it came.
//!
//! * [`record`]: what is durable of an image. [`store`]: the state directory. [`pool`]: where images may be.
//! * [`registry`]: the images of this host and what is durable about them.
//! * [`lineage`]: generations of the images owned here; [`replicas`]: copies that were left behind,
//!   and [`retention`]: for how long; [`released`]: images that QEMU has taken back.
//! * [`flat`]: what is durable of disks that move without their chains.
//! * [`folder`]: intents, journals and what else is in the folder of a migration; [`provided`]: who
//!   gave a target what. [`migration`]: what a restart and a claim make of it. [`abort`]: where crash tests end the
//!   process.
//! * [`heat`]: what guests do with the images, counted for the orders of migrations.
//! * [`batches`]: what is durable of several migrations that one command began.
//! * [`settle`]: what is to be done with an image, by what is recorded and what is seen.
//! * [`heartbeat`]: whether another program has written to a file while no agent had it open.
//! * [`refusals`]: failures in the API's words.
//! * [`stamp`]: how it is known that a file was not changed; [`process`]: which QEMU it was.

pub mod abort;
pub mod batches;
pub mod flat;
pub mod folder;
pub mod heartbeat;
pub mod heat;
pub mod lineage;
pub mod migration;
pub mod owner;
pub mod pool;
pub mod process;
pub mod provided;
pub mod record;
pub mod refusals;
pub mod registry;
pub mod released;
pub mod replicas;
pub mod retention;
pub mod settle;
pub mod stamp;
pub mod store;
