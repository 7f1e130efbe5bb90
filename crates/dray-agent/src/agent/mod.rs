//! The parts of an agent process. The order in which it starts and ends is in [`start`](crate::start).
//!
//! * [`launch`]: the owner loops. [`peers`], [`requests`], [`existing_copies`], [`qcow2_checks`],
//!   [`devices`]: what peers ask for. [`rights`]: who may ask for it; [`room`]: how much of it.
//! * [`fates`]: what targets ask sources that they do not hear of. [`revive`]: migrations of an earlier agent.

mod bases;
mod devices;
mod existing_copies;
pub(crate) mod fates;
mod images_away;
mod launch;
mod offered;
mod partials;
mod peers;
mod probes;
mod qcow2_checks;
mod requests;
pub(crate) mod revive;
mod rights;
pub(crate) mod room;

pub use launch::Tasks;

use crate::batches::Batches;
use crate::jobs::Jobs;
use crate::readiness::Readiness;
use crate::troubles::Troubles;
use dray_api::{ApiResult, ErrorKind, MigrationState, Refusal};
use dray_config::Config;
use dray_host::migration::fate::Preparing;
use dray_host::migration::waiting::Unrevived;
use dray_host::registry::Registry;
use dray_host::store::Store;
use dray_migrate::receiver::TargetSlot;
use dray_migrate::slots::Slots;
use dray_migrate::source::{SessionSettings, SourceSlot};
use dray_net::tls::Identity;
use dray_net::{ControlSettings, Memory};
use dray_provider::bases::Digests;
use dray_provider::offer::Offer;
use dray_provider::reuse::Reuse;
use dray_provider::seed::Seeds;
use dray_serve::{Attachments, FrontEnds};
use dray_vm::frozen::FrozenGuests;
use dray_vm::hypervisor::Hypervisor;
use std::path::PathBuf;
use std::sync::Arc;

/// Everything an agent has.
pub struct Agent {
    /// Its configuration.
    pub config: Arc<Config>,
    /// Its certificate.
    pub identity: Arc<Identity>,
    /// What is durable.
    pub store: Store,
    /// Its images.
    pub registry: Arc<Registry>,
    /// Content of its images by hash.
    pub reuse: Arc<Reuse>,
    /// The digests of base images.
    pub digests: Arc<Digests>,
    /// What runs the VMs of this host.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// The ways by which guests come to them.
    pub front_ends: FrontEnds,
    /// Who is attached to them.
    pub attachments: Arc<Attachments>,
    /// Migrations away from here.
    pub sources: Slots<SourceSlot>,
    /// Migrations to here.
    pub targets: Slots<TargetSlot>,
    /// Images that are being read from backups.
    pub seeds: Seeds,
    /// Several migrations away that one command has begun.
    pub batches: Batches,
    /// Tasks of migrations away that were prepared and not begun.
    pub tasks: Tasks,
    /// Migrations away for which a target is being asked for room.
    pub preparing: Preparing,
    /// Memory for what peers send and ask for.
    pub(crate) memory: Memory,
    /// What peers are asking.
    pub(crate) questions: room::Questions,
    /// Held while room is made for a migration to here.
    pub(crate) making_room: tokio::sync::Mutex<()>,
    /// The backup store for peers, where there is one.
    pub(crate) offer: Option<Arc<Offer>>,
    /// Backups under way.
    pub backups: Arc<Jobs>,
    /// Guests that a backup has frozen.
    pub frozen: FrozenGuests,
    /// What does not work just now.
    pub troubles: Arc<Troubles>,
    /// Whether whoever started the agent knows that guests can be started.
    pub readiness: Arc<Readiness>,
    /// Migrations that a restart found and could not bring back yet.
    pub unrevived: Unrevived,
}

impl Agent {
    /// The NBD socket of this host.
    pub fn nbd_socket(&self) -> PathBuf {
        self.config.nbd_socket()
    }

    /// How to reach a peer.
    ///
    /// # Errors
    /// When no peer of that name is configured.
    pub fn session_settings(&self, peer: &str) -> ApiResult<SessionSettings> {
        let known = self.config.peer(peer).ok_or_else(|| {
            let peers = self.config.peers.all();
            let names: Vec<_> = peers.iter().map(|peer| peer.name.as_str()).collect();
            let why = format!("no peer of that name is configured (known: {})", names.join(", "));
            Refusal::new(ErrorKind::NotFound, format!("cannot reach host '{peer}'"), why)
                .hint(format!("add a [[peer]] to {}", self.config.path.display()))
        })?;
        Ok(SessionSettings {
            identity: Arc::clone(&self.identity),
            peer: known.name.clone(),
            address: known.address.clone(),
            streams: self.config.limits.data_streams as u16,
            control: self.control_settings(),
            memory: self.memory.clone(),
        })
    }

    /// Whether anything migrates, from here or to here.
    pub(crate) fn moves(&self) -> bool {
        let boards = self.sources.all().into_iter().map(|slot| Arc::clone(&slot.board));
        let targets = self.targets.all();
        let mut boards = boards.chain(targets.iter().map(|slot| Arc::clone(&slot.board)));
        boards.any(|board| board.read().state == MigrationState::Running)
    }

    /// Timeouts of control streams.
    pub fn control_settings(&self) -> ControlSettings {
        ControlSettings { dead: self.config.limits.link_dead, ..ControlSettings::default() }
    }
}
