//! The origin of a migration's bytes, for predictions: the content that the target has or would get
//! from others, and the rest, which the source sends.

use super::bases::{Asking, FileAtTarget};
use super::selection::Plan;
use crate::agent::Agent;
use dray_api::{MigrationState, PlannedImage};
use dray_host::folder::intent::{SourceImage, SourceIntent};
use dray_host::lineage;
use dray_host::registry::Entry;
use dray_migrate::forecast::Content;
use dray_migrate::source::{SourceSlot, shared};
use dray_qemu::{bitmap, held};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ByteSize, GenerationId};
use dray_vm::picture::{LayerLocation, Picture};
use dray_wire::request::{Base, Reply, Request, Surveyed};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A target asks its repositories and peers, each of which it gives some time.
const PATIENCE: Duration = Duration::from_secs(90);

/// What is known of the images before they move, by their names here.
#[derive(Default)]
pub(super) struct Survey {
    /// What the target would begin with.
    images: BTreeMap<String, Surveyed>,
    /// Bytes that QEMU has written to images that it has taken back: which, its bitmaps know.
    unseen: BTreeMap<String, u64>,
    /// Bytes of content that the target knows by hash.
    pub indexed: Option<u64>,
    /// Why the target does not say what it has.
    pub silent: Option<String>,
}

impl Agent {
    /// Asks the target. Of what was prepared there it is known already; one that does not know the
    /// question, or does not answer, has nothing.
    pub(super) async fn survey(
        self: &Arc<Self>,
        intent: &SourceIntent,
        plan: &Plan,
        pool: Option<&str>,
        backups: bool,
    ) -> Survey {
        let mut survey = Survey { images: self.prepared_bases(intent), ..Survey::default() };
        self.survey_bases(&mut survey, intent, plan, pool).await;
        let (names, images): (Vec<_>, Vec<_>) = self
            .seedable(intent, &plan.allocated)
            .into_iter()
            .filter(|(name, _)| !survey.images.contains_key(name))
            .unzip();
        let pool = pool.map(str::to_owned);
        let request = Request::Survey { number: None, pool, images, backups };
        match self.ask_within(PATIENCE, &intent.peer, &request).await {
            Ok(Reply::Surveyed { images, indexed }) if images.len() == names.len() => {
                survey.images.extend(names.into_iter().zip(images));
                survey.indexed = Some(indexed);
            }
            Err(why) => survey.silent = Some(why.to_string()),
            Ok(_) => survey.silent = Some("the peer's answer does not fit the question".to_owned()),
        }
        survey
    }

    /// Which base images lie there; files are read for that, here and there.
    async fn survey_bases(
        self: &Arc<Self>,
        survey: &mut Survey,
        intent: &SourceIntent,
        plan: &Plan,
        pool: Option<&str>,
    ) {
        // What was prepared was compared then.
        if intent.images.iter().all(|image| survey.images.contains_key(&image.name)) {
            return;
        }
        let asking = Asking { limit: Some(PATIENCE), events: None };
        // One that cannot be asked is told of by the other question.
        let Ok(lying) = self.lying_there(intent, plan, pool, asking).await else { return };
        for (image, lying) in intent.images.iter().zip(lying) {
            let (base, notes) = match lying {
                FileAtTarget::Nothing => continue,
                FileAtTarget::Same(_) => (Base::InPlace { export: String::new() }, Vec::new()),
                FileAtTarget::Other(why) => (Base::Empty, vec![why]),
                FileAtTarget::Unknown => {
                    let why = "the hosts are still comparing it with the file of that name at the \
                               target";
                    (Base::Empty, vec![format!("{why}; ask again")])
                }
            };
            let surveyed = Surveyed { base, given: Vec::new(), notes };
            survey.images.entry(image.name.clone()).or_insert(surveyed);
        }
    }

    /// What the target has made ready for a migration of these images that has not begun.
    fn prepared_bases(&self, intent: &SourceIntent) -> BTreeMap<String, Surveyed> {
        let paths = |intent: &SourceIntent| -> Vec<_> {
            intent.images.iter().map(|image| image.path.clone()).collect()
        };
        let same = |slot: &Arc<SourceSlot>| {
            let prepared = slot.intent();
            slot.board.read().state == MigrationState::Prepared
                && prepared.peer == intent.peer
                && paths(&prepared) == paths(intent)
        };
        let Some(slot) = self.sources.all().into_iter().find(same) else {
            return BTreeMap::new();
        };
        let base = |image: SourceImage| {
            let (given, notes) = (Vec::new(), Vec::new());
            (image.name, Surveyed { base: image.base, given, notes })
        };
        slot.intent().images.into_iter().map(base).collect()
    }

    /// Asks the VM's QEMU how much it has written to the images that it has taken back.
    pub(super) async fn ask_qemu(&self, survey: &mut Survey, picture: &Picture, plan: &Plan) {
        for layer in picture.layers() {
            let LayerLocation::Local(path) = &layer.place else { continue };
            let Ok(path) = dray_host::registry::real_path(path) else { continue };
            let image = plan.images.iter().find(|image| image.path == path);
            let Some((image, note)) = image.and_then(|i| Some((i, self.released_at(i)?))) else {
                continue;
            };
            let Some(name) = note.bitmap.as_deref().filter(|_| note.is_tracked()) else {
                continue;
            };
            let (qmp, Some(mark)) = (picture.qmp(), note.mark) else { continue };
            if held::check(qmp, &layer.plan.qdev, mark).await.is_err() {
                continue;
            }
            let node = layer.plan.local_node();
            if let Ok(Some(found)) = bitmap::recorded(qmp, node, name).await {
                survey.unseen.insert(image.name.clone(), found.count);
            }
        }
    }

