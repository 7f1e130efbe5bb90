//! The end of a migration, for people and programs: an error, or one summary.

use super::counts::{Counts, Mark};
use super::report::Report;
use dray_api::{
    Compared, Ending, ErrorKind, ImageSummary, MigrationState, Phase, Predicted, Provided, Refusal,
    Summary, Verified, WireBytes,
};
use dray_files::unix_ms;
use dray_host::folder::intent::SourceImage;
use dray_net::NetTotals;
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::request::Base;

impl Report {
    /// It ended before handover.
    pub fn ended(&self, cancelled: bool, error: Refusal) {
        self.slot.board.change(|shown| {
            shown.state =
                if cancelled { MigrationState::Cancelled } else { MigrationState::Failed };
            // The VM's own failure, told earlier, says more than what followed from it.
            if shown.error.is_none() || cancelled {
                shown.error = Some(error);
            }
            // The guest did not stop for it.
            let progress = &mut shown.progress;
            (progress.phase, progress.rate) = (Phase::Ended, 0);
            (progress.seconds_left, progress.downtime_ms) = (None, None);
        });
    }

    /// The target could not start the guest and gave the images back.
    pub fn taken_back(&self) {
        let error = Refusal::new(
            ErrorKind::Hypervisor,
            "migration failed",
            "the target could not start the guest and handed the images back",
        )
        .hint("the guest continues at the source; see the target agent's log");
        self.ended(false, error);
    }

    /// Everything is at the target and the target has told its part: the summary.
    pub(super) fn finish(&self) {
        let verified = outcome(self.verified, self.blocks(), self.incomparable);
        let error = self.flaw(verified);
        let summary = self.summary(verified);
        self.slot.board.change(|shown| {
            shown.state = match error {
                None => MigrationState::Completed,
                Some(_) => MigrationState::Failed,
            };
            shown.error = error;
            shown.progress.complete();
            let measured = summary.downtime_ms.as_ref();
            shown.progress.downtime_ms = measured.map(|downtime| downtime.total);
            shown.summary = Some(summary);
        });
    }

    /// What is wrong although every block is at the target.
    fn flaw(&self, verified: Verified) -> Option<Refusal> {
        if verified == Verified::Different {
            let why = "blocks at the target differ from the source as of handover";
            let error = Refusal::new(ErrorKind::Verification, "verification failed", why);
            return Some(
                error.hint("the source's replica is kept; compare it before you remove it"),
            );
        }
        if let Some(ended) = self.not_released.as_ref().filter(|known| known.qemu_ended) {
            let what = "the guest's QEMU at the target has ended";
            let hint = "its disks are at the target, with all flushed writes: `dray images` there lists those \
                        that are still on dray, `dray images remove NAME` gives one back; then start the vm";
            return Some(Refusal::new(ErrorKind::Hypervisor, what, &ended.why).hint(hint));
        }
        let why = self.guest_failed.as_ref()?;
        let what = "the guest was not started at the target";
        let hint = "its disks are at the target, with all its writes: start the vm there; if its \
                    QEMU there still runs, that QEMU has the guest's memory, and `cont` at its \
                    QMP socket may let the guest continue";
        Some(Refusal::new(ErrorKind::Hypervisor, what, why).hint(hint))
    }

    /// Blocks of all images.
    fn blocks(&self) -> u64 {
        let images = self.slot.intent().images;
        images.iter().map(|image| BlockRange::whole(image.offer.len).len).sum()
    }

