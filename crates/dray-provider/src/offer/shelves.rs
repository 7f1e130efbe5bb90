//! The shelves that are open: one for each peer, whichever of its streams opened it.

use super::Shelf;
use dray_backup::Result;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The shelf of one peer, if it is open. Held while it is being opened.
type Place = Arc<Mutex<Option<Arc<Shelf>>>>;

/// The open shelves, by the names of their peers.
#[derive(Default)]
pub(super) struct Shelves(Mutex<HashMap<String, Place>>);

impl Shelves {
    /// The shelf of `peer`, opened with `open` if it is not open. Nobody else waits for that: the folders of two peers
    /// may lie on different disks.
    ///
    /// # Errors
    /// What `open` says. The next one tries again.
    pub(super) fn get(
        &self,
        peer: &str,
        open: impl FnOnce() -> Result<Shelf>,
    ) -> Result<Arc<Shelf>> {
        let place = Arc::clone(self.0.lock().entry(peer.to_owned()).or_default());
        let mut place = place.lock();
        if let Some(shelf) = &*place {
            return Ok(Arc::clone(shelf));
        }
        let shelf = Arc::new(open()?);
        *place = Some(Arc::clone(&shelf));
        Ok(shelf)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::rules;
    use super::*;
    use dray_backup::Error;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn one_peers_slow_folder_stops_no_other_peer() {
        let dir = tempfile::tempdir().unwrap();
        let open = &|peer: &str| Shelf::open(&dir.path().join(peer), rules(false));
        let shelves = &Shelves::default();
        let ((begin, begun), (go_on, goes_on)) = (channel(), channel());
        std::thread::scope(|scope| {
            let slow = scope.spawn(move || {
                let slowly = || {
                    begin.send(()).unwrap();
                    // In time only if others get theirs meanwhile.
                    goes_on.recv_timeout(Duration::from_secs(10)).expect("another one waits");
                    open("hostb")
                };
                shelves.get("hostb", slowly).unwrap()
            });
            begun.recv().unwrap();
            shelves.get("hostc", || open("hostc")).unwrap();
            go_on.send(()).unwrap();
            let again = shelves.get("hostb", || panic!("it is open"));
            assert!(Arc::ptr_eq(&slow.join().unwrap(), &again.unwrap()));
        });
    }

    #[test]
    fn a_folder_that_could_not_be_opened_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let shelves = Shelves::default();
        shelves.get("hostb", || Err(Error::invalid("no disk"))).unwrap_err();
        shelves.get("hostb", || Shelf::open(dir.path(), rules(false))).unwrap();
    }
}