    /// The blocks of an image that need not be sent, as far as this host knows what was written.
    pub(super) fn shared_with_target(
        &self,
        image: &SourceImage,
        entry: Option<&Entry>,
        survey: &Survey,
    ) -> Option<BlockSet> {
        let base = &survey.images.get(&image.name)?.base;
        shared(base, BlockRange::whole(image.offer.len), |since| match entry {
            Some(entry) => entry.line()?.changed_since(since, &entry.disk),
            None if image.offer.read_only => {
                self.ancestors(image).iter().any(|base| base.id == since).then(BlockSet::new)
            }
            // Without its count nobody knows what QEMU has written.
            None if !survey.unseen.contains_key(&image.name) => None,
            None => self.changed_before_release(image, since),
        })
    }

    /// What was written since a generation while dray still served an image that QEMU has now.
    fn changed_before_release(&self, image: &SourceImage, since: GenerationId) -> Option<BlockSet> {
        let note = self.released_at(image)?;
        let path = self.registry.released.line_path(note.image.id);
        let (line, changed) = lineage::last_state(&path).ok()??;
        line.changed_since(since, &changed)
    }
}

impl Survey {
    /// Takes into account what QEMU has written: nobody knows yet which blocks, but how many.
    pub(super) fn rewrite(&self, image: &SourceImage, content: &mut Content) {
        if let Some(bytes) = self.unseen.get(&image.name) {
            content.rewritten(bytes.div_ceil(BLOCK_SIZE));
        }
    }

    /// Where an image's bytes would come from; `known` says whether this host can tell what was written
    /// since the generation that the target would begin with.
    pub(super) fn planned(
        &self,
        image: &SourceImage,
        content: &Content,
        known: bool,
    ) -> PlannedImage {
        let (source, at_target) = (content.bytes_to_send(), content.bytes_at_target());
        let data = source + at_target;
        let image = image.name.clone();
        let mut planned = PlannedImage { image, data, source, ..Default::default() };
        let Some(surveyed) = self.images.get(&planned.image) else { return planned };
        planned.notes.clone_from(&surveyed.notes);
        match &surveyed.base {
            Base::Empty => {}
            Base::Refused { why } => {
                planned.notes.push(format!("the replica at the target cannot be used: {why}"));
            }
            Base::InPlace { .. } => {
                planned.in_place = true;
                planned.at_target = at_target;
            }
            Base::Replica { generation, .. } if !known => {
                let number = generation.number;
                let why = "this host does not know which blocks were written since";
                planned
                    .notes
                    .push(format!("generation {number} at the target cannot be used: {why}"));
            }
            Base::Replica { generation, .. } => {
                planned.generation = Some(generation.number);
                let given = surveyed.given.iter().filter(|(_, bytes)| *bytes > 0);
                planned.given = given.cloned().collect();
                if surveyed.given.is_empty() {
                    planned.at_target = at_target;
                }
            }
        }
        if let Some(&bytes) = self.unseen.get(&planned.image).filter(|_| known) {
            let why = "dray learns which blocks only when it adopts the disk";
            planned.notes.push(format!("QEMU has written {} of it: {why}", ByteSize(bytes)));
        }
        planned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Ancestor, ImageId};
    use dray_wire::ImageOffer;

    fn image() -> SourceImage {
        let name = "disk".to_owned();
        let offer =
            ImageOffer { id: ImageId(1), name: name.clone(), len: 1 << 20, read_only: false };
        let path = "/pool/disk".into();
        let (chain, given) = (Vec::new(), Vec::new());
        let (device, base, qcow2) = (None, Base::Empty, false);
        SourceImage { name, offer, path, device, base, chain, given, qcow2, seen: None }
    }

    fn replica() -> Base {
        let generation = Ancestor { id: GenerationId(5), number: 7 };
        Base::Replica { generation, distrusted: Vec::new(), unproved: false }
    }

    fn planned(base: Base, given: &[(&str, u64)], known: bool) -> PlannedImage {
        let given = given.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect();
        let images = [("disk".to_owned(), Surveyed { base, given, notes: Vec::new() })].into();
        let content = Content {
            to_send: [BlockRange::new(0, 10)].into_iter().collect(),
            at_target: [BlockRange::new(20, 100)].into_iter().collect(),
        };
        Survey { images, ..Survey::default() }.planned(&image(), &content, known)
    }

    #[test]
    fn every_byte_has_one_place_to_come_from() {
        let lying = planned(replica(), &[], true);
        assert_eq!((lying.data, lying.source), (110 * BLOCK_SIZE, 10 * BLOCK_SIZE));
        assert_eq!((lying.at_target, lying.generation), (100 * BLOCK_SIZE, Some(7)));
        assert!(lying.given.is_empty() && lying.notes.is_empty());
        let read = planned(replica(), &[("nas", 90 * BLOCK_SIZE), ("offsite", 0)], true);
        assert_eq!((read.at_target, read.source), (0, 10 * BLOCK_SIZE));
        assert_eq!(read.given, [("nas".to_owned(), 90 * BLOCK_SIZE)].into());
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        let refused = planned(Base::Refused { why: "it was edited".into() }, &[], false);
        assert_eq!(refused.notes, ["the replica at the target cannot be used: it was edited"]);
        let unknown = planned(replica(), &[("nas", 5)], false);
        assert!(unknown.given.is_empty() && unknown.generation.is_none());
        assert!(unknown.notes[0].starts_with("generation 7 at the target cannot be used"));
    }
}
