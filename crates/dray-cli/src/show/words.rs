//! The numbers of a progress event as words.

use super::units::{BLOCK, about, bytes, millis, rate, share_of};
use dray_api::{Amounts, Phase, Progress};

/// `1.2 GiB of 2.1 GiB`.
pub fn amount(amounts: &Amounts) -> String {
    format!("{} of {}", bytes(amounts.bytes_done), bytes(amounts.bytes_total))
}

/// `57 %`, or a dash while nothing is known of the whole.
pub fn share(amounts: &Amounts) -> String {
    share_of(amounts.bytes_done, amounts.bytes_total)
}

/// The phase and what it is busy with: `sync (memory)`. What has ended is busy with nothing.
pub fn phase(progress: &Progress) -> String {
    match progress.step.filter(|_| progress.phase != Phase::Ended) {
        Some(step) => format!("{} ({step})", progress.phase),
        None if progress.paused => format!("{} (paused)", progress.phase),
        None => progress.phase.to_string(),
    }
}

/// What matters in this phase beside the amount, most important first.
pub fn details(progress: &Progress) -> Vec<String> {
    let mut words = Vec::new();
    if !progress.link_up {
        words.push("link down, waiting for the peer".to_owned());
    }
    let before_handover = progress.phase < Phase::Handover;
    if before_handover && (progress.total.dirty_blocks > 0 || progress.dirty_rate > 0) {
        words.push(format!("dirty {}", dirty(progress)));
    }
    if progress.paused {
        words.push("waits for `dray backfill start` at the target".to_owned());
    }
    if progress.phase == Phase::Backfill {
        words.push(format!("missing {}", bytes(progress.total.bytes_missing)));
        words.push(format!("{} remote reads", progress.remote_reads));
    }
    if progress.memory_bytes > 0 && before_handover {
        let left = bytes(progress.memory_left);
        words.push(format!("memory {} ({left} left)", bytes(progress.memory_bytes)));
    }
    if progress.round > 1 {
        words.push(format!("round {}", progress.round));
    }
    words.extend(progress.seconds_left.map(|left| format!("about {} left", about(left))));
    words.extend(progress.downtime_ms.map(|ms| {
        let sign = if before_handover { "~" } else { "" };
        format!("downtime {sign}{}", millis(ms))
    }));
    words
}

/// The rate, and the limit if there is one.
pub fn speed(progress: &Progress) -> String {
    match progress.bandwidth {
        Some(limit) => format!("{} (limit {})", rate(progress.rate), rate(limit.bytes_per_second)),
        None => rate(progress.rate),
    }
}

/// Dirty bytes and how fast they grow.
pub fn dirty(progress: &Progress) -> String {
    let dirty = bytes(progress.total.dirty_blocks.saturating_mul(BLOCK));
    if progress.dirty_rate == 0 {
        return dirty;
    }
    format!("{dirty} (+{})", rate(progress.dirty_rate))
}
