//! Running VMs' disks that leave their chains and come home: when that is done, and for which. [`freeze`] takes one
//! from its chain for a migration, [`keep`] brings home what was left behind, and [`recover`] ends what an agent died
//! in. How it is done is in [`FlatDisks`].

mod freeze;
mod keep;
mod recover;

use crate::agent::Agent;
use dray_vm::flat::turn::FlatDisks;

impl Agent {
    /// The flattened disks of this host.
    pub(crate) fn flat_disks(&self) -> FlatDisks<'_> {
        FlatDisks { registry: &self.registry, config: &self.config }
    }
}