    fn summary(&self, verified: Verified) -> Summary {
        let intent = self.slot.intent();
        let total = self.total();
        let shown = self.slot.board.read();
        let options = intent.options.as_ref();
        let phases = total.phases(self.vm_runs(), self.now_micros());
        let strategy = options.map_or(dray_types::Strategy::Hybrid, |options| options.strategy);
        Summary {
            result: Ending::Completed,
            migration: intent.migration,
            vm: intent.vm.as_ref().and_then(|vm| vm.name.clone()),
            from: self.host.clone(),
            to: intent.peer.clone(),
            strategy,
            order: options.map(|options| options.order).unwrap_or_default(),
            started_unix_ms: shown.started_unix_ms,
            ended_unix_ms: unix_ms(),
            total_seconds: phases.total(),
            phase_seconds: phases,
            downtime_ms: total.downtime(self.vm_runs()),
            bytes_from_target: total.found.iter().sum::<u64>() * BLOCK_SIZE,
            wire_bytes: wire_bytes(&total.net, total.hash_bytes),
            guest_bytes: total.net.data_blocks * BLOCK_SIZE,
            rounds: shown.progress.round,
            blocks_sent: total.net.data_blocks,
            blocks_sent_twice: total.blocks_resent,
            resends: total.net.mismatches,
            reconnects: total.reconnects,
            remote_reads: self.remote_reads,
            blocks_mirrored: total.blocks_mirrored,
            throttled_operations: total.slowed.operations,
            throttled_ms: total.slowed.nanos as f64 / 1e6,
            verified,
            compared: self.verified.map(|(blocks, _)| Compared::new(blocks, self.blocks())),
            not_released: self.not_released.as_ref().map(|known| known.why.clone()),
            actual: total.predicted.as_ref().map(|_| self.actual(&total)),
            providers: self.providers(&total),
            images: self.image_summaries(&total, &intent.images),
            predicted: total.predicted,
        }
    }

    /// Each image's part of it.
    fn image_summaries(&self, total: &Counts, images: &[SourceImage]) -> Vec<ImageSummary> {
        let sent = total.images.iter().copied().chain(std::iter::repeat((0, 0)));
        let shared = total.shared.iter().copied().chain(std::iter::repeat(0));
        let found = total.found.iter().copied().chain(std::iter::repeat(0));
        let images = images.iter().zip(sent).zip(shared).zip(found).enumerate();
        let images = images.map(|(ix, (((image, sent), shared), found))| ImageSummary {
            qcow2: self.qcow2_of(ix),
            stays_raw: self.stays_raw(ix),
            image: image.name.clone(),
            name_at_target: image.offer.name.clone(),
            bytes: image.offer.len,
            blocks_sent: sent.0,
            blocks_sent_twice: sent.1,
            bytes_from_replica: from_replica(image, shared, found) * BLOCK_SIZE,
            bytes_in_place: if in_place(image) {
                image.offer.len.min(shared * BLOCK_SIZE)
            } else {
                0
            },
            given: image.given.clone(),
            bytes_from_target: if image.base.is_unproved() { 0 } else { found * BLOCK_SIZE },
            replica_not_used: match &image.base {
                Base::Refused { why } => Some(why.clone()),
                _ => None,
            },
        });
        images.collect()
    }

    /// Where the bytes came from: who gave the target what its copies began with, what lay there, what
    /// it found elsewhere in its pools, and what the source sent.
    fn providers(&self, total: &Counts) -> Vec<Provided> {
        let intent = self.slot.intent();
        let mut all: Vec<Provided> = Vec::new();
        for given in intent.images.iter().flat_map(|image| &image.given) {
            match all.iter_mut().find(|known| known.provider == given.provider) {
                Some(known) => add_more(known, given),
                None => all.push(given.clone()),
            }
        }
        let mut add = |provider: String, predicted, bytes| {
            if bytes > 0 || predicted > Some(0) {
                all.push(Provided { provider, predicted, bytes });
            }
        };
        let lying = |what: &dyn Fn(&SourceImage) -> bool| {
            let images = intent.images.iter().zip(&total.at_target);
            images.filter(|(image, _)| what(image)).map(|(_, bytes)| bytes).sum::<u64>()
        };
        let bases = lying(&in_place);
        add(format!("base image at {}", intent.peer), Some(bases), bases);
        let replicas = lying(&|image| image.given.is_empty() && !in_place(image));
        add(format!("replica at {}", intent.peer), Some(replicas), replicas);
        let found = intent.images.iter().zip(&total.found);
        let found = found.filter(|(image, _)| !image.base.is_unproved());
        let found = found.map(|(_, blocks)| blocks).sum::<u64>() * BLOCK_SIZE;
        add(format!("same content at {}", intent.peer), None, found);
        let predicted = total.predicted.as_ref().map(|predicted| predicted.bytes);
        add("source".to_owned(), predicted, total.net.data_blocks * BLOCK_SIZE);
        all
    }
}

