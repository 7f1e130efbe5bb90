//! Which places are asked for generations of images.

use crate::seed::backup::RepositoryCatalogue;
use crate::seed::replica::PeerCatalogue;
use crate::snapshots::Catalogue;
use dray_config::Config;
use std::sync::Arc;

/// The places in the configuration: the repositories, then the peers. A fleet's catalogue would stand
/// here as well.
pub fn catalogues(config: &Arc<Config>) -> Vec<Arc<dyn Catalogue>> {
    let repository = |name: &String| -> Arc<dyn Catalogue> {
        Arc::new(RepositoryCatalogue { config: Arc::clone(config), name: name.clone() })
    };
    let peer = |name: &String| -> Arc<dyn Catalogue> {
        Arc::new(PeerCatalogue { config: Arc::clone(config), name: name.clone() })
    };
    let repositories = config.backups.iter().map(|backup| repository(&backup.name));
    repositories.chain(config.peers.all().iter().map(|known| peer(&known.name))).collect()
}