/// What verification has come to, which found `different` of the blocks that it compared; `of` blocks are in the
/// images. A block that was not compared is not known to be equal.
fn outcome(verified: Option<(u64, u64)>, of: u64, incomparable: bool) -> Verified {
    match verified {
        None => Verified::NotAsked,
        Some((0, _)) if of > 0 => Verified::NothingCompared,
        Some((_, 0)) => Verified::Equal,
        Some(_) if incomparable => Verified::NotComparable,
        Some(_) => Verified::Different,
    }
}

/// Blocks that the target had in a replica: of one that nobody vouches for, those that were found to be right.
fn from_replica(image: &SourceImage, shared: u64, found: u64) -> u64 {
    match &image.base {
        Base::InPlace { .. } => 0,
        base if base.is_unproved() => found,
        _ => shared,
    }
}

/// Whether the target uses a file that it had.
fn in_place(image: &SourceImage) -> bool {
    matches!(image.base, Base::InPlace { .. })
}

/// The same provider gave more, of another image.
fn add_more(given: &mut Provided, more: &Provided) {
    given.bytes += more.bytes;
    given.predicted = given.predicted.zip(more.predicted).map(|(one, other)| one + other);
}

impl Report {
    /// What came of it, to stand beside what was predicted.
    fn actual(&self, total: &Counts) -> Predicted {
        let goals = self.slot.intent().options.map(|options| options.goals()).unwrap_or_default();
        let total_seconds = total.phases(self.vm_runs(), self.now_micros()).total();
        let downtime = total.downtime(self.vm_runs()).map_or(0.0, |downtime| downtime.total);
        let mut missed = Vec::new();
        let mut check = |what: &str, is: f64, goal: Option<f64>| {
            if let Some(goal) = goal.filter(|&goal| is > goal) {
                missed.push(format!("{what} was {is:.3} s instead of {goal:.3} s"));
            }
        };
        check("the downtime", downtime / 1e3, goals.max_downtime);
        check("the total time", total_seconds, goals.deadline);
        let bytes = total.net.data_blocks * BLOCK_SIZE;
        Predicted {
            total_seconds,
            handover_seconds: total.between(Mark::Started, Mark::Serving).unwrap_or(0.0),
            downtime_ms: downtime,
            converges: true,
            bytes,
            bytes_twice: total.blocks_resent * BLOCK_SIZE,
            remote_reads: self.remote_reads,
            added_latency_ms: 0.0,
            link: (total.net.wire_bytes() as f64 / total_seconds.max(1e-3)) as u64,
            link_from: None,
            missed,
        }
    }
}

/// Bytes on the wire by kind: what the frames' payloads do not account for on the data streams is
/// headers, and counts with the zeros that the headers name.
fn wire_bytes(totals: &NetTotals, hash: u64) -> WireBytes {
    let data = totals.data_sent + totals.data_received;
    let payload = totals.raw_bytes + totals.compressed_out;
    WireBytes {
        total: totals.wire_bytes(),
        raw: totals.raw_bytes,
        compressed: totals.compressed_out,
        zero: data.saturating_sub(payload + hash),
        memory: totals.memory_sent + totals.memory_received,
        control: totals.control_sent + totals.control_received,
        hash,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_compared_is_not_verified() {
        assert_eq!(outcome(None, 8, false), Verified::NotAsked);
        assert_eq!(outcome(Some((0, 0)), 8, false), Verified::NothingCompared);
        assert_eq!(outcome(Some((0, 0)), 0, false), Verified::Equal, "there was nothing");
        assert_eq!(outcome(Some((1, 0)), 8, false), Verified::Equal);
        assert_eq!(outcome(Some((8, 1)), 8, false), Verified::Different);
        assert_eq!(outcome(Some((8, 1)), 8, true), Verified::NotComparable);
    }
}
